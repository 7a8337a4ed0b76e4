"""Historical prices of all symbols, and the bars that an episode uses."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from lockstep.tasks.kernels import random_below
from lockstep.tasks.trading.price_data import PriceSeries


class History(NamedTuple):
    """The bars that episodes use, all symbols concatenated."""

    prices: np.ndarray
    """[bars, 4] float64."""
    first_starts: np.ndarray
    """[symbols] int64: the first bar at which an episode of a symbol can start."""
    num_starts: np.ndarray
    """[symbols] int64: number of bars at which an episode can start."""


@njit(cache=True, nogil=True)
def choose_start(key: int, episode: int, history: History, simulated_fraction: float) -> int:
    """Return the bar of `history` at which an episode starts, -1 for the simulated market."""
    symbols = len(history.first_starts)
    if symbols == 0 or random_below(1 << 30, key, episode, 0) < simulated_fraction * (1 << 30):
        return -1
    # Choose uniformly among all start bars of all symbols.
    offset = random_below(history.num_starts.sum(), key, episode, 1 << 40)
    symbol = 0
    while offset >= history.num_starts[symbol]:
        offset -= history.num_starts[symbol]
        symbol += 1
    return int(history.first_starts[symbol] + offset)


def find_bars(symbols: Sequence[PriceSeries], start: int) -> tuple[str, np.ndarray]:
    """Return the symbol, and the times of its bars, from one of the concatenated bars on. Nothing before the first."""
    for bars in symbols if start >= 0 else ():
        if start < len(bars.time):
            return bars.name, bars.time[start:]
        start -= len(bars.time)
    return "", np.zeros(0)
