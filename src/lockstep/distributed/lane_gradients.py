"""Loss and gradient of each lane by itself, for reports of non-finite values and for `lockstep replay`.

A step needs only their sum over all lanes, so they are computed again here, without changing anything.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.distributed.runtime import Runtime
from lockstep.protocols import LossFunction, StateDict
from lockstep.pytree import Tree


class LaneGradients(NamedTuple):
    """Loss and gradient of one lane, not divided by a number of samples."""

    lane: int
    batch: Tree
    """The lane's samples, [N, ...]."""
    sums: dict[str, Tensor]
    """The loss and the metrics of it."""
    gradients: StateDict
    """By name of the parameter, without the parameters that the loss does not depend on."""


def lane_batches(runtime: Runtime, batch: Tree) -> Iterator[tuple[int, Tree]]:
    """Yield every local lane and its samples [N, ...] of a batch [L x N, ...]."""
    yield from zip(runtime.lanes.local, runtime._lane_parts(batch), strict=True)


def lane_gradients(
    runtime: Runtime, parameters: Mapping[nn.Parameter, str], loss: LossFunction, batch: Tree
) -> Iterator[LaneGradients]:
    """Yield loss and gradient of every local lane of a batch [L x N, ...]."""
    for lane, part in lane_batches(runtime, batch):
        with runtime.autocast():
            result = loss(part)
        terms = {"loss": result.loss_sum, **result.metric_sums}
        gradients: StateDict = {}
        if result.loss_sum.requires_grad:
            found = torch.autograd.grad(result.loss_sum, list(parameters), allow_unused=True)
            pairs = zip(parameters.values(), found, strict=True)
            gradients = {name: gradient for name, gradient in pairs if gradient is not None}
        sums = {name: torch.as_tensor(term).detach() for name, term in terms.items()}
        yield LaneGradients(lane, part, sums, gradients)
