"""How a checkpoint that was written becomes part of a run, and how old ones go."""

from pathlib import Path

from lockstep.run.fence import Fence
from lockstep.run.lineage import best_of, lineage, parent_of, published
from lockstep.run.names import Name


def publish(fence: Fence, partial: Path, name: Name) -> None:
    """Make a directory that was written and synced a checkpoint of the run; OSError where that is not to be."""
    if fence.superseded():
        raise OSError(fence.outdated)
    fence.disk.rename(partial, fence.directory / str(name))
    fence.disk.settle(fence.directory)


def prune(fence: Fence, keep: int) -> None:
    """Delete what is neither among the newest, nor the best, nor a milestone, nor this generation's parent."""
    if fence.superseded():
        return  # somebody started this run anew: it is theirs to tidy
    disk, directory = fence.disk, fence.directory
    clear_partials(fence)
    line = lineage(directory, disk)
    spared = {*line[:keep], parent_of(directory, fence.generation, disk), best_of(directory, disk)}
    for name in published(directory, disk):
        if name not in spared and not (name in line and disk.is_milestone(directory / str(name))):
            disk.remove_tree(directory / str(name))


def clear_partials(fence: Fence) -> None:
    """Delete what saves left that were killed or given up."""
    for name in fence.disk.names(fence.directory):
        if name.startswith(".") and name.endswith(".partial"):
            fence.disk.remove(fence.directory / name)
