"""Process-hours of a run over all its starts: used in total, and lost because training after a checkpoint was repeated.

The totals are in status.json. A start that is killed is counted up to the last time that it wrote them, at a log entry.
This module does not import torch.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.checkpoint.naming import CheckpointName

MAX_SECONDS = 1e12
"""Larger numbers in a status file are invalid."""
KEPT_SAVES = 20
"""Newest saves of a start that are recorded."""


@dataclass
class ProcessHours:
    """Process-seconds of the earlier starts, and the time of the newest start."""

    used: float = 0.0
    """Process-seconds of earlier starts."""
    lost: float = 0.0
    """Part of `used` after the checkpoints from which the next starts continued."""
    processes: int = 1
    generation: int = 0
    seconds: float = 0.0
    """Seconds of the newest start."""
    saves: list[tuple[int, float]] = field(default_factory=list)
    """Samples of its published checkpoints, and the seconds after which their state was copied."""

    @property
    def total(self) -> float:
        """Process-seconds of all starts."""
        return self.used + self.processes * self.seconds

    def next_start(self, resumed: CheckpointName | None, processes: int, generation: int) -> "ProcessHours":
        """Return the hours of the next start, which continues from the checkpoint `resumed`."""
        lost = self.lost + self.processes * (self.seconds - self._kept(resumed))
        return ProcessHours(self.total, lost, processes, generation)

    def _kept(self, resumed: CheckpointName | None) -> float:
        """Return the seconds of the newest start whose results are in a checkpoint."""
        if resumed is None or resumed.generation != self.generation:
            return 0.0
        if resumed.samples > max((samples for samples, _ in self.saves), default=-1):
            return self.seconds  # saved after the hours were written
        return max((seconds for samples, seconds in self.saves if samples <= resumed.samples), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """Return the entry of status.json: the totals in hours, and what the next start needs."""
        values = asdict(self) | {"saves": [[samples, round(seconds, 3)] for samples, seconds in self.saves]}
        hours = {"used": round(self.total / 3600, 6), "lost": round(self.lost / 3600, 6)}
        return {"process_hours": hours | {"newest_start": values}}


def read_process_hours(status: dict[str, Any]) -> ProcessHours | None:
    """Return the hours in a status, which may be untrusted. None: it has none, or an invalid one."""
    try:
        values = status["process_hours"]["newest_start"]
        return ProcessHours(
            used=_seconds(values["used"]),
            lost=_seconds(values["lost"]),
            processes=int(_seconds(values["processes"])),
            generation=int(_seconds(values["generation"])),
            seconds=_seconds(values["seconds"]),
            saves=[(int(_seconds(s)), _seconds(t)) for s, t in values["saves"][:KEPT_SAVES]],
        )
    except (KeyError, TypeError, ValueError):
        return None


def _seconds(value: Any) -> float:
    number = value if isinstance(value, int | float) else math.nan
    if not 0 <= number < MAX_SECONDS:
        raise ValueError(value)
    return float(number)
