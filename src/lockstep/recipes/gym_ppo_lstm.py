"""Any Gymnasium task by PPO with memory; the settings solve CartPole-v1 without velocities within 100,000 steps."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nets.encoder import EncoderConfig
from lockstep.nets.memory import MemoryConfig
from lockstep.tasks.gym import GymConfig


@dataclass(frozen=True, kw_only=True)
class GymPPOLSTM(Recipe):
    """PPO with memory on any Gymnasium task, CartPole-v1 unless told otherwise."""

    task: GymConfig = GymConfig(id="CartPole-v1", num_envs=8)
    algo: PPOConfig = PPOConfig(
        learning_rate=1e-3,
        schedule="linear",
        horizon=128,
        batch_size=512,
        sequence=64,
        epochs=10,
        clip_schedule="linear",
        entropy_weight=0.0,
        normalize_obs=True,
        encoder=EncoderConfig(depth=1),
        memory=MemoryConfig(kind="lstm"),
    )
    run: RunConfig = RunConfig(samples=100_000, log_every=5_000, eval_every=25_000)

    name: ClassVar = "gym-ppo-lstm"
    smoke: ClassVar = {
        "algo": {"epochs": 2, "horizon": 32, "batch_size": 64, "sequence": 8, "memory.units": 16},
        "run": {"samples": 2048, "log_every": 512, "eval_every": 1024, "eval_episodes": 8, "save_every": 512},
        "run.gif": False,
    }
    aliases: ClassVar = {"env": "task.id", "env-id": "task.id", "task": "task.id"}
