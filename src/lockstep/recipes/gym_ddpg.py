"""Any Gymnasium task with bounded motions, or one choice, by DDPG; Pendulum-v1 unless told otherwise."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ddpg import DDPGConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nets.encoder import EncoderConfig
from lockstep.tasks.gym import GymConfig


@dataclass(frozen=True, kw_only=True)
class GymDDPG(Recipe):
    """DDPG on any Gymnasium task, Pendulum-v1 unless told otherwise."""

    task: GymConfig = GymConfig(id="Pendulum-v1", num_envs=8)
    algo: DDPGConfig = DDPGConfig(
        gamma=0.98,
        batch_size=128,
        learn_from=2_000,
        epsilon=0.0,
        encoder=EncoderConfig(width=(256,), depth=1, activation="relu"),
    )
    run: RunConfig = RunConfig(samples=20_000, log_every=1_000, eval_every=5_000)

    name: ClassVar = "gym-ddpg"
    presets: ClassVar = {"td3": {"algo": {"twin": True, "delay": 2, "smoothing": 0.2}}}
    smoke: ClassVar = {
        "algo": {"batch_size": 32, "horizon": 8, "learn_from": 32, "capacity": 256, "update_ratio": 0.25},
        "algo.encoder.width": [16],
        "run": {"samples": 512, "log_every": 128, "eval_every": 256, "eval_episodes": 8, "save_every": 128},
        "run.gif": False,
    }
    aliases: ClassVar = {
        "env": "task.id",
        "env-id": "task.id",
        "task": "task.id",
        "a-lr": "algo.actor-rate",
        "c-lr": "algo.critic-rate",
        "buffer-size": "algo.capacity",
    }
