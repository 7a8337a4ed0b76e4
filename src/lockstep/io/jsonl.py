"""Read and write the JSON Lines files of a run, without importing torch."""

import errno
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.io.safe_read import JSON_BYTES, UnreadableFileError, open_regular, parse_json, read_json

CONFIG, METRICS, DIGESTS, CHECKPOINTS = "config.yaml", "metrics.jsonl", "digests.jsonl", "checkpoints"
_LOGGER = logging.getLogger("lockstep")
STATUS, HEARTBEATS, LOGS, FILM = "status.json", "heartbeats", "logs", "best.gif"


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


def last_values(path: Path) -> dict[str, Any]:
    """Return the newest value of every logged name."""
    values: dict[str, Any] = {}
    for line in iter_jsonl(path):
        values |= line
    return values


def truncate_after(path: Path, samples: int) -> None:
    """Drop the lines beyond a number of samples, which a killed run wrote after its last checkpoint."""
    if not path.exists():
        return
    beyond = any(line.get("samples", 0) > samples for line in iter_jsonl(path))
    if not beyond and _ends_with_a_line(path):
        return
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # left over from a killed process
    with partial.open("x") as file:
        file.writelines(json.dumps(line) + "\n" for line in iter_jsonl(path) if line.get("samples", 0) <= samples)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)  # atomic, so that a kill cannot lose the lines to keep


def sync_lines(run: Path) -> None:
    """Wait until the lines written so far are on disk. Called before a checkpoint that covers them is published.

    A failure is only logged as a warning, because the checkpoint is still valid without the log.
    """
    for path in (run / METRICS, run / DIGESTS):
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
