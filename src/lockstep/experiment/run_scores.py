"""Scores and learning curves of one run, read from its log."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.io.jsonl import METRICS, newest_values, read_jsonl

TRAINING_EPISODES = 100
"""Training episodes at the end of a run whose mean return is its score, as in CleanRL's tables."""
RETURN, LENGTH, EVALUATION = "rollout/ep_return_mean", "rollout/ep_length_mean", "eval/return_mean"
"""Metrics in the log: return and length of training episodes since the last entry, and return of evaluations."""
MAX_ABS = 1e100
"""Largest absolute value that is used."""
SCORE = "eval/score"
"""Score of evaluations of data sets in the log. Higher is better."""


class TrainingPoint(NamedTuple):
    """Log entry of training episodes."""

    samples: int
    mean_return: float
    episodes: float
    """Approximate number of episodes that ended since the last entry: steps by mean length."""


class EvaluationPoint(NamedTuple):
    samples: int
    mean_return: float


class FinalScore(NamedTuple):
    """Score of a trained policy, of which higher is better, and what it is: score, return or training return."""

    name: str
    value: float


class RunScores(NamedTuple):
    """Curves of a run, and the seconds that it took."""

    training: list[TrainingPoint]
    evaluations: list[EvaluationPoint]
    seconds: float


def read_scores(run: Path) -> RunScores:
    """Read the curves of a run directory. Values that are not finite are skipped."""
    training, evaluations, seconds, before = [], [], 0.0, 0
    for line in read_jsonl(run / METRICS):
        samples = int(line["samples"]) if _is_number(line.get("samples")) else 0
        if EVALUATION in line:
            if _is_number(line[EVALUATION]):
                evaluations.append(EvaluationPoint(samples, float(line[EVALUATION])))
            continue
        seconds += float(line["time/seconds"]) if _is_number(line.get("time/seconds")) else 0.0
        if _is_number(line.get(RETURN)) and _is_number(line.get(LENGTH)) and line[LENGTH] >= 1:
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


def final_score(run: Path) -> FinalScore | None:
    """Return the score of a run's last evaluation; without evaluations, its mean return at the end of training.

    None if that value is missing or not finite.
    """
    evaluation = newest_values(run / METRICS, [SCORE, EVALUATION])
    for metric, name in ((SCORE, "score"), (EVALUATION, "return")):
        if metric in evaluation:
            value = evaluation[metric]
            return FinalScore(name, float(value)) if _is_number(value) else None
    mean_return = training_return(read_scores(run).training)
    return None if mean_return is None else FinalScore("training return", mean_return)


def _is_number(value: Any) -> bool:
    """Return whether a value of an untrusted log is a number, not too large to compute with."""
    return isinstance(value, int | float) and abs(value) <= MAX_ABS
