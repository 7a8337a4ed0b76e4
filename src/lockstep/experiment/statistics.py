"""Interquartile means of scores, probabilities of improvement, and their intervals, as defined by rliable.

Agarwal et al. (2021), Deep Reinforcement Learning at the Edge of the Statistical Precipice, arXiv:2108.13264.

Shapes: N (or M) runs of a task, S bootstrap samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
"""Confidence level of intervals."""
PERCENT = f"{100 * CONFIDENCE:.0f} %"
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


class Improvement(NamedTuple):
    """Probability that a run of one experiment scores higher than a run of another, with its confidence interval."""

    probability: float
    interval: tuple[float, float]


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
    return _percentile_interval(means, confidence)


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


def probability_of_improvement(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    samples: int = TABLE_SAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Improvement:
    """Return the mean over tasks of P(X > Y) + 0.5 P(X = Y), and its interval under the stratified bootstrap.

    Args:
        first: Scores X of the runs of each task.
        second: Scores Y of the runs of the same tasks. The number of runs may differ.
        samples: Number of bootstrap samples.
        seed: Seed of the resampling.
        confidence: Confidence level.
    """
    generator = np.random.default_rng(seed)
    probability, resampled = 0.0, np.zeros(samples)
    for x, y in zip(map(np.asarray, first), map(np.asarray, second), strict=True):
        wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)  # [N, M]
        x_drawn, y_drawn = (generator.integers(0, len(runs), (samples, len(runs))) for runs in (x, y))
        # Average over the drawn runs of X, then over those of Y. An array [S, N, M] would need too much memory.
        against = np.zeros((samples, len(y)))  # [S, M]
        for runs in x_drawn.T:
            against += wins[runs] / len(x)
        resampled += np.take_along_axis(against, y_drawn, axis=1).mean(axis=1) / len(first)
        probability += float(wins.mean()) / len(first)
    return Improvement(probability, _percentile_interval(resampled, confidence))


def _percentile_interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    tail = 100.0 * (1.0 - confidence) / 2.0
    low, high = np.percentile(values, [tail, 100.0 - tail])
    return float(low), float(high)
