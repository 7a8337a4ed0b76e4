"""Cricket by a graph network: the score to come, or who wins the chase."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.supervised import SupervisedConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nets.graph import GraphConfig
from lockstep.tasks.cricket import CricketConfig


@dataclass(frozen=True, kw_only=True)
class CricketGNN(Recipe):
    """A graph network learns cricket ball by ball, from Cricsheet data or from made-up matches."""

    task: CricketConfig = CricketConfig()
    # Names are learned by heart: without them, matches that nobody has seen are predicted better.
    algo: SupervisedConfig = SupervisedConfig(learning_rate=2e-3, batch_size=512, net=GraphConfig(names=False))
    run: RunConfig = RunConfig(samples=2_000_000, log_every=20_480, eval_every=200_000)

    name: ClassVar = "cricket-gnn"
    presets: ClassVar = {
        "win": {"task": {"predict": "win", "split": "time"}, "run.samples": 1_000_000},
        "tabular": {"algo.net.rounds": 0},
    }
    smoke: ClassVar = {
        "task": {"matches": 20, "thin": 8},
        "algo": {"batch_size": 60, "net": {"hidden": 8}},
        "run": {"samples": 960, "log_every": 240, "eval_every": 480, "save_every": 240},
        "run.gif": False,
    }
    aliases: ClassVar = {"data": "task.data"}
