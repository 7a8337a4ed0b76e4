"""Pure arithmetic: returns, surrogates, schedules. No state, no modules, no processes.

Shapes: T time; every other axis is a batch axis and is left alone.
"""

import math
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.ops import cpu_kernels, fused_losses

Schedule = Literal["constant", "linear", "cosine"]
Scaling = Literal["none", "sqrt", "linear"]


def lr_scale(rule: Scaling, batch: int, reference: int | None) -> float:
    """What a learning rate meant for batches of `reference` is multiplied by for a larger one; never less than 1."""
    if rule == "none" or reference is None or batch <= reference:
        return 1.0
    return float(batch / reference) if rule == "linear" else math.sqrt(batch / reference)


def schedule(kind: Schedule, peak: float, progress: float, warmup: float = 0.0) -> float:
    """The value of a schedule at `progress` in [0, 1], after a linear warm-up over its first `warmup` part."""
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
    time: int = 0,
) -> Tensor:
    """GAE over the axis `time`.

    `next_values[t]` is the value of what followed step t: the next observation, or `final_obs` where the episode was
    cut off. A terminated step has no future; the trace stops wherever an episode ended, terminated or truncated.
    """
    deltas = rewards + discount * next_values * ~terminated - values
    decay = discount * trace * ~ended
    if time == 0 and deltas.dim() == 2 and cpu_kernels.is_supported(deltas, decay):
        return cpu_kernels.discounted_reverse_cumsum(deltas, decay)
    advantages = torch.empty_like(deltas)
    running = torch.zeros_like(deltas.select(time, 0))
    steps = zip(deltas.unbind(time), decay.unbind(time), advantages.unbind(time), strict=True)
    for delta, kept, advantage in reversed(list(steps)):
        running = torch.addcmul(delta, kept, running, out=advantage)
    return advantages


class PPOLoss(NamedTuple):
    """Sums over samples; `total` is what is to be differentiated, the others are for the log."""

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
    """PPO's loss over samples [N], with a gradient with respect to `log_prob`, `entropy` and `values`.

    policy: the pessimistic surrogate; moving on in the direction of an advantage stops paying at 1 +- clip.
    value: half the squared error, pessimistic about moves beyond `value_clip` from the old value.
    clip: a number, or a tensor of one where an update is recorded and the number changes.
    kl: Schulman's low-variance, never negative estimate of KL(old || new).
    """
    data = (old_log_prob, advantages, old_values, returns)
    if isinstance(clip, float) and cpu_kernels.is_supported(log_prob, entropy, values, *data):
        total, sums = cpu_kernels.fused_ppo_loss(
            log_prob, entropy, values, data, clip, value_clip, value_weight, entropy_weight
        )
        return PPOLoss(total, *sums.unbind())
    if fused_losses.is_supported(log_prob, entropy, values, *data):
        total, sums = fused_losses.fused_ppo_loss(
            log_prob, entropy, values, data, clip, value_clip, value_weight, entropy_weight
        )
        return PPOLoss(total, *sums.unbind())
    log_ratio = log_prob - old_log_prob
    policy = -advantages * log_ratio.exp()
    policy = torch.maximum(policy, -advantages * (1.0 + clip * advantages.sign())).sum()
    error = (values - returns).square()
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.maximum(error, (near - returns).square())
    value, spread = 0.5 * error.sum(), entropy.sum()
    with torch.no_grad():
        excess = log_ratio.expm1()
        kl, clipped = (excess - log_ratio).sum(), (excess.abs() > clip).sum()
    total = policy + value_weight * value - entropy_weight * spread
    return PPOLoss(total, policy, value, spread, kl, clipped)


def symlog(x: Tensor) -> Tensor:
    """Logarithm on both sides of zero: small numbers as they are, large ones brought near."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """The inverse of `symlog`."""
    return x.sign() * x.abs().expm1()


def two_hot(values: Tensor, bins: int, reach: float) -> Tensor:
    """Values as weights of two neighbouring bins [..., bins] that lie evenly from -reach to reach, after a symlog."""
    place = (symlog(values).clamp(-reach, reach) + reach) * ((bins - 1) / (2 * reach))
    below = place.floor().clamp(max=bins - 2)  # the last bin is the upper neighbour of the one before it
    part = (place - below).unsqueeze(-1)
    weights = values.new_zeros(*values.shape, bins)
    index = below.long().unsqueeze(-1)
    weights.scatter_(-1, index, 1.0 - part)
    return weights.scatter_(-1, index + 1, part)


def two_hot_inverse(logits: Tensor, reach: float) -> Tensor:
    """The values that logits of bins [..., bins] stand for: the mean bin, and a symexp."""
    places = torch.linspace(-reach, reach, logits.shape[-1], device=logits.device)
    return symexp(logits.float().softmax(-1) @ places)


def two_hot_loss(logits: Tensor, values: Tensor, reach: float) -> Tensor:
    """Cross-entropy between logits of bins [..., bins] and the weights of values [...]."""
    weights = two_hot(values, logits.shape[-1], reach)
    return -(weights * logits.float().log_softmax(-1)).sum(-1)


def discount_from_episode_length(length: float) -> float:
    """A discount that looks as far ahead as a fifth of an episode, between 0.95 and 0.995."""
    fifth = length / 5
    return min(max((fifth - 1) / fifth, 0.95), 0.995)


def percentile_range(values: Tensor) -> Tensor:
    """What lies between the 5th and the 95th percentile of values [N], at least 1."""
    ends = torch.quantile(values, _percentiles(values.dtype, values.device))
    return (ends[1] - ends[0]).clamp(min=1.0)


@cache
def _percentiles(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept on the device: bringing them there makes the host wait."""
    return torch.tensor([0.05, 0.95], dtype=dtype, device=device)


def moments(total: Tensor, squares: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance from pooled sums; a variance that rounding made negative is zero."""
    mean = total / count.clamp(min=1)
    return mean, (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
