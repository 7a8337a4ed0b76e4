"""Data set, network and loss of your own in one file: images of digits. `lockstep train examples/digits.py`"""

from dataclasses import dataclass

from sklearn.datasets import load_digits
from torch import Generator, Tensor, from_numpy, nn
from torch.utils.data import TensorDataset, random_split

from lockstep import Dataset, Loss, NetworkConfig, Recipe, RunConfig, SupervisedConfig


class Digits(Dataset):
    def setup(self) -> None:
        images, labels = (from_numpy(x) for x in load_digits(return_X_y=True))
        examples = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)  # any map-style data set of torch
        parts = random_split(examples, [0.7, 0.1, 0.2], Generator().manual_seed(0))
        self.splits = dict(zip(("train", "validation", "test"), parts, strict=True))
        self.target_type, self.num_classes = "multiclass", 10

    def loss(self, outputs: Tensor, target: Tensor, weight: Tensor) -> Loss:
        losses = nn.functional.cross_entropy(outputs, target, reduction="none", label_smoothing=0.05)  # [N]
        return Loss((losses * weight).sum(), weight.sum())  # a sum and a count; padding has weight 0


@dataclass(frozen=True, kw_only=True)
class CNNConfig(NetworkConfig):
    channels: int = 32

    def build(self, data: Dataset) -> nn.Module:
        c = self.channels
        layers = [nn.Conv2d(1, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(), nn.Linear(c * 4 * 4, data.num_outputs))


@dataclass(frozen=True, kw_only=True)
class DigitsCNN(Recipe):
    task: Digits.Config = Digits.Config()
    algo: SupervisedConfig = SupervisedConfig(epochs=30, batch_size=64, learning_rate=2e-3, net=CNNConfig())
    run: RunConfig = RunConfig(log_every=5_000, eval_every=5_000, reduction="exact")
    smoke_overrides = {"run": {"total_samples": 640, "eval_every": 320, "save_every": 128}}
