"""Team snakes, three against three, by DDPG: one actor for the team, against scripts that grow and past selves."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.ddpg import DDPGConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nets.encoder import EncoderConfig
from lockstep.tasks.team_snakes import TeamSnakesConfig


@dataclass(frozen=True, kw_only=True)
class TeamDDPG(Recipe):
    """DDPG learns to play team snakes."""

    task: TeamSnakesConfig = TeamSnakesConfig(view="ahead", rise="gate", both=True, approach=0.05, death=-0.5)
    algo: DDPGConfig = DDPGConfig(
        actor_rate=3e-4,
        critic_rate=3e-4,
        batch_size=256,
        capacity=200_000,
        learn_from=10_000,
        horizon=4,
        update_ratio=1 / 32,
        gamma=0.97,
        steps=3,
        twin=True,
        epsilon_end=0.02,
        past_selves=4,
        self_every=50_000,
        encoder=EncoderConfig(width=(256,), activation="relu"),
    )
    run: RunConfig = RunConfig(samples=1_000_000, log_every=20_480, eval_every=204_800, eval_episodes=64)

    name: ClassVar = "team-ddpg"
    presets: ClassVar = {
        "central": {"algo.central": True},
        "scripts": {"task.both": False, "task.rise": "curriculum", "algo.past_selves": 0},
    }
    smoke: ClassVar = {
        "task": {"num_envs": 16, "steps": 40},
        "algo": {"batch_size": 32, "horizon": 8, "learn_from": 64, "capacity": 512, "self_every": 256},
        "algo.encoder.width": [16],
        "run": {"samples": 1024, "log_every": 256, "eval_every": 512, "eval_episodes": 8, "save_every": 256},
        "run.gif": False,
    }
    episode_length: ClassVar = 200
    aliases: ClassVar = {
        "a-lr": "algo.actor-rate",
        "c-lr": "algo.critic-rate",
        "tau": "algo.tau",
        "epsilon": "algo.epsilon",
        "epsilon-speed": "algo.epsilon-part",
        "buffer-size": "algo.capacity",
        "opponent-difficulty-strategy": "task.rise",
    }
