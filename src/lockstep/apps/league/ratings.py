"""Confidence intervals of win rates, and Elo ratings."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class MatchRecord(NamedTuple):
    """Result of the games of one team against another."""

    wins: int
    draws: int
    losses: int
    scored: float
    """Mean own score per game."""
    conceded: float
    """Mean opponent score per game."""

    @property
    def games(self) -> int:
        return self.wins + self.draws + self.losses

    @property
    def win_rate(self) -> float:
        """Fraction of games won. A draw is not a win."""
        return self.wins / self.games

    def reversed(self) -> "MatchRecord":
        """Return the record from the point of view of the other team."""
        return MatchRecord(self.losses, self.draws, self.wins, self.conceded, self.scored)


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of a rate (default 95 %). Unlike a normal interval, it is valid near 0 and 1."""
    rate, shrink = successes / trials, 1 + z * z / trials
    middle = (rate + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / shrink
    return middle - half if successes else 0.0, middle + half if successes < trials else 1.0


def elo(names: Sequence[str], records: Mapping[tuple[str, str], MatchRecord], rounds: int = 10_000) -> dict[str, float]:
    """Return maximum-likelihood Elo ratings (Bradley-Terry model), the weakest team at 0.

    A draw is half a win. Each pair gets one extra draw; otherwise an undefeated team would have an infinite rating.
    """
    points = dict.fromkeys(names, 0.0)
    for (one, other), record in records.items():
        points[one] += record.wins + (record.draws + 1) / 2
        points[other] += record.losses + (record.draws + 1) / 2
    strength = dict.fromkeys(names, 1.0)
    for _ in range(rounds):  # MM algorithm of Hunter: the likelihood increases in every round
        expected = dict.fromkeys(names, 0.0)
        for (one, other), record in records.items():
            rate = (record.games + 1) / (strength[one] + strength[other])
            expected[one] += rate
            expected[other] += rate
        updated = {name: points[name] / expected[name] for name in names}
        scale = math.exp(sum(math.log(value) for value in updated.values()) / len(updated))
        updated = {name: value / scale for name, value in updated.items()}
        change = max(abs(math.log(updated[name] / strength[name])) for name in names)
        strength = updated
        if change < 1e-9:
            break
    ratings = {name: 400 * math.log10(strength[name]) for name in names}
    return {name: rating - min(ratings.values()) for name, rating in ratings.items()}
