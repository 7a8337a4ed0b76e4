"""History of a run for `lockstep verify`: its chain, the segments between checkpoints, and what is wrong with them.

Nothing is trained here. A segment is the training between two checkpoints that follow each other. It can be repeated if
the checkpoint that it starts from is kept, or if it is the first one, which starts from the settings.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.checkpoint import format as form
from lockstep.checkpoint.chain import Entry, entry_of, follow, hash_settings, plain_settings, read_log
from lockstep.checkpoint.errors import READ_ERROR
from lockstep.checkpoint.lineage import lineage
from lockstep.config import ConfigError, flat_settings
from lockstep.fork_record import ForkRecord, read_fork
from lockstep.io.jsonl import CHAIN, CHANGES, CHECKPOINTS, iter_jsonl
from lockstep.io.safe_read import UnreadableFileError
from lockstep.run_dir import read_config

DELETED = "the checkpoint that it starts from was deleted"
"""Obstacle of a segment that only an earlier start can overcome."""
LOG_BYTES = 16 * 2**20
"""Bytes of a config_changes.jsonl that are read."""


@dataclass(frozen=True)
class Segment:
    """The training between two checkpoints."""

    number: int
    """Counted from 1."""
    start: Entry | None
    """Checkpoint that the segment starts from. None: the settings."""
    end: Entry
    settings: dict[str, Any] | None
    """Settings of the segment. None: they are not recorded."""
    path: Path | None
    """The kept checkpoint that the segment starts from."""
    obstacle: str = ""
    """Why the segment cannot be repeated; empty if it can."""

    @property
    def first(self) -> int:
        return self.start.samples if self.start else 0

    @property
    def samples(self) -> int:
        return self.end.samples - self.first

    def __str__(self) -> str:
        return f"segment {self.number} ({self.first:,} to {self.end.samples:,} samples)"


@dataclass
class RunHistory:
    """Segments of a run, and problems of its chain."""

    run: Path
    segments: list[Segment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What refutes the run. Each names the segment or the checkpoint."""
    notes: list[str] = field(default_factory=list)
    """What the user should know: changed settings, a chain that starts late, the parent of a fork."""
    samples: int = 0
    """Samples of the newest checkpoint."""
    entries: list[Entry] = field(default_factory=list)
    """The chain of this run, oldest first."""
    kept: dict[str, Path] = field(default_factory=dict)
    """Undamaged checkpoints, by the hash of their entry."""

    @property
    def repeatable(self) -> list[Segment]:
        return [segment for segment in self.segments if not segment.obstacle]


def read_history(run: Path) -> RunHistory:
    """Read the chain of a run and check every kept checkpoint of it.

    Raises:
        ConfigError: The directory has no run, no checkpoint or no chain, or cannot be read.
    """
    recipe, values = read_config(run)
    try:
        names = lineage(run / CHECKPOINTS) if (run / CHECKPOINTS).is_dir() else []
        if not names:
            raise ConfigError(f"{run} has no checkpoint to verify.", "Wait for its first save.")
        history = RunHistory(run, samples=names[0].samples)
        entries, settings = read_log(run)
        kept, damaged = _check_kept(history, [str(name) for name in names], entries)
        logged = (entry for entry in entries.values() if entry.checkpoint == str(names[0]))
        head = kept.get(str(names[0])) or next(logged, None)
        if head is None and damaged:
            history.problems = [f"checkpoint {name} {problem}" for name, problem in damaged.items()]
            return history
        if head is None:
            raise ConfigError(
                f"the newest checkpoint of {run} has no entry in a chain.",
                "An older Lockstep wrote it. Resume the run: the chain starts with the next checkpoint.",
            )
        fork = read_fork(run)
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", "Restore the file from a copy.") from None
    except OSError as error:
        raise ConfigError(f"{run} cannot be read: {error}.", READ_ERROR) from None
    history.kept = {entry.hash: run / CHECKPOINTS / name for name, entry in kept.items()}
    line = follow(head, entries | {entry.hash: entry for entry in kept.values()})
    history.entries = line = _own_part(history, line, fork)
    for name, entry in kept.items():
        if entry not in line and entry.samples >= line[0].samples:
            damaged[name] = "is not part of the chain that leads to the newest checkpoint"
    history.segments = split_segments(history, settings, forked=fork is not None)
    ends = {segment.end.checkpoint: segment for segment in history.segments}
    history.problems = [
        f"{ends[name]}: its end, checkpoint {name}, {problem}" if name in ends else f"checkpoint {name} {problem}"
        for name, problem in damaged.items()
    ]
    _check_settings(history, settings, plain_settings(recipe, values), fork)
    return history


