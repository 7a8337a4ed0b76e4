"""Scores and learning curves of one run, read from its log."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.io.jsonl import METRICS, read_jsonl

TRAINING_EPISODES = 100
"""Training episodes at the end of a run whose mean return is its score, as in CleanRL's tables."""
RETURN, LENGTH, EVALUATION = "rollout/ep_return_mean", "rollout/ep_length_mean", "eval/return_mean"
"""Metrics in the log: return and length of training episodes since the last entry, and return of evaluations."""


class TrainingPoint(NamedTuple):
    """Log entry of training episodes."""

    samples: int
    mean_return: float
    episodes: float
    """Approximate number of episodes that ended since the last entry: steps by mean length."""


class EvaluationPoint(NamedTuple):
    samples: int
    mean_return: float


class RunScores(NamedTuple):
    """Curves of a run, and the seconds that it took."""

    training: list[TrainingPoint]
    evaluations: list[EvaluationPoint]
    seconds: float


def read_scores(run: Path) -> RunScores:
    """Read the curves of a run directory. Values that are not finite are skipped."""
    training, evaluations, seconds, before = [], [], 0.0, 0
    for line in read_jsonl(run / METRICS):
        samples = int(line.get("samples", 0))
        if EVALUATION in line:
            if _is_finite(line[EVALUATION]):
                evaluations.append(EvaluationPoint(samples, float(line[EVALUATION])))
            continue
        seconds += float(line.get("time/seconds", 0.0))
        if _is_finite(line.get(RETURN)) and _is_finite(line.get(LENGTH)) and line[LENGTH] > 0:
            episodes = (samples - before) / line[LENGTH]
            training.append(TrainingPoint(samples, float(line[RETURN]), round(episodes, 2)))
        before = samples
    return RunScores(training, evaluations, seconds)


def training_return(points: Sequence[TrainingPoint], episodes: float = TRAINING_EPISODES) -> float | None:
    """Return the mean return of at least the last `episodes` training episodes; None if no episode ended.

    The log has means of entries, so whole entries are pooled, each with its number of episodes.
    """
    total, count = 0.0, 0.0
    for point in reversed(points):
        total, count = total + point.mean_return * point.episodes, count + point.episodes
        if count >= episodes:
            break
    return total / count if count > 0 else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
