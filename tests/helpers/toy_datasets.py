"""The smallest dataset: numbers, a label or a class to predict from three features."""

from dataclasses import dataclass

import numpy as np
import torch

from lockstep.base import Dataset
from lockstep.rng import RandomStream


@dataclass(frozen=True)
class ToyConfig:
    """Settings of the toy dataset."""

    kind: str = "regression"
    """regression, binary, multiclass, or several for two numbers."""
    examples: int = 103

    def build(self, lanes, device):
        return Toy(self)


class Toy(Dataset):
    """Examples that are drawn once; each includes its row number."""

    def setup(self):
        kind = self.config.kind
        self.target_type = "regression" if kind == "several" else kind
        self.x = RandomStream(0, "toy").normal(0, self.config.examples, 3).numpy()
        target = self.x @ np.array([1.0, -2.0, 0.5])
        if kind == "binary":
            target = target > 0
        elif kind == "multiclass":
            self.num_classes, target = 3, np.digitize(target, [-1.0, 1.0])
        elif kind == "several":
            target = np.stack([target, 100 * self.x[:, 0] + 50], axis=1)
        self.target = target.astype(np.int64 if kind == "multiclass" else np.float32)
        if kind == "regression":
            self.target_mean_std = (0.0, 2.0)
        elif kind == "several":
            self.target_mean_std = torch.tensor([0.0, 50.0]), torch.tensor([2.0, 100.0])
        self.reads = []

    def count(self, split):
        return self.config.examples if split == "train" else self.config.examples // 2

    def read(self, split, rows):
        self.reads.append(rows)
        x = torch.from_numpy(self.x[rows][:, None, :])
        inputs = {"nodes": {"now": {"x": x}}, "row": torch.from_numpy(rows)}
        return {"inputs": inputs, "target": torch.from_numpy(self.target[rows])}
