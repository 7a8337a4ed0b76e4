"""Recurrent PPO learns tasks that need a recurrent state: recall of an early cue, and hidden velocities."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from helpers.logs import last_values
from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.io.jsonl import METRICS
from lockstep.launch.launcher import launch_captured
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.recurrent import RecurrentConfig
from lockstep.tasks.recall.env import RecallConfig
from lockstep.training_loop import train


@dataclass(frozen=True, kw_only=True)
class RecallPPO(Recipe):
    """PPO on Recall; sequences are longer than the delay, so that gradients reach the cue."""

    task: RecallConfig
    algo: PPOConfig
    run: RunConfig

    name: ClassVar = "recall-ppo"


def score(directory: Path, kind: str, delay: int, samples: int) -> float:
    """Train and return the fraction of right answers."""
    length = 2 * (delay + 1)
    recipe = RecallPPO(
        task=RecallConfig(delay=delay, num_cues=4, num_envs=64),
        algo=PPOConfig(
            learning_rate=2e-3,
            schedule="linear",
            rollout_steps=length,
            batch_size=16 * length,
            gae_lambda=0.5,
            gamma=1.0,
            encoder=EncoderConfig(num_layers=1, hidden_sizes=(32,)),
            recurrent=RecurrentConfig(kind=kind, hidden_size=32, init_timescale=delay),
        ),
        run=RunConfig(
            total_samples=samples,
            eval_every=samples,
            eval_episodes=256,
            record_video=False,
            runs_dir=str(directory),
            name=f"{kind}-{delay}",
        ),
    )
    right = train(recipe).clock.evaluation["right_mean"]
    print(f"recall, {kind}, delay {delay}: {right:.3f} right")
    return right


@pytest.mark.parametrize("kind", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
def test_recurrent_ppo_recalls_a_cue_after_4_steps(tmp_path: Path, kind: str) -> None:
    assert score(tmp_path, kind, delay=4, samples=60_000) >= 0.95


def test_feedforward_ppo_can_only_guess_the_cue_after_4_steps(tmp_path: Path) -> None:
    assert 0.1 <= score(tmp_path, "none", delay=4, samples=20_000) <= 0.4  # one in four


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_ppo_recalls_a_cue_after_32_steps(tmp_path: Path, kind: str) -> None:
    assert score(tmp_path, kind, delay=32, samples=400_000) >= 0.95


@pytest.mark.slow
def test_feedforward_ppo_can_only_guess_the_cue_after_32_steps(tmp_path: Path) -> None:
    assert 0.1 <= score(tmp_path, "none", delay=32, samples=100_000) <= 0.4


def without_velocities(directory: Path, recipe: str, processes: int) -> float:
    """Return the mean return on CartPole without velocities over three seeds, at 100,000 steps."""
    returns = []
    for seed in range(3):
        words = [recipe, "task.mask_velocity=true", "run.eval_every=100000", "run.eval_episodes=100"]
        words += [f"run.seed={seed}", f"run.runs_dir={directory}", f"run.name={seed}", "run.record_video=false"]
        problem = launch_captured(["train", *words], processes)
        assert not problem, problem
        returns.append(last_values(directory / str(seed) / METRICS)["eval/return_mean"])
    print(f"{recipe} without velocities, {processes} processes: {returns}")
    return statistics.mean(returns)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processes", [1, 2])
def test_recurrent_ppo_learns_cartpole_without_velocities(tmp_path: Path, processes: int) -> None:
    # Two standard errors below the mean of 20 seeds (docs/benchmarks.md): returns of single seeds are 150 to 500.
    assert without_velocities(tmp_path, "gym-ppo-lstm", processes) >= 285


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_feedforward_ppo_fails_cartpole_without_velocities(tmp_path: Path) -> None:
    assert without_velocities(tmp_path, "gym-ppo", 1) < 150
