"""Fault injection for `prove` and tests: a process sends a signal to itself or its launcher at a configured point."""

import os
import signal
import time
from dataclasses import dataclass

from lockstep.config import ConfigError
from lockstep.launch.process_lifetime import launcher_pid
from lockstep.launch.world import WorldInfo

SWITCH = "LOCKSTEP_FAULT_INJECTION"
"""Must be 1, or VARIABLE has no effect. A variable left over in a shell must not end a run."""
VARIABLE = "LOCKSTEP_INJECT_FAULT"
"""`PROCESS:PHASE:COUNT[:SIGNAL[:launcher]]`: on entering that phase for the COUNT-th time, that process sends SIGNAL
(default: SIGKILL) to itself, or to the launcher that started it. The fault is injected once, not after a restart.
"""


@dataclass(frozen=True)
class FaultInjector:
    """Sends one signal at one point of the run."""

    phase: str
    count: int
    number: int
    launcher: bool

    def at(self, phase: str, count: int) -> None:
        if (phase, count) == (self.phase, self.count):
            os.kill(launcher_pid() if self.launcher else os.getpid(), self.number)
            if self.launcher:
                time.sleep(2.0)  # a short run could end before the launcher forwards the signal


def read(world: WorldInfo) -> FaultInjector | None:
    """Return the fault that the environment configures for this rank, or None."""
    text = os.environ.get(VARIABLE)
    if not text or os.environ.get(SWITCH) != "1" or world.restarts:
        return None
    try:
        process, phase, count, *rest = text.split(":")
        number = signal.Signals[rest[0]] if rest else signal.SIGKILL
        if len(rest) > 2 or rest[1:] not in ([], ["launcher"]):
            raise ValueError(text)
        fault = FaultInjector(phase, int(count), number, "launcher" in rest)
        applies = int(process) == world.rank
    except (ValueError, KeyError):
        raise ConfigError(
            f"{VARIABLE} is {text!r}, which is invalid.",
            f"Use PROCESS:PHASE:COUNT[:SIGNAL[:launcher]], or unset {SWITCH}.",
        ) from None
    return fault if applies else None
