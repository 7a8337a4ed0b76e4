"""A sweep that trains next to a run with faults, and is killed itself now and then."""

import random
import shutil
from pathlib import Path

from killed_sweep import SWEEP, kill_sweep, results, start_sweep

WORDS = [*SWEEP, "--trials", "6", "--prune", "asha", "--parallel", "1"]
SECONDS = 600.0


class SweepUnderWay:
    """A sweep that is started again whenever it was killed. Its results must be those of an undisturbed one."""

    def __init__(self, place: Path) -> None:
        self.kills, self._finished = 0, 0
        self._directory, undisturbed = place / "sweep", place / "undisturbed-sweep"
        assert start_sweep(undisturbed, WORDS).wait(SECONDS) == 0, (undisturbed / "output").read_text()[-3000:]
        self._undisturbed = results(undisturbed)
        self._process = start_sweep(self._directory, WORDS)

    def kill(self, chance: random.Random) -> bool:
        """Send SIGKILL to the sweep or to one of its processes. Return whether it was still training."""
        if self._process.poll() is not None:
            self._handle_end(self._process.returncode)
        kills = kill_sweep(self._process, chance)
        if self._process.poll() is not None:
            self._process = start_sweep(self._directory, WORDS)
        self.kills += kills
        return kills > 0

    def finish(self) -> None:
        """Train the sweep to its end and compare it with the undisturbed one."""
        finished = self._finished
        while self._finished == finished:
            self._handle_end(self._process.wait(SECONDS))
        self.stop()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _handle_end(self, code: int) -> None:
        """Compare a finished sweep and begin another one. Continue one that has given up after kills of a trial."""
        output = (self._directory / "output").read_text()[-3000:]
        assert code == 0 or "exit code -9" in output, f"the sweep ended with {code}:\n{output}"
        if code == 0:
            assert results(self._directory) == self._undisturbed, "the sweep differs from the undisturbed one"
            self._finished += 1
            shutil.rmtree(self._directory)
        self._process = start_sweep(self._directory, WORDS)
