"""TD-MPC2 on one or several tasks of the DeepMind control suite."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.tdmpc2.agent import TDMPC2Config
from lockstep.config import Recipe, RunConfig
from lockstep.recipes.tdmpc2_presets import SMALL, SMOKE
from lockstep.tasks.dm_control.env import DMControlConfig


@dataclass(frozen=True, kw_only=True)
class DMCTDMPC2(Recipe):
    """TD-MPC2 on the DeepMind control suite. Default task: walker-run."""

    task: DMControlConfig = DMControlConfig()
    algo: TDMPC2Config = TDMPC2Config()
    run: RunConfig = RunConfig(total_samples=500_000, log_every=1_000, eval_every=25_000, eval_episodes=16)

    name: ClassVar = "dmc-tdmpc2"
    presets: ClassVar = {"small": SMALL}
    smoke_overrides: ClassVar = {"task": {"tasks": ["pendulum-swingup"], "episode_length": 10}, **SMOKE}
    aliases: ClassVar = {
        "task": "task.tasks",
        "model-size": "algo.model.size",
        "steps": "run.total-samples",
        "episodic": "algo.episodic",
        "mpc": "algo.mpc",
    }
