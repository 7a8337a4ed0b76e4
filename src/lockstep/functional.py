"""Pure arithmetic: returns, surrogates, schedules. No state, no modules, no processes.

Shapes: T time; every other axis is a batch axis and is left alone.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["constant", "linear", "cosine"]


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


def generalized_advantages(
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
    advantages = torch.empty_like(deltas)
    running = torch.zeros_like(deltas.select(time, 0))
    for step in range(deltas.shape[time] - 1, -1, -1):
        running = deltas.select(time, step) + decay.select(time, step) * running
        advantages.select(time, step).copy_(running)
    return advantages


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's pessimistic policy loss for each sample."""
    ratio = log_ratio.exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip, 1.0 + clip))


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Schulman's low-variance, never negative estimate of KL(old || new) for each sample."""
    return log_ratio.expm1() - log_ratio


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half the squared error for each sample, pessimistic about moves beyond `clip` from the old value."""
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss


def moments(total: Tensor, squares: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance from pooled sums; a variance that rounding made negative is zero."""
    mean = total / count.clamp(min=1)
    return mean, (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
