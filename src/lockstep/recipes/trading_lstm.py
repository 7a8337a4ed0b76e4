"""Recurrent PPO on trading, with price files or a simulated market."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.recurrent import RecurrentConfig
from lockstep.tasks.trading.env import TradingConfig


@dataclass(frozen=True, kw_only=True)
class TradingLSTM(Recipe):
    """PPO with an LSTM on trading. Without --data: a simulated market that switches between rising and falling."""

    task: TradingConfig = TradingConfig()
    algo: PPOConfig = PPOConfig(
        learning_rate=1e-3,
        schedule="linear",
        rollout_steps=64,
        batch_size=1024,
        bptt_steps=32,
        epochs=4,
        gamma=0.95,
        gae_lambda=0.9,
        entropy_coef=0.003,
        normalize_rewards=True,
        encoder=EncoderConfig(num_layers=1),
        recurrent=RecurrentConfig(kind="lstm"),
    )
    run: RunConfig = RunConfig(total_samples=500_000, log_every=16_384, eval_every=131_072, eval_episodes=64)

    name: ClassVar = "trading-lstm"
    smoke_overrides: ClassVar = {
        "task": {"num_envs": 16, "episode_length": 48},
        "algo": {"rollout_steps": 16, "batch_size": 128, "bptt_steps": 8, "epochs": 2, "recurrent.hidden_size": 16},
        "run": {"total_samples": 2048, "log_every": 512, "eval_every": 1024, "eval_episodes": 8, "save_every": 512},
        "run.record_video": False,
    }
    aliases: ClassVar = {
        "data": "task.data",
        "learning-rate-actor": "algo.learning-rate",
    }
