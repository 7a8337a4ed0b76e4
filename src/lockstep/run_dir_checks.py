"""Directories that a run refuses: with links or special files, or not seen by all processes."""

import os
import socket
import stat
import time
from pathlib import Path

from lockstep.config import ConfigError
from lockstep.distributed import Runtime


def refuse_unshared(directory: Path, runtime: Runtime) -> None:
    """Raise ConfigError on all processes if one of them does not see the directory that rank 0 created."""
    if runtime.size == 1:
        return
    for process, (visible, host) in enumerate(runtime.all_gather_json([_is_visible(directory), socket.gethostname()])):
        if not visible:
            raise ConfigError(
                f"process {process} on host {host} does not see {directory.parent.parent.absolute()}.",
                "Set --run.runs-dir to a directory on storage shared by all hosts, or to a bucket (s3://...).",
            )


def _is_visible(path: Path) -> bool:
    """Return whether a path exists or becomes visible within 5 seconds."""
    for _ in range(50):
        if path.exists():
            return True
        time.sleep(0.1)
    return False


def refuse_links(path: Path) -> None:
    """Reject links and special files: a run directory from an untrusted source must not redirect writes."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            mode = (Path(folder) / name).lstat().st_mode
            if stat.S_ISLNK(mode):
                raise ConfigError(
                    f"{Path(folder) / name} is a link, but a run must only write to its own directory.",
                    "Replace it by its target, or remove it.",
                )
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe would block
                raise ConfigError(f"{Path(folder) / name} is neither a file nor a directory.", "Remove it.")
