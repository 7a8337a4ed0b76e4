"""Scripted faults: a process signals itself, or its launcher, at a moment known beforehand. For proofs and tests."""

import os
import signal
import time
from dataclasses import dataclass

from lockstep.runtime.place import Place

VARIABLE = "LOCKSTEP_KILL"
"""`PROCESS:PHASE:COUNT[:SIGNAL[:launcher]]`: on entering that phase for the COUNT-th time, that process sends SIGNAL
(SIGKILL unless another is named) to itself, or to the launcher that started it. It strikes once, not after a restart.
"""


@dataclass(frozen=True)
class Strike:
    """One signal at one moment."""

    phase: str
    count: int
    number: int
    launcher: bool

    def at(self, phase: str, count: int) -> None:
        if (phase, count) == (self.phase, self.count):
            os.kill(os.getppid() if self.launcher else os.getpid(), self.number)
            if self.launcher:
                time.sleep(2.0)  # the launcher passes it on, or a short run would be over before that


def read(place: Place) -> Strike | None:
    """What the environment says about the process at this place."""
    script = os.environ.get(VARIABLE)
    if not script or place.restarts:
        return None
    process, phase, count, *rest = script.split(":")
    if int(process) != place.rank:
        return None
    return Strike(phase, int(count), signal.Signals[rest[0]] if rest else signal.SIGKILL, "launcher" in rest)
