"""A rollout: what every local environment saw and did over a horizon.

Shapes: L local lanes, T horizon, E environments a lane, B = L x E local environments, lane after lane. Buffers are
[T, B, ...], so that a step is written as one block. The samples of a lane, T x E of them, are numbered by time first.
S is the length of the sequences that a network with memory learns from.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lockstep.metrics import Metrics
from lockstep.protocols import StateDict
from lockstep.pytree import Tree, leaves, tree_map
from lockstep.transfer import has_float64


class Rollout:
    """Preallocated buffers by name, made when the first step is written."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.buffers: dict[str, Tree] = {}
        self._slots: list[list[Tensor]] = []

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Store values [B, ...] of one time step; the same names, in the same order, every time."""
        if not self._slots:
            self.buffers = tree_map(lambda x: x.new_empty(self.horizon, *x.shape), values)
            self._slots = [[buffer[t] for buffer in leaves(self.buffers)] for t in range(self.horizon)]
        torch._foreach_copy_(self._slots[step], leaves(values))  # one call for all of them

    def __getitem__(self, name: str) -> Any:
        """A buffer, [T, B, ...]."""
        return self.buffers[name]


def flatten_rollout(values: Tree, lanes: int) -> Any:
    """What a rollout holds, [T, B, ...], as samples lane after lane and by time within one, [L x T x E, ...]."""
    return tree_map(lambda x: x.unflatten(1, (lanes, -1)).transpose(0, 1).flatten(0, 2), values)


def episode_starts(ended: Tensor) -> Tensor:
    """Where a step is the first of an episode that starts within the rollout, from where one ended, [T, B]."""
    return torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])


def sequences(batch: Tree, lanes: int, horizon: int, length: int) -> Any:
    """Samples [L x T x E, ...] as sequences of one environment each, S steps long, [L x T/S x E, S, ...]."""

    def regroup(x: Tensor) -> Tensor:
        return x.unflatten(0, (lanes, horizon // length, length, -1)).transpose(2, 3).flatten(0, 2)

    return tree_map(regroup, batch)


def minibatches(batch: Tree, order: Tensor, size: int) -> Iterator[Any]:
    """Samples [L x N, ...] in an order of each lane's own, [L, N], cut into minibatches with `size` of every lane.

    The samples are put in order once; minibatches are views, [L x size, ...], of which each is contiguous.
    """
    starts = torch.arange(len(order), device=order.device).unsqueeze(1) * order.shape[1]
    rows = torch.cat([part.flatten() for part in (order + starts).split(size, dim=1)])
    ordered = tree_map(lambda x: x.index_select(0, rows), batch)
    for start in range(0, len(rows), size * len(order)):
        yield tree_map(lambda x, s=start: x[s : s + size * len(order)], ordered)


class EpisodeStatistics:
    """Return and length of the episodes under way; a lane's belong to its state."""

    def __init__(self, lanes: range, envs: int, device: torch.device | None = None) -> None:
        """They are followed on the device if it is CUDA and has float64, and on the host otherwise."""
        self.lanes = lanes
        on_device = device is not None and device.type == "cuda" and has_float64(device)
        where = device if on_device else torch.device("cpu")
        self.returns = torch.zeros(len(lanes), envs, dtype=torch.float64, device=where)  # [L, E]
        self.lengths = torch.zeros(len(lanes), envs, dtype=torch.int64, device=where)  # [L, E]

    def count(self, rewards: Tensor, ended: Tensor, extras: dict[str, Tensor]) -> Metrics:
        """Follow a rollout's rewards and endings, [T, B]; what the episodes that ended in it amounted to."""
        if self.returns.is_cuda:
            return self._count_on_device(rewards, ended, extras)
        ended = ended.cpu()
        tally = np.zeros((len(self.lanes), 4))
        _tally(rewards.cpu().numpy(), ended.numpy(), self.returns.numpy(), self.lengths.numpy(), tally)
        total, summed, length, episodes = torch.from_numpy(tally).unbind(1)
        metrics = Metrics()
        metrics.add_local("ep_return_mean", total, summed)
        metrics.add_local("ep_length_mean", length, episodes)
        for name, values in extras.items():
            # Rows that did not end mean nothing; lane by lane, so that the bits do not depend on who else lives here.
            last = values.cpu().double()
            counted = ended & ~last.isnan()
            last = torch.where(counted, last, 0.0)
            sums, counts = (
                torch.stack([lane.sum() for lane in flatten_rollout(x, len(self.lanes)).chunk(len(self.lanes))])
                for x in (last, counted)
            )
            metrics.add_local(f"ep_{name}_mean", sums, counts)
        return metrics

    def _count_on_device(self, rewards: Tensor, ended: Tensor, extras: dict[str, Tensor]) -> Metrics:
        """The same without waiting for the device: the sums that the metrics are made of stay there."""
        steps, lanes = len(rewards), len(self.lanes)
        # Return and length [T, 2, B] after each step, from what they were before the rollout.
        along = torch.stack([rewards.double(), torch.ones_like(rewards, dtype=torch.float64)], dim=1)
        alive = (~ended).double().unsqueeze(1)  # [T, 1, B]
        before = torch.stack([self.returns.flatten(), self.lengths.flatten().double()])
        for t in range(steps):
            before = along[t].add_(before) if t == 0 else torch.addcmul(along[t], before, alive[t - 1], out=along[t])
        last = before * alive[-1]
        self.returns.copy_(last[0].view_as(self.returns))
        self.lengths.copy_(last[1].view_as(self.lengths))
        # A return that is not finite would hide all others; NaN in an extra says that it does not count.
        pairs = {"return": (along[:, 0], ended & along[:, 0].isfinite()), "length": (along[:, 1], ended)}
        pairs |= {name: (values.double(), ended & ~values.isnan()) for name, values in extras.items()}
        columns = [x for values, counted in pairs.values() for x in (torch.where(counted, values, 0.0), counted)]
        table = flatten_rollout(torch.stack(columns, dim=-1), lanes).chunk(lanes)  # [T x E, 2 x names] each
        # Summed per lane, so that results do not depend on which lanes share a process.
        sums = torch.stack([lane.sum(0) for lane in table]).unbind(1)
        metrics = Metrics()
        for number, name in enumerate(pairs):
            metrics.add_local(f"ep_{name}_mean", sums[2 * number], sums[2 * number + 1])
        return metrics

    def state(self, lane: int) -> StateDict:
        row = self.lanes.index(lane)
        return {"episode_returns": self.returns[row], "episode_lengths": self.lengths[row]}


@njit(cache=True)
def _tally(rewards: Any, ended: Any, returns: Any, lengths: Any, tally: Any) -> None:
    lanes, envs = returns.shape
    for step in range(rewards.shape[0]):
        for lane in range(lanes):
            for env in range(envs):
                returns[lane, env] += rewards[step, lane * envs + env]
                lengths[lane, env] += 1
                if ended[step, lane * envs + env]:
                    if np.isfinite(returns[lane, env]):  # one that is not would hide all others
                        tally[lane, 0] += returns[lane, env]
                        tally[lane, 1] += 1
                    tally[lane, 2] += lengths[lane, env]
                    tally[lane, 3] += 1
                    returns[lane, env] = 0.0
                    lengths[lane, env] = 0


def minibatch_at(rows: Tree, order: Tensor, per_lane: int, number: int) -> Any:
    """One of an epoch's minibatches again."""
    return next(islice(minibatches(rows, order, per_lane), number, None))
