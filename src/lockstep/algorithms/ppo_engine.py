"""The bare work of PPO, for `bench`: environments and networks with nothing around them."""

import copy
from typing import Any

import torch

from lockstep.algorithms.env_work import env_work
from lockstep.data.rollout import samples
from lockstep.protocols import Work
from lockstep.runtime import Adam
from lockstep.trees import tree_map


def bare_works(agent: Any, fewer: int) -> list[Work]:
    """The environments, the network's forward, and its forward, backward and step, of an iteration of a `PPO`."""
    config, net, runtime = agent.config, copy.deepcopy(agent.net), agent.runtime
    rate = Adam(net.parameters(), eps=config.adam_epsilon)
    rows = max(1, config.batch_size // runtime.lanes.count * len(runtime.lanes) // fewer)
    rows = -(-rows // config.length) * config.length  # whole sequences
    seen = samples(agent.rollout["obs"], len(runtime.lanes))
    envs = agent.task.num_envs
    few = max(1, envs // fewer)  # a process may have fewer environments than that
    obs, minibatch = (tree_map(lambda x, n=n: x[:n].clone(), seen) for n in (few, rows))
    memory, before = net.initial_memory(few), net.initial_memory(rows // config.length)
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
    inference = Work("inference", few, config.horizon, act, fewer)
    works = [inference, Work("learning", rows, updates, learn, fewer)]
    env = env_work(agent.task, agent.rollout["action"][0].clone(), config.horizon)
    return [env, *works] if fewer == 1 else works
