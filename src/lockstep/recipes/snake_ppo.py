"""Snake by PPO, from the board."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nets.encoder import EncoderConfig
from lockstep.tasks.snake import SnakeConfig


@dataclass(frozen=True, kw_only=True)
class SnakePPO(Recipe):
    """PPO learns Snake from the board."""

    task: SnakeConfig = SnakeConfig(size=12, num_envs=128)
    algo: PPOConfig = PPOConfig(
        learning_rate=2.5e-4,
        horizon=64,
        batch_size=1024,
        encoder=EncoderConfig(width=(32, 64), depth=3),
    )
    run: RunConfig = RunConfig(samples=10_000_000, log_every=32_768, eval_every=524_288, eval_episodes=64)

    name: ClassVar = "snake-ppo"
    presets: ClassVar = {
        "tiny": {
            "task.size": 6,
            "algo": {"learning_rate": 4e-4, "schedule": "linear"},
            "run": {"samples": 2_500_000, "eval_every": 250_000},
        },
        "small": {"task.size": 8, "run.samples": 5_000_000},
        "base": {"task.size": 12, "run.samples": 10_000_000},
        "large": {
            "task": {"size": 16, "num_envs": 1024},
            "algo": {"batch_size": 8192, "encoder": {"width": [128], "depth": 3}},
            "run.samples": 50_000_000,
        },
    }
    smoke: ClassVar = {
        "task": {"size": 6, "num_envs": 16},
        "algo": {
            "horizon": 32,
            "batch_size": 128,
            "epochs": 2,
            "encoder": {"width": [8, 16], "depth": 2, "features": 32},
        },
        "run": {"samples": 4096, "log_every": 1024, "eval_every": 2048, "eval_episodes": 8, "save_every": 1024},
        "run.gif": False,
    }
    aliases: ClassVar = {
        "policy-width": "algo.encoder.width",
        "policy-depth": "algo.encoder.depth",
        "grid-size": "task.size",
    }
