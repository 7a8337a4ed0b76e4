"""Read an untrusted run directory for a report: sizes are bounded, links are refused, torch is not imported."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.naming import CheckpointName, generation_file, generations
from lockstep.config import ConfigError, read_yaml
from lockstep.experiment.record import describe_seeds, is_experiment, read_experiment, run_directory
from lockstep.experiment.run_scores import FinalScore, final_score
from lockstep.fork_record import describe_fork, read_fork
from lockstep.io.jsonl import (
    CHECKPOINTS,
    CONFIG,
    DIGESTS,
    FORK,
    METRICS,
    STATUS,
    VIDEO,
    iter_jsonl,
    newest_values,
    read_status,
)
from lockstep.io.safe_read import UnreadableFileError, read_bytes, read_json
from lockstep.sweeps.progress import rank_trials
from lockstep.sweeps.record import is_sweep, read_sweep, read_trials, trial_directory
from lockstep.tools.report.metrics_log import LOG_BYTES, MetricsLog, number, read_log

BENCH = "bench.json"
GIF_BYTES, FILE_BYTES = 3_000_000, 2**20
"""Size limits in bytes. A larger GIF is skipped; a larger record of `prove` or `bench` is refused."""
MAX_SETTINGS = 1000
"""Largest number of settings that are shown."""
FORK_CHARS = 2000
"""Characters of the line about a fork."""
LOCATION_SETTINGS = ("run.name", "run.runs_dir", "run.wandb")
"""Prefixes of settings that only say where a run is written. They are ignored when runs are compared."""


@dataclass(frozen=True)
class RunStart:
    """One start of the run: its number of processes and the samples it resumed from."""

    processes: int | None
    samples: int
    """Samples that it resumed from."""
    timestamp: float
    """Start time in seconds since 1970. NaN if unknown."""


@dataclass(frozen=True)
class ReportedRun:
    """Contents of one run directory."""

    label: str
    recipe: str
    version: str
    settings: dict[str, Any]
    """Values by dotted name."""
    status: dict[str, Any]
    log: MetricsLog
    starts: list[RunStart]
    digests: tuple[int, int]
    """Number of logged digests, and of tensors in each. 0 tensors: digests of the whole agent."""
    gif: bytes | None
    bench: Any
    fork: str
    """Parent and changed settings of a fork. Empty if the run is not a fork."""
    notes: list[str]
    """Messages about contents that could not be shown."""
    final: FinalScore | None
    experiment: str | None
    """Unique label of the experiment that contains the run. None: a single run."""

    @property
    def state(self) -> str:
        return str(self.status.get("state", "-"))[:40]

    @property
    def processes(self) -> int | None:
        found = self.status.get("processes")
        return found if isinstance(found, int) and 0 < found < 10**6 else None


SWEEP_TRIALS = 8
"""Trials of a sweep whose curves are shown."""


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read runs, and all runs of experiments, labeled by directory name, or by path if that name is not unique."""
    unique = list({path.resolve(): path for path in paths}.values())
    names = [path.resolve().name for path in unique]
    runs = []
    for path, name in zip(unique, names, strict=True):
        label = name if names.count(name) == 1 else str(path)
        if is_experiment(path):
            runs += _read_experiment(path, label)
        elif is_sweep(path):
            runs += _read_sweep(path, label)
        else:
            runs.append(read_run(path, label))
    return runs


def _read_sweep(path: Path, label: str) -> list[ReportedRun]:
    """Read the runs of the best trials of a sweep that have metrics."""
    record, trials = read_sweep(path), read_trials(path)
    directories = [trial_directory(path, number, trial) for number, trial in enumerate(trials)]
    numbers = [n for n in rank_trials(record, trials) if newest_values(directories[n] / METRICS, ["samples"])]
    if not numbers:
        raise _no_metrics(path)
    runs = [read_run(directories[n], f"{label}/trial-{n}") for n in numbers[:SWEEP_TRIALS]]
    if len(numbers) > SWEEP_TRIALS:
        runs[0].notes.append(f"Curves of the best {SWEEP_TRIALS} of {len(numbers)} trials of {label} are shown.")
    return runs


def _read_experiment(path: Path, label: str) -> list[ReportedRun]:
    """Read the runs of an experiment that have metrics. Add a note about the others to the first one."""
    directories = {seed: run_directory(path, seed) for seed in read_experiment(path).seeds}
    logged = [seed for seed, run in directories.items() if newest_values(run / METRICS, ["samples"])]
    if not logged:
        raise _no_metrics(path)
    runs = [read_run(directories[seed], f"{label}/{directories[seed].name}", label) for seed in logged]
    missing = [seed for seed in directories if seed not in logged]
    if missing:
        runs[0].notes.append(f"No metrics yet in {label}: seeds {describe_seeds(missing)}.")
    return runs


