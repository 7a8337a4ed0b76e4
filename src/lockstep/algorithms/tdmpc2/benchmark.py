"""The bare work of TD-MPC2, for `bench`: the same tensors through the same modules, with nothing around them.

No replay, no noise that is drawn, no reduction, no scale of the whole run: torch's optimizers on a copy of the model.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.env_benchmark import env_work
from lockstep.algorithms.tdmpc2.losses import model_loss, policy_loss
from lockstep.algorithms.tdmpc2.mppi import Planner, sample_critic_pairs, seen_of
from lockstep.distributed import FusedAdam
from lockstep.protocols import BenchmarkOp
from lockstep.pytree import tree_map


def benchmark_ops(agent: Any, fewer: int) -> list[BenchmarkOp]:
    """The environments, plans and updates of an iteration of a `TDMPC2`, on batches `fewer` times smaller."""
    config, runtime, discounts = agent.config, agent.runtime, agent.discounts
    model, targets = copy.deepcopy(agent.model), copy.deepcopy(agent.targets)
    model_rate = FusedAdam(model.parameters())
    policy_rate = FusedAdam(model.policy.parameters())
    planner = Planner(model, config.plan, config.horizon, discounts)
    pairs = sample_critic_pairs(agent.plan_pairing, 0, planner.rounds, model.critics.count, runtime.device)
    envs, rows = max(1, agent.task.num_envs // fewer), max(1, len(agent.latents) // fewer)
    obs, noise = (
        tree_map(lambda x: x[:envs].clone(), tree) for tree in (agent.task.observations(), agent.plan_noise(0))
    )
    batch = tree_map(lambda x: x[:rows].clone(), agent.with_chance(_stretches(agent), agent.updates))

    @torch.no_grad()
    def act() -> None:
        with runtime.autocast():
            planner.plan(*seen_of(obs), agent.plans[:envs], noise, pairs, explore=True)

    def learn() -> None:
        with runtime.autocast():
            result, latents = model_loss(model, targets, discounts, agent.pairs[0], config.loss, batch)
        _step(model_rate, result.loss_sum, config.max_grad_norm)
        with runtime.autocast():
            own = policy_loss(model, agent.scale, agent.pairs[1], config.loss, batch | {"z": latents})
        _step(policy_rate, own.loss_sum, config.max_grad_norm)
        torch._foreach_lerp_(list(targets.parameters()), list(model.critics.parameters()), config.tau)

    updates = max(1, round(agent.samples * config.updates_per_sample))
    works = [
        BenchmarkOp("inference", envs, config.rollout_steps, act, fewer),
        BenchmarkOp("learning", rows, updates, learn, fewer),
    ]
    env = env_work(agent.task, agent.rollout["action"][0].clone(), config.rollout_steps)
    return [env, *works] if fewer == 1 else works


def _stretches(agent: Any) -> dict[str, Any]:
    """A batch like those of replay, of one observation again and again: there may be nothing in replay yet."""
    rows, steps = len(agent.latents), agent.config.horizon
    obs = tree_map(lambda x: x[:1].unsqueeze(1).expand(rows, steps + 1, *x.shape[1:]), agent.task.observations())
    blank = torch.zeros(rows, steps, device=agent.runtime.device)
    return {
        "obs": obs,
        "action": blank.unsqueeze(-1).expand(-1, -1, agent.model.actions),
        "reward": blank,
        "terminated": blank.bool(),
        "whole": blank.new_ones(rows),
    }


def _step(rate: torch.optim.Optimizer, total: Tensor, max_norm: float) -> None:
    rate.zero_grad()
    parameters = [p for group in rate.param_groups for p in group["params"]]
    total.backward(inputs=parameters)
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    rate.step()
