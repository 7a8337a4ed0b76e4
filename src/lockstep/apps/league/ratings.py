"""Elo ratings, and intervals of win rates and ratings."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

Interval: TypeAlias = tuple[float, float]


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


def wilson(successes: int, trials: int, z: float = 1.96) -> Interval:
    """Return the Wilson score interval of a rate (default 95 %). Unlike a normal interval, it is valid near 0 and 1."""
    rate, shrink = successes / trials, 1 + z * z / trials
    middle = (rate + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / shrink
    return middle - half if successes else 0.0, middle + half if successes < trials else 1.0


def elo(names: Sequence[str], records: Mapping[tuple[str, str], MatchRecord]) -> dict[str, float]:
    """Return maximum-likelihood Elo ratings (Bradley-Terry model), the weakest team at 0.

    A draw is half a win. Each pair gets one extra draw; otherwise an undefeated team would have an infinite rating.
    """
    games, shares = _games(names, records), np.full((len(names), len(names)), 0.5)
    for (one, other), record in records.items():
        share = (record.wins + (record.draws + 1) / 2) / (record.games + 1)
        i, j = names.index(one), names.index(other)
        shares[i, j], shares[j, i] = share, 1 - share
    ratings = _fit(games, shares)
    return dict(zip(names, (ratings - ratings.min()).tolist(), strict=True))


def elo_intervals(
    names: Sequence[str], records: Mapping[tuple[str, str], MatchRecord], seed: int = 0, resamples: int = 1000
) -> dict[str, Interval]:
    """Return 95 % intervals of the ratings that `elo` returns, relative to the mean rating of all teams.

    Only differences of ratings are measured. The mean is the fixed point, so every team has an interval. With the
    weakest team as the fixed point, the few games that it wins would decide the width of every interval.

    The intervals are quantiles over resampled results. For each pair, rates of wins, draws and losses are drawn from
    their posterior distribution, where the extra draw of `elo` is a third of each. Unlike a bootstrap of the games,
    this gives an interval of positive width to a team that won or lost every game.
    """
    games, shares = _games(names, records), np.full((resamples, len(names), len(names)), 0.5)
    generator = np.random.default_rng(seed)
    for (one, other), record in records.items():
        counts = np.array([record.wins, record.draws, record.losses]) + 1 / 3
        wins, draws, losses = generator.dirichlet(counts, resamples).T
        i, j = names.index(one), names.index(other)
        shares[:, i, j], shares[:, j, i] = wins + draws / 2, losses + draws / 2
    ratings = np.array(list(elo(names, records).values()))
    resampled = _fit(games, shares)
    lows, highs = np.quantile(resampled + ratings.mean(), [0.025, 0.975], axis=0).tolist()
    return {name: (low, high) for name, low, high in zip(names, lows, highs, strict=True)}


def _games(names: Sequence[str], records: Mapping[tuple[str, str], MatchRecord]) -> np.ndarray:
    """Return the number of games of each pair with the extra draw, [team, team]."""
    games = np.zeros((len(names), len(names)))
    for (one, other), record in records.items():
        i, j = names.index(one), names.index(other)
        games[i, j] = games[j, i] = record.games + 1
    return games


def _fit(games: np.ndarray, shares: np.ndarray, rounds: int = 10_000) -> np.ndarray:
    """Return Elo ratings with mean 0, [..., team], from the share of points of each team, [..., team, opponent]."""
    points = (games * shares).sum(-1)
    strength = np.ones_like(points)
    for _ in range(rounds):  # MM algorithm of Hunter: the likelihood increases in every round
        expected = (games / (strength[..., :, None] + strength[..., None, :])).sum(-1)
        updated = points / expected
        updated /= np.exp(np.log(updated).mean(-1, keepdims=True))
        change = np.abs(np.log(updated / strength)).max()
        strength = updated
        if change < 1e-9:
            break
    ratings: np.ndarray = 400 * np.log10(strength)
    return ratings
