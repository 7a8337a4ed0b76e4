"""Losses of the world model and its policy, as sums over sequences of the replay buffer.

A batch has `obs` [N, H + 1, ...], `action` [N, H, K], `reward` and `terminated` [N, H], `task` [N] if there are
several tasks, and `whole` [N], which is 0 for invalid sequences. Random draws are passed in: the noise `target`
[N, H, K] and `policy` [N, H + 1, K], and dropout masks `kept` [N, C, H, U] and `policy_kept` [N, 2, H + 1, U].

Shapes: N sequences, H horizon, K action features, Z latent features, C critics, U units.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.algorithms.tdmpc2.world_model import PolicySample, QEnsemble, WorldModel
from lockstep.ops.two_hot import two_hot_loss
from lockstep.protocols import Loss


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the losses."""

    rho: float = 0.5
    """Factor on the weight of a loss for each further step ahead."""
    consistency_coef: float = 20.0
    """Weight of the latent consistency loss."""
    reward_coef: float = 0.1
    """Weight of the reward loss."""
    value_coef: float = 0.1
    """Weight of the value loss."""
    termination_coef: float = 1.0
    """Weight of the termination loss, used if `episodic` is set."""
    entropy_coef: float = 1e-4
    """Weight of the policy's entropy bonus."""


def model_loss(
    model: WorldModel, targets: QEnsemble, discounts: Tensor, pair: Tensor, config: LossConfig, batch: dict[str, Any]
) -> tuple[Loss, Tensor]:
    """Return the loss of predicted latents, rewards, values and terminations; also the latents [N, H + 1, Z]."""
    obs, action, reward, task = batch["obs"], batch["action"], batch["reward"], batch.get("task")
    steps = action.shape[1]
    tasks = None if task is None else task.unsqueeze(1).expand(-1, steps)
    # TD targets: the lower value of two target critics
    with torch.no_grad():
        next_z = model.encode(obs[:, 1:], tasks)  # [N, H, Z]
        next_action = model.act(next_z, batch["target"], tasks).action
        next_value = model.q_value(targets, next_z, next_action, tasks, pair).amin(0)
        discount = discounts[0] if tasks is None else discounts[tasks]
        target = reward + discount * ~batch["terminated"] * next_value  # [N, H]

    # Latent rollout
    path, errors = [model.encode(obs[:, 0], task)], list[Tensor]()
    for step in range(steps):
        path.append(model.dynamics(model.joint(path[-1], action[:, step], task)))
        errors.append((path[-1] - next_z[:, step]).square().mean(-1))
    latents = torch.stack(path, dim=1)
    joint = model.joint(latents[:, :-1], action, tasks)
    q_logits = model.critics(joint, kept=_kept(model, batch, "kept"))  # [C, N, H, bins]

    # Losses
    weight, whole = _weights(config.rho, batch["whole"], steps) / steps, batch["whole"]  # [N, H], [N]
    sums = {
        "consistency": (torch.stack(errors, dim=1) * weight).sum(),
        "reward": (two_hot_loss(model.reward(joint), reward, model.vmax) * weight).sum(),
        "value": (two_hot_loss(q_logits, target, model.vmax).mean(0) * weight).sum(),
    }
    total = (
        config.consistency_coef * sums["consistency"]
        + config.reward_coef * sums["reward"]
        + config.value_coef * sums["value"]
    )
    if model.termination is not None:
        logits, ended = model.termination_logit(latents[:, 1:], tasks), batch["terminated"].float()
        sums["termination"] = F.binary_cross_entropy_with_logits(logits, ended, reduction="none").mean(1) @ whole
        total = total + config.termination_coef * sums["termination"]
    metrics = {name: value.detach() for name, value in sums.items()} | {"target": target.mean(1) @ whole}
    return Loss(total, num_samples=whole.sum(), metric_sums=metrics), latents.detach()


def policy_loss(model: WorldModel, scale: Tensor, pair: Tensor, config: LossConfig, batch: dict[str, Any]) -> Loss:
    """Return the policy loss at latents `z` [N, H + 1, Z]: negative values divided by `scale`, with entropy bonus."""
    sample, values = policy_sample_and_value(model, pair, batch)
    objective = config.entropy_coef * sample.entropy + values / scale
    weight, whole = _weights(config.rho, batch["whole"], objective.shape[1]), batch["whole"]
    sums = {"entropy": sample.entropy.detach().mean(1) @ whole, "value": values.detach().mean(1) @ whole}
    return Loss(-(objective * weight).mean(1).sum(), num_samples=whole.sum(), metric_sums=sums)


def policy_sample_and_value(model: WorldModel, pair: Tensor, batch: dict[str, Any]) -> tuple[PolicySample, Tensor]:
    """Return the policy's actions at latents [N, T, Z], and their mean value by two critics, [N, T]."""
    z, task = batch["z"], batch.get("task")
    tasks = None if task is None else task.unsqueeze(1).expand(z.shape[:2])
    sample = model.act(z, batch["policy"], tasks)
    kept = _kept(model, batch, "policy_kept")
    return sample, model.q_value(model.critics, z, sample.action, tasks, pair, kept).mean(0)


def _kept(model: WorldModel, batch: dict[str, Any], name: str) -> Tensor | None:
    """Return a dropout mask [C, N, H, U] divided by the probability of keeping a unit; None without dropout."""
    return batch[name].transpose(0, 1) / (1.0 - model.dropout) if name in batch else None


def _weights(rho: float, whole: Tensor, steps: int) -> Tensor:
    """Return the weight of each step of each sequence, [N, steps]."""
    return whole.unsqueeze(1) * rho ** torch.arange(steps, device=whole.device)
