"""Reference curves: read points from a CSV file, group them by step, and choose what a line connects."""

import csv
import io
import math
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.config import ConfigError
from lockstep.io.safe_read import UnreadableFileError, read_text

REFERENCE_BYTES = 8 * 2**20
"""Size limit of a file of reference curves in bytes. This is enough for about 150,000 points."""


LINE_POINTS = 4
"""Smallest number of points that are connected by a line."""


class ReferencePoint(NamedTuple):
    step: float
    score: float
    seed: str = ""


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


def first_connected(steps: Sequence[float]) -> int:
    """Return the index of the first point that a line connects to the next one; their number if there is no line.

    A line between a few distant points would suggest values that were not measured. So would a line from step 0, the
    untrained network, to the first point of training.
    """
    return len(steps) if len(steps) < LINE_POINTS else int(steps[0] <= 0)
