"""Of two starts of one run, the newer has it, once it has loaded a checkpoint: the older finds out and stops."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from lockstep.checkpoint.disk import DISK, Disk
from lockstep.checkpoint.lineage import LIMIT, Check, find, lineage, list_checkpoints, newest_generation, read_claim
from lockstep.checkpoint.naming import CheckpointName, generation_file, generations
from lockstep.config import ConfigError

ROUNDS = 3
"""How often a start loads anew because the older one has published meanwhile; then it goes on from what it has."""
PENDING_SECONDS = 600.0
"""For so long the older start deletes nothing, so that a newer one can load; it may have died while it loaded."""


class SupersededError(RuntimeError):
    """Somebody started this run anew: what this process still does belongs to no run."""


class GenerationFence:
    """One start of a run: the generation that it claims, what it goes on from, and whether it is still the newest."""

    def __init__(self, directory: Path, main: bool, disk: Disk = DISK) -> None:
        self.directory, self.main, self.disk = directory, main, disk
        self.generation = 0
        """The one this start has claimed."""
        self.settled = False
        """Whether it has loaded a checkpoint, so that older starts stop."""
        self.superseded_by = ""
        """Why this process may publish nothing more, in a sentence; empty as long as it may."""
        self._looked_at = 0.0
        self._at: int | None = None
        self._tip: CheckpointName | None = None
        """The newest checkpoint when this start last chose one."""
        self._rounds = 0
        self._check: Check | None = None
        self._claim: dict[str, Any] = {}

    # -- taking a run over ---------------------------------------------------------------------------------------------

    def begin(
        self, at: int | None, job: str = "", processes: int = 1, check: Check | None = None
    ) -> tuple[CheckpointName | None, list[str]]:
        """On the main process: claim a generation, then choose the checkpoint to load; and what the user should know.

        `at` asks for the checkpoint at so many samples, `check` tells whether one is whole. The claim is pending:
        nobody stops because of it.
        """
        self.disk.make(self.directory)
        self._at = None if self.came_further(job) else at
        self._check = check
        self._claim = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": job,
            "processes": processes,
            "began": time.time(),
        }
        while not self.generation:
            newest = newest_generation(self.directory, self.disk)
            if newest >= LIMIT:
                raise ConfigError(
                    f"{self.directory} holds generation {newest}, which is more starts than a run can have.",
                    "Lockstep did not write that: remove the files of this generation.",
                )
            try:
                self.disk.create(generation_file(self.directory, newest + 1), json.dumps(self._claim))
                self.generation = newest + 1
            except FileExistsError:
                continue
        return self._select()

    def confirm(self, chosen: CheckpointName | None, problems: list[str]) -> tuple[CheckpointName | None, list[str]]:
        """On the main process, when all processes have tried to load a checkpoint: the same one if the run goes on from
        it, which stops older starts; or another one to load, because an older start has deleted or overtaken it.

        A checkpoint that cannot be loaded is a ConfigError: then the claim is withdrawn, and nothing has changed.
        """
        self._rounds += 1
        gone = chosen is not None and not self.disk.exists(self.directory / str(chosen))
        if problems and not gone:
            self.withdraw()
            raise ConfigError("\n".join(dict.fromkeys(problems)))
        overtaken = self._at is None and self._rounds < ROUNDS and self._newest() != self._tip
        if problems or overtaken:
            following, notes = self._select()
            if problems or following != chosen:
                return following, notes
        claim = {"parent": str(chosen) if chosen else None, **self._claim}
        try:
            # Synced before anything is published that only this claim makes part of the run.
            self.disk.replace(generation_file(self.directory, self.generation), json.dumps(claim))
            self.disk.settle(self.directory)
        except OSError:
            self.withdraw()
            raise
        self.settled = True
        return chosen, []

    def withdraw(self) -> None:
        """Give up a claim that leads nowhere."""
        if self.generation and not self.settled:
            self.disk.remove(generation_file(self.directory, self.generation))

    def _select(self) -> tuple[CheckpointName | None, list[str]]:
        try:
            self._tip = self._newest()
            chosen, notes = find(self.directory, self._at, self._check, self.disk)
            if chosen is None and list_checkpoints(self.directory, self.disk):
                raise ConfigError(
                    f"{self.directory} holds checkpoints, but none belongs to the run.",
                    "Claims of generations may have been removed: move the checkpoints away to start at zero.",
                )
        except BaseException:
            self.withdraw()
            raise
        return chosen, notes

    def _newest(self) -> CheckpointName | None:
        return next(iter(lineage(self.directory, self.disk)), None)

    def came_further(self, job: str) -> bool:
        """Whether this job went on from a checkpoint once already, and has published another one since."""
        if not job or not self.disk.is_directory(self.directory):
            return False
        writers = {name.generation for name in list_checkpoints(self.directory, self.disk)}
        return any(read_claim(self.directory, writer, self.disk).get("job") == job for writer in writers)

    # -- while it runs -------------------------------------------------------------------------------------------------

    def superseded(self) -> bool:
        """Whether a newer start of this run has loaded a checkpoint; asked on the main process."""
        if self.superseded_by or not self.main:
            return bool(self.superseded_by)
        try:
            newer = sorted(self._newer(), reverse=True)
        except OSError:
            return False  # the directory cannot be read just now, nor written to
        for generation in newer:
            by = read_claim(self.directory, generation, self.disk)
            if "parent" in by:
                self.superseded_by = (
                    f"this run was started anew (generation {generation}, by pid {by.get('pid', '?')} on"
                    f" {by.get('host', '?')}), so generation {self.generation} stops here and publishes nothing more."
                )
                break
        return bool(self.superseded_by)

    def is_loading(self) -> bool:
        """Whether a newer start may be loading a checkpoint now."""
        began = (read_claim(self.directory, generation, self.disk).get("began") for generation in self._newer())
        return any(isinstance(at, float) and 0 <= time.time() - at < PENDING_SECONDS for at in began)

    def poll(self) -> bool:
        """Whether it is superseded, looked up at most once a second."""
        if time.monotonic() - self._looked_at > 1.0:
            self._looked_at = time.monotonic()
            self.superseded()
        return bool(self.superseded_by)

    def _newer(self) -> list[int]:
        return [g for g in generations(self.disk.names(self.directory)) if g > self.generation]
