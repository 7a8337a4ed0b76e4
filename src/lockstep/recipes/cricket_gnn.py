"""Graph network on cricket: predict the final score, or the winner of the chase."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep.algorithms.supervised import SupervisedConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nn.gnn import GraphConfig
from lockstep.tasks.cricket.dataset import CricketConfig


@dataclass(frozen=True, kw_only=True)
class CricketGNN(Recipe):
    """Graph network on cricket, ball by ball, from Cricsheet data or synthetic matches."""

    task: CricketConfig = CricketConfig()
    # Name embeddings overfit: without them, predictions of unseen matches are better.
    algo: SupervisedConfig = SupervisedConfig(
        learning_rate=2e-3, batch_size=512, net=GraphConfig(name_embeddings=False)
    )
    run: RunConfig = RunConfig(total_samples=2_000_000, log_every=20_480, eval_every=200_000)

    name: ClassVar = "cricket-gnn"
    presets: ClassVar = {
        "win": {"task": {"target": "win", "split": "time"}, "run.total_samples": 1_000_000},
        "tabular": {"algo.net.num_layers": 0},
    }
    smoke_overrides: ClassVar = {
        "task": {"num_synthetic_matches": 20, "train_stride": 8},
        "algo": {"batch_size": 60, "net": {"hidden_size": 8}},
        "run": {"total_samples": 960, "log_every": 240, "eval_every": 480, "save_every": 240},
        "run.record_video": False,
    }
    aliases: ClassVar = {"data": "task.data"}
