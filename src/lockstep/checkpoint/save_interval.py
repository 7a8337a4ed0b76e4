"""How often a run saves when its config leaves that open: as often as it is cheap."""

import time

FIRST, LEAST, MOST = 20.0, 10.0, 600.0
"""Seconds to the first save, and between two of them at least and at most."""
SHARE = 0.01
"""How much of the time saves may take."""


class SaveInterval:
    """When the next save is due, from what the last one cost."""

    def __init__(self) -> None:
        self._cost: float | None = None
        self._saved_at = time.monotonic()
        self._told = 0.0

    @property
    def interval(self) -> float:
        """Seconds between saves."""
        return FIRST if self._cost is None else min(max(self._cost / SHARE, LEAST), MOST)

    @property
    def due(self) -> bool:
        return time.monotonic() - self._saved_at > self.interval

    def begin(self) -> None:
        """A save begins."""
        self._saved_at = time.monotonic()

    def update(self, cost: float) -> str:
        """Take note of the seconds of work that a save took; what to tell, whenever the interval has changed much."""
        self._cost = cost
        if 0.5 < self.interval / max(self._told, 1e-9) < 2.0:
            return ""
        self._told = self.interval
        return f"Saving every {self.interval:.0f} s: a save takes {cost:.2f} s of work."
