"""Significance of a backtest: block-bootstrap intervals, and the Sharpe ratio deflated by the number of trials.

Stationary bootstrap: Politis and Romano (1994). Probabilistic Sharpe ratio: Bailey and Lopez de Prado (2012). Deflated
Sharpe ratio: Bailey and Lopez de Prado (2014).

Shapes: T traded bars, K series of returns over the same bars, S bootstrap samples.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from lockstep.rng import RandomStream

CONFIDENCE = 0.95
"""Confidence level of intervals, and smallest deflated Sharpe ratio that counts as significant."""
BOOTSTRAP_SAMPLES = 1000
MAX_DRAWS = 4_000_000
"""Largest number of bar indices in memory at a time."""
EULER_GAMMA = 0.5772156649015329


class Interval(NamedTuple):
    """Confidence interval."""

    low: float
    high: float


def block_length(bars: int) -> int:
    """Return the mean length of bootstrap blocks: the cube root of the number of bars."""
    return max(1, round(math.cbrt(bars)))


def stationary_indices(bars: int, samples: int, mean_block: float, generator: np.random.Generator) -> np.ndarray:
    """Return bar indices [S, T] of the stationary bootstrap.

    Blocks start at a random bar, have geometric lengths with the given mean, and wrap around at the end.
    """
    starts_block = generator.random((samples, bars)) < 1.0 / mean_block
    starts_block[:, 0] = True
    offsets = np.arange(bars)
    first = generator.integers(0, bars, (samples, bars))  # used where a block starts
    last_start = np.maximum.accumulate(np.where(starts_block, offsets, 0), axis=1)  # [S, T]
    indices: np.ndarray = (np.take_along_axis(first, last_start, axis=1) + offsets - last_start) % bars
    return indices


def bootstrap_interval(
    series: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    samples: int = BOOTSTRAP_SAMPLES,
    mean_block: float | None = None,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Return the percentile interval of a statistic under the stationary bootstrap.

    Args:
        series: Returns per bar [T], or [T, K] of several strategies, which are resampled together.
        statistic: Maps resampled returns [S, T] or [S, T, K] to one value per sample [S].
        samples: Number of bootstrap samples.
        mean_block: Mean length of blocks in bars. None: the cube root of T.
        seed: Seed of the samples.
        confidence: Confidence level.
    """
    bars = len(series)
    mean_block = block_length(bars) if mean_block is None else mean_block
    stream, chunk, values = RandomStream(seed, "backtest.bootstrap"), max(1, MAX_DRAWS // bars), []
    for number, first in enumerate(range(0, samples, chunk)):
        generator = stream.generator(number)
        values.append(statistic(series[stationary_indices(bars, min(chunk, samples - first), mean_block, generator)]))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(np.concatenate(values), [tail, 1.0 - tail])
    return Interval(float(low), float(high))


def sharpe_interval(returns: np.ndarray, bars_per_year: float, **options: float) -> Interval:
    """Return the bootstrap interval of the annualized Sharpe ratio of returns per bar [T]."""

    def sharpe(sampled: np.ndarray) -> np.ndarray:
        risk = sampled.std(axis=1)
        safe = np.where(risk > 0, risk, 1.0)
        return np.where(risk > 0, sampled.mean(axis=1) / safe, 0.0) * math.sqrt(bars_per_year)

    return bootstrap_interval(returns, sharpe, **options)  # type: ignore[arg-type]


def growth_interval(changes: np.ndarray, bars_per_year: float, **options: float) -> Interval:
    """Return the bootstrap interval of the compound annual growth rate of changes of log equity [T]."""

    def growth(sampled: np.ndarray) -> np.ndarray:
        return np.asarray(np.expm1(np.minimum(sampled.mean(axis=1) * bars_per_year, 700.0)))

    return bootstrap_interval(changes, growth, **options)  # type: ignore[arg-type]


def probabilistic_sharpe(returns: np.ndarray, benchmark: float = 0.0) -> float:
    """Return the probability that the true Sharpe ratio per bar exceeds a benchmark.

    Args:
        returns: Returns per bar [T].
        benchmark: Sharpe ratio per bar, not annualized.
    """
    bars, risk = len(returns), float(returns.std())
    if risk == 0 or bars < 3:
        return 0.0
    standardized = (returns - returns.mean()) / risk
    sharpe = float(returns.mean()) / risk
    skew, kurtosis = (float((standardized**power).mean()) for power in (3, 4))
    # Variance of the estimated Sharpe ratio of returns that are not normal.
    variance = 1.0 - skew * sharpe + (kurtosis - 1.0) / 4.0 * sharpe**2
    return NormalDist().cdf((sharpe - benchmark) * math.sqrt(bars - 1) / math.sqrt(max(variance, 1e-12)))


def expected_max_sharpe(variance: float, trials: float) -> float:
    """Return the expected maximum Sharpe ratio of independent trials without skill.

    Args:
        variance: Variance of the Sharpe ratios of the trials.
        trials: Number of trials. One trial is no selection: the result is 0.
    """
    if trials <= 1:
        return 0.0
    normal = NormalDist()
    quantile, tail = normal.inv_cdf(1.0 - 1.0 / trials), normal.inv_cdf(1.0 - 1.0 / (trials * math.e))
    return math.sqrt(variance) * ((1.0 - EULER_GAMMA) * quantile + EULER_GAMMA * tail)


def deflated_sharpe(returns: np.ndarray, trials: float, trial_sharpes: np.ndarray | None = None) -> float:
    """Return the probability that a strategy has skill, given that it is the best of a number of trials.

    Args:
        returns: Returns per bar [T] of the selected strategy.
        trials: Number of strategies that were tried, this one included.
        trial_sharpes: Sharpe ratios per bar of trials. Their variance is used if it is larger than 1 / (T - 1), that of
            strategies without skill: trials that resemble each other, such as seeds, vary too little.

    Returns:
        Probability from 0 to 1. Below 0.95, the result can be explained by the selection.
    """
    variance = 1.0 / max(len(returns) - 1, 1)
    if trial_sharpes is not None and len(trial_sharpes) > 1:
        variance = max(variance, float(np.var(trial_sharpes, ddof=1)))
    return probabilistic_sharpe(returns, expected_max_sharpe(variance, trials))
