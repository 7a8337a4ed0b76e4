"""Check every file of a run's checkpoints against its hash, and repair damaged files if possible."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.checkpoint import format as form
from lockstep.checkpoint.format_version import UnknownFormat
from lockstep.checkpoint.lineage import list_checkpoints
from lockstep.checkpoint.parity import parity_of
from lockstep.checkpoint.tensorfile import write_bytes
from lockstep.io.jsonl import CHECKPOINTS


@dataclass(frozen=True)
class Checked:
    """Result for one file."""

    path: Path
    size: int
    state: Literal["whole", "repaired", "damaged", "unreadable"]
    details: str = ""


def count_bytes(run: Path) -> int:
    """Count the bytes that `scrub` will read. Files that several checkpoints link to count once."""
    seen: dict[tuple[int, int], int] = {}
    for name in list_checkpoints(run / CHECKPOINTS):
        for path in (run / CHECKPOINTS / str(name)).iterdir():
            found = path.lstat()
            seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())


def scrub(run: Path) -> Iterator[Checked]:
    """Check the files of every checkpoint, newest first, whether or not the run would resume from it."""
    seen: set[tuple[int, int, str]] = set()
    for name in list_checkpoints(run / CHECKPOINTS):
        directory = run / CHECKPOINTS / str(name)
        try:
            files = form.read_manifest(directory)["files"]
            form.read_values(directory)
        except (form.CorruptCheckpointError, UnknownFormat) as error:
            if directory.exists():  # a live run may have deleted it
                yield Checked(directory, 0, "damaged", str(error).replace("\n", " "))
            continue
        except OSError as error:
            yield Checked(directory, 0, "unreadable", str(error))
            continue
        # Check segments before parity files: a segment is repaired from its parity, then parity from its segment.
        for file in sorted(files, key=lambda file: file.endswith(".parity")):
            checked = _check(directory, files, file, seen)
            if checked is not None and directory.exists():
                yield checked


def _check(directory: Path, files: dict[str, str], name: str, seen: set[tuple[int, int, str]]) -> Checked | None:
    path, size = directory / name, 0
    try:
        if form.resolve_member(directory, name).exists():
            found = path.stat()
            size, key = found.st_size, (found.st_dev, found.st_ino, files[name])
            if key in seen:
                return None
            seen.add(key)
        if blocks := form.check_file(directory, files, name):
            return Checked(path, size, "repaired", f"{blocks} blocks, from its parity file")
        return Checked(path, size, "whole")
    except form.CorruptCheckpointError as damage:
        if name.endswith(".parity") and _rebuild_parity(directory, files, name):
            return Checked(path, size, "repaired", "computed again from its segment")
        return Checked(path, size, "damaged", str(damage))
    except OSError as error:
        return Checked(path, size, "unreadable", str(error))


def _rebuild_parity(directory: Path, files: dict[str, str], name: str) -> bool:
    """Rewrite a parity file in place from its undamaged segment, so that every link to it is repaired."""
    segment = name.removesuffix(".parity") + ".safetensors"
    try:
        form.resolve_member(directory, name)
        form.check_file(directory, files, segment)
        return write_bytes(directory / name, parity_of(directory / segment).parts()) == files[name]
    except (form.CorruptCheckpointError, KeyError):
        return False
