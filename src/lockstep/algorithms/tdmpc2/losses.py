"""What a world model and its policy learn by, as sums over stretches of replay: arithmetic, and nothing else.

A batch holds `obs` [N, H + 1, ...], `action` [N, H, K], `reward` and `terminated` [N, H], `task` [N] where there are
several, and `whole` [N], 0 for a stretch that counts nothing. And what is left to chance: noise, `target` [N, H, K] and
`policy` [N, H + 1, K], and which units critics do not forget, `kept` [N, C, H, U] and `policy_kept` [N, 2, H + 1, U].

Shapes: N stretches, H steps ahead, K action features, Z of a latent, C critics, U units.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.algorithms.tdmpc2.world_model import PolicySample, QEnsemble, WorldModel
from lockstep.ops.functional import two_hot_loss
from lockstep.protocols import Loss


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What each error counts."""

    rho: float = 0.5
    """What it counts for each step that it lies further ahead."""
    consistency_coef: float = 20.0
    """That of foreseen latents."""
    reward_coef: float = 0.1
    """That of rewards."""
    value_coef: float = 0.1
    """That of values."""
    termination_coef: float = 1.0
    """That of ends, where episodes have them."""
    entropy_coef: float = 1e-4
    """How much the policy's entropy is worth."""


def model_loss(
    model: WorldModel, targets: QEnsemble, discounts: Tensor, pair: Tensor, config: LossConfig, batch: dict[str, Any]
) -> tuple[Loss, Tensor]:
    """How far foreseen latents, rewards and values are from what came; and the latents, [N, H + 1, Z]."""
    obs, action, reward, task = batch["obs"], batch["action"], batch["reward"], batch.get("task")
    steps = action.shape[1]
    tasks = None if task is None else task.unsqueeze(1).expand(-1, steps)
    with torch.no_grad():
        following = model.encode(obs[:, 1:], tasks)  # [N, H, Z]
        chosen = model.act(following, batch["target"], tasks).action
        worth = model.q_value(targets, following, chosen, tasks, pair).amin(0)
        discount = discounts[0] if tasks is None else discounts[tasks]
        target = reward + discount * ~batch["terminated"] * worth  # [N, H]
    path, apart = [model.encode(obs[:, 0], task)], list[Tensor]()
    for step in range(steps):
        path.append(model.dynamics(model.joint(path[-1], action[:, step], task)))
        apart.append((path[-1] - following[:, step]).square().mean(-1))
    latents = torch.stack(path, dim=1)
    joint = model.joint(latents[:, :-1], action, tasks)
    judged = model.critics(joint, kept=_kept(model, batch, "kept"))  # [C, N, H, bins]
    weight, whole = _weights(config.rho, batch["whole"], steps) / steps, batch["whole"]  # [N, H], [N]
    sums = {
        "consistency": (torch.stack(apart, dim=1) * weight).sum(),
        "reward": (two_hot_loss(model.reward(joint), reward, model.reach) * weight).sum(),
        "value": (two_hot_loss(judged, target, model.reach).mean(0) * weight).sum(),
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
    known = {name: value.detach() for name, value in sums.items()} | {"target": target.mean(1) @ whole}
    return Loss(total, num_samples=whole.sum(), metric_sums=known), latents.detach()


def policy_loss(model: WorldModel, scale: Tensor, pair: Tensor, config: LossConfig, batch: dict[str, Any]) -> Loss:
    """What critics think of the policy's own actions at the latents `z` [N, H + 1, Z], divided by a scale."""
    acted, values = judge_policy(model, pair, batch)
    worth = config.entropy_coef * acted.entropy + values / scale
    weight, whole = _weights(config.rho, batch["whole"], worth.shape[1]), batch["whole"]
    sums = {"entropy": acted.entropy.detach().mean(1) @ whole, "value": values.detach().mean(1) @ whole}
    return Loss(-(worth * weight).mean(1).sum(), num_samples=whole.sum(), metric_sums=sums)


def judge_policy(model: WorldModel, pair: Tensor, batch: dict[str, Any]) -> tuple[PolicySample, Tensor]:
    """What the policy does at latents [N, T, Z], and what two critics think of it on average, [N, T]."""
    z, task = batch["z"], batch.get("task")
    tasks = None if task is None else task.unsqueeze(1).expand(z.shape[:2])
    acted = model.act(z, batch["policy"], tasks)
    kept = _kept(model, batch, "policy_kept")
    return acted, model.q_value(model.critics, z, acted.action, tasks, pair, kept).mean(0)


def _kept(model: WorldModel, batch: dict[str, Any], name: str) -> Tensor | None:
    """What critics do not forget, [C, N, H, U], with the weight that makes up for the rest."""
    return batch[name].transpose(0, 1) / (1.0 - model.dropout) if name in batch else None


def _weights(rho: float, whole: Tensor, steps: int) -> Tensor:
    """What each step of each stretch counts, [N, steps]."""
    return whole.unsqueeze(1) * rho ** torch.arange(steps, device=whole.device)
