"""What a report needs from a run directory, which may be a stranger's: bounded, without links, without torch."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.naming import CheckpointName, generation_file, generations
from lockstep.config import ConfigError, read_yaml
from lockstep.io.jsonl import CHECKPOINTS, CONFIG, DIGESTS, FILM, METRICS, STATUS, iter_jsonl, read_status
from lockstep.io.safe_read import UnreadableFileError, open_regular, read_json
from lockstep.tools.report.metrics_log import LOG_BYTES, MetricsLog, number, read_log

BENCH = "bench.json"
GIF_BYTES, FILE_BYTES = 3_000_000, 2**20
"""A larger film is left out, and a larger record of a proof or of a measurement is none of ours."""
SETTINGS = 1000
"""How many settings are shown."""
ELSEWHERE = ("run.name", "run.runs_dir", "run.wandb")
"""How settings begin that say where a run is written, not what it is."""


@dataclass(frozen=True)
class RunStart:
    """One start of the run: on how many processes, and from where."""

    generation: int
    processes: int | None
    begin: int
    """The samples it went on from."""
    began: float
    """When, in seconds since 1970; not a number where that is not known."""


@dataclass(frozen=True)
class Run:
    """One run, ready to be shown."""

    path: Path
    label: str
    recipe: str
    version: str
    settings: dict[str, Any]
    """By dotted names."""
    status: dict[str, Any]
    log: MetricsLog
    starts: list[RunStart]
    digests: tuple[int, int]
    """How often digests were logged, and of how many tensors."""
    gif: bytes | None
    bench: Any
    notes: list[str]
    """What could not be shown, in words."""

    @property
    def state(self) -> str:
        return str(self.status.get("state", "-"))[:40]

    @property
    def processes(self) -> int | None:
        found = self.status.get("processes")
        return found if isinstance(found, int) and 0 < found < 10**6 else None


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs by the names of their directories; by their paths where two have the same name."""
    once = list({path.resolve(): path for path in paths}.values())
    names = [path.resolve().name for path in once]
    return [
        read_run(path, name if names.count(name) == 1 else str(path)) for path, name in zip(once, names, strict=True)
    ]


def read_run(path: Path, label: str) -> Run:
    """Read a run directory; what is missing is left out, and what is no run directory refused."""
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} is not a run directory: it has no {CONFIG}.", "`lockstep ls` lists the runs.")
    for name in (CONFIG, METRICS, STATUS, DIGESTS, CHECKPOINTS):
        if (path / name).is_symlink():
            raise ConfigError(
                f"{path / name} is a link, and a report shows nothing from outside a run.",
                "Put what it leads to in its place.",
            )
    values = read_yaml(path / CONFIG)
    values.pop("format", None)
    version, recipe = values.pop("lockstep", "?"), values.pop("recipe", "?")
    log = read_log(path / METRICS)
    if not log.series:
        raise ConfigError(
            f"{path} has no metrics yet.", "Wait for its first log line; a smaller run.log_every brings it sooner."
        )
    notes: list[str] = []
    return Run(
        path=path,
        label=label,
        recipe=Path(_short(recipe)).stem,
        version=_short(version),
        settings=dict(list(_flatten(values))[:SETTINGS]),
        status=read_status(path),
        log=log,
        starts=_read_starts(path / CHECKPOINTS),
        digests=_count_digests(path / DIGESTS),
        gif=_own_gif(path / FILM, label, notes),
        bench=_own_bench(path / BENCH, label, notes),
        notes=notes,
    )


def group(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that share a recipe and all settings but the seed, together."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        apart = ("run.seed", *ELSEWHERE)
        settings = {name: value for name, value in run.settings.items() if not name.startswith(apart)}
        groups.setdefault(f"{run.recipe} {settings!r}", []).append(run)
    return list(groups.values())


def differences(runs: Sequence[Run]) -> list[str]:
    """Settings that are not the same in all runs, but for where they are written."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    names = [name for name in names if not name.startswith(ELSEWHERE)]
    return [name for name in names if len({repr(run.settings.get(name, "")) for run in runs}) > 1]


def read_record(path: Path, what: str) -> Any:
    """The json that a command left, such as a proof or a measurement, from a file the user names."""
    try:
        return read_json(path, FILE_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.", f"Give {what}.") from None
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", f"Give {what}.") from None


def read_gif(path: Path) -> bytes:
    """A film that may go into the page; Unreadable for one that may not."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            film = file.read(GIF_BYTES)
    except OSError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error.strerror}") from None
    if size > GIF_BYTES:
        raise UnreadableFileError(
            f"{path} has {size / 1e6:.1f} MB, more than the {GIF_BYTES / 1e6:.0f} MB a page may carry"
        )
    if film[:6] not in (b"GIF87a", b"GIF89a"):
        raise UnreadableFileError(f"{path} is not a GIF")
    return film


def _own_gif(path: Path, label: str, notes: list[str]) -> bytes | None:
    if not path.exists() and not path.is_symlink():
        return None
    try:
        if path.is_symlink():
            raise UnreadableFileError(f"{path} is a link")
        return read_gif(path)
    except UnreadableFileError as error:
        notes.append(f"The film of {label} is left out: {error}.")
        return None


def _own_bench(path: Path, label: str, notes: list[str]) -> Any:
    try:
        if path.is_symlink():
            raise UnreadableFileError(f"{path} is a link")
        return read_json(path, FILE_BYTES)
    except FileNotFoundError:
        return None
    except UnreadableFileError as error:
        notes.append(f"The measurement of {label} is left out: {error}.")
        return None


def _read_starts(directory: Path) -> list[RunStart]:
    """The starts that made the run what it is now, the first one first; those that left nothing are not on the line."""
    line: list[RunStart] = []
    names = os.listdir(directory) if directory.is_dir() else []
    published = [name.generation for name in map(CheckpointName.parse, names) if name]
    generation = max(published or generations(names), default=0)
    while generation:
        claimed = _claim(directory, generation)
        parent = CheckpointName.parse(str(claimed.get("parent"))[:100])
        processes = claimed.get("processes")
        known = processes if isinstance(processes, int) and 0 < processes < 10**6 else None
        began = number(claimed.get("began"))
        line.append(
            RunStart(generation, known, parent.samples if parent else 0, began if 0 < began < 1e11 else math.nan)
        )
        if parent is None or parent.generation >= generation:
            break
        generation = parent.generation
    return line[::-1]


def _claim(directory: Path, generation: int) -> dict[str, Any]:
    path = generation_file(directory, generation)
    try:
        claimed = {} if path.is_symlink() else read_json(path)
    except (OSError, UnreadableFileError):
        return {}
    return claimed if isinstance(claimed, dict) else {}


def _count_digests(path: Path) -> tuple[int, int]:
    count, tensors = 0, 0
    for line in iter_jsonl(path, LOG_BYTES):
        digests = line.get("digests")
        if isinstance(digests, dict):
            count, tensors = count + 1, len(digests)
    return count, tensors


def _flatten(values: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted names."""
    for key, value in values.items():
        name = f"{before}{_short(key)}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, _writable(value)


def _writable(value: Any) -> Any:
    """The value, unless it has a number that Python does not write out: one of more than 4,300 digits."""
    try:
        repr(value)
    except ValueError:
        return "a number too long to show"
    return value


def _short(value: object) -> str:
    """The beginning of a stranger's word."""
    return str(_writable(value))[:100]
