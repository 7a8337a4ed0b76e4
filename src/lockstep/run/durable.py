"""Directories that survive a power cut: each new name is on disk before anything relies on it."""

from pathlib import Path

from lockstep.run.format import settle_directory


def make_directories(path: Path) -> None:
    """Make a directory and those above it that are missing, and wait until all their names are on disk."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        settle_directory(directory.parent)
