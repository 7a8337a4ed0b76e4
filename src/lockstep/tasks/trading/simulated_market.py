"""Simulated markets, and the indicators of any market, each computed from past bars only.

Shapes: N bars of an episode, F indicators.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from lockstep.tasks.kernels import philox
from lockstep.tasks.trading.price_data import CLOSE, HIGH, LOW, OPEN

GBM, REGIME_SWITCHING, MEAN_REVERTING = range(3)
MARKETS = {"gbm": GBM, "regime_switching": REGIME_SWITCHING, "mean_reverting": MEAN_REVERTING}
LOOKBACK = 20
"""Number of earlier bars that an indicator may need."""
INDICATORS = (
    "return",  # from close to close
    "gap",  # from close to open
    "range",  # from low to high
    "body",  # from open to close
    "momentum",  # over 10 bars
    "trend",  # close relative to the mean of 20 closes
    "strength",  # RSI over 14 bars, from -1 to 1
    "volatility",  # log of the standard deviation of 20 returns
)


@njit(cache=True, nogil=True)
def _normals(key: Any, episode: Any, draw: Any) -> tuple[float, float]:
    """Return two samples of the standard normal distribution (Box-Muller)."""
    first, second = philox(key, episode, draw)
    radius = math.sqrt(-2.0 * math.log((np.float64(first >> np.uint64(11)) + 1.0) / 2.0**53))
    angle = 2.0 * math.pi * np.float64(second >> np.uint64(11)) / 2.0**53
    return radius * math.cos(angle), radius * math.sin(angle)


@njit(cache=True, nogil=True)
def simulate(prices: Any, market: int, key: Any, episode: Any, volatility: float) -> None:
    """Fill [N, 4] with the price path of a key and episode. A walk has no expected profit."""
    last_log_close, regime = 0.0, 1.0
    for n in range(len(prices)):
        move, gap = _normals(key, episode, 3 * n + 1)
        up, down = _normals(key, episode, 3 * n + 2)
        switch, _ = _normals(key, episode, 3 * n + 3)
        # Random walk, gaps included: the expected price is constant.
        drift, scale = -0.52 * volatility * volatility, volatility
        if market == REGIME_SWITCHING:
            if abs(switch) > 2.33:  # about one bar in fifty
                regime = -regime
            drift, scale = 0.2 * regime * volatility, volatility * (1.0 if regime > 0 else 1.5)
        elif market == MEAN_REVERTING:
            drift = -0.1 * last_log_close
        log_open = last_log_close + 0.2 * scale * gap
        log_close = log_open + drift + scale * move
        prices[n, OPEN], prices[n, CLOSE] = 100.0 * math.exp(log_open), 100.0 * math.exp(log_close)
        prices[n, HIGH] = 100.0 * math.exp(max(log_open, log_close) + 0.3 * scale * abs(up))
        prices[n, LOW] = 100.0 * math.exp(min(log_open, log_close) - 0.3 * scale * abs(down))
        last_log_close = log_close


@njit(cache=True, nogil=True)
def compute_indicators(prices: Any, out: Any) -> None:
    """Compute indicators [N, F] of prices [N, 4]. The first LOOKBACK rows have too few past bars and are zero."""
    out[:LOOKBACK] = 0.0
    for n in range(LOOKBACK, len(prices)):
        close, previous_close = prices[n, CLOSE], prices[n - 1, CLOSE]
        mean, squares, rises, moves, level = 0.0, 0.0, 0.0, 0.0, 0.0
        for k in range(n - LOOKBACK + 1, n + 1):
            move = math.log(prices[k, CLOSE] / prices[k - 1, CLOSE])
            mean += move / LOOKBACK
            squares += move * move / LOOKBACK
            level += prices[k, CLOSE] / LOOKBACK
            if k > n - 14:
                rises += max(move, 0.0)
                moves += abs(move)
        out[n, 0] = math.log(close / previous_close)
        out[n, 1] = math.log(prices[n, OPEN] / previous_close)
        out[n, 2] = math.log(prices[n, HIGH] / prices[n, LOW])
        out[n, 3] = math.log(close / prices[n, OPEN])
        out[n, 4] = math.log(close / prices[n - 10, CLOSE])
        out[n, 5] = math.log(close / level)
        out[n, 6] = 2.0 * rises / moves - 1.0 if moves > 0.0 else 0.0
        out[n, 7] = 0.5 * math.log(max(squares - mean * mean, 1e-12))
