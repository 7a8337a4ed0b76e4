"""A small sweep as a process, how to kill it, and what it must have in common with one that was not killed."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from helpers.tiny_recipes import hash_of

SPACE = """
algo.learning_rate: {low: 1e-5, high: 1e-1, log: true}
algo.gamma: [0.9, 0.99]
algo.entropy_coef: [0.0, 0.01]
"""
SWEEP = ["sweep", "gym-ppo", "--space", "space.yaml", "--window", "4"]
SWEEP += ["task.num_envs=8", "algo.rollout_steps=32", "algo.batch_size=64", "run.name=sweep", "run.device=cpu"]
SWEEP += ["run.total_samples=2304", "run.eval_every=256", "run.eval_episodes=8", "run.save_every=256"]


def start_sweep(directory: Path, new: list[str]) -> subprocess.Popen[bytes]:
    """Start a sweep in a directory with the arguments `new`, or continue the one that was started there."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "space.yaml").write_text(SPACE)
    begun = (directory / "runs" / "sweep" / "sweep.json").exists()
    words = ["sweep", "runs/sweep", *new[new.index("--parallel") :]] if begun else new
    with (directory / "output").open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "lockstep", *words], cwd=directory, stdout=output, stderr=output)


def kill_sweep(process: subprocess.Popen[bytes], draw: random.Random) -> int:
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


def results(directory: Path) -> tuple[str, str, dict[str, str]]:
    """Return trials, best settings and hashes of a sweep."""
    sweep = directory / "runs" / "sweep"
    hashes = {run.name: hash_of(run) for run in sorted(sweep.glob("trial-*/"))}
    return (sweep / "trials.json").read_text(), (sweep / "best.yaml").read_text(), hashes
