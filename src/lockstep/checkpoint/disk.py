"""The file operations by which checkpoints are claimed, published and deleted.

One object, so that tests can put a simulated disk in its place: one that stalls a process between any two operations,
kills it there, or loses what was not synced.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from lockstep.checkpoint import format as form
from lockstep.io.durable import fsync_dir, make_directories


class Disk:
    """The disk of this machine."""

    def names(self, directory: Path) -> list[str]:
        """The names in a directory."""
        return os.listdir(directory)

    def is_directory(self, path: Path) -> bool:
        """Whether a path is a directory, and not a link to one."""
        return path.is_dir() and not path.is_symlink()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def read_json(self, path: Path) -> Any:
        """A small JSON file; Damaged where it is missing or is none."""
        return form.read_json(path)

    def verify(self, checkpoint: Path) -> None:
        """Damaged, if a file of a checkpoint is not as it was written."""
        form.verify(checkpoint)

    def is_milestone(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is to be kept for good."""
        return form.is_permanent(checkpoint)

    def make(self, directory: Path) -> None:
        """Create a directory, if it is not there."""
        directory.mkdir(exist_ok=True)

    def make_all(self, directory: Path) -> None:
        """Create a directory and those above it, if they are not there, and sync their names."""
        make_directories(directory)

    def make_new(self, directory: Path) -> None:
        """Create a directory and sync its name; FileExistsError where something of that name is there."""
        directory.mkdir()
        fsync_dir(directory.parent)

    def create(self, path: Path, text: str) -> None:
        """Write a new file and sync it; FileExistsError where somebody else has created it."""
        with path.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, path: Path, text: str) -> None:
        """Replace a small file in one step."""
        form.replace_text(path, text)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a directory with all that is in it, if it is there."""
        if self.is_directory(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def remove_tree(self, directory: Path) -> None:
        """Remove a directory with all that is in it; OSError where that fails."""
        shutil.rmtree(directory)

    def settle(self, directory: Path) -> None:
        """Sync the names in a directory."""
        fsync_dir(directory)


DISK = Disk()
