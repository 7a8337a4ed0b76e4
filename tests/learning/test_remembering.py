"""PPO with memory learns what only memory can: a cue seen long ago, and velocities that are not shown."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nets.encoder import EncoderConfig
from lockstep.nets.memory import MemoryConfig
from lockstep.run.records import METRICS, last_values
from lockstep.runtime.launch import launch_quietly
from lockstep.tasks.recall import RecallConfig
from lockstep.train import train


@dataclass(frozen=True, kw_only=True)
class RecallPPO(Recipe):
    """PPO on Recall; sequences are longer than the delay, so that an answer reaches its cue."""

    task: RecallConfig
    algo: PPOConfig
    run: RunConfig

    name: ClassVar = "recall-ppo"


def score(directory: Path, kind: str, delay: int, samples: int) -> float:
    """The part of right answers after training."""
    length = 2 * (delay + 1)
    recipe = RecallPPO(
        task=RecallConfig(delay=delay, cues=4, num_envs=64),
        algo=PPOConfig(
            learning_rate=2e-3,
            schedule="linear",
            horizon=length,
            batch_size=16 * length,
            gae_lambda=0.5,
            gamma=1.0,
            encoder=EncoderConfig(depth=1, width=(32,)),
            memory=MemoryConfig(kind=kind, units=32, span=delay),
        ),
        run=RunConfig(
            samples=samples,
            eval_every=samples,
            eval_episodes=256,
            gif=False,
            dir=str(directory),
            name=f"{kind}-{delay}",
        ),
    )
    right = train(recipe).clock.evaluation["right_mean"]
    print(f"recall, {kind}, delay {delay}: {right:.3f} right")
    return right


@pytest.mark.parametrize("kind", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
def test_a_cue_is_recalled_after_a_few_steps(tmp_path: Path, kind: str) -> None:
    assert score(tmp_path, kind, delay=4, samples=60_000) >= 0.95


def test_without_memory_an_answer_is_a_guess(tmp_path: Path) -> None:
    assert 0.1 <= score(tmp_path, "none", delay=4, samples=20_000) <= 0.4  # one in four


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_cue_is_recalled_after_thirty_two_steps(tmp_path: Path, kind: str) -> None:
    assert score(tmp_path, kind, delay=32, samples=400_000) >= 0.95


@pytest.mark.slow
def test_without_memory_it_is_a_guess_after_thirty_two_steps(tmp_path: Path) -> None:
    assert 0.1 <= score(tmp_path, "none", delay=32, samples=100_000) <= 0.4


def without_velocities(directory: Path, recipe: str, processes: int) -> float:
    """The mean return of CartPole without velocities over three seeds, at 100,000 steps."""
    returns = []
    for seed in range(3):
        words = [recipe, "task.mask_velocity=true", "run.eval_every=100000", "run.eval_episodes=100"]
        words += [f"run.seed={seed}", f"run.dir={directory}", f"run.name={seed}", "run.gif=false"]
        problem = launch_quietly(["train", *words], processes)
        assert not problem, problem
        returns.append(last_values(directory / str(seed) / METRICS)["eval/return_mean"])
    print(f"{recipe} without velocities, {processes} processes: {returns}")
    return statistics.mean(returns)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processes", [1, 2])
def test_memory_balances_a_pole_whose_velocity_is_hidden(tmp_path: Path, processes: int) -> None:
    assert without_velocities(tmp_path, "gym-ppo-lstm", processes) >= 450


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_without_memory_a_pole_whose_velocity_is_hidden_falls(tmp_path: Path) -> None:
    assert without_velocities(tmp_path, "gym-ppo", 1) < 150
