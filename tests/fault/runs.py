"""A run of a second that has everything a run can have: continuous actions, normalisers, saves at every iteration."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lockstep.config import overlay
from lockstep.recipes.gym_ppo import GymPPO
from lockstep.run.checkpoints import Checkpoints
from lockstep.train import train
from processes import Outcome, outcomes

ITERATIONS, SAMPLES = 4, 8 * 16
"""Iterations of a run, and samples of an iteration."""
SETTINGS = {
    "task.id": "Pendulum-v1",
    "task.kwargs": {"max_episode_steps": 40},
    "algo": {"horizon": 16, "batch_size": 64, "epochs": 2, "normalize_obs": True, "normalize_rewards": True},
    "algo.encoder": {"width": 8, "depth": 1},
    "run": {"samples": ITERATIONS * SAMPLES, "save_every": SAMPLES, "check_every": 1, "log_every": 2 * SAMPLES},
    "run.eval_every": 2 * SAMPLES,
    "run.eval_episodes": 4,
    "run.reduction": "exact",
    "run.digests": True,
    "run.gif": False,
    "run.timeout": 20.0,
}


def trial(directory: str, name: str, extra: dict[str, Any], resume: bool) -> None:
    """Train, as one of the processes of a group."""
    train(overlay(GymPPO(), SETTINGS | extra | {"run.dir": directory, "run.name": name}), resume=resume)


def trial_that_finishes_each_save(*arguments: Any) -> None:
    """The same, with every checkpoint on disk before the next iteration: what a kill finds there is then certain."""
    save = Checkpoints.save

    def save_and_wait(self: Checkpoints, *args: Any, **settings: Any) -> None:
        save(self, *args, **settings)
        self.wait()

    with patch.object(Checkpoints, "save", save_and_wait):
        trial(*arguments)


def run_killed(directory: Path, name: str, processes: int, kill: str) -> str:
    """Train until one process kills itself, with every save before that on disk; the errors."""
    environment = {"LOCKSTEP_KILL": kill}
    return errors(
        outcomes(trial_that_finishes_each_save, processes, str(directory), name, {}, False, environment=environment)
    )


def run(directory: Path, name: str, processes: int, resume: bool = False, kill: str | None = None) -> list[Outcome]:
    """Train on several processes, one of which may be told to kill itself; how each ended."""
    environment = {"LOCKSTEP_KILL": kill} if kill else {}
    return outcomes(trial, processes, str(directory), name, {}, resume, environment=environment)


def errors(ended: list[Outcome]) -> str:
    return "\n".join(outcome.error for outcome in ended).strip()


LOCKSTEP = [sys.executable, "-m", "lockstep"]


def words(directory: Path, *more: str) -> list[str]:
    """The same run as a command line, `lockstep train ...`."""
    flat = {"task.id": SETTINGS["task.id"], "run.dir": directory, "run.name": "run"}
    for group in ("algo", "algo.encoder", "run"):
        flat |= {f"{group}.{name}": value for name, value in SETTINGS[group].items()}
    flat |= {name: value for name, value in SETTINGS.items() if name.startswith("run.")}
    kwargs = [str(word) for pair in SETTINGS["task.kwargs"].items() for word in pair]
    return ["train", "gym-ppo", *(f"{name}={value}" for name, value in flat.items()), "--task.kwargs", *kwargs, *more]
