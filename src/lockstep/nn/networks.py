"""Networks of supervised learning: settings that build a module for a data set, and an MLP.

Shapes: N examples, F features.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lockstep.base import Dataset
from lockstep.config import ConfigError
from lockstep.pytree import Tree, named_leaves, tree_map
from lockstep.rng import watch_draws


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Base class of the settings of a network. Its fields become flags: `--algo.net.NAME`."""

    def validate(self) -> None:
        """Check the settings before any process starts.

        Raises:
            ConfigError: A setting is invalid. By default, none is.
        """

    def build(self, data: Dataset) -> nn.Module:
        """Build the network of a data set.

        Args:
            data: The data set. Its members `example_inputs()`, `output_shape`, `num_outputs` and `vocabularies`
                describe inputs and outputs.

        Returns:
            A module that maps a batch of inputs [N, ...] to outputs [N, *output_shape].
        """
        raise NotImplementedError(f"{type(self).__name__} must implement build().")


@dataclass(frozen=True, kw_only=True)
class MLPConfig(NetworkConfig):
    """Shape of an MLP for inputs of any shape, which are flattened."""

    hidden_size: int = 128
    """Units of every hidden layer."""
    num_layers: int = 2
    """Number of hidden layers."""
    activation: Literal["relu", "tanh", "gelu"] = "relu"
    """Activation after each hidden layer."""
    embedding_size: int = 8
    """Features of each categorical input."""
    dropout: float = 0.0
    """Probability with which a hidden unit is dropped in training."""

    def validate(self) -> None:
        """Check the settings before any process starts."""
        if self.hidden_size < 1 or self.num_layers < 0 or self.embedding_size < 1:
            raise ConfigError(
                f"an MLP with hidden_size {self.hidden_size}, num_layers {self.num_layers} and embedding_size "
                f"{self.embedding_size} is not valid.",
                "Use hidden_size >= 1, num_layers >= 0 and embedding_size >= 1.",
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout is {self.dropout}.", "Use a probability from 0 to below 1.")

    def build(self, data: Dataset) -> nn.Module:
        """Build the MLP of a data set."""
        return FlattenMLP(data, self)


class FlattenMLP(nn.Module):
    """MLP on all inputs together. Inputs with a vocabulary are embedded; all others are numbers."""

    def __init__(self, data: Dataset, config: MLPConfig) -> None:
        super().__init__()
        self.output_shape = data.output_shape
        leaves = named_leaves(data.example_inputs())
        sizes = {name: math.prod(x.shape[1:]) for name, x in leaves.items()}
        ids = {name: count for name, count in data.vocabularies.items() if name in leaves}
        # Names of modules contain no dots.
        self.keys = {name: name.replace(".", "/") for name in ids}
        self.embeddings = nn.ModuleDict(
            {self.keys[name]: nn.Embedding(count, config.embedding_size) for name, count in ids.items()}
        )
        width = sum(size * (config.embedding_size if name in ids else 1) for name, size in sizes.items())
        layers: list[nn.Module] = []
        for _ in range(config.num_layers):
            layers += [nn.Linear(width, config.hidden_size), _ACTIVATIONS[config.activation]()]
            layers += [nn.Dropout(config.dropout)] if config.dropout else []
            width = config.hidden_size
        self.layers = nn.Sequential(*layers, nn.Linear(width, data.num_outputs))

    def forward(self, inputs: Tree) -> Tensor:
        features = []  # [N, F] each
        for name, x in named_leaves(inputs).items():
            embedded = self.embeddings[self.keys[name]](x.long()) if name in self.keys else x.float()
            features.append(embedded.reshape(x.shape[0], -1))
        return self.layers(torch.cat(features, dim=1)).reshape(-1, *self.output_shape)


def check_network(net: nn.Module, data: Dataset, device: torch.device) -> bool:
    """Apply a network to one example and check its output. Return whether it draws random numbers in training.

    Raises:
        ConfigError: The output has another shape than the data set asks for, or a layer has batch statistics.
    """
    for name, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"the network has a {type(module).__name__} ({name}), whose statistics would depend on the number of "
                "processes.",
                "Use GroupNorm or LayerNorm.",
            )
    inputs = data.network_input(tree_map(lambda x: x.to(device), data.example_inputs()))
    with torch.no_grad(), watch_draws(device) as has_drawn:
        outputs = net(inputs)
        draws_random = has_drawn()
    expected = (1, *data.output_shape)
    has_own_loss = type(data).loss is not Dataset.loss
    if not isinstance(outputs, Tensor) or (tuple(outputs.shape) != expected and not has_own_loss):
        actual = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ConfigError(
            f"{type(net).__name__} returns {actual} for one example of {type(data).__name__}, not {list(expected)}.",
            "Return a tensor [N, *data.output_shape], or set output_shape in setup() of the data set.",
        )
    return draws_random


_ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
