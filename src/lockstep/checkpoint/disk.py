"""File operations that claim, publish and delete checkpoints.

They are methods of one object so that tests can substitute a simulated disk. The simulated disk stalls or kills a
process between any two operations, or loses data that was not synced.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint import format as form
from lockstep.checkpoint.incremental import link_or_copy
from lockstep.checkpoint.naming import CheckpointName
from lockstep.io import safe_read
from lockstep.io.durable import fsync_dir, make_directories

POINTER_BYTES = 100
"""Bytes of a pointer to a checkpoint that are read."""


class Disk:
    """File operations on the local file system, or on another one that all hosts share."""

    is_remote = False
    """Whether operations are requests to another machine, which training must not wait for."""

    def names(self, directory: Path) -> list[str]:
        """List the names in a directory."""
        return os.listdir(directory)

    def is_directory(self, path: Path) -> bool:
        """Return whether a path is a directory and not a symbolic link."""
        return path.is_dir() and not path.is_symlink()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def read_json(self, path: Path) -> Any:
        """Read a small JSON file. Raises CorruptCheckpointError if it is missing or invalid."""
        return form.read_json(path)

    def read_text(self, path: Path) -> str:
        """Read a pointer to a checkpoint. Raises FileNotFoundError, UnreadableFileError or ReadFailed."""
        return safe_read.read_text(path, POINTER_BYTES)

    def verify(self, checkpoint: Path, replay: bool = True) -> None:
        """Check the files of a checkpoint. Raises CorruptCheckpointError if one differs from what was written."""
        form.verify(checkpoint, replay)

    def fetch(self, checkpoint: Path, lanes: range | None = None, replay: bool = True) -> None:
        """Copy what a process needs of a checkpoint to its path: the files of some lanes; None: of all."""

    def release(self, checkpoint: Path) -> None:
        """Remove what `fetch` has copied."""

    def is_milestone(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint is permanent, that is, exempt from pruning (`run.keep_every`)."""
        return form.is_permanent(checkpoint)

    def make(self, directory: Path) -> None:
        """Create a directory unless it exists."""
        directory.mkdir(exist_ok=True)

    def make_all(self, directory: Path) -> None:
        """Create a directory and its missing parents, and fsync the directories that contain them."""
        make_directories(directory)

    def make_new(self, directory: Path) -> None:
        """Create a directory and fsync its parent. Raises FileExistsError if the path exists."""
        directory.mkdir()
        fsync_dir(directory.parent)

    def create(self, path: Path, text: str) -> None:
        """Create a file and fsync it. Raises FileExistsError if another process has created it."""
        with path.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, path: Path, text: str) -> None:
        """Replace a small file atomically."""
        form.replace_text(path, text)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file or a directory tree if it exists, ignoring errors inside the tree."""
        if self.is_directory(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def upload(self, partial: Path, files: Mapping[str, str]) -> None:
        """Store the files that a process has written for an unfinished checkpoint, by name, with their hashes."""

    def link(self, source: Path, target: Path) -> None:
        """Make a file of the last checkpoint part of a new one."""
        link_or_copy(source, target)

    def remove_unreferenced(self, names: list[CheckpointName]) -> None:
        """Remove stored files that none of these checkpoints, which are all, contains."""

    def fsync_directory(self, directory: Path) -> None:
        """Fsync a directory, so that the names in it are durable."""
        fsync_dir(directory)


DISK = Disk()
