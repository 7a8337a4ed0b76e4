"""Fencing: when a run is started twice, the older start stops as soon as the newer one has loaded a checkpoint."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.checkpoint.disk import DISK, Disk
from lockstep.checkpoint.lineage import LIMIT, Check, find, lineage, list_checkpoints, newest_generation, read_claim
from lockstep.checkpoint.naming import CheckpointName, generation_file, generations
from lockstep.config import ConfigError

MAX_LOADS = 3
"""Maximum number of loads while an older start keeps publishing. The last one loaded is then used."""
PENDING_SECONDS = 600.0
"""Seconds for which the older start deletes nothing after a newer claim, so that the newer start can load.

Limited because the newer start may have died while loading."""


class SupersededError(RuntimeError):
    """The run was started again, so this process must stop and publish nothing."""


class GenerationFence:
    """One start of a run: its generation, the checkpoint it resumes from, and whether it is still the newest start."""

    def __init__(self, directory: Path, main: bool, disk: Disk = DISK) -> None:
        self.directory, self.main, self.disk = directory, main, disk
        self.generation = 0
        """The generation that this start has claimed."""
        self.settled = False
        """Whether this start has loaded a checkpoint and confirmed its claim, which stops older starts."""
        self.superseded_by = ""
        """Message naming the newer start; empty while this start may publish."""
        self._polled_at = 0.0
        self._requested_samples: int | None = None
        self._newest_seen: CheckpointName | None = None
        """The newest checkpoint of the run at the time of the last selection."""
        self._loads = 0
        self._check: Check | None = None
        self._claim: dict[str, Any] = {}

    # -- taking over a run ---------------------------------------------------------------------------------------------

    def begin(
        self, at: int | None, job: str = "", processes: int = 1, check: Check | None = None
    ) -> tuple[CheckpointName | None, list[str]]:
        """Claim a generation on the main process; return the checkpoint to load, and messages for the user.

        `at` selects a checkpoint by its global samples. `check` raises CorruptCheckpointError for a damaged one. The
        claim is pending: older starts do not stop because of it.
        """
        self.disk.make(self.directory)
        self._requested_samples = None if self.has_published(job) else at
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
                    "Lockstep did not write this generation. Remove its files.",
                )
            with suppress(FileExistsError):  # another start has claimed it
                self.disk.create(generation_file(self.directory, newest + 1), json.dumps(self._claim))
                self.generation = newest + 1
        return self._select()

    def confirm(self, chosen: CheckpointName | None, problems: list[str]) -> tuple[CheckpointName | None, list[str]]:
        """Confirm the claim on the main process, after all processes have tried to load a checkpoint.

        Returns the same checkpoint if the run resumes from it; older starts then stop. Returns another one to load if
        an older start has deleted the chosen one or published a newer one. Raises ConfigError if the checkpoint cannot
        be loaded; the claim is then withdrawn and nothing has changed.
        """
        self._loads += 1
        deleted = chosen is not None and not self.disk.exists(self.directory / str(chosen))
        if problems and not deleted:
            self.withdraw()
            raise ConfigError("\n".join(dict.fromkeys(problems)))
        overtaken = self._requested_samples is None and self._loads < MAX_LOADS and self._newest() != self._newest_seen
        if problems or overtaken:
            next_chosen, notes = self._select()
            if problems or next_chosen != chosen:
                return next_chosen, notes
        claim = {"parent": str(chosen) if chosen else None, **self._claim}
        try:
            # Sync the claim before publishing: without it, later checkpoints would not be part of the run.
            self.disk.replace(generation_file(self.directory, self.generation), json.dumps(claim))
            self.disk.fsync_directory(self.directory)
        except OSError:
            self.withdraw()
            raise
        self.settled = True
        return chosen, []

    def withdraw(self) -> None:
        """Remove a pending claim."""
        if self.generation and not self.settled:
            self.disk.remove(generation_file(self.directory, self.generation))

    def _select(self) -> tuple[CheckpointName | None, list[str]]:
        try:
            self._newest_seen = self._newest()
            chosen, notes = find(self.directory, self._requested_samples, self._check, self.disk)
            if chosen is None and list_checkpoints(self.directory, self.disk):
                raise ConfigError(
                    f"{self.directory} holds checkpoints, but none belongs to the run.",
                    "Claim files (attempt-*.json) may have been removed. Restore them, or move the checkpoints away to "
                    "start from scratch.",
                )
        except BaseException:
            self.withdraw()
            raise
        return chosen, notes

    def _newest(self) -> CheckpointName | None:
        return next(iter(lineage(self.directory, self.disk)), None)

    def has_published(self, job: str) -> bool:
        """Return whether an earlier start of the same job has already published a checkpoint."""
        if not job or not self.disk.is_directory(self.directory):
            return False
        published = {name.generation for name in list_checkpoints(self.directory, self.disk)}
        return any(read_claim(self.directory, generation, self.disk).get("job") == job for generation in published)

    # -- during training -----------------------------------------------------------------------------------------------

    def superseded(self) -> bool:
        """Return whether a newer start of this run has loaded a checkpoint. Only the main process reads the claims."""
        if self.superseded_by or not self.main:
            return bool(self.superseded_by)
        try:
            newer = sorted(self._newer(), reverse=True)
        except OSError:
            return False  # an unreadable directory cannot be written to either, so nothing is published meanwhile
        for generation in newer:
            claim = read_claim(self.directory, generation, self.disk)
            if "parent" in claim:
                self.superseded_by = (
                    f"this run was started again (generation {generation}, by pid {claim.get('pid', '?')} on "
                    f"{claim.get('host', '?')}), so generation {self.generation} stops here and publishes nothing more."
                )
                break
        return bool(self.superseded_by)

    def error(self) -> "SupersededError":
        """Return the error that ends a superseded start, also on processes that do not read the claims."""
        return SupersededError(self.superseded_by or "another start of this run has taken it over.")

    def is_loading(self) -> bool:
        """Return whether a newer start may be loading a checkpoint now."""
        start_times = (read_claim(self.directory, generation, self.disk).get("began") for generation in self._newer())
        return any(isinstance(start, float) and 0 <= time.time() - start < PENDING_SECONDS for start in start_times)

    def allows_writing(self) -> bool:
        """Return whether this start may write logs and status. It asks a local disk, but waits for no remote one."""
        return not (self.poll() if self.disk.is_remote else self.superseded())

    def poll(self) -> bool:
        """Like `superseded`, but read the directory at most once per second; on a remote disk never.

        There, a background thread calls `superseded` from time to time.
        """
        if not self.disk.is_remote and time.monotonic() - self._polled_at > 1.0:
            self._polled_at = time.monotonic()
            self.superseded()
        return bool(self.superseded_by)

    def _newer(self) -> list[int]:
        return [g for g in generations(self.disk.names(self.directory)) if g > self.generation]
