"""`lockstep benchmark SUITE --procs 2` trains and scores a task of the suites."""

import json
import sys

import pytest

from helpers.multiprocess import command

TASKS = {
    "classic": ("gymnasium", "CartPole-v1"),
    "mujoco-ppo": ("mujoco", "Hopper-v4"),
    "mujoco-td3": ("mujoco", "Hopper-v4"),
    "mujoco-sac": ("mujoco", "Hopper-v4"),
    "minatar": ("minatar", "MinAtar/Breakout-v1"),
    "minigrid": ("minigrid", "MiniGrid-Empty-Random-5x5-v0"),
}
"""The package and the task by suite. Evaluations of Atari take too long."""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suite", TASKS)
def test_suite_trains_and_scores_on_two_processes(tmp_path, suite):
    package, task = TASKS[suite]
    pytest.importorskip(package)
    words = ["benchmark", suite, "--tasks", task, "--procs", "2", "--seeds", "1", "--steps", "1024", "--out", "results"]
    ended = command([sys.executable, "-m", "lockstep", *words], directory=tmp_path, seconds=1500)
    assert ended.code == 0, ended.output
    (line,) = (tmp_path / "results" / f"{suite}.jsonl").read_text().splitlines()
    result = json.loads(line)
    assert (result["task"], result["procs"]) == (task, 2)
    assert result["last_evaluation"] is not None
    assert f"{task}, 2 processes" in (tmp_path / "results" / f"{suite}.md").read_text()
