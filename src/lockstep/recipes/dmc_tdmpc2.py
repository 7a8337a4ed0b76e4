"""Any task of the DeepMind control suite, or several at once, by TD-MPC2."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.tdmpc2 import TDMPC2Config
from lockstep.config import Recipe, RunConfig
from lockstep.tasks.dmcontrol import DMControlConfig


@dataclass(frozen=True, kw_only=True)
class DMCTDMPC2(Recipe):
    """TD-MPC2 on a task of the control suite, walker-run unless told otherwise."""

    task: DMControlConfig = DMControlConfig()
    algo: TDMPC2Config = TDMPC2Config()
    run: RunConfig = RunConfig(samples=500_000, log_every=1_000, eval_every=25_000, eval_episodes=16)

    name: ClassVar = "dmc-tdmpc2"
    presets: ClassVar = {
        # Learns the lightest tasks in minutes on one CPU core.
        "small": {
            "algo": {"learning_rate": 1e-3, "batch_size": 128, "capacity": 100_000, "learn_from": 1_000, "tau": 0.03},
            "algo.plan": {"samples": 64, "from_policy": 8, "elites": 8, "rounds": 4},
            "algo.model": {"size": 1, "encoder": 64, "width": 64, "latent": 32, "critics": 2},
            "run": {"samples": 20_000, "log_every": 500, "eval_every": 4_000, "eval_episodes": 8},
        }
    }
    smoke: ClassVar = {
        "task": {"names": ["pendulum-swingup"], "steps": 10},
        "algo": {
            "batch_size": 32,
            "learn_from": 24,
            "capacity": 256,
            "update_ratio": 0.0625,
            "collect": 4,
            "plan": {"samples": 8, "from_policy": 2, "elites": 4, "rounds": 1},
            "model": {"size": 1, "encoder": 16, "width": 16, "latent": 16, "critics": 3, "bins": 11},
        },
        "run": {"samples": 256, "log_every": 64, "eval_every": 128, "eval_episodes": 8, "save_every": 64},
        "run.gif": False,
    }
    episode_length: ClassVar = 500
    aliases: ClassVar = {
        "task": "task.names",
        "model-size": "algo.model.size",
        "buffer-size": "algo.capacity",
        "steps": "run.samples",
        "episodic": "algo.episodic",
        "mpc": "algo.planning",
    }
