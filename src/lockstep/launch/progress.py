"""Progress of workers: counted in each worker, sent to the launcher over a pipe, and checked there against a deadline.

Progress is a phase entered or left, a collective completed, or data written by a save. The pipe does not depend on the
run's disk, so a launcher also detects workers that are blocked on a disk.
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
"""Seconds after its deadline that a launcher waits for a worker to exit by itself, with its own report."""
MAX_UPDATE_GAP = 2.0
"""Maximum seconds counted between two updates. Time in which the observer itself was stopped does not count."""


class IdleTime:
    """Seconds in which a polled counter has not changed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count: object = None
        self._updated = time.monotonic()

    def update(self, count: object) -> float:
        now = time.monotonic()
        self.seconds = 0.0 if count != self._count else self.seconds + min(now - self._updated, MAX_UPDATE_GAP)
        self._count, self._updated = count, now
        return self.seconds


def written_bytes(thread: int | None) -> int:
    """Return the bytes that a thread of this process has written; 0 if the system does not report them."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/self/task/{thread}/io").read_text().split()[3])
    return 0


class ProgressPipe:
    """A worker's end of the progress pipe. Sends nothing if the process was not started by our launcher."""

    def __init__(self) -> None:
        descriptor = os.environ.pop(ENV_PROGRESS_FD, "")  # child processes must not write to the pipe
        self._descriptor = int(descriptor) if descriptor.isdigit() else -1
        if self._descriptor >= 0:
            os.set_inheritable(self._descriptor, False)
            os.set_blocking(self._descriptor, False)

    def send(self, **values: Any) -> None:
        """Send values as one JSON line. If the pipe is full or closed, the message is lost."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.write(self._descriptor, json.dumps(values).encode() + b"\n")


@dataclass
class WorkerProgress:
    """Latest progress message and idle time of one worker, in the launcher."""

    message: dict[str, Any] = field(default_factory=dict)
    idle: IdleTime = field(default_factory=IdleTime)
    _rest: bytes = b""

    def read(self, descriptor: int) -> None:
        """Read all available messages and keep the latest."""
        with suppress(OSError):
            while part := os.read(descriptor, 65536):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        if lines:
            self.message = json.loads(lines[-1])
        self.idle.update(self.message.get("progress"))

    @property
    def overdue(self) -> bool:
        """Whether the worker exceeded its deadline and did not exit by itself."""
        allowed = self.message.get("allowed")
        return allowed is not None and self.idle.seconds > allowed + GRACE


def overdue_workers(workers: dict[int, WorkerProgress], descriptors: Mapping[int, int]) -> list[int]:
    """Read the pipes of all running workers. Return the local ranks that are overdue; none while one compiles."""
    for rank, descriptor in descriptors.items():
        workers.setdefault(rank, WorkerProgress()).read(descriptor)
    compiling = any(worker.message.get("compiling") for worker in workers.values())
    return [] if compiling else [rank for rank in descriptors if workers[rank].overdue]