def read_run(path: Path, label: str, experiment: str | None = None) -> ReportedRun:
    """Read a run directory. Missing optional files are skipped; a directory that is not a run is refused."""
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} is not a run directory: it has no {CONFIG}.", "`lockstep ls` lists the runs.")
    for name in (CONFIG, METRICS, STATUS, DIGESTS, CHECKPOINTS):
        if (path / name).is_symlink():
            raise ConfigError(
                f"{path / name} is a link, but a report shows nothing from outside a run.",
                "Replace the link with the file that it points to.",
            )
    values = read_yaml(path / CONFIG)
    values.pop("format", None)
    version, recipe = values.pop("lockstep", "?"), values.pop("recipe", "?")
    log = read_log(path / METRICS)
    if not log.series:
        raise _no_metrics(path)
    notes: list[str] = []
    record = _read_optional(path / FORK, f"The parent of {label}", lambda _: read_fork(path), notes)
    starts = _read_starts(path / CHECKPOINTS)
    return ReportedRun(
        label=label,
        recipe=Path(_short(recipe)).stem,
        version=_short(version),
        settings=dict(list(_flatten(values))[:MAX_SETTINGS]),
        status=read_status(path),
        log=log,
        starts=starts[1:] if record else starts,  # the first one only created the fork
        digests=_count_digests(path / DIGESTS),
        gif=_read_optional(path / VIDEO, f"The video of {label}", read_gif, notes),
        bench=_read_optional(path / BENCH, f"The benchmark of {label}", lambda f: read_json(f, FILE_BYTES), notes),
        fork=describe_fork(record)[:FORK_CHARS] if record else "",
        notes=notes,
        final=final_score(path),
        experiment=experiment,
    )


def _no_metrics(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} has no metrics yet.", "Wait for its first log line, or train with a smaller run.log_every."
    )


def group(runs: Sequence[ReportedRun]) -> list[list[ReportedRun]]:
    """Group the runs of an experiment, and other runs that share a recipe and all settings except the seed."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        if run.experiment is not None:
            groups.setdefault(f"experiment {run.experiment}", []).append(run)
            continue
        ignored = ("run.seed", *LOCATION_SETTINGS)
        settings = {name: value for name, value in run.settings.items() if not name.startswith(ignored)}
        groups.setdefault(f"{run.recipe} {settings!r}", []).append(run)
    return list(groups.values())


def differences(runs: Sequence[ReportedRun]) -> list[str]:
    """Return names of settings that differ between runs, except those in `LOCATION_SETTINGS`."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    names = [name for name in names if not name.startswith(LOCATION_SETTINGS)]
    return [name for name in names if len({repr(run.settings.get(name, "")) for run in runs}) > 1]


def read_record(path: Path, what: str) -> Any:
    """Read a JSON file written by another command, such as `prove` or `bench`, from a path that the user gives."""
    try:
        return read_json(path, FILE_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.", f"Give {what}.") from None
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", f"Give {what}.") from None


def read_gif(path: Path) -> bytes:
    """Read a GIF for the page. Raises UnreadableFileError if it is too large or not a GIF."""
    try:
        gif = read_bytes(path, GIF_BYTES)
    except FileNotFoundError:
        raise UnreadableFileError(f"{path} does not exist") from None
    if gif[:6] not in (b"GIF87a", b"GIF89a"):
        raise UnreadableFileError(f"{path} is not a GIF")
    return gif


def _read_optional(path: Path, what: str, read: Callable[[Path], Any], notes: list[str]) -> Any:
    """Read an optional file of a run. Add a note if it exists but cannot be shown."""
    if not os.path.lexists(path):
        return None
    try:
        if path.is_symlink():
            raise UnreadableFileError(f"{path} is a link")
        return read(path)
    except UnreadableFileError as error:
        notes.append(f"{what} is not shown: {error}.")
        return None


def _read_starts(directory: Path) -> list[RunStart]:
    """Follow the newest checkpoint back to the first start. Return the starts in order.

    Starts whose checkpoints were not resumed from are not included.
    """
    starts: list[RunStart] = []
    names = os.listdir(directory) if directory.is_dir() else []
    published = [name.generation for name in map(CheckpointName.parse, names) if name]
    generation = max(published or generations(names), default=0)
    while generation:
        claim = _claim(directory, generation)
        parent = CheckpointName.parse(str(claim.get("parent"))[:100])
        processes = claim.get("processes")
        valid = processes if isinstance(processes, int) and 0 < processes < 10**6 else None
        timestamp = number(claim.get("began"))
        starts.append(RunStart(valid, parent.samples if parent else 0, timestamp if 0 < timestamp < 1e11 else math.nan))
        if parent is None or parent.generation >= generation:
            break
        generation = parent.generation
    return starts[::-1]


def _claim(directory: Path, generation: int) -> dict[str, Any]:
    path = generation_file(directory, generation)
    try:
        claim = {} if path.is_symlink() else read_json(path)
    except (OSError, UnreadableFileError):
        return {}
    return claim if isinstance(claim, dict) else {}


def _count_digests(path: Path) -> tuple[int, int]:
    count, tensors = 0, 0
    for line in iter_jsonl(path, LOG_BYTES):
        digests = line.get("digests")
        if isinstance(digests, dict):
            count, tensors = count + 1, len(digests)
        elif "agent" in line:
            count += 1
    return count, tensors


def _flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with their dotted names."""
    for key, value in values.items():
        name = f"{prefix}{_short(key)}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, _formattable(value)


def _formattable(value: Any) -> Any:
    """Return the value, or a message if it has an integer of over 4,300 digits, which Python refuses to format."""
    try:
        repr(value)
    except ValueError:
        return "a number too long to show"
    return value


def _short(value: object) -> str:
    """Return the first 100 characters of an untrusted value."""
    return str(_formattable(value))[:100]
