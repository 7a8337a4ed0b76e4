"""Rollout buffer: observations, actions and rewards of all local environments over a horizon.

Shapes: L local lanes, T horizon, E environments per lane, B = L x E local environments, lane after lane. Buffers are
[T, B, ...], so that a step is written as one block. The T x E samples of a lane are numbered by time first.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lockstep.pytree import Tree, leaves, tree_map


class Rollout:
    """Buffers by name, allocated when the first step is written."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.buffers: dict[str, Tree] = {}
        self._slots: list[list[Tensor]] = []

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Store values [B, ...] of one time step. Names and their order must be the same in every call."""
        if not self._slots:
            self.buffers = tree_map(lambda x: x.new_empty(self.horizon, *x.shape), values)
            self._slots = [[buffer[t] for buffer in leaves(self.buffers)] for t in range(self.horizon)]
        torch._foreach_copy_(self._slots[step], leaves(values))  # one call for all of them

    def __getitem__(self, name: str) -> Any:
        """A buffer, [T, B, ...]."""
        return self.buffers[name]


def flatten_rollout(values: Tree, lanes: int) -> Any:
    """Reshape a rollout [T, B, ...] to samples [L x T x E, ...], lane after lane and by time within a lane."""
    return tree_map(lambda x: x.unflatten(1, (lanes, -1)).transpose(0, 1).flatten(0, 2), values)


def minibatches(batch: Tree, order: Tensor, size: int) -> Iterator[Any]:
    """Shuffle samples [L x N, ...] by an order per lane [L, N]; yield minibatches with `size` samples of every lane.

    The samples are copied into order once. Minibatches are contiguous views [L x size, ...].
    """
    starts = torch.arange(len(order), device=order.device).unsqueeze(1) * order.shape[1]
    rows = torch.cat([part.flatten() for part in (order + starts).split(size, dim=1)])
    ordered = tree_map(lambda x: x.index_select(0, rows), batch)
    for start in range(0, len(rows), size * len(order)):
        yield tree_map(lambda x, s=start: x[s : s + size * len(order)], ordered)


def minibatch_at(rows: Tree, order: Tensor, per_lane: int, number: int) -> Any:
    """Recompute minibatch `number` of an epoch."""
    return next(islice(minibatches(rows, order, per_lane), number, None))
