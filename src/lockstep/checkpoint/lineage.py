"""Generations and lineage: which checkpoints of a run directory belong to the current run.

Every start claims a generation: a file that only one process can create. The claim is pending until the start has
loaded a checkpoint; then it names that checkpoint as its parent. Checkpoint names contain their generation.

The lineage begins with the newest generation that has published a checkpoint. It continues with the parent, the
parent's generation up to that parent, and so on. A start that ends before its first checkpoint therefore does not
change the run, and checkpoints that an older start publishes late are not part of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint.disk import DISK, Disk
from lockstep.checkpoint.errors import READ_ERROR, CorruptCheckpointError
from lockstep.checkpoint.naming import CheckpointName, generation_file, generations
from lockstep.config import ConfigError
from lockstep.io.safe_read import ReadFailed, UnreadableFileError

LIMIT = 10**6
"""Upper bound on generations. Lockstep does not write larger ones."""


def newest_generation(directory: Path, disk: Disk = DISK) -> int:
    """Return the newest generation, claimed or published; 0 if there is none."""
    names = disk.names(directory)
    published = (name.generation for name in map(CheckpointName.parse, names) if name)
    return max([*generations(names), *published], default=0)


def read_claim(directory: Path, generation: int, disk: Disk = DISK) -> dict[str, Any]:
    """Read the claim of a generation (host, pid, job); empty if it is missing or unreadable."""
    try:
        claimed = disk.read_json(generation_file(directory, generation))
    except (CorruptCheckpointError, OSError):
        return {}
    return claimed if isinstance(claimed, dict) else {}


def parent_of(directory: Path, generation: int, disk: Disk = DISK) -> CheckpointName | None:
    """Return the checkpoint that a generation resumed from; None for a fresh start.

    Raises CorruptCheckpointError if the claim names no parent.
    """
    path = generation_file(directory, generation)
    claimed = disk.read_json(path)
    parent = claimed.get("parent", "") if isinstance(claimed, dict) else ""
    name = CheckpointName.parse(str(parent))
    if name is None and parent is not None:
        raise CorruptCheckpointError(f"{path} does not name a checkpoint")
    return name


def list_checkpoints(directory: Path, disk: Disk = DISK) -> list[CheckpointName]:
    """List all checkpoints of all generations, newest first."""
    names = filter(None, map(CheckpointName.parse, disk.names(directory)))
    return sorted((name for name in names if disk.is_directory(directory / str(name))), reverse=True)


def lineage(directory: Path, disk: Disk = DISK) -> list[CheckpointName]:
    """List the checkpoints of the current run, newest first."""
    line: list[CheckpointName] = []
    limit: CheckpointName | None = None
    checkpoints = list_checkpoints(directory, disk)
    generation = max((name.generation for name in checkpoints), default=0)
    while generation:
        line += [n for n in checkpoints if n.generation == generation and (limit is None or n.samples <= limit.samples)]
        try:
            limit = parent_of(directory, generation, disk)
        except CorruptCheckpointError:
            break
        if limit is None or limit.generation >= generation:
            break
        generation = limit.generation
    return line


Check = Callable[[Path], object]
"""Function that raises CorruptCheckpointError for a damaged checkpoint."""


def find(
    directory: Path, at: int | None = None, check: Check | None = None, disk: Disk = DISK
) -> tuple[CheckpointName | None, list[str]]:
    """Return the newest undamaged checkpoint (or the one at `at` samples), and a message for each damaged one.

    A checkpoint that cannot be read is not skipped; it raises ConfigError.
    """
    try:
        return _find(directory, at, check or disk.verify, disk)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error}.", READ_ERROR) from None


def _find(directory: Path, at: int | None, check: Check, disk: Disk) -> tuple[CheckpointName | None, list[str]]:
    notes: list[str] = []
    names = lineage(directory, disk) if disk.is_directory(directory) else []
    candidates = [name for name in names if at is None or name.samples == at]
    if at is not None and not candidates:
        available = ", ".join(str(name.samples) for name in sorted(names)) or "none"
        raise ConfigError(f"there is no checkpoint at {at} samples in {directory}.", f"There are: {available}.")
    for name in candidates:
        try:
            check(directory / str(name))
            return name, [f"{note} Using the previous one." for note in notes]
        except (CorruptCheckpointError, OSError) as damage:
            if not disk.exists(directory / str(name)):
                continue  # the start that is training has deleted it in the meantime
            if isinstance(damage, OSError):
                raise
            notes.append(f"Checkpoint {name} is damaged: {damage}.")
    if notes and at is not None:
        raise ConfigError("\n".join(notes), "Choose another checkpoint, or omit it to use the newest undamaged one.")
    if notes:
        raise ConfigError("\n".join(notes), f"No undamaged checkpoint is left in {directory}.")
    if candidates:
        return _find(directory, at, check, disk)  # all were deleted in the meantime, after newer ones were published
    return None, notes


def best_checkpoint(directory: Path, disk: Disk = DISK) -> CheckpointName | None:
    """Return the checkpoint with the best evaluation, if the current run has one."""
    try:
        name = CheckpointName.parse(disk.read_text(directory / "best").strip())
    except ReadFailed as failed:
        raise failed.error from None  # the best checkpoint is unknown, so none may be deleted
    except (FileNotFoundError, UnreadableFileError):
        return None
    return name if name in lineage(directory, disk) else None


def find_best(directory: Path, check: Check, disk: Disk = DISK) -> tuple[CheckpointName | None, list[str]]:
    """Return the best checkpoint, or the newest undamaged one if the best is unknown or damaged, and messages."""
    notes: list[str] = []
    try:
        best = best_checkpoint(directory, disk) if disk.is_directory(directory) else None
        if best is not None:
            check(directory / str(best))
            return best, notes
    except CorruptCheckpointError as error:
        notes.append(f"The best checkpoint is damaged: {error}. Using the newest intact one.")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error}.", READ_ERROR) from None
    name, found = find(directory, None, check, disk)
    return name, notes + found
