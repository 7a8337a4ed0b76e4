"""Create directories and copies durably: fsync them, so that they survive a power cut."""

import errno
import os
import shutil
from pathlib import Path

from lockstep.io.safe_read import UnreadableFileError, open_regular


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


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file to a new path; wait until its content is on disk."""
    try:
        content = open_regular(source)
    except UnreadableFileError as error:
        raise OSError(errno.EINVAL, str(error), str(source)) from None
    with content, target.open("xb") as copy:
        shutil.copyfileobj(content, copy, 2**20)
        copy.flush()
        os.fsync(copy.fileno())
