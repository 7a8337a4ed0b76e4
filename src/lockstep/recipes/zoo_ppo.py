"""PPO with one policy for all agents of a PettingZoo parallel environment."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.tasks.pettingzoo.env import PettingZooConfig


@dataclass(frozen=True, kw_only=True)
class ZooPPO(Recipe):
    """PPO on any PettingZoo parallel environment. Default: simple_spread_v3 of MPE."""

    task: PettingZooConfig = PettingZooConfig()
    algo: PPOConfig = PPOConfig(
        learning_rate=7e-4,
        schedule="linear",
        rollout_steps=25,
        batch_size=600,
        epochs=10,
        gamma=0.99,
        gae_lambda=0.95,
        entropy_coef=0.01,
        normalize_obs=True,
        normalize_rewards=True,
    )
    run: RunConfig = RunConfig(total_samples=1_200_000, log_every=24_000, eval_every=240_000)

    name: ClassVar = "zoo-ppo"
    presets: ClassVar = {"central": {"task.centralized_critic": True}}
    smoke_overrides: ClassVar = {
        "task": {"num_envs": 24},
        "algo": {"epochs": 2, "rollout_steps": 16, "batch_size": 192, "encoder": {"hidden_sizes": [16]}},
        "run": {"total_samples": 1536, "log_every": 384, "eval_every": 768, "eval_episodes": 8, "save_every": 384},
        "run.record_video": False,
    }
    aliases: ClassVar = {"env": "task.id", "env-id": "task.id", "task": "task.id"}
