"""Interquartile means of scores and their stratified bootstrap intervals, as defined by rliable.

Agarwal et al. (2021), Deep Reinforcement Learning at the Edge of the Statistical Precipice, arXiv:2108.13264.

Shapes: N runs of a task, S bootstrap samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
"""Confidence level of intervals."""
TABLE_SAMPLES, CURVE_SAMPLES = 50_000, 2_000
"""Bootstrap samples of an interval in a table, as in rliable, and of each point of a curve."""


@dataclass(frozen=True)
class Estimate:
    """Interquartile mean of scores with its confidence interval, and their mean and standard deviation."""

    iqm: float
    interval: tuple[float, float] | None
    """None: one run has no interval."""
    mean: float
    standard_deviation: float | None
    """Of the runs, with N - 1. None: one run has none."""
    runs: int


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half of the last axis: the lowest and the highest quarter are dropped.

    The quarters are rounded down to whole scores, as by `scipy.stats.trim_mean(scores, 0.25)`.
    """
    ordered, count = np.sort(scores, axis=-1), scores.shape[-1]
    dropped = count // 4
    means: np.ndarray = ordered[..., dropped : count - dropped].mean(axis=-1)
    return means


def bootstrap_interval(
    tasks: Sequence[np.ndarray], samples: int = TABLE_SAMPLES, seed: int = 0, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Return the percentile interval of the interquartile mean of all scores, under the stratified bootstrap.

    Args:
        tasks: Scores [N] of each task. The runs of a task are resampled among themselves (strata).
        samples: Number of bootstrap samples.
        seed: Seed of the resampling.
        confidence: Confidence level.
    """
    generator = np.random.default_rng(seed)
    resampled = [scores[generator.integers(0, len(scores), (samples, len(scores)))] for scores in tasks]  # [S, N] each
    means = interquartile_mean(np.concatenate(resampled, axis=1))
    tail = 100.0 * (1.0 - confidence) / 2.0
    low, high = np.percentile(means, [tail, 100.0 - tail])
    return float(low), float(high)


def estimate(tasks: Sequence[Sequence[float]], samples: int = TABLE_SAMPLES) -> Estimate:
    """Summarize the scores of the runs of one or more tasks."""
    arrays = [np.asarray(scores, dtype=np.float64) for scores in tasks]
    pooled = np.concatenate(arrays)
    several = len(pooled) > 1
    return Estimate(
        iqm=float(interquartile_mean(pooled)),
        interval=bootstrap_interval(arrays, samples) if several else None,
        mean=float(pooled.mean()),
        standard_deviation=float(pooled.std(ddof=1)) if several else None,
        runs=len(pooled),
    )
