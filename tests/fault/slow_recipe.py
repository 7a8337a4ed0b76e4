"""A recipe for fault tests: uses every feature of a run, at a pace that can be changed while it trains."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lockstep.algorithms.ppo import PPOConfig
from lockstep.checkpoint.lineage import list_checkpoints
from lockstep.config import Recipe, RunConfig
from lockstep.lanes import Lanes
from lockstep.nn.encoders import EncoderConfig
from lockstep.tasks.gym.env import GymConfig, GymEnvs

ITERATION = 128
"""Samples per iteration, which is also the checkpoint interval."""


def samples_of(run: Path) -> int:
    """Return the samples of a run's newest checkpoint, of any generation."""
    checkpoints = run / "checkpoints"
    return max((name.samples for name in list_checkpoints(checkpoints)), default=0) if checkpoints.is_dir() else 0


def set_pace(file: Path, seconds: float) -> None:
    """Set the minimum seconds per iteration from now on, with a rename: a process may read the file at any time."""
    partial = file.with_suffix(".partial")
    partial.write_text(str(seconds))
    partial.rename(file)


@dataclass(frozen=True, kw_only=True)
class PacedConfig(GymConfig):
    """Pendulum environments. The pace affects timing only, not results."""

    id: str = "Pendulum-v1"
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=lambda: {"max_episode_steps": 40})
    pace: str = ""
    """File with the minimum seconds per iteration. Empty: no delay."""

    def build(self, lanes: Lanes, device: torch.device) -> GymEnvs:
        task = super().build(lanes, device)
        if self.pace:
            task.on_iteration_start = lambda _: self._wait()
        return task

    def _wait(self) -> None:
        begun = time.monotonic()
        while time.monotonic() < begun + float(Path(self.pace).read_text()):  # read again: a test may change it
            time.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class Paced(Recipe):
    """PPO on Pendulum with exact reduction and a checkpoint per iteration."""

    task: PacedConfig = PacedConfig()
    algo: PPOConfig = PPOConfig(
        rollout_steps=16,
        batch_size=64,
        epochs=2,
        normalize_obs=True,
        normalize_rewards=True,
        encoder=EncoderConfig(hidden_sizes=(8,), num_layers=1),
    )
    run: RunConfig = RunConfig(
        total_samples=24 * ITERATION,
        save_every=ITERATION,
        log_every=4 * ITERATION,
        eval_every=8 * ITERATION,
        eval_episodes=4,
        reduction="exact",
        replica_check_every=1,
        collective_timeout=8.0,
        device="cpu",
        record_video=False,
    )
