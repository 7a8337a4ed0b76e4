"""Progress of processes: counted in each worker, reported to its launcher over a pipe, and held to a deadline there.

Progress is a phase entered or left, a collective completed, or data written by a save. The pipe does not depend on the
run's disk, so a launcher notices workers that wait for a disk that does not answer.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.launch.process_lifetime import ENV_PROGRESS_FD

GRACE = 10.0
"""Seconds after its deadline that a launcher leaves a worker to end by itself, with a report of its own."""
STEP = 2.0
"""The most seconds that count between two looks: a process that was stopped for a while has not been idle meanwhile."""


class IdleTime:
    """Seconds in which a counter has not changed, by looks at it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count: object = None
        self._looked = time.monotonic()

    def look(self, count: object) -> float:
        now = time.monotonic()
        self.seconds = 0.0 if count != self._count else self.seconds + min(now - self._looked, STEP)
        self._count, self._looked = count, now
        return self.seconds


def written_bytes(thread: int | None) -> int:
    """Bytes that a thread of this process has passed to the system for writing; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/self/task/{thread}/io").read_text().split()[3])
    return 0


class ProgressPipe:
    """A worker's end of the pipe. Nothing is sent where no launcher of ours has started the process."""

    def __init__(self) -> None:
        given = os.environ.pop(ENV_PROGRESS_FD, "")  # processes that this one starts must not write to it
        self._descriptor = int(given) if given.isdigit() else -1
        if self._descriptor >= 0:
            os.set_inheritable(self._descriptor, False)
            os.set_blocking(self._descriptor, False)

    def send(self, **values: Any) -> None:
        """Send what is known. A pipe that is full or closed loses the message."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.write(self._descriptor, json.dumps(values).encode() + b"\n")


@dataclass
class Watched:
    """One worker, as its launcher last heard of it."""

    told: dict[str, Any] = field(default_factory=dict)
    idle: IdleTime = field(default_factory=IdleTime)
    _rest: bytes = b""

    def read(self, descriptor: int) -> None:
        """Take in all messages that have arrived."""
        with suppress(OSError):
            while part := os.read(descriptor, 65536):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        if lines:
            self.told = json.loads(lines[-1])
        self.idle.look(self.told.get("progress"))

    @property
    def overdue(self) -> bool:
        """Whether it made no progress for longer than it may, and has not ended by itself."""
        allowed = self.told.get("allowed")
        return allowed is not None and self.idle.seconds > allowed + GRACE


class Deadlines:
    """The workers of one start, by local rank."""

    def __init__(self) -> None:
        self.workers: dict[int, Watched] = {}

    def look(self, descriptors: Mapping[int, int]) -> list[int]:
        """Read from every worker that runs. Returns those that are overdue."""
        for rank, descriptor in descriptors.items():
            self.workers.setdefault(rank, Watched()).read(descriptor)
        compiling = any(watched.told.get("compiling") for watched in self.workers.values())
        return [] if compiling else [rank for rank in descriptors if self.workers[rank].overdue]
