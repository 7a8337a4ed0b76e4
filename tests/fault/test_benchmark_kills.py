"""A suite that is killed with its runs and started again has the results of one that was not."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from lockstep.apps.benchmark.results import read_results

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SECONDS = 600


def start(out):
    words = ["benchmark", "classic", "--tasks", "CartPole-v1", "Pendulum-v1", "--seeds", "2", "--parallel", "2"]
    words += ["--steps", "30000", "--runs", str(out / "runs"), "--out", str(out)]
    with (out / "output").open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "lockstep", *words], cwd=out, stderr=output)


def scores(out):
    results = sorted(read_results(out / "classic.jsonl"), key=lambda result: result.command)
    return [replace(result, seconds=0.0) for result in results]


def test_suite_killed_with_its_runs_has_the_results_of_an_undisturbed_one(tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for directory in (undisturbed, killed):
        directory.mkdir()
    assert start(undisturbed).wait(SECONDS) == 0

    process = start(killed)
    deadline = time.monotonic() + SECONDS
    while not list(killed.glob("runs/classic/*/checkpoints/*-g*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    runs = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(runs, timeout=60)
    assert runs
    assert not alive  # they die with the command
    assert start(killed).wait(SECONDS) == 0
    assert ": resumed, output in" in (killed / "output").read_text()

    assert len(scores(killed)) == 4
    assert scores(killed) == scores(undisturbed)
    assert (killed / "classic.svg").read_text() == (undisturbed / "classic.svg").read_text()
