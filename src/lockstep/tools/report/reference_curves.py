"""Plot a run's evaluations over samples, with reference curves in the background.

from lockstep.tools.report.reference_curves import draw_curve
draw_curve(Path("runs/NAME"), Path("curve.png"), reference=Path("walker-run.csv"), per_sample=2)
"""

import csv
import io
import math
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import ConfigError
from lockstep.io.jsonl import METRICS, read_jsonl
from lockstep.io.safe_read import UnreadableFileError, read_text

REFERENCE_BYTES = 8 * 2**20
"""Size limit of a file of reference curves in bytes. This is enough for about 150,000 points."""


class ReferencePoint(NamedTuple):
    step: float
    score: float
    seed: str = ""


def evaluations_of(run: Path, per_sample: float = 1.0) -> list[ReferencePoint]:
    """Return the mean returns of a run's evaluations. One sample of the run is `per_sample` steps of the reference."""
    lines = [line for line in read_jsonl(run / METRICS) if "eval/return_mean" in line]
    return [ReferencePoint(per_sample * line["samples"], float(line["eval/return_mean"])) for line in lines]


def read_reference(path: Path) -> list[ReferencePoint]:
    """Read points from a CSV file with the columns step, reward and, if it has several runs, seed."""
    try:
        rows = csv.DictReader(io.StringIO(read_text(path, REFERENCE_BYTES), newline=""))
        points = [ReferencePoint(float(row["step"]), float(row["reward"]), row.get("seed") or "") for row in rows]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", "Give a CSV file of curves.") from error
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", "Give a CSV file of curves.") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"{path} is not a file of curves.", "Give one with the columns step, reward and seed."
        ) from error
    if not points or not all(math.isfinite(point.step + point.score) for point in points):
        raise ConfigError(f"{path} is empty or has non-finite values.", "Give a finite step and reward in each line.")
    return points


def scores_by_step(points: Sequence[ReferencePoint], until: float) -> list[tuple[float, list[float]]]:
    """Return the scores of all seeds by step, in order, up to `until` and one step beyond it."""
    scores: dict[float, list[float]] = {}
    for point in points:
        scores.setdefault(point.step, []).append(point.score)
    steps = sorted(scores)
    index = bisect_left(steps, until)
    return [(step, scores[step]) for step in steps[: max(1, index + 1)]]


def draw_curve(run: Path, picture: Path, reference: Path | None = None, per_sample: float = 1.0) -> None:
    """Plot a run's evaluations, with the mean and range of a reference in the background, to an image file."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib.", "pip install matplotlib") from error
    evaluations = evaluations_of(run, per_sample)
    if not evaluations:
        raise ConfigError(f"{run} has no evaluations yet.", "Wait for the first, or set --run.eval-every.")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if reference is not None:
        _draw_reference(axes, read_reference(reference), reference.stem, evaluations[-1].step)
    steps, scores, _ = zip(*evaluations, strict=True)
    axes.plot(steps, scores, color="#1f6fb4", marker="o", markersize=4, label=run.name)
    axes.set_xlabel("steps")
    axes.set_ylabel("return")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=120)


def _draw_reference(axes: Any, points: list[ReferencePoint], name: str, until: float) -> None:
    """Plot the reference up to the end of the run and one point beyond, so that a longer one does not dwarf the run."""
    steps, scores = zip(*scores_by_step(points, until), strict=True)
    low, high = [min(values) for values in scores], [max(values) for values in scores]
    axes.fill_between(steps, low, high, color="#8a8f98", alpha=0.25, linewidth=0)
    means = [sum(values) / len(values) for values in scores]
    axes.plot(steps, means, color="#8a8f98", label=f"{name}, reference")
