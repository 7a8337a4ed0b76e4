"""DDPG on team snakes, three against three: one shared actor against scripts of rising level and an opponent pool."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ddpg.agent import DDPGConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nn.encoders import EncoderConfig
from lockstep.tasks.team_snakes.env import TeamSnakesConfig


@dataclass(frozen=True, kw_only=True)
class TeamDDPG(Recipe):
    """DDPG on team snakes."""

    task: TeamSnakesConfig = TeamSnakesConfig(
        observation="egocentric",
        level_schedule="gate",
        control_both_teams=True,
        approach_reward=0.05,
        death_penalty=-0.5,
    )
    algo: DDPGConfig = DDPGConfig(
        actor_lr=3e-4,
        critic_lr=3e-4,
        batch_size=256,
        buffer_size=200_000,
        learning_starts=10_000,
        rollout_steps=4,
        updates_per_sample=1 / 32,
        gamma=0.98,
        n_step=5,
        twin_critics=True,
        actor_gradient="expected",
        schedule="cosine",
        epsilon_end=0.02,
        opponent_pool_size=4,
        snapshot_every=50_000,
        encoder=EncoderConfig(hidden_sizes=(256, 256), activation="relu"),
    )
    run: RunConfig = RunConfig(total_samples=1_000_000, log_every=20_480, eval_every=100_000, eval_episodes=64)

    name: ClassVar = "team-ddpg"
    presets: ClassVar = {
        "central": {"algo": {"centralized_critic": True, "actor_gradient": "sampled"}},
        "scripts": {
            "task.control_both_teams": False,
            "task.level_schedule": "curriculum",
            "algo.opponent_pool_size": 0,
        },
    }
    smoke_overrides: ClassVar = {
        "task": {"num_envs": 16, "max_episode_steps": 40},
        "algo": {
            "batch_size": 32,
            "rollout_steps": 8,
            "learning_starts": 64,
            "buffer_size": 512,
            "snapshot_every": 256,
        },
        "algo.encoder.hidden_sizes": [16],
        "run": {"total_samples": 1024, "log_every": 256, "eval_every": 512, "eval_episodes": 8, "save_every": 256},
        "run.record_video": False,
    }
    aliases: ClassVar = {
        "a-lr": "algo.actor-lr",
        "c-lr": "algo.critic-lr",
        "epsilon": "algo.epsilon",
        "opponent-difficulty-strategy": "task.level-schedule",
    }
