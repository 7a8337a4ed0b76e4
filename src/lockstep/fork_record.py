"""The record of a fork, `fork.json` in its run directory: its parent, the checkpoint, and the changed settings.

Torch is not imported. The file may come from an untrusted source, and the parent may have been deleted.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.bucket.urls import is_url
from lockstep.checkpoint.format_version import FORMAT, UnknownFormat, without_version
from lockstep.checkpoint.naming import generation_file
from lockstep.io.jsonl import CHECKPOINTS, FORK
from lockstep.io.safe_read import UnreadableFileError, read_json, shallow

RECORD_BYTES = 256 * 2**10
MAX_PATH, MAX_DEPTH = 4096, 6
"""Limits of a record: bytes of the file, characters of the path, and nesting depth of a value."""
SHOWN_CHARS = 40
"""Characters of a changed value that are shown."""
_KEY = re.compile(r"\w[\w.]{0,199}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ID = re.compile(r"([0-9a-f]{16})?", re.ASCII)


@dataclass(frozen=True)
class ForkRecord:
    """Where a fork came from."""

    parent: str
    """Absolute path or URL of the parent when it was forked."""
    parent_id: str
    """`run_id` of the parent. It still identifies a parent that was moved."""
    samples: int
    """Samples of the parent's checkpoint."""
    hash: str
    """Hash of that checkpoint, as computed by `hash_checkpoint`."""
    changes: dict[str, list[Any]]
    """Old and new value of each changed setting, by dotted name."""

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def run_id(run: Path) -> str:
    """Identify a run by the claim of its first start, also after its directory was moved. Empty: it has none.

    A claim that was published has the id itself instead of host and process.
    """
    path = generation_file(run / CHECKPOINTS, 1)
    try:
        claim = None if path.is_symlink() else read_json(path, RECORD_BYTES)
    except (OSError, ValueError, UnreadableFileError):
        return ""
    if not isinstance(claim, dict) or "began" not in claim:
        return ""
    if _matches(_ID, claim.get("run_id")):
        return str(claim["run_id"])
    text = json.dumps([claim.get(name) for name in ("host", "pid", "began")])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_fork(run: Path) -> ForkRecord | None:
    """Read the record of a fork. None: the run is not a fork. Raises UnreadableFileError if the record is invalid."""
    path = run / FORK
    if path.is_symlink():
        raise UnreadableFileError(f"{path} is a link")
    try:
        values = read_json(path, RECORD_BYTES)
    except FileNotFoundError:
        return None
    if not isinstance(values, dict):
        raise UnreadableFileError(f"{path} holds no record of a fork")
    try:
        record = without_version(values, path, UnreadableFileError)
    except UnknownFormat as error:
        raise UnreadableFileError(str(error).partition("\n")[0].rstrip(".")) from None
    if record.keys() != {"parent", "parent_id", "samples", "hash", "changes"}:
        raise UnreadableFileError(f"{path} does not have the fields of a record of a fork")
    for name, valid in (
        ("parent", _is_path(record["parent"])),
        ("parent_id", _matches(_ID, record["parent_id"])),
        ("samples", _is_count(record["samples"])),
        ("hash", _matches(_HASH, record["hash"])),
        ("changes", _is_changes(record["changes"])),
    ):
        if not valid:
            raise UnreadableFileError(f"{path} has no valid value for {name}")
    return ForkRecord(**record)


def parent_exists(record: ForkRecord) -> bool:
    """Return whether the parent is still where it was forked. Another run with its name is not the parent.

    A parent in a bucket is assumed to exist: finding out would take a request.
    """
    if is_url(record.parent):
        return True
    return bool(record.parent_id) and run_id(Path(record.parent)) == record.parent_id


def describe_fork(record: ForkRecord) -> str:
    """Return a line about a fork: parent, samples and changed settings, and whether the parent was deleted."""
    missing = "" if parent_exists(record) else f" ({record.parent} was deleted or moved)"
    changes = ", ".join(describe_changes(record.changes)) or "no changed settings"
    return f"fork of {Path(record.parent).name} at {record.samples:,} samples{missing}: {changes}"


def describe_changes(changes: dict[str, list[Any]]) -> list[str]:
    """Return a text for each changed setting, such as `algo.gamma 0.99 -> 0.9`."""
    return [f"{key} {_shown(old)} -> {_shown(new)}" for key, (old, new) in changes.items()]


def _shown(value: Any) -> str:
    value = float(f"{value:.6g}") if isinstance(value, float) else value
    text = value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _is_path(value: Any) -> bool:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_PATH or "\0" in value:
        return False
    return Path(value).is_absolute() or is_url(value)


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_changes(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _matches(_KEY, key) and isinstance(pair, list) and len(pair) == 2 and shallow(pair, MAX_DEPTH)
        for key, pair in value.items()
    )
