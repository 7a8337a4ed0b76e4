"""Losses of predictions: pure functions from network outputs and targets to one loss per example.

Shapes: N examples, C classes; `...` are the axes of one target. The loss of an example is the mean over its targets.
"""

from torch import Tensor
from torch.nn import functional as nnf


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Compute the squared error [N] of numbers [N, ...]."""
    return _example_mean((outputs - target).square())


def binary_cross_entropy(outputs: Tensor, target: Tensor) -> Tensor:
    """Compute the cross-entropy [N] of logits [N, ...] for labels 0 and 1."""
    return _example_mean(nnf.binary_cross_entropy_with_logits(outputs, target, reduction="none"))


def cross_entropy(outputs: Tensor, target: Tensor) -> Tensor:
    """Compute the cross-entropy [N] of logits [N, C, ...] for classes [N, ...]."""
    return _example_mean(nnf.cross_entropy(outputs, target, reduction="none"))


def _example_mean(losses: Tensor) -> Tensor:
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses
