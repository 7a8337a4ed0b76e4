"""The files of a sweep: what it searches, and its trials so far. They may be untrusted, so they are read strictly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.config import ConfigError, check_text
from lockstep.experiment.record_file import (
    MAX_NUMBER,
    are_settings,
    format_values,
    is_count,
    is_number,
    is_text,
    read_values,
)
from lockstep.io.jsonl import SWEEP, TRIALS
from lockstep.io.safe_read import shallow

MAX_TRIALS, MAX_PROCS, MAX_COPIES = 1000, 4096, 10_000
PRUNERS = ("asha", "median", "pbt", "none")
SAMPLERS = ("tpe", "random")
DIRECTIONS = ("maximize", "minimize")
TRIAL_RUN = "--trial-run"
"""Internal first argument of `lockstep train` in the process of one trial. Sweep and number follow."""


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """What a sweep searches, and how. Together with the recipe's code it decides all results."""

    recipe: str
    """Name of the recipe, or path of the file that defines it."""
    command: str
    """Command that started the sweep, for people."""
    settings: Mapping[str, Any]
    """Settings of the recipe, by group, which trials change."""
    space: Mapping[str, Any]
    """Entries of the search space by dotted name."""
    procs: int
    """Processes of each trial."""
    trials: int
    metric: str | None
    """Metric in the log. None: the score of the last evaluation, or the training return without evaluations."""
    direction: Literal["maximize", "minimize"]
    prune: str
    """asha, median, pbt or none."""
    min_samples: int
    """Samples of the first rung."""
    eta: int
    """asha: one of this number of trials continues after each rung, and rungs grow by this factor."""
    sampler: str
    """tpe or random."""
    seed: int
    """Seed of the suggestions."""
    window: int
    """Trial k is suggested from the results of trials 0 to k - window."""

    @property
    def total_samples(self) -> int:
        """Global samples of a trial that is not pruned."""
        return int(self.settings["run"]["total_samples"])

    @property
    def sign(self) -> int:
        """1 if higher values are better, else -1."""
        return 1 if self.direction == "maximize" else -1


@dataclass(frozen=True)
class Copy:
    """pbt: a trial continues from a copy of a better one, with changed settings."""

    number: int
    """The trial."""
    parent: int
    """The copied trial."""
    samples: int
    """Global samples of the rung at which it was copied."""
    settings: dict[str, Any]
    """Searched settings after it, by dotted name."""


@dataclass
class TrialRecord:
    """Settings and results of one trial."""

    settings: dict[str, Any]
    """Searched settings by dotted name. pbt: the present ones."""
    values: list[float | None] = field(default_factory=list)
    """Value of the metric at each rung that was trained, and at the end. None: nothing was logged by then."""
    failure: str | None = None
    """Why the trial has no result, such as a non-finite loss. None: it did not fail."""
    copies: list[Copy] = field(default_factory=list)
    """pbt: what the trial continued from, oldest first."""


def is_sweep(directory: Path) -> bool:
    """Return whether a directory is that of a sweep."""
    return (directory / SWEEP).is_file()


def trial_directory(sweep: Path, number: int, trial: TrialRecord) -> Path:
    """Return the run directory of a trial. Each copy of another trial has one of its own.

    Raises:
        ConfigError: It is a link, but a trial must be inside its sweep.
    """
    path = sweep / (f"trial-{number}-copy-{len(trial.copies)}" if trial.copies else f"trial-{number}")
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, but trials are directories in their sweep.", "Replace it by its target.")
    return path


def format_sweep(record: SweepRecord) -> str:
    """Return the text of the file of a sweep."""
    return format_values(asdict(record))


def format_trials(trials: Sequence[TrialRecord]) -> str:
    """Return the text of the file of the trials."""
    return format_values({"trials": [_plain(trial) for trial in trials]})


def _plain(trial: TrialRecord) -> dict[str, Any]:
    """Return a trial as plain values. Only trials with copies have a list of them."""
    values = asdict(trial)
    return values if trial.copies else {name: value for name, value in values.items() if name != "copies"}


def read_sweep(sweep: Path) -> SweepRecord:
    """Read and check the file of a sweep.

    Raises:
        ConfigError: There is no such file, or a value in it is invalid.
    """
    path = sweep / SWEEP
    values = read_values(path, f"{sweep} is not a sweep: it has no {SWEEP}.", "a sweep")
    for key, is_valid in _CHECKS.items():
        if key not in values or not is_valid(values[key]):
            problem = "is invalid" if key in values else "is missing"
            raise ConfigError(f"{path} is not the file of a sweep: {key} {problem}.", "Restore the file.")
    for key in ("recipe", "command"):
        check_text(values[key], f"{key} in {path}")
    return SweepRecord(**{key: values[key] for key in _CHECKS})


def read_trials(sweep: Path) -> list[TrialRecord]:
    """Read the trials of a sweep. Without the file, it has none yet."""
    path = sweep / TRIALS
    if not path.exists():
        return []
    trials = read_values(path, f"{path} does not exist.", "the trials of a sweep").get("trials")
    if not isinstance(trials, list) or len(trials) > MAX_TRIALS or not all(map(_is_trial, trials)):
        raise ConfigError(f"{path} is not the file of the trials of a sweep.", "Restore the file.")
    records = [_parse_trial(trial) for trial in trials]
    if any(max(copy.number, copy.parent) >= len(records) for record in records for copy in record.copies):
        raise ConfigError(f"{path} has a copy of a trial that does not exist.", "Restore the file.")
    return records


def _parse_trial(values: dict[str, Any]) -> TrialRecord:
    return TrialRecord(**values | {"copies": [Copy(**copy) for copy in values.get("copies", [])]})


def _is_copy(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"number", "parent", "samples", "settings"}:
        return False
    numbers = (value["number"], value["parent"], value["samples"])
    return all(type(n) is int and 0 <= n < MAX_NUMBER for n in numbers) and isinstance(value["settings"], dict)


def _is_trial(value: object) -> bool:
    if not isinstance(value, dict) or not shallow(value):
        return False
    if value.keys() - {"copies"} != {"settings", "values", "failure"}:
        return False
    copies = value.get("copies", [])
    if not isinstance(copies, list) or len(copies) > MAX_COPIES or not all(map(_is_copy, copies)):
        return False
    values = value["values"]
    numbers = isinstance(values, list) and all(number is None or is_number(number) for number in values)
    return numbers and isinstance(value["settings"], dict) and (value["failure"] is None or is_text(value["failure"]))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "recipe": is_text,
    "command": is_text,
    "settings": are_settings,
    "space": lambda value: isinstance(value, dict) and shallow(value) and len(value) > 0,
    "procs": lambda value: is_count(value, MAX_PROCS),
    "trials": lambda value: is_count(value, MAX_TRIALS),
    "metric": lambda value: value is None or is_text(value),
    "direction": lambda value: value in DIRECTIONS,
    "prune": lambda value: value in PRUNERS,
    "min_samples": is_count,
    "eta": lambda value: is_count(value) and value > 1,
    "sampler": lambda value: value in SAMPLERS,
    "seed": lambda value: type(value) is int and 0 <= value < MAX_NUMBER,
    "window": lambda value: is_count(value),
}
"""Keys of the file with the check of each value."""
