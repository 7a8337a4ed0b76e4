"""A program that writes the files of a run instead of training it, for tests of code that starts runs."""

import subprocess
import sys

TRAIN = """
import json, os, pathlib, sys, time, signal
mode, *arguments = sys.argv[1:]
settings = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
resumed = arguments[0] == "resume"
if resumed:
    run = pathlib.Path(arguments[1])
elif arguments[1] == "--seed-run":
    run = pathlib.Path(arguments[2], f"seed-{arguments[3]}")
else:
    run = pathlib.Path(settings["run.runs_dir"], settings["run.name"])
(run / "checkpoints").mkdir(parents=True, exist_ok=resumed)
(run / "config.yaml").touch()
def status(state):
    (run / "status.json").write_text(json.dumps({"state": state}))
def preempt(*_):
    (run / "checkpoints" / "000000000001-g0001").mkdir(exist_ok=True)
    status("preempted")
    sys.exit(75)
signal.signal(signal.SIGTERM, preempt)
print(mode, *arguments, flush=True)
if mode == "fail":
    sys.exit("no such environment")
if mode == "wait" and not resumed:
    (run / "waiting").touch()
    time.sleep(60)
if "--stop-at" in arguments:
    (run / "checkpoints" / f"{int(arguments[arguments.index('--stop-at') + 1]):012d}-g0001").mkdir()
    status("preempted")
    sys.exit(0)
seed = int(run.name.rpartition("seed")[2].strip("-"))
with (run / "metrics.jsonl").open("a") as log:
    log.write(json.dumps({"samples": 500, "rollout/ep_return_mean": seed, "rollout/ep_length_mean": 5}) + "\\n")
    log.write(json.dumps({"samples": 500, "eval/return_mean": 10 * seed}) + "\\n")
status("finished")
"""


class FakeTraining:
    """Starts the program: a substitute for `start_lockstep`. Each start takes the next mode; then `finish`."""

    def __init__(self, tmp_path, modes):
        self.program = tmp_path / "train.py"
        self.program.write_text(TRAIN)
        self.modes, self.started, self.active, self.most = list(modes), [], [], 0

    def __call__(self, arguments, log):
        self.started.append(list(arguments))
        mode = self.modes.pop(0) if self.modes else "finish"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-S", str(self.program), mode, *arguments], stdout=output, stderr=subprocess.STDOUT
            )
        self.active.append(process)
        self.most = max(self.most, sum(process.poll() is None for process in self.active))
        return process
