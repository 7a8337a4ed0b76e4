"""PPO on any batched tensor simulator, with settings close to rsl_rl's. The default is a simulator of point masses."""

from dataclasses import dataclass, field
from typing import ClassVar

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nn.encoders import EncoderConfig
from lockstep.tasks.simulators.env import SimulatorConfig


@dataclass(frozen=True, kw_only=True)
class SimPPO(Recipe):
    """PPO on a batched simulator in the form of rsl_rl or ManiSkill. Default: point masses."""

    task: SimulatorConfig = field(default_factory=SimulatorConfig)
    algo: PPOConfig = PPOConfig(
        learning_rate=1e-3,
        schedule="linear",
        rollout_steps=24,
        batch_size=1536,
        epochs=5,
        entropy_coef=0.005,
        value_coef=1.0,
        value_clip_coef=0.2,
        max_grad_norm=1.0,
        normalize_obs=True,
        encoder=EncoderConfig(hidden_sizes=(128, 64)),
    )
    run: RunConfig = RunConfig(total_samples=500_000, log_every=24_576, eval_every=122_880)

    name: ClassVar = "sim-ppo"
    smoke_overrides: ClassVar = {
        "task": {"num_envs": 16},
        "algo": {"epochs": 2, "rollout_steps": 8, "batch_size": 64, "encoder": {"hidden_sizes": [16]}},
        "run": {"total_samples": 512, "log_every": 128, "eval_every": 256, "eval_episodes": 8, "save_every": 128},
        "run.record_video": False,
    }
    aliases: ClassVar = {"make": "task.make", "task": "task.make"}
