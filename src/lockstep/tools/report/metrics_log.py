"""Read a run's metrics log into columns: metrics over samples, time by phase, last and best evaluation."""

import math
import operator
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.io.jsonl import iter_jsonl

LOG_BYTES = 256 * 2**20
"""Bytes of a log that are read."""
MAX_METRICS, MAX_ABS = 300, 1e100
"""Largest number of metrics that are kept, and largest absolute value that is drawn."""
SPEED, DURATION, NOT_DRAWN = "time/global_fps", "time/seconds", ("system/", "time/")
"""Metrics of the speed and of the seconds since the last entry, and prefixes of metrics that are neither drawn nor
kept, except the speed."""
PHASES = {
    "env": "environments",
    "act": "acting",
    "load": "loading data",
    "learn": "learning",
    "reduce": "reduction between processes",
    "evaluate": "evaluations",
    "compile": "compilation",
    "check": "replica checks",
    "copy": "copying for checkpoints",
}
"""Phases of the time split and their labels. The rest of the time is `other`."""
_PHASE_KEYS = {name: f"time/{name}" for name in PHASES}


@dataclass
class Series:
    """One metric over the run's samples."""

    x: "array[float]" = field(default_factory=lambda: array("d"))
    y: "array[float]" = field(default_factory=lambda: array("d"))
    skipped: int = 0
    """Number of values that were skipped because they are non-finite or too large to draw."""


@dataclass
class MetricsLog:
    """Contents of metrics.jsonl."""

    series: dict[str, Series] = field(default_factory=dict)
    samples: float = 0.0
    timed_samples: float = 0.0
    """Samples up to which a speed was logged."""
    seconds: float = 0.0
    """Duration of the timed samples."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase."""
    last: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    """Last and best evaluation, with their samples."""

    @property
    def speed(self) -> float:
        """Training samples per second over the whole log, without the time of evaluations."""
        training = self.seconds - self.phase_seconds.get("evaluate", 0.0)
        return self.timed_samples / training if training > 0 else math.nan

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of the time by phase. They add up to one."""
        if not self.seconds > 0:
            return {}
        shares = {name: self.phase_seconds[name] / self.seconds for name in PHASES if self.phase_seconds.get(name)}
        total = max(1.0, sum(shares.values()))
        shares = {name: share / total for name, share in shares.items()}
        return shares | {"other": max(0.0, 1.0 - sum(shares.values()))}


def number(value: object) -> float:
    """Return a finite number that can be drawn, or NaN for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ABS:
        return math.nan
    return float(value)


def read_log(path: Path) -> MetricsLog:
    """Read a log in one pass and keep its numbers as columns."""
    log = MetricsLog()
    evaluations: set[str] = set()
    for line in iter_jsonl(path, LOG_BYTES):
        samples = number(line.get("samples"))
        if samples >= 0:
            _add_time(log, line, samples)
            _add_values(log, line, samples, evaluations)
            if not evaluations.isdisjoint(line):
                _add_evaluation(log, line, samples)
            log.samples = max(log.samples, samples)
    for series in log.series.values():
        _sort(series)
    return log


def score_of(evaluation: Mapping[str, float]) -> float:
    """Return the number that decides which evaluation is best, as `TrainState` does during the run."""
    return evaluation.get("score", evaluation.get("return_mean", math.nan))


def _add_values(log: MetricsLog, line: dict[str, Any], samples: float, evaluations: set[str]) -> None:
    """Add a line to the columns. This is the inner loop of a report: a log may have a million values."""
    known = log.series
    for name, value in line.items():
        series = known.get(name)
        if series is None:
            if name.startswith(NOT_DRAWN) and name != SPEED:
                continue
            if name.startswith("eval/"):
                evaluations.add(name)
            if len(known) >= MAX_METRICS or name in ("samples", "iteration") or len(name) > 100:
                continue
            series = known[name] = Series()
        drawable = value if type(value) is float and -MAX_ABS <= value <= MAX_ABS else number(value)
        if drawable == drawable:  # not NaN
            series.x.append(samples)
            series.y.append(drawable)
        else:
            series.skipped += 1


def _add_time(log: MetricsLog, line: dict[str, Any], samples: float) -> None:
    """Add the time since the last line with a speed, and split it by phase."""
    speed = number(line.get(SPEED))
    if not speed > 0 or samples <= log.timed_samples:
        return
    # Logs of Lockstep 0.2 have no duration; their speed includes evaluations.
    duration = number(line.get(DURATION))
    seconds, log.timed_samples = duration if duration > 0 else (samples - log.timed_samples) / speed, samples
    log.seconds += seconds
    for name, key in _PHASE_KEYS.items():
        share = line.get(key)
        if share is not None and 0 <= number(share) <= 1:
            log.phase_seconds[name] = log.phase_seconds.get(name, 0.0) + share * seconds


def _add_evaluation(log: MetricsLog, line: dict[str, Any], samples: float) -> None:
    found = [(name.removeprefix("eval/"), value) for name, value in line.items() if name.startswith("eval/")]
    log.last = {"samples": samples} | {name[:100]: number(value) for name, value in found[:MAX_METRICS]}
    if not log.best or score_of(log.last) > score_of(log.best) or math.isnan(score_of(log.best)):
        log.best = log.last


def _sort(series: Series) -> None:
    """Sort a series by samples. Lockstep writes samples in increasing order; an untrusted file may not."""
    if not all(map(operator.le, series.x, series.x[1:])):
        order = sorted(range(len(series.x)), key=series.x.__getitem__)
        series.x, series.y = (array("d", [column[n] for n in order]) for column in (series.x, series.y))
