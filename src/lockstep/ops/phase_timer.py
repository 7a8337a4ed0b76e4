"""Time by phase of the training loop, from the host clock or from CUDA events.

On a GPU the host only launches work, so its clock would attribute the time of an update to the next phase that
synchronizes. A CUDA event recorded at every change of phase measures when the device reaches it. Reading the times does
not synchronize: events that the device has not reached are counted the next time.
"""

import time
from collections import deque

import torch


class PhaseTimer:
    """Accumulates seconds by phase, timed by the host clock."""

    def __init__(self) -> None:
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def switch(self, ended: str | None) -> None:
        """Add the time since the last switch to the phase that ended; None: to no phase."""
        now = time.perf_counter()
        self._add(ended, now - self._since)
        self._since = now

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _add(self, ended: str | None, seconds: float) -> None:
        if ended is not None:
            self._seconds[ended] = self._seconds.get(ended, 0.0) + seconds


class DeviceTimer(PhaseTimer):
    """Times phases by events on the current stream of a CUDA device."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: deque[tuple[str | None, torch.cuda.Event]] = deque()
        """Phase that ended, and the event recorded then. The first entry only marks the start."""
        self._spare: list[torch.cuda.Event] = []

    def switch(self, ended: str | None) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((ended, event))
        if len(self._marks) >= _BACKLOG:
            self._settle()

    def take(self) -> dict[str, float]:
        self._settle()
        return super().take()

    def _settle(self) -> None:
        """Count the events that the device has reached."""
        while len(self._marks) > 1 and self._marks[1][1].query():
            _, before = self._marks.popleft()
            ended, event = self._marks[0]
            self._add(ended, before.elapsed_time(event) / 1e3)
            self._spare.append(before)


_BACKLOG = 1024
"""Events kept before querying which of them the device has reached."""