def _check_kept(
    history: RunHistory, names: list[str], entries: dict[str, Entry]
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Check the files of every kept checkpoint. Return entries and problems by name of the directory."""
    kept: dict[str, Entry] = {}
    damaged: dict[str, str] = {}
    logged = {entry.checkpoint: entry for entry in entries.values()}
    for name in names:
        directory = history.run / CHECKPOINTS / name
        try:
            manifest = form.verify(directory)
        except form.CorruptCheckpointError as damage:
            if directory.exists():  # a live run may have deleted it
                damaged[name] = f"is not what was written: {damage}"
            continue
        if (entry := entry_of(manifest)) is None:
            if name in logged:
                damaged[name] = f"has no entry of the chain, but {CHAIN} has one for it"
            continue
        if name in logged and entry.hash not in entries:
            changed = [file for file, digest in logged[name].files.items() if manifest["files"].get(file) != digest]
            what = f": {', '.join(sorted(changed)[:3])} differ" if changed else ""
            damaged[name] = f"was written again after it was published{what}"
            continue
        kept[name] = entry
    return kept, damaged


def _own_part(history: RunHistory, line: list[Entry], fork: ForkRecord | None) -> list[Entry]:
    """Return the entries of this run, oldest first, without those of the parent of a fork."""
    if fork is not None:
        line = [entry for entry in line if entry.samples >= fork.samples]
        parent = Path(fork.parent).name
        history.notes.append(
            f"Forked from {parent} at {fork.samples:,} samples. Verify that run for the training before them."
        )
    elif line[0].parent:
        before = line[0].previous or "another checkpoint"
        history.notes.append(f"The chain starts after {before}: the training up to there cannot be checked.")
    return line


def _check_settings(
    history: RunHistory, settings: dict[str, dict[str, Any]], config: dict[str, Any], fork: ForkRecord | None
) -> None:
    """Compare the settings of each checkpoint with those before it, and config.yaml with the newest ones."""
    line = history.entries
    logged: dict[int, set[str]] = {fork.samples: set(fork.changes)} if fork else {}
    for change in iter_jsonl(history.run / CHANGES, LOG_BYTES):
        if isinstance(change.get("changes"), dict) and isinstance(change.get("samples"), int):
            logged.setdefault(change["samples"], set()).update(map(str, change["changes"]))
    for before, after in pairwise(line):
        if before.config == after.config or before.config not in settings or after.config not in settings:
            continue
        differences = changed_settings(settings[before.config], settings[after.config])
        if unlogged := [text for key, text in differences.items() if key not in logged.get(before.samples, ())]:
            history.problems.append(
                f"{_containing(history, after)} has other settings, which no resume recorded: {'; '.join(unlogged)}"
            )
        else:
            history.notes.append(f"Changed from {before.samples:,} samples: {'; '.join(differences.values())}.")
    newest = line[-1]
    if newest.config in settings and hash_settings(config) != newest.config:
        differences = changed_settings(settings[newest.config], config)
        if edited := [text for key, text in differences.items() if key not in logged.get(newest.samples, ())]:
            history.problems.append(f"config.yaml was edited after {_containing(history, newest)}: {'; '.join(edited)}")


def _containing(history: RunHistory, entry: Entry) -> str:
    """Name the segment that ends with a checkpoint, or contains it."""
    segments = (str(segment) for segment in history.segments if segment.end.samples >= entry.samples)
    return next(segments, f"the training up to {entry.samples:,} samples")


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Return a text for each setting that both have with other values, by dotted name."""
    old, new = flat_settings(before), flat_settings(now)
    return {
        key: f"{key} {str(old[key])[:40]} -> {str(new[key])[:40]}"
        for key in sorted(old.keys() & new.keys())
        if old[key] != new[key]
    }


def split_segments(history: RunHistory, settings: dict[str, dict[str, Any]], forked: bool) -> list[Segment]:
    """Return the segments between complete checkpoints of the chain."""
    line = history.entries
    from_settings = not line[0].parent and not forked
    segments: list[Segment] = []
    start = None if from_settings else line[0]
    started_with, configs = "", set[str]()
    for entry in line if from_settings else line[1:]:
        started_with, configs = started_with or entry.started_with, configs | {entry.config}
        if not entry.complete:
            continue  # an evaluation was pending, which a repetition would finish
        known = settings.get(entry.config)
        path = history.kept.get(start.hash) if start else None
        obstacle = ""
        if started_with:
            obstacle = f"it was started with {started_with}"
        elif known is None or len(configs) > 1:
            obstacle = "its settings are not recorded" if known is None else "its settings changed within it"
        elif start is not None and path is None:
            obstacle = DELETED
        segments.append(Segment(len(segments) + 1, start, entry, known, path, obstacle))
        start, started_with, configs = entry, "", set()
    return segments
