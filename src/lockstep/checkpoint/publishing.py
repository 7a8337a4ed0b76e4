"""How a checkpoint that was written becomes part of a run, and how old ones go.

Both are one rename: a checkpoint that is to go is renamed first, so that nobody finds half of one, and of two processes
that want the same directory only one gets it.
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
"""Which start has written a checkpoint or a claim that is not finished."""


def publish(fence: GenerationFence, partial: Path, name: CheckpointName) -> None:
    """Make a directory that was written and synced a checkpoint of the run; OSError where that is not to be."""
    disk, target = fence.disk, fence.directory / str(name)
    if fence.superseded():
        raise OSError(fence.superseded_by)
    if disk.exists(target):  # renamed by an attempt whose sync then failed
        try:
            disk.verify(target)
        except CorruptCheckpointError:
            discard(disk, target)
    if disk.exists(target):
        discard(disk, partial)
    else:
        disk.rename(partial, target)
    disk.settle(fence.directory)


def prune(fence: GenerationFence, keep: int) -> None:
    """Delete what is neither among the newest, nor the best, nor a milestone, nor this generation's parent.

    Called when a new checkpoint is on disk. What has more samples than that one stays until the run has come as far,
    and what a newer start has written is never touched.
    """
    if fence.superseded() or fence.is_loading():
        return
    disk, directory = fence.disk, fence.directory
    clear_leftovers(fence)
    line = lineage(directory, disk)
    if not line or line[0].generation != fence.generation:
        return
    spared = {*line[:keep], parent_of(directory, fence.generation, disk), best_checkpoint(directory, disk)}
    for name in list_checkpoints(directory, disk):
        path = directory / str(name)
        if name in spared or name.generation > fence.generation or name.samples > line[0].samples:
            continue
        if not (name in line and disk.is_milestone(path)):
            discard(disk, path)


def discard(disk: Disk, path: Path) -> None:
    """Delete a directory, which is gone in one step."""
    grave = path.with_name(f".{path.name.strip('.')}.deleted")
    if disk.exists(grave):  # a kill may have left it
        disk.remove(grave)
    with suppress(FileNotFoundError):  # somebody else deletes it
        disk.rename(path, grave)
        disk.remove(grave)


def clear_leftovers(fence: GenerationFence) -> None:
    """Delete what saves and deletions of this and older starts left when they were killed or given up."""
    for leftover in fence.disk.names(fence.directory):
        path = fence.directory / leftover
        if not _is_leftover(leftover, fence.generation):
            continue
        if leftover.endswith(".partial") and fence.disk.is_directory(path):
            discard(fence.disk, path)  # an older start may still be about to publish it
        else:
            fence.disk.remove(path)


def _is_leftover(name: str, generation: int) -> bool:
    """Whether a name is that of a file or directory that some start up to a generation did not finish."""
    if not (name.startswith(".") and name.endswith((".partial", ".deleted"))):
        return False
    written_by = _GENERATION.search(name)
    return written_by is None or int(written_by[1]) <= generation
