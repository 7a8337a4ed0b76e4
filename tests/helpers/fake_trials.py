"""Trials that end at once, in a random order: a substitute for `start_lockstep` without processes."""

import json
import math
import random
from pathlib import Path


class Killed(Exception):
    """The process that trains the sweep was killed."""


class FakeTrials:
    """Writes the files of the run that is started. `seed` decides the order in which runs end.

    The score of a run grows with its samples and is highest near a learning rate of 1e-3, with some variation.
    """

    def __init__(self, sweep, seed=0, kill_after=None, failures=None, total=900, why=""):
        self.sweep, self.total, self.why = sweep, total, why
        self.random, self.kill_after, self.failures = random.Random(seed), kill_after, dict(failures or {})
        self.started, self.active, self.most = [], [], 0

    def __call__(self, arguments, log):
        if self.kill_after is not None and len(self.started) >= self.kill_after:
            raise Killed
        self.started.append(list(arguments))
        trial = Path(arguments[1]).name if arguments[0] == "resume" else f"trial-{arguments[3]}"
        stop = int(arguments[arguments.index("--stop-at") + 1]) if "--stop-at" in arguments else None
        process = FakeProcess(self, self.sweep / trial, stop, self.random.randrange(4))
        self.active = [other for other in self.active if other.returncode is None] + [process]
        self.most = max(self.most, len(self.active))
        return process


class FakeProcess:
    def __init__(self, training, run, stop, polls):
        self.training, self.run, self.stop, self.polls, self.returncode = training, run, stop, polls, None

    def poll(self):
        self.polls -= 1
        if self.polls < 0 and self.returncode is None:
            self.returncode = self._train()
        return self.returncode

    def terminate(self):
        self.returncode = -15

    def wait(self):
        return self.returncode

    def _train(self):
        number = int(self.run.name.split("-")[1])
        self.run.mkdir(exist_ok=True)
        if self.training.failures.get(number, 0) > 0:
            self.training.failures[number] -= 1
            (self.run / "status.json").write_text(json.dumps({"state": "failed", "why": self.training.why}))
            return 1
        trial = json.loads((self.training.sweep / "trials.json").read_text())["trials"][number]
        samples = self.stop or self.training.total
        rate = trial["settings"]["algo.learning_rate"]
        score = math.log(samples) - abs(math.log10(rate) + 3) + math.sin(1e5 * rate * samples)
        (self.run / "checkpoints" / f"{samples:012d}-g0001").mkdir(parents=True, exist_ok=True)
        with (self.run / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"samples": samples, "eval/return_mean": score}) + "\n")
        state = "preempted" if self.stop else "finished"
        (self.run / "status.json").write_text(json.dumps({"state": state}))
        return 0
