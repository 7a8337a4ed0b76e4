"""Encoders: from an observation of any space to a vector of features.

Shapes: N samples, C channels, H height, W width, D features.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from lockstep.config import ConfigError
from lockstep.nn.activations import Tanh
from lockstep.nn.initialization import orthogonal_init


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of the network: an MLP for vectors, a CNN for images and boards."""

    kind: Literal["auto", "mlp", "cnn"] = "auto"
    """auto is a CNN for images and boards and an MLP for all else; mlp flattens images and boards."""
    share_encoder: bool | None = None
    """Whether policy and value share the encoder; none shares a CNN, and gives each an MLP of its own."""
    hidden_sizes: tuple[int, ...] = (64,)
    """Units of each hidden layer, or channels of each convolution; the last number holds for all that follow."""
    num_layers: int = 2
    """Number of hidden layers, or of convolutions."""
    out_features: int = 256
    """Units of the layer that follows the convolutions."""
    activation: Literal["tanh", "relu"] = "tanh"
    """What follows each hidden layer of an MLP."""

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each layer, `depth` numbers."""
        return (*self.hidden_sizes, *self.hidden_sizes[-1:] * self.num_layers)[: self.num_layers]

    def build(self, space: Space) -> nn.Module:
        """The encoder for an observation space; a network of your own is a config of your own, which builds it."""
        return build_encoder(space, self)


class MLP(nn.Module):
    """Hidden layers with tanh, or ReLU."""

    def __init__(self, space: spaces.Box, config: EncoderConfig) -> None:
        super().__init__()
        sizes = [math.prod(space.shape), *config.widths]
        layers: list[nn.Module] = []
        for size, next_size in pairwise(sizes):
            activation = Tanh() if config.activation == "tanh" else nn.ReLU(inplace=True)
            layers += [orthogonal_init(nn.Linear(size, next_size), math.sqrt(2)), activation]
        self.layers = nn.Sequential(*layers)
        self.features = sizes[-1]
        self.scale = _scale(space)

    def forward(self, obs: Tensor) -> Tensor:
        x = obs.reshape(obs.shape[0], -1)  # not len(): an export must not take it for a constant
        x = x.to(_kind_of_number(obs, self.scale))
        return self.layers(x if self.scale == 1.0 else x * self.scale)  # [N, D]


class CNN(nn.Module):
    """3x3 convolutions padded to keep the board's size, one pooling by two, one linear layer."""

    def __init__(self, space: spaces.Box, config: EncoderConfig) -> None:
        super().__init__()
        # Boards come as planes first; cameras often as height, width and colours.
        self.colours_last = space.shape[2] in (1, 3, 4) and min(space.shape[:2]) >= 8
        planes, height, width = np.roll(space.shape, 1).tolist() if self.colours_last else space.shape
        channels = config.widths
        layers: list[nn.Module] = []
        for before, after in pairwise((planes, *channels)):
            layers += [orthogonal_init(nn.Conv2d(before, after, 3, padding=1), math.sqrt(2)), nn.ReLU(inplace=True)]
        pooled = (height // 2) * (width // 2) * channels[-1]
        # The largest of four and ReLU may trade places without a bit changing, and then ReLU has a quarter to do.
        layers.insert(-1, nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.dense = nn.Sequential(
            orthogonal_init(nn.Linear(pooled, config.out_features), math.sqrt(2)), nn.ReLU(inplace=True)
        )
        self.features = config.out_features
        self.scale = _scale(space)
        # Channels-last is 1.5 times faster in training on CPUs, and what tensor cores want.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor) -> Tensor:
        obs = obs.movedim(-1, 1) if self.colours_last else obs  # [N, C, H, W]
        x = obs.to(_kind_of_number(obs, self.scale), memory_format=torch.channels_last)
        x = self.layers(x if self.scale == 1.0 else x * self.scale)
        # As it lies in memory, channels last: flattened channels first it would be copied, forward and backward.
        return self.dense(x.movedim(1, -1).flatten(1))  # [N, D]


class DictEncoder(nn.Module):
    """An encoder for each part of a dict observation, features side by side."""

    def __init__(self, space: spaces.Dict, config: EncoderConfig) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: build_encoder(part, config) for name, part in space.spaces.items()})
        self.features = sum(part.features for part in self.parts.values())  # type: ignore[misc]

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return torch.cat([encode(obs[name]) for name, encode in self.parts.items()], dim=-1)  # [N, D]


def _scale(space: spaces.Box) -> float:
    """Bytes come as 0..255 from cameras and as 0..1 from boards; both enter a network as 0..1."""
    return 1.0 / float(np.max(space.high)) if space.dtype == np.uint8 else 1.0


def _kind_of_number(obs: Tensor, scale: float) -> torch.dtype:
    """What the first layer gets. Half precision holds every byte, and autocast would come to it by way of fp32."""
    device = obs.device.type
    direct = obs.dtype == torch.uint8 and scale == 1.0 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if direct else torch.float32


def build_encoder(space: Space, config: EncoderConfig) -> nn.Module:
    """The encoder that fits an observation space; it says its width in `features`."""
    if isinstance(space, spaces.Dict):
        return DictEncoder(space, config)
    if isinstance(space, spaces.Box):
        if config.kind == "cnn" and len(space.shape) != 3:
            raise ConfigError(
                f"encoder.kind is cnn, and observations of shape {space.shape} are no images.", "Use auto or mlp."
            )
        return CNN(space, config) if len(space.shape) == 3 and config.kind != "mlp" else MLP(space, config)
    raise ConfigError(
        f"observations of {space} have no encoder.", "Use Box or Dict spaces, or build a network of your own."
    )
