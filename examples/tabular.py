"""A table of numbers and categories, with a loss of your own. `lockstep train examples/tabular.py`"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from lockstep import Loss, MLPConfig, Recipe, RunConfig, SupervisedConfig, TableDataset


class Diabetes(TableDataset):
    """Progression of diabetes in 442 patients. `--task.path FILE.csv` or `FILE.parquet` reads a table of your own."""

    def read_columns(self, names: Sequence[str]) -> Any:
        if self.config.path:
            return super().read_columns(names)
        table = load_diabetes(scaled=False)
        return dict(zip(table.feature_names, table.data.T, strict=True)) | {"progression": table.target}

    def loss(self, outputs: Tensor, target: Tensor, weight: Tensor) -> Loss:
        mean, std = self.target_mean_std
        losses = nn.functional.huber_loss(outputs, (target - mean) / std, reduction="none")  # [N]
        return Loss((losses * weight).sum(), weight.sum())


NUMERIC = ("age", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")


@dataclass(frozen=True, kw_only=True)
class DiabetesMLP(Recipe):
    """An MLP with a Huber loss on the diabetes table."""

    task: Diabetes.Config = Diabetes.Config(numeric=NUMERIC, categorical=("sex",), target=("progression",))
    algo: SupervisedConfig = SupervisedConfig(epochs=40, batch_size=64, net=MLPConfig(hidden_size=32, dropout=0.1))
    run: RunConfig = RunConfig(log_every=5_000, eval_every=2_500)
    smoke_overrides: ClassVar = {"run": {"total_samples": 640, "eval_every": 320, "save_every": 128}}
