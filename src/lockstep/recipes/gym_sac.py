"""SAC on any Gymnasium environment with a bounded Box action space."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.sac import SACConfig
from lockstep.config import Recipe, RunConfig
from lockstep.recipes.off_policy_smoke import SMOKE
from lockstep.tasks.gym.env import GymConfig


@dataclass(frozen=True, kw_only=True)
class GymSAC(Recipe):
    """SAC on any Gymnasium environment with bounded continuous actions. Default: Pendulum-v1."""

    task: GymConfig = GymConfig(id="Pendulum-v1", num_envs=8)
    algo: SACConfig = SACConfig(
        actor_lr=1e-3, critic_lr=1e-3, temperature_lr=1e-3, buffer_size=200_000, learning_starts=1_000
    )
    run: RunConfig = RunConfig(total_samples=20_000, log_every=1_000, eval_every=5_000)

    name: ClassVar = "gym-sac"
    presets: ClassVar = {
        # The settings of the authors; the learning rate of the critics is also that of Stable-Baselines3.
        "mujoco": {
            "algo": {
                "actor_lr": 3e-4,
                "critic_lr": 3e-4,
                "temperature_lr": 3e-4,
                "buffer_size": 1_000_000,
                "learning_starts": 10_000,
            },
            "run": {"total_samples": 1_000_000, "log_every": 5_000, "eval_every": 25_000},
        }
    }
    smoke_overrides: ClassVar = SMOKE
    aliases: ClassVar = {
        "env": "task.id",
        "env-id": "task.id",
        "task": "task.id",
        "a-lr": "algo.actor-lr",
        "policy-lr": "algo.actor-lr",
        "c-lr": "algo.critic-lr",
        "q-lr": "algo.critic-lr",
        "alpha": "algo.temperature",
        "ent-coef": "algo.temperature",
    }
