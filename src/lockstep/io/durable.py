"""Directories that survive a power cut: each new name is on disk before anything relies on it."""

import errno
import os
from pathlib import Path


def fsync_dir(path: Path) -> None:
    """Wait until the names in a directory are on disk, as fsync does for what is in a file."""
    if os.name == "nt":
        return  # Windows opens no directories, and keeps its names in a journal
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a disk of the network's that does not know how
            raise
    finally:
        os.close(directory)


def make_directories(path: Path) -> None:
    """Make a directory and those above it that are missing, and wait until all their names are on disk."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        fsync_dir(directory.parent)
