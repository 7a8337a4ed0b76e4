"""Pending collectives: handles to wait for, and a log of the collective that this process waits in.

Over gloo `wait()` blocks the host. Over NCCL it returns immediately and the device waits instead, so a hang shows as a
stream that does not advance. The log therefore records two CUDA events around every wait of the device. The first
completes when the device arrives at the collective, the second when the collective is done.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from lockstep.launch.stack_traces import is_internal_frame

T = TypeVar("T")


class Handle(Protocol):
    """A pending reduction; its tensor holds the result after `wait`."""

    def wait(self) -> Any: ...


class CompletedHandle:
    """A reduction over one process, which is complete immediately."""

    def wait(self) -> None: ...


class PendingCollective(NamedTuple):
    """The collective that a process, or its device, waits in."""

    number: int
    name: str
    since: float | None
    """Time at which it arrived; None while the device still computes what comes before the collective."""
    line: str = ""
    """Line that launched the collective, where the host has moved on since."""


class PeerLostError(RuntimeError):
    """Another process was lost during a collective. The cause is recorded in that process, not in this one."""


class DeviceWait:
    """A collective that the device waits for while the host continues."""

    __slots__ = ("_arrived", "_done", "line", "name", "number", "since")

    def __init__(self, number: int, name: str, wait: Callable[[], Any]) -> None:
        self.number, self.name, self.line = number, name, _calling_line()
        self.since: float | None = None
        self._arrived, self._done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._arrived.record()
        wait()  # orders the stream after the collective; the host does not block
        self._done.record()

    def seconds(self) -> float | None:
        """Return how long the device waited; None while it still waits."""
        return self._arrived.elapsed_time(self._done) / 1e3 if self._done.query() else None

    def pending(self) -> PendingCollective:
        """Return the state of this wait. `since` is the time of the first call that finds the device arrived."""
        if self.since is None and self._arrived.query():
            self.since = time.monotonic()
        return PendingCollective(self.number, self.name, self.since, self.line)


class CollectiveLog:
    """Numbered log of the collectives of one process. Heartbeats report the current number to other processes."""

    def __init__(self) -> None:
        self.begun = self.completed = 0
        self.last = ""
        self.waited = 0.0
        """Total seconds that this process, or its device, waited."""
        self._blocked: PendingCollective | None = None
        self._queued: deque[DeviceWait] = deque()
        self._lock = threading.Lock()  # the watchdog thread reads while the main thread appends

    def begin(self, name: str) -> int:
        self.begun += 1
        self.last = name
        return self.begun

    def wait(self, number: int, name: str, action: Callable[[], T]) -> T:
        """Run a blocking wait of the host, and log it as pending until it returns."""
        wait = self._blocked = PendingCollective(number, name, time.monotonic())
        try:
            return action()
        except RuntimeError as error:
            if any(part in str(error) for part in _LOST):
                raise PeerLostError(f"another process was lost in collective {number} ('{name}'): {error}") from error
            raise
        finally:
            self.waited += time.monotonic() - (wait.since or 0.0)
            self._blocked = None
            self.completed += 1

    def queue(self, number: int, name: str, wait: Callable[[], Any]) -> None:
        """Start a wait of the device, which does not block the host, and log it as pending."""
        self._queued.append(DeviceWait(number, name, wait))
        if len(self._queued) > _MAX_QUEUED:
            self._pop_completed()

    def now(self) -> PendingCollective | None:
        """Return the collective that the host waits in, else the oldest that the device has not completed."""
        self._pop_completed()
        if self._blocked is not None:
            return self._blocked
        with self._lock:
            return self._queued[0].pending() if self._queued else None

    def _pop_completed(self) -> None:
        """Remove the waits that the device has completed, and add up their durations."""
        with self._lock:
            while self._queued and (seconds := self._queued[0].seconds()) is not None:
                self.waited += seconds
                self.completed += 1
                self._queued.popleft()


_MAX_QUEUED = 64
"""Device waits that are queued before the main thread removes the completed ones."""


class TrackedHandle:
    """A pending collective whose wait is logged."""

    __slots__ = ("_name", "_number", "_wait", "_work")

    def __init__(self, log: CollectiveLog, name: str, work: Handle, on_device: bool = False) -> None:
        self._name, self._work = name, work
        self._number = log.begin(name)
        self._wait = log.queue if on_device else log.wait

    def wait(self) -> None:
        self._wait(self._number, self._name, self._work.wait)


def _calling_line() -> str:
    """Return the line outside of this package and torch that called a collective."""
    frame = sys._getframe(2)
    while frame.f_back is not None and is_internal_frame(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


_LOST = ("onnection closed", "onnection reset", "onnection refused", "roken pipe", "imed out", "emote process exited")
"""Parts of the error messages of gloo and NCCL for a lost connection."""
