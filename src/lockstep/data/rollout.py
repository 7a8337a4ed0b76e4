"""A rollout: what every local environment saw and did over a horizon, stored lane by lane.

Shapes: L local lanes, T horizon, E environments a lane. Buffers are [L, T, E, ...], so that one lane is one contiguous
block wherever it lives.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lockstep.protocols import Metrics, State
from lockstep.trees import Tree, tree_map


class Rollout:
    """Preallocated buffers by name, made when a name is first written."""

    def __init__(self, lanes: int, horizon: int, envs: int) -> None:
        self.shape = (lanes, horizon, envs)
        self.buffers: dict[str, Tree] = {}

    def write(self, step: int, **values: Tree) -> None:
        """Store values [L, E, ...] of one time step."""
        for name, value in values.items():
            if name not in self.buffers:
                self.buffers[name] = tree_map(lambda x: x.new_empty(*self.shape, *x.shape[2:]), value)
            tree_map(lambda buffer, x: buffer[:, step].copy_(x), self.buffers[name], value)

    def __getitem__(self, name: str) -> Tree:
        return self.buffers[name]

    def tensor(self, name: str) -> Tensor:
        """A buffer that is one tensor, [L, T, E, ...]."""
        buffer = self.buffers[name]
        assert isinstance(buffer, Tensor)
        return buffer


def samples(buffer: Tree) -> Any:
    """A view of [L, T, E, ...] as [L, T x E, ...]."""
    return tree_map(lambda x: x.flatten(1, 2), buffer)


def take(batch: Tree, rows: Tensor) -> Tree:
    """The samples `rows` [L, M] of a batch [L, N, ...], contiguous [L, M, ...]."""

    def gather(x: Tensor) -> Tensor:
        lanes, count = x.shape[:2]
        offsets = torch.arange(lanes, device=rows.device).unsqueeze(1) * count
        return x.flatten(0, 1).index_select(0, (rows + offsets).flatten()).unflatten(0, (lanes, -1))

    return tree_map(gather, batch)


class Episodes:
    """Return and length of the episodes under way; a lane's belong to its state."""

    def __init__(self, lanes: range, envs: int) -> None:
        self.lanes = lanes
        self.returns = torch.zeros(len(lanes), envs, dtype=torch.float64)  # [L, E]
        self.lengths = torch.zeros(len(lanes), envs, dtype=torch.int64)  # [L, E]

    def count(self, rewards: Tensor, ended: Tensor, extras: dict[str, Tensor]) -> Metrics:
        """Follow a rollout's rewards and endings, [L, T, E]; what the episodes that ended in it amounted to."""
        rewards, ended = rewards.cpu(), ended.cpu()
        tally = np.zeros((len(self.lanes), 3))
        _tally(rewards.numpy(), ended.numpy(), self.returns.numpy(), self.lengths.numpy(), tally)
        total, length, episodes = torch.from_numpy(tally).unbind(1)
        metrics = Metrics()
        metrics.add("ep_return_mean", total, episodes)
        metrics.add("ep_length_mean", length, episodes)
        for name, values in extras.items():
            # Lane by lane, so that the bits of a lane's sum do not depend on who else lives here.
            sums = torch.stack([lane[done].sum() for lane, done in zip(values.cpu().double(), ended, strict=True)])
            metrics.add(f"ep_{name}_mean", sums, episodes)
        return metrics

    def state(self, lane: int) -> State:
        row = self.lanes.index(lane)
        return {"episode_returns": self.returns[row], "episode_lengths": self.lengths[row]}


@njit(cache=True)
def _tally(rewards: Any, ended: Any, returns: Any, lengths: Any, tally: Any) -> None:
    for lane in range(rewards.shape[0]):
        for step in range(rewards.shape[1]):
            for env in range(rewards.shape[2]):
                returns[lane, env] += rewards[lane, step, env]
                lengths[lane, env] += 1
                if ended[lane, step, env]:
                    tally[lane, 0] += returns[lane, env]
                    tally[lane, 1] += lengths[lane, env]
                    tally[lane, 2] += 1
                    returns[lane, env] = 0.0
                    lengths[lane, env] = 0
