"""Pure functions: GAE, PPO loss, schedules, moments. No state, no modules, no processes.

Shapes: T time; every other axis is a batch axis.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.ops import cpu_kernels, fused_losses

Schedule = Literal["constant", "linear", "cosine"]
Scaling = Literal["none", "sqrt", "linear"]


def lr_scale(rule: Scaling, batch: int, reference: int | None) -> float:
    """Return the factor for a learning rate tuned for batch size `reference` when used with `batch`; at least 1."""
    if rule == "none" or reference is None or batch <= reference:
        return 1.0
    return float(batch / reference) if rule == "linear" else math.sqrt(batch / reference)


def schedule(kind: Schedule, peak: float, progress: float, warmup: float = 0.0) -> float:
    """Return a schedule's value at `progress` in [0, 1], with linear warm-up over the first fraction `warmup`."""
    if progress < warmup:
        return peak * progress / warmup
    rest = (progress - warmup) / (1.0 - warmup) if warmup < 1.0 else 1.0
    if kind == "linear":
        return peak * (1.0 - rest)
    if kind == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * rest))
    return peak


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    discount: float,
    trace: float,
) -> Tensor:
    """Compute generalized advantage estimates (GAE) over time, the first axis.

    `next_values[t]` is the value of the observation after step t: the next observation, or `final_obs` if the episode
    was truncated. A terminated step has no bootstrap value. `trace` is GAE's lambda; the trace stops at the end of an
    episode, terminated or truncated.
    """
    deltas = rewards + discount * next_values * ~terminated - values
    decay = discount * trace * ~ended
    if deltas.dim() == 2 and cpu_kernels.is_supported(deltas, decay):
        return cpu_kernels.discounted_reverse_cumsum(deltas, decay)
    advantages = torch.empty_like(deltas)
    running = torch.zeros_like(deltas[0])
    for delta, factor, advantage in reversed(list(zip(deltas, decay, advantages, strict=True))):
        running = torch.addcmul(delta, factor, running, out=advantage)
    return advantages


class PPOLoss(NamedTuple):
    """Sums over samples. `total` is the loss to differentiate; the others are metrics."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    clipped: Tensor


def ppo_loss(
    log_prob: Tensor,
    entropy: Tensor,
    values: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float | Tensor,
    value_clip: float | None,
    value_weight: float,
    entropy_weight: float,
) -> PPOLoss:
    """Compute the PPO loss over samples [N], with gradients for `log_prob`, `entropy` and `values`.

    policy: clipped surrogate objective with probability ratios limited to 1 +- clip.
    value: half the squared error, clipped at `value_clip` from the old value; the larger of the two errors counts.
    clip: a number, or a one-element tensor if a CUDA graph must read a changing value.
    kl: Schulman's low-variance, non-negative estimate of KL(old || new).
    """
    data = (old_log_prob, advantages, old_values, returns)
    kernel: Any = None
    if isinstance(clip, float) and cpu_kernels.is_supported(log_prob, entropy, values, *data):
        kernel = cpu_kernels.PPOLossCPU
    elif fused_losses.is_supported(log_prob, entropy, values, *data):
        kernel = fused_losses.FusedPPOLoss
    if kernel is not None:
        weights = (clip, value_clip, value_weight, entropy_weight)
        total, sums = kernel.apply(log_prob, entropy, values, data, weights)
        return PPOLoss(total, *sums.unbind())
    # Clipped surrogate
    log_ratio = log_prob - old_log_prob
    policy = -advantages * log_ratio.exp()
    policy = torch.maximum(policy, -advantages * (1.0 + clip * advantages.sign())).sum()
    # Clipped value loss
    error = (values - returns).square()
    if value_clip is not None:
        clipped_values = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.maximum(error, (clipped_values - returns).square())
    value, entropy_sum = 0.5 * error.sum(), entropy.sum()
    with torch.no_grad():
        excess = log_ratio.expm1()
        kl, clipped = (excess - log_ratio).sum(), (excess.abs() > clip).sum()
    total = policy + value_weight * value - entropy_weight * entropy_sum
    return PPOLoss(total, policy, value, entropy_sum, kl, clipped)


def moments(total: Tensor, squares: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and variance from pooled sums. A negative variance due to rounding is set to zero."""
    mean = total / count.clamp(min=1)
    return mean, (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
