"""Returns and lengths of episodes, pooled per lane.

Shapes: L local lanes, T steps, E environments per lane, B = L x E local environments in lane order.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lockstep.data.rollout import flatten_rollout
from lockstep.metrics import Metrics
from lockstep.protocols import StateDict
from lockstep.pytree import load_into
from lockstep.transfer import has_float64


class EpisodeStatistics:
    """Return and length of the current episodes. They are part of each lane's state."""

    def __init__(self, lanes: range, envs: int, device: torch.device | None = None) -> None:
        """Keep them on the device if it is CUDA and supports float64, otherwise on the host."""
        self.lanes = lanes
        stats_device = device if device is not None and device.type == "cuda" and has_float64(device) else "cpu"
        self.returns = torch.zeros(len(lanes), envs, dtype=torch.float64, device=stats_device)  # [L, E]
        self.lengths = torch.zeros(len(lanes), envs, dtype=torch.int64, device=stats_device)  # [L, E]

    def count(self, rewards: Tensor, ended: Tensor, extras: dict[str, Tensor], active: Tensor | None = None) -> Metrics:
        """Add the rewards and episode ends of a rollout, [T, B]; return metrics of the episodes that ended in it.

        Inactive rows (`Step.active`) always end, but their episodes are not counted.
        """
        counted = ended if active is None else ended & active
        if self.returns.is_cuda:
            return self._count_on_device(rewards, ended, counted, extras)
        ended, ends = ended.cpu(), counted.cpu()
        tally = np.zeros((len(self.lanes), 4))
        _tally(rewards.cpu().numpy(), ended.numpy(), ends.numpy(), self.returns.numpy(), self.lengths.numpy(), tally)
        total, finite_episodes, length, episodes = torch.from_numpy(tally).unbind(1)
        metrics = Metrics()
        metrics.add_local("ep_return_mean", total, finite_episodes)
        metrics.add_local("ep_length_mean", length, episodes)
        for name, values in extras.items():
            # Count only rows that ended. Sum per lane so that results do not depend on which lanes share a process.
            last = values.cpu().double()
            counted = ends & ~last.isnan()
            last = torch.where(counted, last, 0.0)
            sums, counts = (
                torch.stack([lane.sum() for lane in flatten_rollout(x, len(self.lanes)).chunk(len(self.lanes))])
                for x in (last, counted)
            )
            metrics.add_local(f"ep_{name}_mean", sums, counts)
        return metrics

    def _count_on_device(self, rewards: Tensor, ended: Tensor, counted: Tensor, extras: dict[str, Tensor]) -> Metrics:
        """Compute `count` on the device without synchronizing; the sums stay there."""
        steps, lanes = len(rewards), len(self.lanes)
        # Return and length [T, 2, B] after each step, starting from their values before the rollout.
        running = torch.stack([rewards.double(), torch.ones_like(rewards, dtype=torch.float64)], dim=1)
        mask = (~ended).double().unsqueeze(1)  # [T, 1, B]
        total = torch.stack([self.returns.flatten(), self.lengths.flatten().double()])
        for t in range(steps):
            total = running[t].add_(total) if t == 0 else torch.addcmul(running[t], total, mask[t - 1], out=running[t])
        last = total * mask[-1]
        self.returns.copy_(last[0].view_as(self.returns))
        self.lengths.copy_(last[1].view_as(self.lengths))
        # Skip non-finite returns, which would make the mean non-finite. NaN in an extra means "no value".
        pairs = {"return": (running[:, 0], counted & running[:, 0].isfinite()), "length": (running[:, 1], counted)}
        pairs |= {name: (values.double(), counted & ~values.isnan()) for name, values in extras.items()}
        columns = [x for values, rows in pairs.values() for x in (torch.where(rows, values, 0.0), rows)]
        table = flatten_rollout(torch.stack(columns, dim=-1), lanes).chunk(lanes)  # [T x E, 2 x names] each
        # Sum per lane so that results do not depend on which lanes share a process.
        sums = torch.stack([lane.sum(0) for lane in table]).unbind(1)
        metrics = Metrics()
        for number, name in enumerate(pairs):
            metrics.add_local(f"ep_{name}_mean", sums[2 * number], sums[2 * number + 1])
        return metrics

    def lane_state(self, lane: int) -> StateDict:
        row = self.lanes.index(lane)
        return {"episode_returns": self.returns[row], "episode_lengths": self.lengths[row]}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        load_into(self.lane_state(lane), state, f"lane {lane}")


@njit(cache=True)
def _tally(rewards: Any, ended: Any, counted: Any, returns: Any, lengths: Any, tally: Any) -> None:
    lanes, envs = returns.shape
    for step in range(rewards.shape[0]):
        for lane in range(lanes):
            for env in range(envs):
                returns[lane, env] += rewards[step, lane * envs + env]
                lengths[lane, env] += 1
                if ended[step, lane * envs + env]:
                    if counted[step, lane * envs + env]:
                        if np.isfinite(returns[lane, env]):  # a non-finite return would make the mean non-finite
                            tally[lane, 0] += returns[lane, env]
                            tally[lane, 1] += 1
                        tally[lane, 2] += lengths[lane, env]
                        tally[lane, 3] += 1
                    returns[lane, env] = 0.0
                    lengths[lane, env] = 0
