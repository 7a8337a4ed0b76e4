"""Lines of json that a run leaves behind, and how to read them: no torch needed."""

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
    """Add a line, all of it or nothing: a disk that fills up may take a part, which would spoil the next one."""
    text = (json.dumps(line) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        if file.write(text) < len(text):
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a jsonl file; one that a kill cut in half, or that is none of ours, is passed over."""
    return list(iter_jsonl(path))


def iter_jsonl(path: Path, limit: int = sys.maxsize) -> Iterator[dict[str, Any]]:
    """The same, one at a time, of so many bytes at most: a log need not fit into memory, nor need a stranger's line."""
    try:
        opened = open_regular(path)
    except (FileNotFoundError, UnreadableFileError):
        return
    with opened as file:
        while limit > 0 and (text := file.readline(min(limit, JSON_BYTES))):
            limit -= len(text)
            try:
                line = parse_json(text.decode())
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("samples", 0), int | float):
                yield line


def read_status(path: Path) -> dict[str, Any]:
    """How a run stands, as it wrote it down; nothing where that cannot be read."""
    try:
        status = read_json(path / STATUS)
    except (OSError, UnreadableFileError):
        return {}
    return status if isinstance(status, dict) else {}


def last_values(path: Path) -> dict[str, Any]:
    """The newest value of everything that was logged."""
    values: dict[str, Any] = {}
    for line in iter_jsonl(path):
        values |= line
    return values


def truncate_after(path: Path, samples: int) -> None:
    """Drop the lines beyond a number of samples: what a killed run wrote after its last checkpoint."""
    if not path.exists():
        return
    beyond = any(line.get("samples", 0) > samples for line in iter_jsonl(path))
    if not beyond and _ends_with_a_line(path):
        return
    beside = path.with_name(f".{path.name}.partial")
    beside.unlink(missing_ok=True)  # a kill may have left it
    with beside.open("x") as file:
        file.writelines(json.dumps(line) + "\n" for line in iter_jsonl(path) if line.get("samples", 0) <= samples)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)  # in one step: a kill must not take the lines that are to stay


def sync_lines(run: Path) -> None:
    """Wait until the lines that were written so far are on disk: before a checkpoint that covers them is published.

    A log is no reason to give a checkpoint up, so a failure is only told of.
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
