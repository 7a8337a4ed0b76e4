"""check_env accepts valid datasets and reports the fault of each invalid one."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lockstep.base import Dataset
from lockstep.protocols import Loss
from lockstep.rng import RandomStream
from lockstep.tasks.cricket.dataset import CricketConfig
from lockstep.tasks.env_checker import check_env


class Points(Dataset):
    """Valid dataset: predict one number from three others."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Dataset.Config):
        examples: int = 100

    def setup(self):
        self.x = RandomStream(0, "points").normal(0, self.config.examples, 3).numpy()

    def count(self, split):
        return self.config.examples if split == "train" else self.config.examples // 2

    def read(self, split, rows):
        x = torch.from_numpy(self.x[rows])
        return {"inputs": {"x": x}, "target": x.sum(1)}

    def compute_metrics(self, split, predictions):
        return {"score": -float(np.abs(predictions).mean())}


class NoTestSplit(Points):
    def count(self, split):
        return 0 if split == "test" else super().count(split)


class NoTarget(Points):
    def read(self, split, rows):
        return {"inputs": super().read(split, rows)["inputs"]}


class OneTargetForAll(Points):
    def read(self, split, rows):
        return super().read(split, rows) | {"target": torch.zeros(1)}


class TargetsInDoubles(Points):
    def read(self, split, rows):
        return super().read(split, rows) | {"target": torch.zeros(len(rows), dtype=torch.float64)}


class MissingValues(Points):
    def read(self, split, rows):
        return super().read(split, rows) | {"target": torch.full((len(rows),), torch.nan)}


class LabelsOfThreeKinds(Points):
    target_type = "binary"

    def read(self, split, rows):
        return super().read(split, rows) | {"target": torch.from_numpy(rows % 3).float()}


class UnknownTargetType(Points):
    target_type = "classification"


class ThreeClasses(Points):
    target_type, num_classes = "multiclass", 3

    def read(self, split, rows):
        return super().read(split, rows) | {"target": torch.from_numpy(rows % 3)}

    def compute_metrics(self, split, predictions):
        return Dataset.compute_metrics(self, split, predictions)


class ClassesFromOne(ThreeClasses):
    def read(self, split, rows):
        return super().read(split, rows) | {"target": torch.from_numpy(rows % 3 + 1)}


class ClassesAsNumbers(ThreeClasses):
    def read(self, split, rows):
        return super().read(split, rows) | {"target": torch.from_numpy(rows % 3).float()}


class SeveralNumbers(ThreeClasses):
    target_type = "regression"

    def read(self, split, rows):
        examples = super().read(split, rows)
        return examples | {"target": examples["inputs"]["x"][:, :2] * 2}


class MeanLoss(Points):
    def loss(self, outputs, target, weight):
        return Loss(((outputs - target).square() * weight).sum() / weight.sum(), 1)


class LossOfPadding(Points):
    def loss(self, outputs, target, weight):
        return Loss((outputs - target).square().sum(), len(outputs))


class Augmented(Points):
    def setup(self):
        super().setup()
        self.reads = 0

    def read(self, split, rows):
        self.reads += 1
        return super().read(split, rows) | {"target": torch.full((len(rows),), float(self.reads))}


class SortsItsRows(Points):
    def read(self, split, rows):
        return super().read(split, np.sort(rows))


class NormalizesByBatch(Points):
    def read(self, split, rows):
        x = torch.from_numpy(self.x[rows])
        return {"inputs": {"x": x - x.mean(0)}, "target": x.sum(1)}


class NoScore(Points):
    def compute_metrics(self, split, predictions):
        return {"mae": 1.0}


class ScoreAsArray(Points):
    def compute_metrics(self, split, predictions):
        return {"score": np.float32(1.0)}


class ForgetsState(Points):
    def setup(self):
        super().setup()
        self.state = torch.rand(3, generator=torch.Generator().manual_seed(id(self) % 1000))

    def shared_state(self):
        return {"state": self.state}

    def load_shared_state(self, state):
        pass


class DrawsFromTorch(Points):
    def read(self, split, rows):
        torch.rand(1)
        return super().read(split, rows)


@pytest.mark.parametrize(
    "config",
    [Points.Config(), ThreeClasses.Config(), SeveralNumbers.Config(), CricketConfig(num_synthetic_matches=20)],
    ids=["points", "classes", "several", "cricket"],
)
def test_check_env_valid_dataset_has_no_faults(config, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check_env(config) == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoTestSplit, "count('test') is 0"),
        (NoTarget, "Return a dict with `inputs` and `target`"),
        (OneTargetForAll, "Return a tensor with one row per example"),
        (TargetsInDoubles, "Return float32 [N, ...]"),
        (UnknownTargetType, "Set it to one of regression, binary, multiclass"),
        (ClassesFromOne, "classes from 1 to 3, but num_classes is 3"),
        (ClassesAsNumbers, "Return int64 [N, ...]"),
        (MeanLoss, "not a mean"),
        (LossOfPadding, "counts examples of weight 0"),
        (MissingValues, "not finite"),
        (LabelsOfThreeKinds, "labels other than 0 and 1"),
        (Augmented, "differ when read again"),
        (SortsItsRows, "differ when read in another order"),
        (NormalizesByBatch, "depends on the other rows of its batch"),
        (NoScore, "Add `score`"),
        (ScoreAsArray, "not Python floats"),
        (ForgetsState, "differ after load_shared_state"),
        (DrawsFromTorch, "global state of torch"),
    ],
)
def test_check_env_invalid_dataset_reports_fault(kind, message):
    faults = check_env(kind.Config())
    assert any(message in fault for fault in faults), faults
