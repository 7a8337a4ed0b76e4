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
def temporary_directory(purpose: str = "", parent: Path | None = None) -> Iterator[Path]:
    """Create a directory for the duration of the block. First remove directories abandoned by killed processes.

    `parent` is the directory to create it in, such as the file system that a result is moved to. It is hidden there.
    None: the system's directory for temporary files.
    """
    remove_leftovers(parent)
    prefix = f"{_prefix(parent)}{purpose}-" if purpose else _prefix(parent)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        _remove(path)
        os.close(lock)


def remove_leftovers(parent: Path | None = None) -> None:
    """Remove this user's temporary directories whose owners have ended. Directories without a lock file are kept."""
    with suppress(OSError):
        for path in (parent or Path(tempfile.gettempdir())).glob(f"{_prefix(parent)}*"):
            with suppress(OSError):
                if _is_own_directory(path) and _is_abandoned(path / _LOCK):
                    _remove(path)


def _prefix(parent: Path | None) -> str:
    return _PREFIX if parent is None else f".{_PREFIX}"


def _remove(path: Path) -> None:
    """Remove a directory, and its lock last: a kill in between would otherwise leave files that are never removed."""
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _LOCK:
            entry.unlink(missing_ok=True)
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
