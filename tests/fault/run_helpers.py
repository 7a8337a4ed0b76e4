"""A one-second run that uses every feature: continuous actions, normalizers, a checkpoint per iteration."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from helpers.multiprocess import Outcome, outcomes
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.config import apply_overrides
from lockstep.recipes.gym_ppo import GymPPO
from lockstep.training_loop import train

ITERATIONS, SAMPLES = 4, 8 * 16
"""Iterations per run, and samples per iteration."""
SETTINGS = {
    "task.id": "Pendulum-v1",
    "task.env_kwargs": {"max_episode_steps": 40},
    "algo": {"rollout_steps": 16, "batch_size": 64, "epochs": 2, "normalize_obs": True, "normalize_rewards": True},
    "algo.encoder": {"hidden_sizes": 8, "num_layers": 1},
    "run": {
        "total_samples": ITERATIONS * SAMPLES,
        "save_every": SAMPLES,
        "replica_check_every": 1,
        "log_every": 2 * SAMPLES,
    },
    "run.eval_every": 2 * SAMPLES,
    "run.eval_episodes": 4,
    "run.reduction": "exact",
    "run.log_tensor_digests": True,
    "run.record_video": False,
    "run.collective_timeout": 20.0,
}


def trial(directory: str, name: str, extra: dict[str, Any], resume: bool) -> None:
    """Train as one process of a group."""
    train(apply_overrides(GymPPO(), SETTINGS | extra | {"run.runs_dir": directory, "run.name": name}), resume=resume)


def trial_that_finishes_each_save(*arguments: Any) -> None:
    """Like `trial`, but wait until each checkpoint is written, so that a kill always leaves the same files."""
    save = CheckpointManager.save

    def save_and_wait(self: CheckpointManager, *args: Any, **settings: Any) -> None:
        save(self, *args, **settings)
        self.wait()

    with patch.object(CheckpointManager, "save", save_and_wait):
        trial(*arguments)


def run_killed(directory: Path, name: str, processes: int, kill: str) -> str:
    """Train until one process kills itself, with all earlier checkpoints written; return the errors."""
    environment = {"LOCKSTEP_INJECT_FAULT": kill}
    return errors(
        outcomes(trial_that_finishes_each_save, processes, str(directory), name, {}, False, environment=environment)
    )


def run(directory: Path, name: str, processes: int, resume: bool = False, kill: str | None = None) -> list[Outcome]:
    """Train on several processes, optionally with an injected kill; return the outcome of each process."""
    environment = {"LOCKSTEP_INJECT_FAULT": kill} if kill else {}
    return outcomes(trial, processes, str(directory), name, {}, resume, environment=environment)


def errors(ended: list[Outcome]) -> str:
    return "\n".join(outcome.error for outcome in ended).strip()


LOCKSTEP = [sys.executable, "-m", "lockstep"]


def words(directory: Path, *more: str) -> list[str]:
    """Return the same run as a command line, `lockstep train ...`."""
    flat = {"task.id": SETTINGS["task.id"], "run.runs_dir": directory, "run.name": "run"}
    for group in ("algo", "algo.encoder", "run"):
        flat |= {f"{group}.{name}": value for name, value in SETTINGS[group].items()}
    flat |= {name: value for name, value in SETTINGS.items() if name.startswith("run.")}
    kwargs = [str(word) for pair in SETTINGS["task.env_kwargs"].items() for word in pair]
    return [
        "train",
        "gym-ppo",
        *("--preset", "none"),  # SETTINGS are changes to the recipe's defaults
        *(f"{name}={value}" for name, value in flat.items()),
        "--task.env-kwargs",
        *kwargs,
        *more,
    ]
