"""Data set and network of your own in one file: images of digits. `lockstep train examples/digits.py`"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from lockstep import Dataset, NetworkConfig, Recipe, RunConfig, SupervisedConfig


class Digits(Dataset):
    def setup(self) -> None:
        images, labels = (torch.from_numpy(x) for x in load_digits(return_X_y=True))
        examples = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)  # any map-style data set of torch
        parts = random_split(examples, [0.7, 0.1, 0.2], torch.Generator().manual_seed(0))
        self.splits = dict(zip(("train", "validation", "test"), parts, strict=True))
        self.target_type, self.num_classes = "multiclass", 10


@dataclass(frozen=True, kw_only=True)
class CNNConfig(NetworkConfig):
    channels: int = 32
    """Channels of both convolutions."""

    def build(self, data: Dataset) -> nn.Module:
        first, second = nn.Conv2d(1, self.channels, 3, padding=1), nn.Conv2d(self.channels, self.channels, 3, padding=1)
        head = nn.Linear(self.channels * 4 * 4, data.num_outputs)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), head)


@dataclass(frozen=True, kw_only=True)
class DigitsCNN(Recipe):
    task: Digits.Config = Digits.Config()
    algo: SupervisedConfig = SupervisedConfig(batch_size=64, learning_rate=2e-3, net=CNNConfig())
    run: RunConfig = RunConfig(total_samples=40_000, log_every=5_000, eval_every=5_000, reduction="exact")
    smoke_overrides: ClassVar = {"run": {"total_samples": 640, "eval_every": 320, "save_every": 128}}
