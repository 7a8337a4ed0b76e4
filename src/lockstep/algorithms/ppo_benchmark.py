"""The bare work of PPO, for `bench`: environments and networks with nothing around them."""

import copy
from typing import Any

import torch

from lockstep.algorithms.env_benchmark import env_work
from lockstep.data.rollout import flatten_rollout
from lockstep.distributed import FusedAdam
from lockstep.protocols import BenchmarkOp
from lockstep.pytree import tree_map


def benchmark_ops(agent: Any, fewer: int) -> list[BenchmarkOp]:
    """The environments, the network's forward, and its forward, backward and step, of an iteration of a `PPO`."""
    config, net, runtime = agent.config, copy.deepcopy(agent.net), agent.runtime
    rate = FusedAdam(net.parameters(), eps=config.adam_eps)
    rows = max(1, config.batch_size // runtime.lanes.num_lanes * len(runtime.lanes) // fewer)
    rows = -(-rows // config.length) * config.length  # whole sequences
    seen = flatten_rollout(agent.rollout["obs"], len(runtime.lanes))
    envs = agent.task.num_envs
    few = max(1, envs // fewer)  # a process may have fewer environments than that
    obs, minibatch = (tree_map(lambda x, n=n: x[:n].clone(), seen) for n in (few, rows))
    memory, before = net.initial_state(few), net.initial_state(rows // config.length)
    starts = torch.zeros(rows // config.length, config.length, dtype=torch.bool, device=runtime.device)

    @torch.no_grad()
    def act() -> None:
        with agent.acting():
            net.step(obs, memory)

    def learn() -> None:
        with runtime.autocast():
            outputs, value = net(minibatch, before, starts)
        rate.zero_grad()
        (outputs.sum() + value.sum()).backward()
        rate.step()

    updates = config.epochs * agent.samples // config.batch_size
    inference = BenchmarkOp("inference", few, config.rollout_steps, act, fewer)
    works = [inference, BenchmarkOp("learning", rows, updates, learn, fewer)]
    env = env_work(agent.task, agent.rollout["action"][0].clone(), config.rollout_steps)
    return [env, *works] if fewer == 1 else works
