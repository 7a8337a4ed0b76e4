"""Read and write the JSON Lines files of a run, without importing torch."""

import errno
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.io.safe_read import JSON_BYTES, UnreadableFileError, open_regular, parse_json, read_json

CONFIG, METRICS, DIGESTS, CHECKPOINTS = "config.yaml", "metrics.jsonl", "digests.jsonl", "checkpoints"
_LOGGER = logging.getLogger("lockstep")
STATUS, HEARTBEATS, LOGS, VIDEO, HANG_REPORT = "status.json", "heartbeats", "logs", "best.gif", "hang.txt"
TASK, CHANGES, FORK = "task.json", "config_changes.jsonl", "fork.json"
SWEEP, TRIALS = "sweep.json", "trials.json"
"""Files of a sweep, a directory that contains the runs of its trials."""
CHAIN = "chain.jsonl"
"""Entries of all checkpoints of a run, also of deleted ones."""
EXPERIMENT = "experiment.json"
"""File of an experiment, a directory that contains the runs of several seeds."""
SEVERAL_RUNS = {
    EXPERIMENT: "an experiment of several seeds",
    SWEEP: "a sweep of several trials",
}
"""Files that mark directories with several runs, and what these are."""
BLOCK = 16 * 2**10
"""Bytes read at a time from the end of a log."""
TAIL = 64 * 2**20
"""Bytes at the end of a log that are searched for a rarely logged value."""


def append_jsonl(path: Path, line: dict[str, Any]) -> None:
    """Append a whole line or nothing. A partial line, as on a full disk, would corrupt the next one."""
    text = (json.dumps(line) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        if file.write(text) < len(text):
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSON Lines file; skip lines that are truncated or not valid."""
    return list(iter_jsonl(path))


def iter_jsonl(path: Path, limit: int = sys.maxsize) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a JSON Lines file, reading at most `limit` bytes and one line at a time."""
    try:
        opened = open_regular(path)
    except (FileNotFoundError, UnreadableFileError):
        return
    with opened as file:
        while limit > 0 and (text := file.readline(min(limit, JSON_BYTES))):
            limit -= len(text)
            if (line := parse_line(text)) is not None:
                yield line


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Return the values of one line; None if it is truncated or not valid."""
    try:
        line = parse_json(text.decode())
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("samples", 0), int | float) else None


def read_status(path: Path) -> dict[str, Any]:
    """Return the status that a run last wrote; an empty dict if it cannot be read."""
    try:
        status = read_json(path / STATUS)
    except (OSError, UnreadableFileError):
        return {}
    return status if isinstance(status, dict) else {}


def newest_values(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the newest logged value of each name; skip names that are not in the last TAIL bytes of the log.

    Reads from the end, so that listing many runs does not read whole logs.
    """
    missing = {name: f'"{name}"'.encode() for name in names}
    found: dict[str, Any] = {}
    try:
        with open_regular(path) as file:
            for text in _lines_from_the_end(file, missing):
                line = parse_line(text) or {}
                for name in [name for name in missing if name in line]:
                    found[name] = line[name]
                    del missing[name]
    except (FileNotFoundError, UnreadableFileError):
        pass
    return found


def _lines_from_the_end(file: BinaryIO, missing: dict[str, bytes]) -> Iterator[bytes]:
    """Yield lines that contain a missing name, last line first, until no name is missing.

    Most blocks are searched as bytes and never split or parsed.
    """
    end = os.fstat(file.fileno()).st_size
    rest, stop = b"", max(0, end - TAIL)
    while end > stop and missing and len(rest) <= JSON_BYTES:
        begin = max(stop, end - BLOCK)
        file.seek(begin)
        text = file.read(end - begin) + rest
        end = begin
        # The first line of a block may begin in the block before it.
        rest, newline, whole = text.partition(b"\n") if begin > 0 else (b"", b"\n", text)
        if not newline or not any(name in whole for name in missing.values()):
            continue
        for line in reversed(whole.split(b"\n")):
            if any(name in line for name in missing.values()):
                yield line


def truncate_after(path: Path, samples: int) -> None:
    """Drop the lines beyond a number of samples, which a killed run wrote after its last checkpoint."""
    if not path.exists():
        return
    beyond = any(line.get("samples", 0) > samples for line in iter_jsonl(path))
    if not beyond and _ends_with_a_line(path):
        return
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # left over from a killed process
    copy_until(path, partial, samples)
    partial.replace(path)  # atomic, so that a kill cannot lose the lines to keep


def copy_until(source: Path, target: Path, samples: int) -> None:
    """Copy the valid lines up to a number of samples to a new file, durably. A missing source has no lines."""
    with target.open("x") as file:
        file.writelines(json.dumps(line) + "\n" for line in iter_jsonl(source) if line.get("samples", 0) <= samples)
        file.flush()
        os.fsync(file.fileno())


def sync_lines(run: Path) -> None:
    """Wait until the lines written so far are on disk. Called before a checkpoint that covers them is published.

    A failure is only logged as a warning, because the checkpoint is still valid without the log.
    """
    for path in (run / METRICS, run / DIGESTS, run / CHAIN):
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:
            continue
        except OSError as error:
            _LOGGER.warning("%s may miss lines after a power cut: %s.", path, error)


def _ends_with_a_line(path: Path) -> bool:
    try:
        opened = open_regular(path)
    except UnreadableFileError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    with opened as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 1))
        return file.read(1) == b"\n"
