"""Trading by PPO with memory, on files of prices or on a computed market."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nets.encoder import EncoderConfig
from lockstep.nets.memory import MemoryConfig
from lockstep.tasks.trading import TradingConfig


@dataclass(frozen=True, kw_only=True)
class TradingLSTM(Recipe):
    """PPO with memory trades; without --data, on a market that switches between rise and fall."""

    task: TradingConfig = TradingConfig()
    algo: PPOConfig = PPOConfig(
        learning_rate=1e-3,
        schedule="linear",
        horizon=64,
        batch_size=1024,
        sequence=32,
        epochs=4,
        gamma=0.95,
        gae_lambda=0.9,
        entropy_weight=0.003,
        normalize_rewards=True,
        encoder=EncoderConfig(depth=1),
        memory=MemoryConfig(kind="lstm"),
    )
    run: RunConfig = RunConfig(samples=500_000, log_every=16_384, eval_every=131_072, eval_episodes=64)

    name: ClassVar = "trading-lstm"
    smoke: ClassVar = {
        "task": {"num_envs": 16, "length": 48},
        "algo": {"horizon": 16, "batch_size": 128, "sequence": 8, "epochs": 2, "memory.units": 16},
        "run": {"samples": 2048, "log_every": 512, "eval_every": 1024, "eval_episodes": 8, "save_every": 512},
        "run.gif": False,
    }
    episode_length: ClassVar = 256
    aliases: ClassVar = {
        "data": "task.data",
        "update-interval": "algo.horizon",
        "learning-rate-actor": "algo.learning-rate",
    }
