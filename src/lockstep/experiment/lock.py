"""Lock of a directory with several runs, so that two processes never train the same run."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.config import ConfigError

LOCK = ".lock"
"""File that the process which trains the runs keeps locked."""


@contextmanager
def locked(directory: Path, what: str) -> Iterator[None]:
    """Lock the directory of an experiment or a sweep. The kernel unlocks it if this process dies.

    Args:
        directory: Directory with the runs.
        what: experiment or sweep, for messages.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.open(directory / LOCK, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"{directory / LOCK} cannot be opened: {error}.", "Check its permissions.") from None
    try:
        with suppress(OSError):  # some network file systems have no locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process trains the {what} {directory}.", "Wait until it has ended, or stop it."
                ) from None
        yield
    finally:
        os.close(lock)
