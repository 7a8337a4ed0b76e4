"""Operations of TD-MPC2 without the code around them, for `bench`: the same tensors through the same modules.

They use torch's Adam on a copy of the model. Replay, random draws, reductions and the value scale are not included.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.env_benchmark import env_step_op
from lockstep.algorithms.tdmpc2.losses import model_loss, policy_loss
from lockstep.algorithms.tdmpc2.mppi import Planner, split_obs
from lockstep.distributed import FusedAdam
from lockstep.protocols import BenchmarkOp
from lockstep.pytree import tree_map


def benchmark_ops(agent: Any, fewer: int) -> list[BenchmarkOp]:
    """Return the environment steps, plans and updates of one TD-MPC2 iteration, with batches `fewer` times smaller."""
    config, runtime, discounts = agent.config, agent.runtime, agent.discounts
    model, targets = copy.deepcopy(agent.model), copy.deepcopy(agent.targets)
    model_adam = FusedAdam(model.parameters())
    policy_adam = FusedAdam(model.policy.parameters())
    planner = Planner(model, config.plan, config.horizon, discounts)
    pairs = planner.draw_pairs(agent.plan_pair_rng, 0)
    envs, rows = max(1, agent.task.num_envs // fewer), max(1, len(agent.latents) // fewer)
    drawn = planner.draw_noise(agent.act_rng, agent.elite_rng, 0, agent.envs_per_lane)
    obs, noise = (tree_map(lambda x: x[:envs].clone(), tree) for tree in (agent.task.observations(), drawn))
    batch = tree_map(lambda x: x[:rows].clone(), agent.add_random_draws(_sequences(agent), agent.updates))

    @torch.no_grad()
    def act() -> None:
        with runtime.autocast():
            planner.plan(*split_obs(obs), agent.plans[:envs], noise, pairs, explore=True)

    def learn() -> None:
        # Model update
        with runtime.autocast():
            result, latents = model_loss(model, targets, discounts, agent.pairs[0], config.loss, batch)
        _step(model_adam, result.loss_sum, config.max_grad_norm)
        # Policy update
        with runtime.autocast():
            policy = policy_loss(model, agent.scale, agent.pairs[1], config.loss, batch | {"z": latents})
        _step(policy_adam, policy.loss_sum, config.max_grad_norm)
        # Target critics
        torch._foreach_lerp_(list(targets.parameters()), list(model.critics.parameters()), config.tau)

    updates = max(1, round(agent.samples * config.updates_per_sample))
    ops = [
        BenchmarkOp("inference", envs, config.rollout_steps, act, fewer),
        BenchmarkOp("learning", rows, updates, learn, fewer),
    ]
    # A run that learns offline has collected nothing yet.
    stepped = agent.rollout["action"][0] if agent.rollout.buffers else agent.plans[:, 0]
    env = env_step_op(agent.task, stepped.clone(), config.rollout_steps)
    return [env, *ops] if fewer == 1 else ops


def _sequences(agent: Any) -> dict[str, Any]:
    """Return a batch with the shapes of the replay buffer's, from one observation: the buffer may still be empty."""
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


def _step(optimizer: torch.optim.Optimizer, total: Tensor, max_norm: float) -> None:
    optimizer.zero_grad()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    total.backward(inputs=parameters)
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()
