"""Historical prices of all symbols, the bars that an episode uses, and the scale of the indicators.

Shapes: F indicators, K features: further columns of the files.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from lockstep.config import ConfigError
from lockstep.protocols import Split
from lockstep.rng import RandomStream
from lockstep.tasks.kernels import random_below
from lockstep.tasks.trading.config import TradingConfig, find_part, symbol_costs
from lockstep.tasks.trading.price_data import PriceSeries
from lockstep.tasks.trading.simulated_market import INDICATORS, LOOKBACK, MARKETS, compute_indicators, simulate

MIN_HELD_OUT_STEPS = 16
"""Smallest number of steps of an episode on a validation or test part."""


class History(NamedTuple):
    """The bars that episodes use, all symbols concatenated."""

    prices: np.ndarray
    """[bars, 4] float64."""
    first_starts: np.ndarray
    """[symbols] int64: the first bar at which an episode of a symbol can start."""
    num_starts: np.ndarray
    """[symbols] int64: number of bars at which an episode can start."""
    first_bars: np.ndarray
    """[symbols] int64: the first bar of a symbol."""
    borrow: np.ndarray
    """[symbols] float64: cost of a short position per bar."""
    features: np.ndarray
    """[bars, K] float64: further columns of the files."""


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


@njit(cache=True, nogil=True)
def find_symbol(history: History, start: int) -> int:
    """Return the symbol of a bar of `history`."""
    symbol = 0
    while symbol + 1 < len(history.first_bars) and start >= history.first_bars[symbol + 1]:
        symbol += 1
    return symbol


def find_bars(symbols: Sequence[PriceSeries], start: int) -> tuple[str, np.ndarray]:
    """Return the symbol, and the times of its bars, from one of the concatenated bars on. Nothing before the first."""
    for bars in symbols if start >= 0 else ():
        if start < len(bars.time):
            return bars.name, bars.time[start:]
        start -= len(bars.time)
    return "", np.zeros(0)


def bars_per_episode(config: TradingConfig, episode_length: int) -> int:
    """Return the bars that an episode reads, including those before its first step and two after its last step."""
    return config.observed_bars + episode_length + 2


def build_history(config: TradingConfig, symbols: Sequence[PriceSeries]) -> tuple[History, int]:
    """Return the bars of the part that episodes use, and the number of steps of an episode.

    Raises:
        ConfigError: A part has too few bars. A training part is also rejected if the validation part is too short, so
            that the error is raised before training.
    """
    steps = _episode_length(config, symbols, config.split)
    if config.split == "train" and config.has_validation:
        _episode_length(config, symbols, "validation")
    first_starts, num_starts, num_bars = [], [], 0
    for bars in symbols:
        part = find_part(config, bars, config.split)
        start = _first_start(config, part)
        first_starts.append(num_bars + start)
        starts = part.stop - start - bars_per_episode(config, steps) + 1
        num_starts.append(1 if config.start_at_first_bar else starts)
        num_bars += len(bars.time)
    lengths = [len(bars.time) for bars in symbols]
    history = History(
        prices=np.concatenate([bars.prices for bars in symbols]) if symbols else np.ones((1, 4)),
        first_starts=np.array(first_starts, np.int64),
        num_starts=np.array(num_starts, np.int64),
        first_bars=np.cumsum([0, *lengths[:-1]], dtype=np.int64)[: len(symbols)],
        borrow=np.array([symbol_costs(config, bars).borrow for bars in symbols], np.float64),
        features=np.concatenate([bars.features for bars in symbols]) if symbols else np.zeros((1, 0)),
    )
    return history, steps


def _first_start(config: TradingConfig, part: range) -> int:
    """Return the first bar that an episode can read. Its first step is at the close of the part's first bar.

    If there are too few bars before the part, it is later.
    """
    return max(0, part.start - config.observed_bars + 1)


def _episode_length(config: TradingConfig, symbols: Sequence[PriceSeries], split: Split) -> int:
    """Return the steps of an episode. Held-out parts may be shorter than an episode of training."""
    steps = config.episode_length
    for bars in symbols:
        part = find_part(config, bars, split)
        longest = part.stop - _first_start(config, part) - bars_per_episode(config, 0) if part else 0
        needed = config.episode_length if split == "train" else min(config.episode_length, MIN_HELD_OUT_STEPS)
        if longest < needed:
            raise ConfigError(
                f"the {split} part of {bars.name} has {len(part)} of its {len(bars.time)} bars, but an episode of "
                f"{needed} steps reads {bars_per_episode(config, needed)}. The embargo is {config.embargo_bars} bars.",
                _fix_short_part(config, split, longest),
            )
        steps = min(steps, longest)
    return steps


def _fix_short_part(config: TradingConfig, split: Split, longest: int) -> str:
    if config.split_dates:
        return "Use a smaller --task.embargo or --task.episode-length, a longer file, or other dates."
    if split == "train":
        return f"Use --task.episode-length {max(1, longest)}, or a larger --task.data-range."
    if split == "validation":
        low, high = config.data_range
        return (
            f"Use a larger --task.test-start than {config.test_start}, a smaller --task.data-range or --task.embargo, "
            f"or no validation part: --task.data-range {low} {max(high, config.test_start)}"
        )
    return f"Evaluate another part: --split validation. Or train with a --task.test-start below {config.test_start}."


def fit_scale(config: TradingConfig, symbols: Sequence[PriceSeries], stream: RandomStream) -> np.ndarray:
    """Return means and standard deviations [2, F + K] of indicators and features, computed from the training part."""
    parts = [(bars, find_part(config, bars, "train")) for bars in symbols]
    series = [bars.prices[part.start : part.stop] for bars, part in parts]
    if not symbols or config.simulated_fraction > 0:
        simulated = np.zeros((4096, 4))
        simulate(simulated, MARKETS[config.market], stream.draw_seed(0), 0, config.volatility)
        series.append(simulated)
    computed = [np.zeros((len(prices), len(INDICATORS))) for prices in series]
    for prices, indicators in zip(series, computed, strict=True):
        compute_indicators(prices, indicators)
    table = np.concatenate([indicators[LOOKBACK:] for indicators in computed])
    scale = np.stack([table.mean(axis=0), table.std(axis=0) + 1e-8]).astype(np.float64)
    if not config.features or not symbols:
        return scale
    further = np.concatenate([bars.features[part.start : part.stop] for bars, part in parts])
    return np.concatenate([scale, np.stack([further.mean(axis=0), further.std(axis=0) + 1e-8])], axis=1)
