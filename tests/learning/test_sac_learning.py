"""SAC reaches its reference score on Pendulum-v1."""

import statistics
from pathlib import Path

import pytest

from helpers.logs import last_values
from lockstep.io.jsonl import METRICS
from lockstep.launch.launcher import launch_captured


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processes", [1, 2])
def test_sac_solves_pendulum_in_6k_steps(tmp_path: Path, processes: int) -> None:
    words = ("gym-sac", "run.total_samples=6000", "run.eval_every=6000", "run.eval_episodes=32")
    scores = []
    for seed in range(2):
        name = f"seed-{seed}"
        place = (f"run.runs_dir={tmp_path}", f"run.name={name}", f"run.seed={seed}", "run.record_video=false")
        problem = launch_captured(["train", *words, *place], processes)
        assert not problem, problem
        scores.append(last_values(tmp_path / name / METRICS)["eval/return_mean"])
    assert statistics.mean(scores) >= -200
