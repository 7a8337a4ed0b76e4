"""DDPG on any Gymnasium environment with a bounded Box or a Discrete action space."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.algorithms.ddpg.agent import DDPGConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nn.encoders import EncoderConfig
from lockstep.recipes.off_policy_smoke import SMOKE
from lockstep.tasks.gym.env import GymConfig

TD3: dict[str, Any] = {"twin_critics": True, "policy_delay": 2, "target_noise": 0.2}
"""Settings that make DDPG TD3."""


@dataclass(frozen=True, kw_only=True)
class GymDDPG(Recipe):
    """DDPG on any Gymnasium environment. Default: Pendulum-v1."""

    task: GymConfig = GymConfig(id="Pendulum-v1", num_envs=8)
    algo: DDPGConfig = DDPGConfig(
        gamma=0.98,
        batch_size=128,
        learning_starts=2_000,
        epsilon=0.0,
        encoder=EncoderConfig(hidden_sizes=(256,), num_layers=1, activation="relu"),
    )
    run: RunConfig = RunConfig(total_samples=20_000, log_every=1_000, eval_every=5_000)

    name: ClassVar = "gym-ddpg"
    presets: ClassVar = {
        "td3": {"algo": TD3},
        # The settings of the authors of TD3 (github.com/sfujim/TD3).
        "mujoco": {
            "algo": {
                **TD3,
                "actor_lr": 3e-4,
                "critic_lr": 3e-4,
                "gamma": 0.99,
                "batch_size": 256,
                "buffer_size": 1_000_000,
                "learning_starts": 25_000,
                "max_grad_norm": None,
                "critic_action_input": "first",
                "encoder.num_layers": 2,
            },
            "run": {"total_samples": 1_000_000, "log_every": 5_000, "eval_every": 25_000},
        },
    }
    smoke_overrides: ClassVar = SMOKE
    aliases: ClassVar = {
        "env": "task.id",
        "env-id": "task.id",
        "task": "task.id",
        "a-lr": "algo.actor-lr",
        "c-lr": "algo.critic-lr",
    }
