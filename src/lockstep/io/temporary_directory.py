"""Temporary directories that a later process removes if their owner is killed.

A directory holds a lock file that its owner keeps locked. The kernel releases the lock when the owner and every process
forked from it have ended. A lock that can be acquired therefore belongs to an abandoned directory.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "lockstep-"
_LOCK = "lock"


@contextmanager
def temporary_directory(purpose: str = "") -> Iterator[Path]:
    """Create a directory for the duration of the block. First remove directories abandoned by killed processes."""
    remove_leftovers()
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-" if purpose else _PREFIX))
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_leftovers() -> None:
    """Remove this user's temporary directories whose owners have ended. Directories without a lock file are kept."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if _is_own_directory(path) and _is_abandoned(path / _LOCK):
                    shutil.rmtree(path, ignore_errors=True)


def _is_own_directory(path: Path) -> bool:
    found = path.lstat()  # does not follow links
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_abandoned(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
