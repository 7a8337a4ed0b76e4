"""Prioritized fictitious self-play (PFSP): draw the opponent of each game by the win rates against the snapshots.

Vinyals et al., 2019, "Grandmaster level in StarCraft II using multi-agent reinforcement learning".

Shapes: B local environments in lane order, C snapshots.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.config import ConfigError


class PrioritizedSampling:
    """Snapshot that each environment plays against. A new one is drawn when a game ends.

    The weight of a snapshot is (1 - win rate) ** power. The results count over all processes and are added once per
    iteration, so that all processes draw with the same weights. They are halved with every new snapshot: the actor has
    changed, and old games say less about it.
    """

    def __init__(self, snapshots: int, power: float, index_in_lane: Tensor, games: int) -> None:
        """The first `games` environments of each lane play against snapshots. `index_in_lane`: [B]."""
        self.power, self._in_pool = power, index_in_lane < games
        self.opponents = index_in_lane % snapshots
        """[B] snapshot of each environment; without meaning outside the pool."""
        self.results = torch.zeros(snapshots, 2, device=index_in_lane.device)
        """[C, 2] points (a draw is half a win) and games of all processes up to the last iteration."""
        self._new_results = torch.zeros_like(self.results)

    def win_rates(self) -> Tensor:
        """Return the estimated win rates [C]. One win and one loss are added, so that they are never 0 or 1."""
        points, games = self.results.unbind(1)
        return (points + 1) / (games + 2)

    def end_step(self, ended: Tensor, info: dict[str, Tensor], uniform: Tensor) -> None:
        """Count the games that ended [B] and draw their next opponents, with uniform random numbers [B].

        Raises:
            ConfigError: The task does not report who won.
        """
        if "won" not in info:
            raise ConfigError(
                "opponent_sampling is pfsp, but the task reports no won in episode_info.",
                "Report it, or use --algo.opponent-sampling uniform.",
            )
        ended = ended & self._in_pool
        points = info["won"] + info["drawn"] / 2 if "drawn" in info else info["won"]
        counted = torch.where(ended, points, 0.0)
        # Sums of halves: exact in any order.
        self._new_results.index_add_(0, self.opponents, torch.stack([counted, ended.to(counted.dtype)], dim=1))
        cumulative = (1 - self.win_rates()).pow(self.power).cumsum(0)
        drawn = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).clamp_(max=len(cumulative) - 1)
        self.opponents.copy_(torch.where(ended, drawn, self.opponents))

    def end_iteration(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Add the results of an iteration, over all processes."""
        self.results += all_reduce_sum(self._new_results)
        self._new_results.zero_()

    def replace_snapshot(self, slot: int) -> None:
        """Forget the results of a snapshot that was replaced, and half of the results of the others."""
        self.results *= 0.5
        self.results[slot] = 0.0
