"""Of two starts of one run, the newer has it: the older finds out, publishes nothing more, and stops."""

import time
from pathlib import Path

from lockstep.run.lineage import claimant, newest_generation
from lockstep.runtime import Runtime


class Outdated(RuntimeError):
    """Somebody started this run anew: what this process still does belongs to no run."""


class Fence:
    """One start of a run, and whether it is still the newest."""

    def __init__(self, directory: Path, runtime: Runtime) -> None:
        self.directory, self.runtime = directory, runtime
        self.generation = 0
        """The one this start has claimed."""
        self.outdated = ""
        """Why this process may publish nothing more, in a sentence; empty as long as it may."""
        self._looked_at = 0.0

    def superseded(self) -> bool:
        """Whether somebody has claimed a newer generation of this run; asked on the main process."""
        if self.outdated or not self.runtime.main:
            return bool(self.outdated)
        try:
            newest = newest_generation(self.directory)
        except OSError:
            return False  # it cannot be looked into just now, nor written to
        if newest > self.generation:
            by = claimant(self.directory, newest)
            self.outdated = (
                f"this run was started anew (generation {newest}, by pid {by.get('pid', '?')} on"
                f" {by.get('host', '?')}), so generation {self.generation} stops here and publishes nothing more."
            )
        return bool(self.outdated)

    def look(self) -> bool:
        """The same, at most once a second."""
        if time.monotonic() - self._looked_at > 1.0:
            self._looked_at = time.monotonic()
            self.superseded()
        return bool(self.outdated)
