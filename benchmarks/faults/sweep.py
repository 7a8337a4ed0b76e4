"""A sweep that trains next to a run with faults, and is killed itself now and then."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from lockstep.checkpoint.format import hash_checkpoint
from lockstep.checkpoint.lineage import find

SPACE = """
algo.learning_rate: {low: 1e-5, high: 1e-1, log: true}
algo.gamma: [0.9, 0.99]
"""
WORDS = ["sweep", "gym-ppo", "--space", "space.yaml", "--trials", "6", "--prune", "asha", "--parallel", "1"]
WORDS += ["task.num_envs=8", "algo.rollout_steps=32", "algo.batch_size=64", "run.name=sweep", "run.device=cpu"]
WORDS += ["run.total_samples=2304", "run.eval_every=256", "run.eval_episodes=8", "run.save_every=256"]
SECONDS = 600.0


class SweepUnderWay:
    """A sweep that is started again whenever it was killed. Its results must be those of an undisturbed one."""

    def __init__(self, place: Path) -> None:
        self.place, self.kills, self.finished = place, 0, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._undisturbed = self._train(place / "undisturbed-sweep")
        self.start()

    def start(self) -> None:
        """Begin the sweep, or continue it after it was killed."""
        begun = (self.place / "sweep" / "runs" / "sweep" / "sweep.json").exists()
        words = ["sweep", "runs/sweep", "--parallel", "1"] if begun else WORDS
        self._process = self._start(self.place / "sweep", words)

    def kill(self, chance: random.Random) -> bool:
        """Send SIGKILL to the sweep or to one of its trials. Return whether it was still training."""
        assert self._process is not None
        if self._process.poll() is not None:
            self._handle_end(self._process.returncode)
        try:
            trials = psutil.Process(self._process.pid).children(recursive=True)
            victim = chance.choice([psutil.Process(self._process.pid), *trials])
            victim.kill()
        except psutil.NoSuchProcess:
            return False
        if victim.pid == self._process.pid:
            self._process.wait()
            _, alive = psutil.wait_procs(trials, timeout=30)
            assert not alive, "trials outlived their sweep"
            self.start()
        self.kills += 1
        return True

    def finish(self) -> None:
        """Train the sweep to its end and compare it with the undisturbed one."""
        assert self._process is not None
        finished = self.finished
        while self.finished == finished:
            self._handle_end(self._process.wait(SECONDS))
        self.stop()

    def _handle_end(self, code: int) -> None:
        """Compare a finished sweep and begin another one. Continue one that has given up after kills of a trial."""
        directory = self.place / "sweep"
        output = (directory / "output").read_text()[-3000:]
        assert code == 0 or "exit code -9" in output, f"the sweep ended with {code}:\n{output}"
        if code == 0:
            assert self._results(directory) == self._undisturbed, "the sweep differs from the undisturbed one"
            self.finished += 1
            shutil.rmtree(directory)
        self.start()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _train(self, directory: Path) -> object:
        assert self._start(directory, WORDS).wait(SECONDS) == 0, (directory / "output").read_text()[-3000:]
        return self._results(directory)

    def _start(self, directory: Path, words: list[str]) -> subprocess.Popen[bytes]:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "space.yaml").write_text(SPACE)
        with (directory / "output").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "lockstep", *words],
                cwd=directory,
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    @staticmethod
    def _results(directory: Path) -> object:
        """Return trials, best settings and hashes."""
        sweep = directory / "runs" / "sweep"
        checkpoints = {run.name: run / "checkpoints" for run in sorted(sweep.glob("trial-*/"))}
        hashes = {name: hash_checkpoint(path / str(find(path)[0])) for name, path in checkpoints.items()}
        return (sweep / "trials.json").read_text(), (sweep / "best.yaml").read_text(), hashes
