"""Time by phase of the loop: by the host's clock, or by CUDA events where the device works behind the host.

On a GPU the host only launches work, so its clock would give the time of an update to whichever phase synchronizes
next. An event recorded at every change of phase measures when the device got there instead. Reading the times waits for
nothing: what the device has not reached yet is counted the next time.
"""

import time
from collections import deque
from typing import Protocol

import torch


class PhaseTimer(Protocol):
    """Adds up seconds by phase."""

    def switch(self, ended: str | None) -> None:
        """Give the time since the last switch to the phase that ended; None gives it to no phase."""

    def take(self) -> dict[str, float]:
        """Seconds by phase since they were last taken."""


class HostTimer:
    """Times phases by the host's clock."""

    def __init__(self) -> None:
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def switch(self, ended: str | None) -> None:
        now = time.perf_counter()
        if ended is not None:
            self._seconds[ended] = self._seconds.get(ended, 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return taken


class DeviceTimer:
    """Times phases by events on the current stream of a CUDA device."""

    def __init__(self) -> None:
        self._marks: deque[tuple[str | None, torch.cuda.Event]] = deque()
        """Phase that ended, and the event recorded then. The first one only begins the time after it."""
        self._spare: list[torch.cuda.Event] = []
        self._seconds: dict[str, float] = {}

    def switch(self, ended: str | None) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((ended, event))
        if len(self._marks) >= _BACKLOG:
            self._settle()

    def take(self) -> dict[str, float]:
        self._settle()
        taken, self._seconds = self._seconds, {}
        return taken

    def _settle(self) -> None:
        """Count what the device has passed."""
        while len(self._marks) > 1 and self._marks[1][1].query():
            _, before = self._marks.popleft()
            ended, event = self._marks[0]
            if ended is not None:
                self._seconds[ended] = self._seconds.get(ended, 0.0) + before.elapsed_time(event) / 1e3
            self._spare.append(before)


_BACKLOG = 1024
"""Events that are kept before the device is asked which of them it has passed."""
