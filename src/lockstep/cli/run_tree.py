"""Order runs as a tree for `lockstep ls --tree`: every fork below its parent."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.fork_record import ForkRecord, describe_fork, read_fork, run_id
from lockstep.io.safe_read import UnreadableFileError

MAX_DEPTH = 12
"""Deepest indentation. Forks of forks below it are listed at this depth."""


@dataclass(frozen=True)
class TreeRow:
    """A run in the tree."""

    path: Path
    depth: int
    """Number of listed ancestors, at most `MAX_DEPTH`."""
    fork: str
    """Where the run was forked, or why that is unknown. Empty if it is not a fork."""


def arrange(paths: Sequence[Path]) -> list[TreeRow]:
    """Return the runs with every fork after its parent. A fork whose parent is not listed has no indentation."""
    records, texts = _read(paths)
    listed = {run_id(path): path for path in reversed(paths)} if records else {}  # the first of several copies
    children: dict[Path, list[Path]] = {}
    for path, record in records.items():
        parent = listed.get(record.parent_id) if record.parent_id else None
        if parent is not None and parent != path:
            children.setdefault(parent, []).append(path)
    below = {path for group in children.values() for path in group}
    rows: dict[Path, TreeRow] = {}
    # Records from an untrusted source may form a cycle, which has no root: list its runs, too.
    for root in (*(path for path in paths if path not in below), *paths):
        waiting = [(root, 0)]
        while waiting:
            path, depth = waiting.pop()
            if path not in rows:
                rows[path] = TreeRow(path, min(depth, MAX_DEPTH), texts.get(path, ""))
                waiting += [(child, depth + 1) for child in reversed(children.get(path, []))]
    return list(rows.values())


def _read(paths: Sequence[Path]) -> tuple[dict[Path, ForkRecord], dict[Path, str]]:
    """Return the records of forks, and a text for each fork."""
    records, texts = {}, {}
    for path in paths:
        try:
            record = read_fork(path)
        except (OSError, UnreadableFileError) as error:
            texts[path] = f"fork of an unknown run: {error}"
            continue
        if record is not None:
            records[path], texts[path] = record, describe_fork(record)
    return records, texts
