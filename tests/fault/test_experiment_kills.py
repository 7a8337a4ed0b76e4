"""An experiment that is killed and resumed ends with the hashes of one that was not; its runs are ordinary runs."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import lockstep
from helpers.tiny_recipes import hash_of

pytestmark = pytest.mark.distributed

SECONDS = 600
SMALL = {
    "task": {"num_envs": 8, "size": 5},
    "algo": {"rollout_steps": 8, "batch_size": 64},
    "run": {"total_samples": 256, "eval_every": 128, "log_every": 64, "record_video": False},
}


def test_run_of_an_experiment_equals_the_single_run_of_its_seed(tmp_path):
    """The runs of the experiment train in processes of their own, the single run in this one."""
    settings = SMALL | {"run": SMALL["run"] | {"runs_dir": str(tmp_path), "reduction": "exact"}}
    experiment = lockstep.train("snake-ppo", seeds=2, **settings)
    assert (experiment.status, experiment.seeds, len(experiment.scores)) == ("finished", (0, 1), 2)
    alone = lockstep.train("snake-ppo", **settings | {"run": settings["run"] | {"seed": 1}})
    assert hash_of(experiment.runs[1].path) == hash_of(alone.path) != hash_of(experiment.runs[0].path)
    assert experiment.scores[1] == alone.evaluations[-1]["return_mean"]


def start(command, directory):
    with (directory / "output").open("ab") as output:
        words = [sys.executable, "-m", "lockstep", *command]
        return subprocess.Popen(words, cwd=directory, stdout=output, stderr=output)


def hashes(experiment):
    return [hash_of(run) for run in sorted(experiment.glob("seed-[0-9]"))]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["experiment.json", "seed-0/status.json", "seed-?/checkpoints/*-g0001", "finished"])
def test_killed_experiment_has_the_hashes_of_an_undisturbed_one(tmp_path, moment):
    """The kill comes after the file of the experiment, a run directory, a checkpoint, or a finished run appears."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    train = ["train", "gym-ppo", "--seeds", "3", "--parallel", "2", "run.total_samples=30000", "run.name=exp"]
    train += ["run.save_every=4000", "run.eval_every=10000", "run.record_video=false"]
    for directory in (undisturbed, killed):
        directory.mkdir()
    assert start(train, undisturbed).wait(SECONDS) == 0

    process, experiment = start(train, killed), killed / "runs" / "exp"
    deadline = time.monotonic() + SECONDS
    while not (
        "finished" in "".join(path.read_text() for path in experiment.glob("seed-?/status.json"))
        if moment == "finished"
        else list(experiment.glob(moment))
    ):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    runs = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(runs, timeout=60)
    assert not alive  # they die with the command
    assert start(["resume", "runs/exp"], killed).wait(SECONDS) == 0

    assert len(hashes(experiment)) == 3
    assert hashes(experiment) == hashes(undisturbed / "runs" / "exp")
