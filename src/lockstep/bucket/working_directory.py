"""Working directories: the local copy of a run in a bucket, on each host, while the run trains or a command reads it.

All processes of a host that train one run share a directory, and the last one removes it. A directory is in use while a
process holds a shared lock of a file in it; the kernel releases the lock if the process dies. Directories that are
not in use are removed by the next start.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHE = "LOCKSTEP_CACHE_DIR"
"""Environment variable with the directory of working directories. Default: ~/.cache/lockstep (or XDG_CACHE_HOME)."""
URL_FILE = ".url"
"""File with the URL of the run in a working directory."""
_LOCK = ".lock"


def cache_directory() -> Path:
    """Return the directory that contains the working directories of this host."""
    if configured := os.environ.get(CACHE):
        return Path(configured).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "lockstep"


@contextmanager
def working_directory(name: str) -> Iterator[Path]:
    """Create a working directory, or use the one of that name that another process of this host has created."""
    parent = cache_directory()
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_abandoned(parent)
    path = parent / name
    lock = _lock_shared(path)
    try:
        yield path
    finally:
        _remove_if_unused(path, lock)


def _lock_shared(path: Path) -> int:
    """Create a directory and lock it. Repeat if another process has removed it in between."""
    while True:
        path.mkdir(exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_same_file(path / _LOCK, lock):
                return lock
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.iterdir():
        with suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            _remove_if_unused(path, lock)


def _remove_if_unused(path: Path, lock: int) -> None:
    """Remove a directory unless another process has locked it. Closes `lock`."""
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(path / _LOCK, lock):
                shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether a path still is the opened file. It is not if another process has removed the directory."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
