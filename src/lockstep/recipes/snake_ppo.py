"""PPO on Snake, with the board as observation."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nn.encoders import EncoderConfig
from lockstep.tasks.snake.env import SnakeConfig


@dataclass(frozen=True, kw_only=True)
class SnakePPO(Recipe):
    """PPO on Snake, with the board as observation."""

    task: SnakeConfig = SnakeConfig(size=12, num_envs=128)
    algo: PPOConfig = PPOConfig(
        learning_rate=2.5e-4,
        rollout_steps=64,
        batch_size=1024,
        encoder=EncoderConfig(hidden_sizes=(32, 64), num_layers=3),
    )
    run: RunConfig = RunConfig(total_samples=10_000_000, log_every=32_768, eval_every=524_288, eval_episodes=64)

    name: ClassVar = "snake-ppo"
    presets: ClassVar = {
        "features": {
            "task.observation": "features",
            "algo": {
                "learning_rate": 5e-4,
                "schedule": "linear",
                "gamma": 0.995,
                "encoder": {"hidden_sizes": [256, 256], "num_layers": 2},
            },
            "run": {"total_samples": 8_000_000, "eval_every": 1_000_000},
        },
        "tiny": {
            "task.size": 6,
            "algo": {"learning_rate": 4e-4, "schedule": "linear"},
            "run": {"total_samples": 2_500_000, "eval_every": 250_000},
        },
        "small": {"task.size": 8, "run.total_samples": 5_000_000},
        "base": {"task.size": 12, "run.total_samples": 10_000_000},
        "large": {
            "task": {"size": 16, "num_envs": 1024},
            "algo": {"batch_size": 8192, "encoder": {"hidden_sizes": [128], "num_layers": 3}},
            "run.total_samples": 50_000_000,
        },
    }
    smoke_overrides: ClassVar = {
        "task": {"size": 6, "num_envs": 16},
        "algo": {
            "rollout_steps": 32,
            "batch_size": 128,
            "epochs": 2,
            "encoder": {"hidden_sizes": [8, 16], "num_layers": 2, "out_features": 32},
        },
        "run": {"total_samples": 4096, "log_every": 1024, "eval_every": 2048, "eval_episodes": 8, "save_every": 1024},
        "run.record_video": False,
    }
    aliases: ClassVar = {
        "policy-width": "algo.encoder.hidden-sizes",
        "policy-depth": "algo.encoder.num-layers",
        "grid-size": "task.size",
    }
