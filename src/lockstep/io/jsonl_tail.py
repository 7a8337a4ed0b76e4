"""Read the newest values of a log from its end, so that listing many runs does not read whole logs."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.io.safe_read import JSON_BYTES, UnreadableFileError, open_regular, parse_json

BLOCK = 16 * 2**10
TAIL = 64 * 2**20
"""Bytes at the end of a log that are searched for a rarely logged value."""


def newest_values(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the newest logged value of each name; skip names that are not in the last TAIL bytes of the log."""
    missing = {name: f'"{name}"'.encode() for name in names}
    found: dict[str, Any] = {}
    try:
        with open_regular(path) as file:
            for text in _lines_from_the_end(file, missing):
                try:
                    line = parse_json(text.decode())
                except ValueError:  # truncated by a kill, or not written by lockstep
                    continue
                if isinstance(line, dict) and isinstance(line.get("samples", 0), int | float):
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
