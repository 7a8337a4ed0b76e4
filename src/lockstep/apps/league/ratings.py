"""What games say of strength: how sure a win rate is, and ratings that explain all results at once."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class MatchRecord(NamedTuple):
    """What the games of one side against another came to."""

    wins: int
    draws: int
    losses: int
    scored: float
    """A game, on average."""
    conceded: float

    @property
    def games(self) -> int:
        return self.wins + self.draws + self.losses

    @property
    def win_rate(self) -> float:
        """Games won of games played: a draw is not won."""
        return self.wins / self.games

    def reversed(self) -> "MatchRecord":
        """The same games as the other side saw them."""
        return MatchRecord(self.losses, self.draws, self.wins, self.conceded, self.scored)


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a rate, of 95 % unless told: honest near 0 and 1, too, where a normal one is not."""
    rate, shrink = successes / trials, 1 + z * z / trials
    middle = (rate + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / shrink
    return middle - half if successes else 0.0, middle + half if successes < trials else 1.0


def elo(names: Sequence[str], records: Mapping[tuple[str, str], MatchRecord], rounds: int = 10_000) -> dict[str, float]:
    """Elo ratings that make the results most likely (Bradley and Terry's model), the weakest at 0.

    A draw is half a win. Every pair that met is given one more draw, or who never lost would be infinitely strong.
    """
    won = dict.fromkeys(names, 0.0)
    met: list[tuple[str, str, float]] = []
    for (one, other), record in records.items():
        won[one] += record.wins + (record.draws + 1) / 2
        won[other] += record.losses + (record.draws + 1) / 2
        met.append((one, other, record.games + 1))
    strength = dict.fromkeys(names, 1.0)
    for _ in range(rounds):  # Hunter's minorisation: each round can only make the results likelier
        expected = dict.fromkeys(names, 0.0)
        for one, other, games in met:
            share = games / (strength[one] + strength[other])
            expected[one] += share
            expected[other] += share
        after = {name: won[name] / expected[name] for name in names}
        scale = math.exp(sum(math.log(value) for value in after.values()) / len(after))
        after = {name: value / scale for name, value in after.items()}
        moved = max(abs(math.log(after[name] / strength[name])) for name in names)
        strength = after
        if moved < 1e-9:
            break
    ratings = {name: 400 * math.log10(strength[name]) for name in names}
    return {name: rating - min(ratings.values()) for name, rating in ratings.items()}
