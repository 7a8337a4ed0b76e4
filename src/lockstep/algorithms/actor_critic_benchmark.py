"""Operations of an iteration of an off-policy actor-critic without the code around them, for `bench`.

Shapes: B environments, N samples of a batch.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.algorithms.env_benchmark import env_step_op
from lockstep.distributed import FusedAdam
from lockstep.protocols import BenchmarkOp
from lockstep.pytree import Tree, tree_map


def actor_critic_ops(
    algorithm: Any,
    actor_inputs: Callable[[Tree], Tree],
    q_values: Callable[[nn.ModuleList, Tree, Tensor], list[Tensor]],
    env_action: Callable[[], Tensor],
    fewer: int,
) -> list[BenchmarkOp]:
    """Return the operations environment steps, inference and updates. The networks are copied.

    Args:
        algorithm: An algorithm with `actor`, `critics` and a filled `rollout`.
        actor_inputs: Converts observations [B, ...] or [N, ...] to inputs of the actor.
        q_values: Returns the values of each critic for observations [N, ...] and outputs of the actor.
        env_action: Returns actions [B, ...] for the environments.
        fewer: Divisor of the numbers of environments and samples. Above 1: without environment steps.
    """
    config, runtime, lanes = algorithm.config, algorithm.runtime, algorithm.lanes
    actor, critics = copy.deepcopy(algorithm.actor), copy.deepcopy(algorithm.critics)
    optimizers = [FusedAdam(net.parameters()) for net in (actor, critics)]
    rows = max(1, config.batch_size // lanes.num_lanes * len(lanes) // fewer)
    envs = max(1, algorithm.task.num_envs // fewer)  # a process may host fewer than `fewer` environments
    obs, batch = (
        tree_map(lambda x, n=n: x[0, :1].expand(n, *x.shape[2:]).clone(), algorithm.rollout["obs"])
        for n in (envs, rows)
    )
    inputs, batch_inputs = actor_inputs(obs), actor_inputs(batch)

    @torch.no_grad()
    def act() -> None:
        with runtime.autocast():
            actor(inputs)

    def learn() -> None:
        with runtime.autocast():
            values = q_values(critics, batch, actor(batch_inputs))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack([each.sum() for each in values]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    updates = max(1, round(algorithm.samples * config.updates_per_sample))
    ops = [
        BenchmarkOp("inference", envs, config.rollout_steps, act, fewer),
        BenchmarkOp("learning", rows, updates, learn, fewer),
    ]
    return [env_step_op(algorithm.task, env_action(), config.rollout_steps), *ops] if fewer == 1 else ops
