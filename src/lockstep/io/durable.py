"""Create directories durably: fsync parent directories so that new entries survive a power cut."""

import errno
import os
from pathlib import Path


def fsync_dir(path: Path) -> None:
    """Wait until the entries of a directory are on disk, as fsync does for the content of a file."""
    if os.name == "nt":
        return  # Windows cannot open directories; NTFS journals their entries
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not support it
            raise
    finally:
        os.close(directory)


def make_directories(path: Path) -> None:
    """Create a directory and its missing parents; wait until all their entries are on disk."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        fsync_dir(directory.parent)
