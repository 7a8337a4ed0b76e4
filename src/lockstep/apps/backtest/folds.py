"""Folds of a walk-forward backtest: consecutive periods of test, each with the bars before it for training."""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from lockstep.config import ConfigError
from lockstep.tasks.trading.config import AUTO
from lockstep.tasks.trading.price_data import PriceSeries

MIN_FOLD_BARS = 3
"""Smallest number of test bars of a fold."""

Window = Literal["expanding", "rolling"]


class Fold(NamedTuple):
    """A test period and the period of training before it. All times are in seconds since 1970."""

    train_start: float
    start: float
    """Time of the first bar of the test period."""
    stop: float
    """Time of the first bar after the test period."""

    def test_bars(self, bars: PriceSeries) -> range:
        """Return the bars of a symbol at whose close a decision is made. The last bars of a file fill orders."""
        first, last = (int(np.searchsorted(bars.time, time)) for time in (self.start, self.stop))
        return range(first, min(last, len(bars.time) - 3))

    def split_dates(self) -> tuple[str, ...]:
        """Return the setting `task.split_dates` of the runs that train before this fold."""
        first, *others = (datetime.fromtimestamp(time, UTC).isoformat() for time in self)
        return (first, AUTO, *others)


def split_into_folds(
    symbols: Sequence[PriceSeries], count: int, train_fraction: float, window: Window = "expanding"
) -> list[Fold]:
    """Split the bars after `train_fraction` of them into folds.

    Args:
        symbols: Prices. The folds of one symbol have equally many bars. Those of several symbols are equally long, in
            the period that all of them have in common.
        count: Number of folds.
        train_fraction: Fraction of the bars, or of the common period, before the first fold.
        window: expanding: train on everything before a fold. rolling: train on a period as long as that before the
            first fold.

    Raises:
        ConfigError: The symbols have no period in common, or a fold has too few bars.
    """
    first = max(bars.time[0] for bars in symbols)
    if len(symbols) == 1:
        time = symbols[0].time
        indices = np.linspace(round(train_fraction * len(time)), len(time) - 3, count + 1).round().astype(int)
        edges = time[indices].tolist()
        lengths = [int(index) for index in indices]  # in bars, because bars may be missing
    else:
        last = min(bars.time[-1] for bars in symbols)
        if last <= first:
            names = ", ".join(bars.name for bars in symbols)
            raise ConfigError(f"{names} have no period in common.", "Give files of the same period.")
        edges = np.linspace(first + train_fraction * (last - first), last, count + 1).tolist()
        lengths = []
    folds = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        if window == "expanding":
            train_start = min(bars.time[0] for bars in symbols)
        elif lengths:
            train_start = symbols[0].time[lengths[number] - lengths[0]]
        else:
            train_start = start - (edges[0] - first)
        folds.append(Fold(float(train_start), float(start), float(stop)))
    for number, fold in enumerate(folds, 1):
        for bars in symbols:
            if len(fold.test_bars(bars)) < MIN_FOLD_BARS:
                raise ConfigError(
                    f"fold {number} of {count} has {len(fold.test_bars(bars))} bars of {bars.name}.",
                    "Use fewer --folds, a smaller --train-fraction, or a longer file.",
                )
    return folds
