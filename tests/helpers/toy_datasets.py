"""The smallest dataset: a number or a label to predict from three features."""

from dataclasses import dataclass

import numpy as np
import torch

from lockstep.ops import prediction_metrics
from lockstep.rng import RandomStream


@dataclass(frozen=True)
class ToyConfig:
    """Settings of the toy dataset."""

    kind: str = "regression"
    examples: int = 103

    def build(self, lanes, device):
        return Toy(self)


class Toy:
    """Examples that are drawn once; each includes its row number."""

    vocabularies: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, config):
        self.config, self.target_type = config, config.kind
        self.x = RandomStream(0, "toy").normal(0, config.examples, 3).numpy()
        target = self.x @ np.array([1.0, -2.0, 0.5])
        self.target = (target if config.kind == "regression" else target > 0).astype(np.float32)
        self.target_mean_std = (0.0, 2.0) if config.kind == "regression" else (0.0, 1.0)
        self.reads = []

    def count(self, split):
        return self.config.examples if split == "train" else self.config.examples // 2

    def read(self, split, rows):
        self.reads.append(rows)
        x = torch.from_numpy(self.x[rows][:, None, :])
        inputs = {"nodes": {"now": {"x": x}}, "row": torch.from_numpy(rows)}
        return {"inputs": inputs, "target": torch.from_numpy(self.target[rows])}

    def compute_metrics(self, split, predictions):
        of = (
            prediction_metrics.regression_metrics
            if self.target_type == "regression"
            else prediction_metrics.classification_metrics
        )
        result = of(predictions, self.target[: self.count(split)])
        return result | {"score": -result["mae" if self.target_type == "regression" else "log_loss"]}

    def plot(self, split, predictions, directory):
        return []

    def on_iteration_start(self, clock): ...
    def close(self): ...
    def shared_state(self):
        return {}

    def load_shared_state(self, state): ...
    def lane_state(self, lane):
        return {}

    def load_lane_state(self, lane, state): ...
