"""Count the file operations of a process, and kill it at the k-th of them.

A Python audit hook sees every file that is opened, created, linked, renamed or removed. The rest (fsync, and a partly
written file) is wrapped here.
"""

import os
import signal
import sys

from lockstep.checkpoint import format as form
from lockstep.checkpoint import tensorfile

EVENTS = {
    "open",
    "os.mkdir",
    "os.link",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
    "os.listdir",
    "os.scandir",
}


class Operations:
    """Counts the file operations in a directory while `active`, and kills this process at operation `at`."""

    def __init__(self, directory: str, at: int) -> None:
        self.directory, self.at, self.active = directory, at, False
        self.names: list[str] = []

    def pass_by(self, name: str) -> None:
        if self.active:
            self.names.append(name)
            if len(self.names) == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple) -> None:
        if self.active and event in EVENTS and self.directory in _place(event, arguments):
            self.pass_by(event)

    def wrap(self) -> None:
        fsync, write = os.fsync, tensorfile.write_bytes

        def watched_fsync(descriptor):
            self.pass_by("fsync")
            fsync(descriptor)

        def watched_write(path, parts, parity=None):
            digest = write(path, parts, parity)
            if len(self.names) + 1 == self.at and self.active:
                os.truncate(path, path.stat().st_size // 2)  # a kill while the file is being written
            self.pass_by("half a file")
            return digest

        os.fsync, form.write_bytes, tensorfile.write_bytes = watched_fsync, watched_write, watched_write
        sys.addaudithook(self.audit)


def _place(event: str, arguments: tuple) -> str:
    """Return the path of an operation, also if it identifies its directory by a descriptor."""
    path, rest = arguments[0], arguments[1:]
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    if event in ("os.remove", "os.rmdir") and rest[0] >= 0:
        return os.path.join(os.readlink(f"/proc/self/fd/{rest[0]}"), os.fsdecode(path))
    return os.fsdecode(path)
