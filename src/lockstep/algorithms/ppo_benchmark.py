"""Operations of PPO without the code around them, for `bench`: environments and networks."""

import copy
from typing import Any

import torch

from lockstep.algorithms.env_benchmark import env_work
from lockstep.data.rollout import flatten_rollout
from lockstep.distributed import FusedAdam
from lockstep.protocols import BenchmarkOp
from lockstep.pytree import tree_map


def benchmark_ops(agent: Any, fewer: int) -> list[BenchmarkOp]:
    """Return the operations of one PPO iteration: environment steps, inference, and forward, backward and Adam step."""
    config, net, runtime = agent.config, copy.deepcopy(agent.net), agent.runtime
    adam = FusedAdam(net.parameters(), eps=config.adam_eps)
    rows = max(1, config.batch_size // runtime.lanes.num_lanes * len(runtime.lanes) // fewer)
    rows = -(-rows // config.length) * config.length  # whole sequences
    seen = flatten_rollout(agent.collector.rollout["obs"], len(runtime.lanes))
    envs = agent.task.num_envs
    few = max(1, envs // fewer)  # a process may host fewer than `fewer` environments
    obs, minibatch = (tree_map(lambda x, n=n: x[:n].clone(), seen) for n in (few, rows))
    memory, before = net.initial_state(few), net.initial_state(rows // config.length)
    starts = torch.zeros(rows // config.length, config.length, dtype=torch.bool, device=runtime.device)

    @torch.no_grad()
    def act() -> None:
        with agent.collector.acting():
            net.step(obs, memory)

    def learn() -> None:
        with runtime.autocast():
            outputs, value = net(minibatch, before, starts)
        adam.zero_grad()
        (outputs.sum() + value.sum()).backward()
        adam.step()

    updates = config.epochs * agent.samples // config.batch_size
    inference = BenchmarkOp("inference", few, config.rollout_steps, act, fewer)
    ops = [inference, BenchmarkOp("learning", rows, updates, learn, fewer)]
    env = env_work(agent.task, agent.collector.rollout["action"][0].clone(), config.rollout_steps)
    return [env, *ops] if fewer == 1 else ops
