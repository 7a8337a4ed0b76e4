"""Of two starts of one run, the newer has it: the older finds out, publishes nothing more, and stops."""

import time
from pathlib import Path

from lockstep.run.disk import DISK, Disk
from lockstep.run.lineage import claim, claimant, find, newest_generation
from lockstep.run.names import Name


class Outdated(RuntimeError):
    """Somebody started this run anew: what this process still does belongs to no run."""


class Fence:
    """One start of a run, and whether it is still the newest."""

    def __init__(self, directory: Path, main: bool, disk: Disk = DISK) -> None:
        self.directory, self.main, self.disk = directory, main, disk
        self.generation = 0
        """The one this start has claimed."""
        self.outdated = ""
        """Why this process may publish nothing more, in a sentence; empty as long as it may."""
        self._looked_at = 0.0

    def begin(self, at: int | None, job: str = "", processes: int = 1) -> tuple[Name | None, list[str]]:
        """On the main process: the checkpoint to go on from, with a generation claimed; and what the user should know.

        `at` asks for the checkpoint at so many samples.
        """
        self.disk.make(self.directory)
        newest = newest_generation(self.directory, self.disk)
        if job and claimant(self.directory, newest, self.disk).get("job") == job:
            at = None  # this job went on from there once already, and came further
        chosen, notes = find(self.directory, at, self.disk)
        self.generation = claim(self.directory, chosen, job, processes, self.disk)
        return chosen, notes

    def confirm(self, chosen: Name | None, problems: list[str]) -> tuple[Name | None, list[str]]:
        """On the main process: whether all processes have loaded a checkpoint; the same one where they have."""
        return chosen, []

    def superseded(self) -> bool:
        """Whether somebody has claimed a newer generation of this run; asked on the main process."""
        if self.outdated or not self.main:
            return bool(self.outdated)
        try:
            newest = newest_generation(self.directory, self.disk)
        except OSError:
            return False  # it cannot be looked into just now, nor written to
        if newest > self.generation:
            by = claimant(self.directory, newest, self.disk)
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
