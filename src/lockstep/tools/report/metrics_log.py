"""A run's log as columns: every quantity over samples, the time split, and the evaluations that stand out."""

import math
import operator
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.io.jsonl import iter_jsonl

LOG_BYTES = 256 * 2**20
"""How much of a log is read."""
NAMES, LARGEST = 300, 1e100
"""How many quantities are kept, and the number beyond which nothing is drawn."""
SPEED, UNDRAWN = "time/global_fps", ("system/", "time/")
"""The speed is drawn; what else begins with these is not, and is not kept."""
PHASES = {
    "env": "environments",
    "act": "acting",
    "load": "loading data",
    "learn": "learning",
    "reduce": "reduction between processes",
    "evaluate": "evaluations",
    "check": "comparing processes",
    "copy": "copying for checkpoints",
}
"""Phases that the time split names, in words; the rest is `other`."""
_SHARES = {name: f"time/{name}" for name in PHASES}


@dataclass
class Series:
    """One quantity over the run's samples."""

    x: "array[float]" = field(default_factory=lambda: array("d"))
    y: "array[float]" = field(default_factory=lambda: array("d"))
    left_out: int = 0
    """Values that were no numbers, or too large to draw."""


@dataclass
class MetricsLog:
    """What metrics.jsonl comes to."""

    series: dict[str, Series] = field(default_factory=dict)
    samples: float = 0.0
    timed: float = 0.0
    """The samples up to which a speed was logged, and how long they took."""
    seconds: float = 0.0
    split: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase."""
    last: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    """The last evaluation and the best one, with their samples."""

    @property
    def speed(self) -> float:
        """Samples a second, over all that was logged."""
        return self.timed / self.seconds if self.seconds > 0 else math.nan

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the time, by phase; they add up to one."""
        if not self.seconds > 0:
            return {}
        shares = {name: self.split[name] / self.seconds for name in PHASES if self.split.get(name)}
        total = max(1.0, sum(shares.values()))
        shares = {name: share / total for name, share in shares.items()}
        return shares | {"other": max(0.0, 1.0 - sum(shares.values()))}


def number(value: object) -> float:
    """A finite number that can be drawn; anything else is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if abs(found) <= LARGEST else math.nan


def read_log(path: Path) -> MetricsLog:
    """Go through a log once, and keep its numbers as columns."""
    log = MetricsLog()
    evaluations: set[str] = set()
    for line in iter_jsonl(path, LOG_BYTES):
        samples = number(line.get("samples"))
        if samples >= 0:
            _note_time(log, line, samples)
            _note_values(log, line, samples, evaluations)
            if not evaluations.isdisjoint(line):
                _note_evaluation(log, line, samples)
            log.samples = max(log.samples, samples)
    for series in log.series.values():
        _sort(series)
    return log


def score_of(evaluation: Mapping[str, float]) -> float:
    """What the best evaluation is the best by, as the run's own clock has it."""
    return evaluation.get("score", evaluation.get("return_mean", math.nan))


def _note_values(log: MetricsLog, line: dict[str, Any], samples: float, evaluations: set[str]) -> None:
    """Add a line to the columns. A log may have a million values, so this is the report's inner loop."""
    known = log.series
    for name, value in line.items():
        series = known.get(name)
        if series is None:
            if name.startswith(UNDRAWN) and name != SPEED:
                continue
            if name.startswith("eval/"):
                evaluations.add(name)
            if len(known) >= NAMES or name in ("samples", "iteration") or len(name) > 100:
                continue
            series = known[name] = Series()
        shown = value if type(value) is float and -LARGEST <= value <= LARGEST else number(value)
        if shown == shown:  # not NaN
            series.x.append(samples)
            series.y.append(shown)
        else:
            series.left_out += 1


def _note_time(log: MetricsLog, line: dict[str, Any], samples: float) -> None:
    """Add the time since the last line that told a speed, and what went on in it."""
    speed = number(line.get(SPEED))
    if not speed > 0 or samples <= log.timed:
        return
    seconds, log.timed = (samples - log.timed) / speed, samples
    log.seconds += seconds
    for name, key in _SHARES.items():
        share = line.get(key)
        if share is not None and 0 <= number(share) <= 1:
            log.split[name] = log.split.get(name, 0.0) + share * seconds


def _note_evaluation(log: MetricsLog, line: dict[str, Any], samples: float) -> None:
    found = [(name.removeprefix("eval/"), value) for name, value in line.items() if name.startswith("eval/")]
    log.last = {"samples": samples} | {name[:100]: number(value) for name, value in found[:NAMES]}
    if not log.best or score_of(log.last) > score_of(log.best) or math.isnan(score_of(log.best)):
        log.best = log.last


def _sort(series: Series) -> None:
    """A run's own samples only grow; a stranger's need not."""
    if not all(map(operator.le, series.x, series.x[1:])):
        order = sorted(range(len(series.x)), key=series.x.__getitem__)
        series.x, series.y = (array("d", [column[n] for n in order]) for column in (series.x, series.y))
