"""Status of one process: written by its main thread, read by the watchdog's threads."""

import time
from dataclasses import dataclass, field

import torch

from lockstep.distributed.collectives import CollectiveLog
from lockstep.launch.kernel_compilation import is_compiling_kernel
from lockstep.ops.compilation import COMPILE


@dataclass
class ProcessStatus:
    """Rank, device and progress of this process."""

    rank: int
    size: int
    device: torch.device
    collective_log: CollectiveLog = field(default_factory=CollectiveLog)
    started: float = field(default_factory=time.monotonic)
    phases: list[str] = field(default_factory=list)
    """Names of the phases entered, outermost first."""
    phase_counts: dict[str, int] = field(default_factory=dict)
    """How often each phase was entered."""
    progress: int = 0
    """Incremented with every phase entered or left. The watchdog ends a process if it does not change for too long."""
    update: int = 0
    """Number of the current optimizer update."""
    stop_requested: bool = False
    """Whether this process received a stop request. The loop synchronizes it at the end of an iteration."""

    @property
    def phase(self) -> str:
        """The innermost phase; the compile phase while a numba kernel is compiled."""
        if is_compiling_kernel():
            return COMPILE
        phases = self.phases[:]  # copied, because the main thread may change the list
        return phases[-1] if phases else "between phases"
