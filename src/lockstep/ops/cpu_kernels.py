"""Fused numba kernels for CPUs, where many torch operations on small tensors are mostly overhead.

Each function has a textbook form next to its caller, which other devices and precisions use. Tests compare the two.
Gradients are written by hand.

Shapes: N samples, K choices, T time, B environments.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.autograd.function import once_differentiable


def start_numba() -> None:
    """Run a small kernel to initialize numba, which takes about a second. Processes forked later need not repeat it."""
    row, column = np.zeros(1, np.float32), np.zeros((1, 1), np.float32)
    _categorical(column, column, np.zeros(1, np.int64), row, row.copy())


def is_supported(*tensors: Tensor) -> bool:
    """Return whether the kernels support the device and dtype of these tensors."""
    if torch.compiler.is_compiling():
        return False  # torch.compile fuses the textbook form, and a numba kernel would be a graph break
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)


# -- discrete actions --------------------------------------------------------------------------------------------------


class CategoricalCPU(torch.autograd.Function):
    """Log probability and entropy, [N] each, of actions [N] under logits [N, K]."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        # Softmax and exp by torch along the long axis, where they are vectorized; along the short axis they are not.
        logs = outputs.t().contiguous().log_softmax(0)  # [K, N]
        probs = logs.exp()
        log_prob, entropy = torch.empty(2, len(outputs)).unbind()
        _categorical(logs.numpy(), probs.numpy(), action.numpy(), log_prob.numpy(), entropy.numpy())
        context.saved = logs, probs, entropy, action
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None]:
        logs, probs, entropy, action = context.saved
        gradient = torch.empty(logs.shape[::-1])  # [N, K]
        tensors = (logs, probs, entropy, action, grad_log_prob, grad_entropy, gradient)
        _categorical_gradient(*(x.numpy() for x in tensors))
        return gradient, None


@njit(cache=True, nogil=True)
def _categorical(logs: Any, probs: Any, action: Any, log_prob: Any, entropy: Any) -> None:
    for n in range(len(action)):
        log_prob[n], entropy[n] = logs[action[n], n], 0
    for k in range(len(logs)):
        for n in range(len(action)):
            if probs[k, n] != 0:  # a masked action contributes 0; NaN propagates
                entropy[n] -= probs[k, n] * logs[k, n]


@njit(cache=True, nogil=True)
def _categorical_gradient(
    logs: Any, probs: Any, entropy: Any, action: Any, grad_log_prob: Any, grad_entropy: Any, gradient: Any
) -> None:
    """Gradient of the log probability of a: [k = a] - p_k; of the entropy H: -p_k (log p_k + H)."""
    for n in range(len(action)):
        for k in range(len(logs)):
            factor = grad_log_prob[n] + grad_entropy[n] * (logs[k, n] + entropy[n])
            gradient[n, k] = 0 if probs[k, n] == 0 else -probs[k, n] * factor
        gradient[n, action[n]] += grad_log_prob[n]


# -- PPO loss ----------------------------------------------------------------------------------------------------------


class PPOLossCPU(torch.autograd.Function):
    """Total PPO loss, and its other sums [5] in the order of `functional.PPOLoss`.

    `data` are the old log probabilities, advantages, old values and returns. `weights` are clip, value clip, value
    weight and entropy weight.
    """

    @staticmethod
    def forward(
        context: Any,
        log_prob: Tensor,
        entropy: Tensor,
        values: Tensor,
        data: tuple[Tensor, Tensor, Tensor, Tensor],
        weights: tuple[float, float | None, float, float],
    ) -> tuple[Tensor, Tensor]:
        clip, value_clip, value_weight, entropy_weight = weights
        grad_log_prob, grad_value = torch.empty(2, len(values)).unbind()
        sums = torch.zeros(5, dtype=torch.float64)
        old_log_prob, *rest = data
        log_ratio = log_prob - old_log_prob
        tensors = (log_ratio, log_ratio.expm1(), entropy, values, *rest, grad_log_prob, grad_value, sums)
        arrays: tuple[Any, ...] = tuple(x.numpy() for x in tensors)
        _ppo(*arrays, clip, math.inf if value_clip is None else value_clip)  # type: ignore[call-arg]
        context.saved = grad_log_prob, grad_value, value_weight, entropy_weight
        policy, value, entropy_sum, *_ = sums.tolist()
        sums = sums.float()
        context.mark_non_differentiable(sums)
        return torch.tensor(policy + value_weight * value - entropy_weight * entropy_sum), sums

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_value, value_weight, entropy_weight = context.saved
        scale = float(grad_total)
        grad_entropy = torch.full_like(grad_log_prob, -entropy_weight * scale)
        return grad_log_prob * scale, grad_entropy, grad_value * (value_weight * scale), None, None


@njit(cache=True, nogil=True)
def _ppo(
    log_ratio: Any,
    excess: Any,
    entropy: Any,
    values: Any,
    advantages: Any,
    old_values: Any,
    returns: Any,
    grad_log_prob: Any,
    grad_value: Any,
    sums: Any,
    clip: float,
    value_clip: float,
) -> None:
    """Compute PPO's sums and gradients; `excess` is the probability ratio minus one."""
    policy, value, entropy_sum, divergence, clipped = 0.0, 0.0, 0.0, 0.0, 0.0
    for n in range(len(values)):
        surrogate = -advantages[n] * (excess[n] + 1.0)
        bound = -advantages[n] * (1.0 + clip * np.sign(advantages[n]))
        # Clipped surrogate. NaN propagates, because `surrogate < bound` is False for it.
        policy += bound if surrogate < bound else surrogate
        grad_log_prob[n] = 0.0 if surrogate < bound else surrogate
        divergence += excess[n] - log_ratio[n]
        clipped += abs(excess[n]) > clip
        entropy_sum += entropy[n]

        # Clipped value loss, in float64: otherwise rounding could make equal errors differ.
        predicted = np.float64(values[n])
        error, move = predicted - returns[n], predicted - old_values[n]
        clipped_error = error
        if not abs(move) <= value_clip and value_clip < np.inf:
            clipped_error = old_values[n] + math.copysign(value_clip, move) - returns[n]
        clipped_square = clipped_error * clipped_error
        if np.isnan(clipped_square):  # propagate NaN of an old value
            error = clipped_square
        value += 0.5 * max(error * error, clipped_square)
        grad_value[n] = 0.0 if error * error < clipped_square else error
    sums[0], sums[1], sums[2], sums[3], sums[4] = policy, value, entropy_sum, divergence, clipped


# -- advantages --------------------------------------------------------------------------------------------------------


def discounted_reverse_cumsum(deltas: Tensor, decay: Tensor) -> Tensor:
    """x[t] = delta[t] + decay[t] x[t + 1] over time, from the end; [T, B]."""
    result = torch.empty(deltas.shape)
    _accumulate(deltas.numpy(), decay.numpy(), result.numpy())
    return result


@njit(cache=True, nogil=True)
def _accumulate(deltas: Any, decay: Any, result: Any) -> None:
    last = len(deltas) - 1
    for b in range(deltas.shape[1]):
        result[last, b] = deltas[last, b]
    for t in range(last - 1, -1, -1):
        for b in range(deltas.shape[1]):
            result[t, b] = deltas[t, b] + decay[t, b] * result[t + 1, b]
