"""Automatic save interval, used if `run.save_every` is not set."""

import time

FIRST_INTERVAL, MIN_INTERVAL, MAX_INTERVAL = 20.0, 10.0, 600.0
"""Seconds before the first save, and the minimum and maximum between two saves."""
TIME_SHARE = 0.01
"""Fraction of run time that saves may take."""


class SaveInterval:
    """Decides when the next save is due from the cost of the last one."""

    def __init__(self) -> None:
        self._cost: float | None = None
        self._saved_at = time.monotonic()
        self._reported = 0.0

    @property
    def interval(self) -> float:
        """Seconds between saves."""
        return FIRST_INTERVAL if self._cost is None else min(max(self._cost / TIME_SHARE, MIN_INTERVAL), MAX_INTERVAL)

    @property
    def due(self) -> bool:
        return time.monotonic() - self._saved_at > self.interval

    def begin(self) -> None:
        """Record the start of a save."""
        self._saved_at = time.monotonic()

    def update(self, cost: float) -> str:
        """Record the seconds of work of a save; return a message if the interval changed by a factor of 2 or more."""
        self._cost = cost
        if 0.5 < self.interval / max(self._reported, 1e-9) < 2.0:
            return ""
        self._reported = self.interval
        return f"Saving every {self.interval:.0f} s: a save takes {cost:.2f} s of work."
