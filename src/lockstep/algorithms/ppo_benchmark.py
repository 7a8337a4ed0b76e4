"""Operations of an iteration of PPO without the code around them, for `bench`."""

import copy
from typing import Any

import torch

from lockstep.algorithms.env_benchmark import env_step_op
from lockstep.data.rollout import flatten_rollout
from lockstep.distributed import FusedAdam
from lockstep.nn.recurrent import split_at_resets
from lockstep.protocols import BenchmarkOp
from lockstep.pytree import tree_map


def ppo_ops(algorithm: Any, fewer: int) -> list[BenchmarkOp]:
    """Return the operations environment steps, inference and updates. The network is copied.

    Args:
        algorithm: PPO after a rollout.
        fewer: Divisor of the numbers of environments and samples. Above 1: without environment steps.
    """
    config, runtime, collector = algorithm.config, algorithm.runtime, algorithm.collector
    net = copy.deepcopy(algorithm.net)
    adam = FusedAdam(net.parameters(), eps=config.adam_eps)
    rows = max(1, config.batch_size // runtime.lanes.num_lanes * len(runtime.lanes) // fewer)
    rows = -(-rows // config.length) * config.length  # whole sequences
    samples = flatten_rollout(collector.rollout["obs"], len(runtime.lanes))
    envs = max(1, algorithm.task.num_envs // fewer)  # a process may host fewer than `fewer` environments
    obs, minibatch = (tree_map(lambda x, n=n: x[:n].clone(), samples) for n in (envs, rows))
    memory, batch_memory = net.initial_state(envs), net.initial_state(rows // config.length)
    starts = torch.zeros(rows // config.length, config.length, dtype=torch.bool, device=runtime.device)

    @torch.no_grad()
    def act() -> None:
        with collector.acting():
            net.step(obs, memory)

    def learn() -> None:
        with runtime.autocast():
            outputs, value = net(minibatch, batch_memory, split_at_resets(starts) if batch_memory else None)
        adam.zero_grad()
        (outputs.sum() + value.sum()).backward()
        adam.step()

    updates = config.epochs * algorithm.samples // config.batch_size
    ops = [
        BenchmarkOp("inference", envs, config.rollout_steps, act, fewer),
        BenchmarkOp("learning", rows, updates, learn, fewer),
    ]
    env = env_step_op(algorithm.task, collector.rollout["action"][0].clone(), config.rollout_steps)
    return [env, *ops] if fewer == 1 else ops
