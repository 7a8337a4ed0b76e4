"""PPO on any Gymnasium environment. The defaults solve CartPole-v1 within 100,000 steps."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.recipes.ppo_presets import FAMILIES
from lockstep.tasks.gym.env import GymConfig


@dataclass(frozen=True, kw_only=True)
class GymPPO(Recipe):
    """PPO on any Gymnasium environment. Default: CartPole-v1."""

    task: GymConfig = GymConfig(id="CartPole-v1", num_envs=8)
    algo: PPOConfig = PPOConfig(
        learning_rate=1e-3,
        schedule="linear",
        rollout_steps=32,
        batch_size=256,
        epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        clip_coef_schedule="linear",
        entropy_coef=0.0,
    )
    run: RunConfig = RunConfig(total_samples=100_000, log_every=5_000, eval_every=80_000)

    name: ClassVar = "gym-ppo"
    presets: ClassVar = FAMILIES
    smoke_overrides: ClassVar = {
        "algo": {"epochs": 4, "rollout_steps": 32, "batch_size": 64},
        "run": {"total_samples": 2048, "log_every": 512, "eval_every": 1024, "eval_episodes": 8, "save_every": 512},
        "run.record_video": False,
    }
    aliases: ClassVar = {"env": "task.id", "env-id": "task.id", "task": "task.id"}
