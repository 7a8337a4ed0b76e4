"""PPO loss and action log-probabilities in few tensor operations, with hand-written gradients.

On a GPU, the operations of a small loss take longer to launch than to compute. The textbook forms are next to their
callers in `functional.py` and `nn/distributions.py`, and tests compare the two. `cpu_kernels.py` does the same for
CPUs.

Shapes: N samples, K choices, D action features.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def is_supported(*tensors: Tensor) -> bool:
    """Return whether tensors are fp32 and not on a CPU. False in torch.compile, which fuses the textbook forms."""
    return (
        all(x.device.type != "cpu" and x.dtype == torch.float32 for x in tensors) and not torch.compiler.is_compiling()
    )


# -- discrete actions --------------------------------------------------------------------------------------------------


class FusedCategorical(torch.autograd.Function):
    """Log probability and entropy, [N] each, of actions [N] under logits [N, K]."""

    @staticmethod
    def forward(context: Any, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        logs = logits.log_softmax(-1)
        probs, index = logs.exp(), action.unsqueeze(-1)
        entropy = torch.special.entr(probs).sum(-1)  # a masked action contributes 0
        context.save_for_backward(logs, probs, entropy, index)
        return logs.gather(-1, index).squeeze(-1), entropy

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None]:
        """Gradient of the log probability of a: [k = a] - p_k; of the entropy H: -p_k (log p_k + H)."""
        logs, probs, entropy, index = context.saved_tensors
        # The log probability of a masked action is -inf, and 0 x -inf is NaN.
        factor = logs.clamp(min=_LOWEST_LOG).add_(entropy.unsqueeze(-1))
        factor = torch.addcmul(grad_log_prob.unsqueeze(-1), factor, grad_entropy.unsqueeze(-1))
        gradient = torch.mul(probs, factor).neg_()
        return gradient.scatter_add_(-1, index, grad_log_prob.unsqueeze(-1)), None


_LOWEST_LOG = -1e4
"""Far below the log of the smallest non-zero probability."""


# -- continuous actions ------------------------------------------------------------------------------------------------


class FusedGaussian(torch.autograd.Function):
    """Log probability and entropy, [N] each, of actions [N, D]; outputs are means and log stds [N, 2 D]."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = outputs.chunk(2, -1)
        inverse = log_std.neg().exp_()
        distance = torch.mul(action - mean, inverse)
        context.save_for_backward(inverse, distance)
        features = mean.shape[-1]
        log_std_sum = log_std.sum(-1)
        # Sum of -d^2 / 2 - log_std - log(2 pi) / 2 over features
        log_prob = distance.square().sum(-1).mul_(-0.5).sub_(log_std_sum).sub_(0.5 * features * math.log(2 * math.pi))
        return log_prob, log_std_sum + 0.5 * features * math.log(2 * math.pi * math.e)

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None]:
        """Gradient of the log probability: d / std for the mean, d^2 - 1 for the log std; of the entropy: 1 for it."""
        inverse, distance = context.saved_tensors
        factor = distance * grad_log_prob.unsqueeze(-1)
        grad_log_std = torch.addcmul((grad_entropy - grad_log_prob).unsqueeze(-1), factor, distance)
        return torch.cat([factor.mul_(inverse), grad_log_std], dim=-1), None


# -- PPO loss ----------------------------------------------------------------------------------------------------------


class FusedPPOLoss(torch.autograd.Function):
    """Total PPO loss and its other sums [5]; see `cpu_kernels.PPOLossCPU`. `clip` may be a one-element tensor."""

    @staticmethod
    def forward(
        context: Any,
        log_prob: Tensor,
        entropy: Tensor,
        values: Tensor,
        data: tuple[Tensor, Tensor, Tensor, Tensor],
        weights: tuple[float | Tensor, float | None, float, float],
    ) -> tuple[Tensor, Tensor]:
        old_log_prob, advantages, old_values, returns = data
        clip, value_clip, value_weight, entropy_weight = weights
        log_ratio = log_prob - old_log_prob
        excess = log_ratio.expm1()
        # Surrogate, and its bound: advantage x (1 +- clip)
        surrogate = torch.addcmul(advantages, advantages, excess)
        if isinstance(clip, float):
            bound = torch.add(advantages, advantages.abs(), alpha=clip)
        else:
            bound = torch.addcmul(advantages, advantages.abs(), clip)
        # Value loss: half the squared error; beyond `value_clip` from the old value, the larger of the two errors
        error = values - returns
        squared, grad_value = error.square(), error
        if value_clip is not None:
            move = values - old_values
            clipped_error = torch.clamp(move, -value_clip, value_clip).add_(old_values).sub_(returns)
            # Within `value_clip` the two are equal except for rounding, and the gradient is that of the error.
            beyond = (move.abs() > value_clip) & (clipped_error.square() > squared)
            squared, grad_value = torch.maximum(squared, clipped_error.square()), torch.where(beyond, 0.0, error)
        columns = [torch.minimum(surrogate, bound), squared, entropy, excess - log_ratio, excess.abs() > clip]
        sums = _loss_matrix(values.device, value_weight, entropy_weight) @ torch.stack(columns).sum(1)  # [6]
        context.save_for_backward(torch.where(surrogate > bound, 0.0, surrogate), grad_value)
        context.weights = value_weight, entropy_weight
        total, rest = sums[0], sums[1:]
        context.mark_non_differentiable(rest)
        return total.clone(), rest

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_value = context.saved_tensors
        value_weight, entropy_weight = context.weights
        grad_entropy = (grad_total * -entropy_weight).expand_as(grad_log_prob)
        return grad_log_prob * -grad_total, grad_entropy, grad_value * (grad_total * value_weight), None, None


@cache
def _loss_matrix(device: torch.device, value_weight: float, entropy_weight: float) -> Tensor:
    """Matrix from the sums of columns [5] to the total and the named sums [6]; cached on the device."""
    rows = torch.zeros(6, 5)
    rows[0, :3] = torch.tensor([-1.0, 0.5 * value_weight, -entropy_weight])
    rows[1, 0], rows[2, 1], rows[3, 2], rows[4, 3], rows[5, 4] = -1.0, 0.5, 1.0, 1.0, 1.0
    return rows.to(device)
