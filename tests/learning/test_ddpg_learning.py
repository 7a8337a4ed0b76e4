"""DDPG learns: a short test, and the reference scores, marked slow."""

import statistics
from pathlib import Path

import pytest

from helpers.logs import last_values
from lockstep.io.jsonl import METRICS
from lockstep.launch.launcher import launch_captured


def trained(directory: Path, processes: int, *words: str) -> dict[str, float]:
    """Train with command-line words; return the last value of every logged metric."""
    problem = launch_captured(
        ["train", *words, f"run.runs_dir={directory}", "run.name=run", "run.record_video=false"], processes
    )
    assert not problem, problem
    return last_values(directory / "run" / METRICS)


@pytest.mark.distributed
def test_ddpg_on_team_snakes_beats_random_play(tmp_path: Path) -> None:
    words = (
        "team-ddpg",
        "task.opponent_level=0",
        "task.level_schedule=fixed",
        "algo.learning_starts=2560",
        "algo.encoder.hidden_sizes=128",
    )
    more = ("run.total_samples=20480", "run.eval_every=20480", "run.eval_episodes=32")
    last = trained(tmp_path, 1, *words, *more)
    assert last["eval/score_mean"] >= 2.5  # random play gets 0.9
    assert last["eval/won_mean"] >= 0.6


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processes", [1, 2])
def test_ddpg_solves_pendulum_in_20k_steps(tmp_path: Path, processes: int) -> None:
    words = ("gym-ddpg", "run.total_samples=20000", "run.eval_every=20000", "run.eval_episodes=32")
    scores = [
        trained(tmp_path / str(seed), processes, *words, f"run.seed={seed}")["eval/return_mean"] for seed in range(3)
    ]
    assert statistics.mean(scores) >= -200
