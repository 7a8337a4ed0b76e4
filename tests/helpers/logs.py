"""Read the log of a run in a test."""

from pathlib import Path
from typing import Any

from lockstep.io.jsonl import iter_jsonl


def last_values(path: Path) -> dict[str, Any]:
    """Return the newest value of every logged name."""
    values: dict[str, Any] = {}
    for line in iter_jsonl(path):
        values |= line
    return values
