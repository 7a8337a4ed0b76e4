"""SAC on any Gymnasium environment with a bounded Box action space."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.sac import SACConfig
from lockstep.config import Recipe, RunConfig
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
    smoke_overrides: ClassVar = {
        "algo": {
            "batch_size": 32,
            "rollout_steps": 8,
            "learning_starts": 32,
            "buffer_size": 256,
            "updates_per_sample": 0.25,
        },
        "algo.encoder.hidden_sizes": [16],
        "run": {"total_samples": 512, "log_every": 128, "eval_every": 256, "eval_episodes": 8, "save_every": 128},
        "run.record_video": False,
    }
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
