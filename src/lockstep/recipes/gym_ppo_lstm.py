"""Recurrent PPO on any Gymnasium environment. The defaults solve CartPole-v1 without velocities in 100,000 steps."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.recurrent import RecurrentConfig
from lockstep.tasks.gym.env import GymConfig


@dataclass(frozen=True, kw_only=True)
class GymPPOLSTM(Recipe):
    """PPO with an LSTM on any Gymnasium environment. Default: CartPole-v1."""

    task: GymConfig = GymConfig(id="CartPole-v1", num_envs=8)
    algo: PPOConfig = PPOConfig(
        learning_rate=1e-3,
        schedule="linear",
        rollout_steps=128,
        batch_size=512,
        bptt_steps=64,
        epochs=10,
        clip_coef_schedule="linear",
        entropy_coef=0.0,
        normalize_obs=True,
        encoder=EncoderConfig(num_layers=1),
        recurrent=RecurrentConfig(kind="lstm"),
    )
    run: RunConfig = RunConfig(total_samples=100_000, log_every=5_000, eval_every=80_000)

    name: ClassVar = "gym-ppo-lstm"
    smoke_overrides: ClassVar = {
        "algo": {"epochs": 2, "rollout_steps": 32, "batch_size": 64, "bptt_steps": 8, "recurrent.hidden_size": 16},
        "run": {"total_samples": 2048, "log_every": 512, "eval_every": 1024, "eval_episodes": 8, "save_every": 512},
        "run.record_video": False,
    }
    aliases: ClassVar = {"env": "task.id", "env-id": "task.id", "task": "task.id"}
