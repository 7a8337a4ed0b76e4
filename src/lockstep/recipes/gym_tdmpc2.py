"""TD-MPC2 on any Gymnasium environment with continuous actions."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.tdmpc2.agent import TDMPC2Config
from lockstep.config import Recipe, RunConfig
from lockstep.recipes.tdmpc2_presets import SMALL, SMOKE
from lockstep.tasks.gym.env import GymConfig


@dataclass(frozen=True, kw_only=True)
class GymTDMPC2(Recipe):
    """TD-MPC2 on any Gymnasium environment with bounded continuous actions. Default: Pendulum-v1."""

    task: GymConfig = GymConfig(id="Pendulum-v1", num_envs=8)
    algo: TDMPC2Config = TDMPC2Config(episodic=True)
    run: RunConfig = RunConfig(total_samples=500_000, log_every=1_000, eval_every=25_000, eval_episodes=16)

    name: ClassVar = "gym-tdmpc2"
    presets: ClassVar = {"small": SMALL}
    smoke_overrides: ClassVar = {"task.env_kwargs": {"max_episode_steps": 20}, **SMOKE}
    aliases: ClassVar = {
        "env": "task.id",
        "env-id": "task.id",
        "task": "task.id",
        "model-size": "algo.model.size",
        "episodic": "algo.episodic",
        "mpc": "algo.mpc",
    }
