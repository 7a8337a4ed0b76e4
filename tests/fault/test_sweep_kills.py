"""A sweep whose processes are killed ends with the table, the best settings and the hashes of an undisturbed one."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers.tiny_recipes import hash_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(7200)]

KILLS = 20
SECONDS = 3600
SPACE = """
algo.learning_rate: {low: 1e-5, high: 1e-1, log: true}
algo.gamma: [0.9, 0.99]
algo.entropy_coef: [0.0, 0.01]
"""
SWEEP = ["sweep", "gym-ppo", "--space", "space.yaml", "--window", "4", "--parallel", "2"]
SWEEP += ["task.num_envs=8", "algo.rollout_steps=32", "algo.batch_size=64", "run.name=sweep", "run.device=cpu"]
SWEEP += ["run.total_samples=2304", "run.eval_every=256", "run.eval_episodes=8", "run.save_every=256"]


def start(command, directory):
    with (directory / "output").open("ab") as output:
        words = [sys.executable, "-m", "lockstep", *command]
        return subprocess.Popen(words, cwd=directory, stdout=output, stderr=output)


def kill(process, draw):
    """Kill the sweep or one of its processes, if it is still running. Return the number of killed processes."""
    try:
        trials = psutil.Process(process.pid).children(recursive=True)
        if trials and draw.random() < 0.6:
            draw.choice(trials).kill()
            return 1
        os.kill(process.pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return 0
    process.wait()
    _, alive = psutil.wait_procs(trials, timeout=120)
    assert not alive  # they die with the sweep
    return 1


def results(directory):
    """Return trials, best settings and hashes of a sweep."""
    sweep = directory / "runs" / "sweep"
    hashes = {run.name: hash_of(run) for run in sorted(sweep.glob("trial-*/"))}
    return (sweep / "trials.json").read_text(), (sweep / "best.yaml").read_text(), hashes


@pytest.mark.parametrize(("prune", "trials"), [("asha", 12), ("pbt", 4)])
def test_sweep_killed_20_times_equals_an_undisturbed_one(tmp_path, prune, trials):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for directory in (undisturbed, killed):
        directory.mkdir()
        (directory / "space.yaml").write_text(SPACE)
    new = [*SWEEP, "--prune", prune, "--trials", str(trials)]
    begun = time.monotonic()
    assert start(new, undisturbed).wait(SECONDS) == 0
    pace = (time.monotonic() - begun) / KILLS

    draw, kills, deadline = random.Random(0), 0, time.monotonic() + SECONDS
    process, command = start(new, killed), ["sweep", "runs/sweep", "--parallel", "2"]
    while True:
        try:
            code = process.wait(draw.uniform(0.1, 1.1) * pace if kills < KILLS else SECONDS)
        except subprocess.TimeoutExpired:
            kills += kill(process, draw)
            continue
        assert time.monotonic() < deadline
        if code == 0:
            break
        exists = (killed / "runs" / "sweep" / "sweep.json").exists()
        if not exists:
            shutil.rmtree(killed / "runs", ignore_errors=True)
        process = start(command if exists else new, killed)  # killed, or a trial was killed three times
    assert kills >= KILLS
    assert results(killed) == results(undisturbed)
