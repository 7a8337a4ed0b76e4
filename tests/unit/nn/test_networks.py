"""Networks of supervised learning: the MLP, and the checks of networks of the user."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.base import Dataset
from lockstep.config import ConfigError
from lockstep.nn.networks import MLPConfig, NetworkConfig, check_network
from lockstep.protocols import Loss
from lockstep.rng import RandomStream

CPU = torch.device("cpu")


class Mixed(Dataset):
    """A number, a matrix and a categorical input; two outputs."""

    def setup(self):
        stream = RandomStream(0, "test.mixed")
        examples = [
            ({"x": stream.normal(i, 2, 3), "kind": torch.tensor(i % 4), "scale": torch.tensor(i, dtype=torch.uint8)}, y)
            for i, y in enumerate(stream.normal(99, 9, 2))
        ]
        self.splits = {"train": examples}
        self.vocabularies = {"kind": 4}


class Vectors(Dataset):
    def setup(self):
        self.splits = {"train": TensorDataset(torch.ones(4, 3), torch.ones(4))}


class OwnLoss(Vectors):
    def loss(self, outputs, target, weight):
        return Loss(outputs.sum(), weight.sum())


@dataclass(frozen=True, kw_only=True)
class Own(NetworkConfig):
    """A network of the user."""

    def build(self, data):
        return nn.Linear(3, 2)


def test_mlp_embeds_categories_and_flattens_the_rest():
    data = Mixed(Mixed.Config())
    net = MLPConfig(hidden_size=16, embedding_size=5).build(data)
    assert net.layers[0].in_features == 6 + 5 + 1
    inputs = data.read("train", torch.arange(9).numpy())["inputs"]
    assert net(inputs).shape == (9, 2)
    other = inputs | {"kind": (inputs["kind"] + 1) % 4}
    assert (net(other) != net(inputs)).any(dim=1).all()
    assert not check_network(net, data, CPU)


@pytest.mark.parametrize("settings", [{"hidden_size": 0}, {"num_layers": -1}, {"dropout": 1.0}])
def test_mlp_config_with_invalid_number_is_rejected(settings):
    with pytest.raises(ConfigError):
        MLPConfig(**settings).validate()


def test_network_with_dropout_draws_random_numbers():
    data = Vectors(Vectors.Config())
    assert check_network(MLPConfig(dropout=0.5).build(data), data, CPU)


def test_network_with_wrong_output_shape_is_rejected():
    data = Vectors(Vectors.Config())
    with pytest.raises(ConfigError, match=r"Linear returns \[1, 2\] for one example of Vectors, not \[1\]"):
        check_network(Own().build(data), data, CPU)
    assert not check_network(Own().build(data), OwnLoss(OwnLoss.Config()), CPU)  # its loss may take any shape


def test_network_with_batch_norm_is_rejected():
    data = Vectors(Vectors.Config())
    with pytest.raises(ConfigError, match=r"BatchNorm1d \(0\).*\n.*GroupNorm"):
        check_network(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), data, CPU)
