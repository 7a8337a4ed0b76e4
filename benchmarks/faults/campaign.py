"""Runs of one recipe with faults at random moments. Each must end with the hash of the undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from faults.log import CampaignLog, Line
from faults.settings import run_settings
from faults.storage import BucketStorage, Storage
from faults.sweep import SweepUnderWay
from lockstep.io.temporary_directory import remove_leftovers

LOCKSTEP = [sys.executable, "-m", "lockstep"]
BOUND = 150.0
"""Seconds without a new checkpoint after which a run counts as hung."""
RUN = "run"


class Campaign:
    """Runs of one recipe, until enough faults were injected."""

    def __init__(
        self, recipe: str, seed: int, place: Path, log: CampaignLog, storage: Storage, sweep: SweepUnderWay | None
    ) -> None:
        self.recipe, self.place, self.log, self.storage, self.sweep = recipe, place, log, storage, sweep
        self.chance = random.Random(f"{seed}-{log.faults}")
        self.head: Line = {
            "recipe": recipe,
            "storage": "bucket" if isinstance(storage, BucketStorage) else "directory",
            "seed": seed,
        }
        self.forks: list[str] = []
        self.wanted = 0
        self.output, self.temporary = place / "output.txt", place / "tmp"
        self.temporary.mkdir()
        self.environment = os.environ | {"TMPDIR": str(self.temporary)}
        self.launcher: subprocess.Popen[bytes] | None = None
        self.processes = 0
        self.reached = 0
        """Samples of the furthest checkpoint that was seen: only damage may undo it."""
        self.fault_began = 0.0
        """Time of the last fault."""
        self._pending: Line | None = None
        """Log line of a fault after which no checkpoint was published yet."""
        self._began = time.monotonic()

    def train(self, kinds: Sequence[Callable[["Campaign"], bool]], weights: Sequence[int], faults: int) -> None:
        """Train runs until the log has this number of faults."""
        self.wanted = faults
        undisturbed = self._finish(["train", *self._words("undisturbed")], "undisturbed")
        print(f"{self.recipe}: undisturbed {undisturbed}", flush=True)
        while self.log.faults < faults:
            kills = self.sweep.kills if self.sweep is not None else 0
            hashes = self._disturb(kinds, weights)
            # The hash of the run and its forks, or the one of them that differs.
            found = next((value for value in hashes if value != undisturbed), undisturbed)
            line = self.head | {"hash": found, "undisturbed": undisturbed, "forks": len(hashes) - 1}
            if self.sweep is not None:
                line["sweep_kills"] = self.sweep.kills - kills
            self.log.add(line | {"left": (left := self._leftovers())})
            print(f"{self.recipe}: run {self.log.runs} ended: {', '.join(sorted(set(hashes)))}", flush=True)
            assert set(hashes) == {undisturbed}, f"run and forks have {hashes}, undisturbed is {undisturbed}"
            assert not left, f"left behind: {left}"

    # -- the run -------------------------------------------------------------------------------------------------------

    def _words(self, name: str) -> list[str]:
        return [*run_settings(self.recipe), f"run.runs_dir={self.storage.runs_dir}", f"run.name={name}"]

    def _disturb(self, kinds: Sequence[Callable[["Campaign"], bool]], weights: Sequence[int]) -> list[str]:
        """Train one run from its start to its end, with faults. Return its hash and those of its forks."""
        self._start(["train", *self._words(RUN)], self._some())
        seen = None
        while True:
            ended = self._wait_for_news(seen)
            self._log_pending()
            if ended == 0:
                break
            assert ended is None, f"the run ended with {ended}:\n{self.output.read_text()[-5000:]}"
            time.sleep(self.chance.uniform(0.0, 1.0))
            if self.log.faults < self.wanted:
                self._inject(self.chance.choices(kinds, weights)[0])
            seen = self._newest()
        left = self.storage.leftovers(RUN)
        assert not left, f"the run has left {left}"
        hashes = [self.storage.hash(RUN)]
        hashes += [self._finish(["resume", f"{self.storage.runs_dir}/{fork}"], fork) for fork in self.forks]
        self.storage.remove(RUN)
        self.reached, self.forks = 0, []
        return hashes

    def _inject(self, fault: Callable[["Campaign"], bool]) -> None:
        before, self.fault_began = self.processes, time.monotonic()
        if self.launcher is None or self.launcher.poll() is not None or not fault(self):
            return
        line = {"fault": fault.__name__.replace("_", " "), "processes": before, "then": self.processes}
        self._pending = line | {"samples": int((self._newest() or "0").partition("-")[0])}

    def _log_pending(self) -> None:
        """Log the last fault, after which the run has published a checkpoint or ended."""
        if self._pending is None:
            return
        at, recovered_after = self.fault_began - self._began, time.monotonic() - self.fault_began
        line = {"seconds": round(at, 1)} | self._pending | {"recovered_after": round(recovered_after, 1)}
        self._pending = None
        self.log.add(self.head | line)
        print(f"{self.recipe}: {self.log.faults:>4} of {self.wanted}  {line}", flush=True)

    def _finish(self, words: list[str], name: str) -> str:
        """Train a run to its end without faults, remove it, and return its hash."""
        self._start(words, 1)
        assert self.launcher is not None
        code = self.launcher.wait(1200)
        assert code == 0, f"{name} ended with {code}:\n{self.output.read_text()[-3000:]}"
        value = self.storage.hash(name)
        self.storage.remove(name)
        return value

    def _start(self, words: list[str], processes: int) -> None:
        self.processes = processes
        with self.output.open("ab") as output:
            self.launcher = subprocess.Popen(
                [*LOCKSTEP, *words, "--procs", str(processes), "--max-restarts", "100"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )

    def resume(self) -> None:
        """Continue on another number of processes. A run that was killed before it had a config starts again."""
        if self.storage.has_config(RUN):
            self._start(["resume", f"{self.storage.runs_dir}/{RUN}"], self._some())
        else:
            self.storage.remove(RUN)
            self._start(["train", *self._words(RUN)], self._some())

    def _some(self) -> int:
        return self.chance.choice([n for n in (1, 2, 3, 4) if n != self.processes])

    def _wait_for_news(self, seen: str | None) -> int | None:
        """Wait until there is a newer checkpoint, or the run has ended. Return its exit code in that case."""
        deadline = time.monotonic() + BOUND
        while time.monotonic() < deadline:
            assert self.launcher is not None
            if (code := self.launcher.poll()) is not None:
                return code
            furthest = max((name.samples for name in self.storage.checkpoints(RUN)), default=0)
            assert furthest >= self.reached, f"a checkpoint at {self.reached} samples was lost; now {furthest}"
            self.reached = furthest
            if self._newest() not in (None, seen):
                return None
            time.sleep(0.1)
        raise AssertionError(f"no checkpoint for {BOUND:.0f} s:\n{self.output.read_text()[-5000:]}")

    def _newest(self) -> str | None:
        names = self.storage.checkpoints(RUN)
        # By generation first: a checkpoint after a restart is news, even if it repeats samples.
        return str(max(names, key=lambda name: (name.generation, name.samples))) if names else None

    def generation(self) -> int:
        """Return the newest generation with a checkpoint."""
        return max((name.generation for name in self.storage.checkpoints(RUN)), default=0)

    def wait_for_checkpoint(self, ended: Callable[[], bool], deadline: float) -> None:
        """Wait until the run has published another checkpoint, or `ended` is true."""
        seen = self._newest()
        while not ended() and self._newest() == seen and time.monotonic() < deadline:
            time.sleep(0.05)

    # -- processes -----------------------------------------------------------------------------------------------------

    def workers(self) -> list[psutil.Process]:
        """Return the processes that train: the launcher itself if there is one process."""
        assert self.launcher is not None
        try:
            launcher = psutil.Process(self.launcher.pid)
            forked = [worker for server in self.fork_servers() for worker in server.children()]
            return forked if self.processes > 1 else [launcher]
        except psutil.NoSuchProcess:
            return []

    def fork_servers(self) -> list[psutil.Process]:
        """Return the process that the launcher's workers are forked from."""
        assert self.launcher is not None
        try:
            return psutil.Process(self.launcher.pid).children() if self.processes > 1 else []
        except psutil.NoSuchProcess:
            return []

    def send(self, number: int) -> bool:
        """Send a signal to some worker. Return whether there was one."""
        workers = self.workers()
        if not workers:
            return False
        try:
            self.chance.choice(workers).send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    def expect(self, codes: set[int]) -> None:
        """Wait for the end of the command, which must have one of these exit codes."""
        assert self.launcher is not None
        try:
            code = self.launcher.wait(BOUND)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.output.read_text()[-5000:]}") from None
        assert code in codes, f"it ended with {code}:\n{self.output.read_text()[-5000:]}"

    def was_killed(self) -> bool:
        """Wait for the end of a killed command. Return False if it had finished before."""
        self.expect({-signal.SIGKILL, 0})
        assert self.launcher is not None
        return self.launcher.returncode != 0

    def _leftovers(self) -> list[str]:
        """Return processes and temporary files that a finished run has left."""
        deadline = time.monotonic() + 20
        while (alive := self._descendants()) and time.monotonic() < deadline:
            time.sleep(0.2)
        commands = []
        for process in alive:
            with suppress(psutil.Error):
                commands.append(" ".join(process.cmdline())[:200])
        before, tempfile.tempdir = tempfile.tempdir, str(self.temporary)
        remove_leftovers()  # as the next command does
        tempfile.tempdir = before
        # torch keeps a cache of compiled code for all processes of a user.
        files = [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        return [*commands, *files]

    def _descendants(self) -> list[psutil.Process]:
        """Return the processes that have this campaign's directory for temporary files."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(self.temporary) and process.status() != "zombie":
                    found.append(process)
        return found

    def stop(self) -> None:
        """Kill all processes of the campaign, after an error."""
        for process in self._descendants():
            with suppress(psutil.Error):
                process.kill()
