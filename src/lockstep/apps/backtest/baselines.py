"""Baseline strategies: target positions that depend on past closes only.

Shapes: N bars of a file, T test bars, R random strategies.
"""

import numpy as np

from lockstep.rng import RandomStream
from lockstep.tasks.trading.price_data import CLOSE, PriceSeries

FAST, SLOW = 20, 100
"""Window sizes in bars of the moving averages; momentum looks SLOW bars back."""
HOLD, AVERAGE, MOMENTUM, RANDOM = "buy and hold", f"SMA {FAST}/{SLOW}", f"momentum {SLOW}", "random"
RANDOM_STRATEGIES = 200


def baseline_targets(bars: PriceSeries, test_bars: range) -> dict[str, np.ndarray]:
    """Return the target positions [T] of each baseline by name."""
    closes = bars.prices[:, CLOSE]
    targets = {HOLD: np.ones(len(closes)), AVERAGE: sma(closes), MOMENTUM: momentum(closes)}
    return {name: values[test_bars.start : test_bars.stop].astype(float) for name, values in targets.items()}


def sma(closes: np.ndarray) -> np.ndarray:
    """Return where the fast mean of closes is above the slow one, [N]. False before SLOW bars are available."""
    sums = np.concatenate([[0.0], np.cumsum(closes)])
    above = np.zeros(len(closes), bool)
    ends = np.arange(SLOW, len(closes) + 1)
    fast, slow = ((sums[ends] - sums[ends - span]) / span for span in (FAST, SLOW))
    above[SLOW - 1 :] = fast > slow
    return above


def momentum(closes: np.ndarray) -> np.ndarray:
    """Return where the close is above that of SLOW bars before, [N]. False before SLOW bars are available."""
    rising = np.zeros(len(closes), bool)
    rising[SLOW:] = closes[SLOW:] > closes[:-SLOW]
    return rising


def random_targets(bars: int, levels: int, turnover: float, stream: RandomStream, count: int) -> np.ndarray:
    """Return target positions [R, T] of random strategies with an expected turnover.

    At each bar, a strategy changes to one of the other positions with the same probability.

    Args:
        bars: T.
        levels: Position sizes per side.
        turnover: Total turnover to match, relative to the equity.
        stream: Random numbers.
        count: R.
    """
    positions = np.arange(-levels, levels + 1) / levels
    distance = np.abs(positions[:, None] - positions[None, :])
    mean_change = distance.sum() / (len(positions) * (len(positions) - 1))
    probability = min(1.0, turnover / max(bars, 1) / mean_change)
    generator = stream.generator(0)
    changes = generator.random((count, bars)) < probability
    # A move by 1 to 2L positions, modulo 2L + 1, reaches every other position with the same probability.
    moves = np.where(changes, generator.integers(1, 2 * levels + 1, (count, bars)), 0)
    targets: np.ndarray = positions[(levels + np.cumsum(moves, axis=1)) % (2 * levels + 1)]
    return targets
