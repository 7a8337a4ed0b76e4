"""Publication of written checkpoints, and deletion of old ones.

Both are a single rename. A checkpoint is renamed before it is deleted, so that no reader finds a partial one. If two
processes rename the same directory, only one succeeds.
"""

import re
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.disk import Disk
from lockstep.checkpoint.fencing import GenerationFence
from lockstep.checkpoint.format import CorruptCheckpointError
from lockstep.checkpoint.lineage import best_checkpoint, lineage, list_checkpoints, parent_of
from lockstep.checkpoint.naming import CheckpointName

_GENERATION = re.compile(r"(?:-g|attempt-)(\d{1,9})", re.ASCII)
"""Finds the generation in the name of an unfinished checkpoint or claim."""


def publish(fence: GenerationFence, partial: Path, name: CheckpointName) -> None:
    """Publish a written and synced directory as a checkpoint. Raises OSError if this start is superseded."""
    disk, target = fence.disk, fence.directory / str(name)
    if fence.superseded():
        raise OSError(fence.superseded_by)
    if disk.exists(target):  # renamed by an earlier save whose fsync failed
        try:
            disk.verify(target)
        except CorruptCheckpointError:
            discard(disk, target)
    if disk.exists(target):
        discard(disk, partial)
    else:
        disk.rename(partial, target)
    disk.fsync_directory(fence.directory)


def prune(fence: GenerationFence, keep: int) -> None:
    """Delete all checkpoints but the `keep` newest, the best, permanent ones and this generation's parent.

    Called when a new checkpoint is on disk. Checkpoints with more samples than that one are kept until the run has
    reached their samples. Checkpoints of a newer start are never touched.
    """
    if fence.superseded() or fence.is_loading():
        return
    disk, directory = fence.disk, fence.directory
    clear_leftovers(fence)
    line = lineage(directory, disk)
    if not line or line[0].generation != fence.generation:
        return
    kept = {*line[:keep], parent_of(directory, fence.generation, disk), best_checkpoint(directory, disk)}
    for name in list_checkpoints(directory, disk):
        path = directory / str(name)
        if name in kept or name.generation > fence.generation or name.samples > line[0].samples:
            continue
        if not (name in line and disk.is_milestone(path)):
            discard(disk, path)
    if disk.is_remote:
        remaining = list_checkpoints(directory, disk)
        if not (fence.superseded() or fence.is_loading()):  # a newer start may be storing files
            disk.remove_unreferenced(remaining)


def discard(disk: Disk, path: Path) -> None:
    """Delete a directory atomically: rename it, then remove it."""
    deleted = path.with_name(f".{path.name.strip('.')}.deleted")
    if disk.exists(deleted):  # left by a killed process
        disk.remove(deleted)
    with suppress(FileNotFoundError):  # another process has deleted it
        disk.rename(path, deleted)
        disk.remove(deleted)


def clear_leftovers(fence: GenerationFence) -> None:
    """Delete what interrupted saves and deletions of this and older starts have left."""
    for name in fence.disk.names(fence.directory):
        written_by = _GENERATION.search(name)
        unfinished = name.startswith(".") and name.endswith((".partial", ".deleted"))
        if not unfinished or (written_by and int(written_by[1]) > fence.generation):
            continue
        path = fence.directory / name
        if name.endswith(".partial") and fence.disk.is_directory(path):
            discard(fence.disk, path)  # rename first: an older start may still try to publish it
        else:
            fence.disk.remove(path)
