"""Encoders: networks from observations of any space to feature vectors.

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
from lockstep.space_layout import CRITIC, is_channels_last, policy_obs

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel size and stride of the convolutions of Mnih et al., 2015 (Nature 518)."""
NATURE_SIDE = 36
"""Smallest height and width that these convolutions take."""
IMPALA = (16, 32, 32)
"""Channels of the three stages of the residual network of Espeholt et al., 2018 (IMPALA, arXiv:1802.01561)."""
MAX_INPUTS = {"mlp": 2**14, "cnn": 2**16, "impala": 2**16}
"""Largest number of inputs of the linear layer that sees a whole image."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of the network: an MLP for vectors, a CNN for images and boards."""

    kind: Literal["auto", "mlp", "cnn", "nature", "impala"] = "auto"
    """Type of encoder. auto: nature for camera images (uint8 up to 255) from 36 x 36 pixels, cnn for boards and smaller
    images, MLP otherwise. mlp: also flatten images and boards. cnn: 3x3 convolutions, for boards and small images.
    nature: strided convolutions with 32, 64 and 64 channels. impala: residual network with 15 convolutions, slower and
    often better than nature. Vectors of a dict observation get an MLP with auto, nature and impala."""
    share_encoder: bool | None = None
    """Whether policy and value share the encoder. None: share a CNN, separate MLPs. Observations with a part `critic`
    always have separate encoders."""
    hidden_sizes: tuple[int, ...] = (64,)
    """Units of each hidden layer, or channels of each convolution. The last number applies to all further layers."""
    num_layers: int = 2
    """Number of hidden layers or convolutions."""
    out_features: int = 256
    """Units of the linear layer after the convolutions."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation after each hidden layer of an MLP."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each layer, `num_layers` numbers."""
        return (*self.hidden_sizes, *self.hidden_sizes[-1:] * self.num_layers)[: self.num_layers]

    def check_image_size(self, space: Space) -> None:
        """Raise ConfigError if images of an observation space are too large for this encoder."""
        if type(self).build is not EncoderConfig.build:  # a custom network
            return
        if isinstance(space, spaces.Dict):
            for part in space.values():
                self.check_image_size(part)
        elif isinstance(space, spaces.Box) and len(space.shape) == 3 and (kind := image_kind(space, self)) != "nature":
            inputs = linear_inputs(space, self)
            outputs = self.widths[0] if kind == "mlp" else self.out_features
            if inputs > MAX_INPUTS[kind]:
                raise ConfigError(
                    f"observations of shape {space.shape} are too large for algo.encoder.kind {self.kind}: one linear "
                    f"layer would have {inputs:,} inputs and {inputs * outputs:,} weights.",
                    "Use --algo.encoder.kind nature, whose strided convolutions reduce images, or a wrapper that "
                    "resizes them.",
                )

    def is_shared(self, encoder: nn.Module, observations: Space) -> bool:
        """Return whether the value function uses the encoder of the policy. It does not if it sees more."""
        if policy_obs(observations) is observations:
            has_cnn = any(isinstance(module, CNN) for module in encoder.modules())
            return has_cnn if self.share_encoder is None else self.share_encoder
        if self.share_encoder:
            raise ConfigError(
                f"algo.encoder.share_encoder is true, but only the value function sees the part {CRITIC}.",
                "Use --algo.encoder.share-encoder none.",
            )
        return False

    def build(self, space: Space) -> nn.Module:
        """Build the encoder for an observation space. Override this in a subclass to use a custom network."""
        return build_encoder(space, self)


def orthogonal_init(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Linear | nn.Conv2d:
    """Initialize a layer with orthogonal weights and zero bias, as usual for PPO."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Module):
    """Hidden layers with tanh or ReLU."""

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
        x = obs.reshape(obs.shape[0], -1)  # not len(), which an export would record as a constant
        x = x.to(_input_dtype(obs, self.scale))
        return self.layers(x if self.scale == 1.0 else x * self.scale)  # [N, D]


class CNN(nn.Module):
    """Convolutions and one linear layer."""

    def __init__(self, space: spaces.Box, config: EncoderConfig) -> None:
        super().__init__()
        self.channels_last = is_channels_last(space.shape)
        planes, height, width = _planes_first(space)
        match image_kind(space, config):
            case "nature":
                if min(height, width) < NATURE_SIDE:
                    raise ConfigError(
                        f"observations of shape {space.shape} are too small for algo.encoder.kind nature.",
                        "Use --algo.encoder.kind cnn.",
                    )
                layers = _nature_layers(planes)
            case "impala":
                layers = _impala_layers(planes)
            case _:
                layers = _board_layers(planes, config.widths)
        self.layers = nn.Sequential(*layers)
        self.dense = nn.Sequential(
            orthogonal_init(nn.Linear(linear_inputs(space, config), config.out_features), math.sqrt(2)),
            nn.ReLU(inplace=True),
        )
        self.features = config.out_features
        self.scale = _scale(space)
        # Channels-last is 1.5 times faster in training on CPUs, and the layout that tensor cores prefer.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor) -> Tensor:
        obs = obs.movedim(-1, 1) if self.channels_last else obs  # [N, C, H, W]
        x = obs.to(_input_dtype(obs, self.scale), memory_format=torch.channels_last)
        x = self.layers(x if self.scale == 1.0 else x * self.scale)
        # Flatten in memory order (channels last): channels first would need a copy, forward and backward.
        return self.dense(x.movedim(1, -1).flatten(1))  # [N, D]


def _board_layers(planes: int, widths: tuple[int, ...]) -> list[nn.Module]:
    """Return 3x3 convolutions with padding, and one 2x2 max-pooling at the end."""
    layers: list[nn.Module] = []
    for before, after in pairwise((planes, *widths)):
        layers += [orthogonal_init(nn.Conv2d(before, after, 3, padding=1), math.sqrt(2)), nn.ReLU(inplace=True)]
    # Max-pooling and ReLU commute bit for bit. Pooling first leaves a quarter of the work for ReLU.
    layers.insert(-1, nn.MaxPool2d(2))
    return layers


def _nature_layers(planes: int) -> list[nn.Module]:
    """Return the strided convolutions of the Nature paper."""
    layers: list[nn.Module] = []
    for channels, kernel, stride in NATURE:
        layers += [orthogonal_init(nn.Conv2d(planes, channels, kernel, stride), math.sqrt(2)), nn.ReLU(inplace=True)]
        planes = channels
    return layers


def _impala_layers(planes: int) -> list[nn.Module]:
    """Return the stages of the IMPALA network: a convolution, 3x3 max-pooling with stride 2, two residual blocks."""
    layers: list[nn.Module] = []
    for channels in IMPALA:
        convolution = orthogonal_init(nn.Conv2d(planes, channels, 3, padding=1), 1.0)
        layers += [convolution, nn.MaxPool2d(3, stride=2, padding=1), Residual(channels), Residual(channels)]
        planes = channels
    return [*layers, nn.ReLU(inplace=True)]


class Residual(nn.Module):
    """Two 3x3 convolutions with ReLU before each, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = [orthogonal_init(nn.Conv2d(channels, channels, 3, padding=1), math.sqrt(2)) for _ in range(2)]
        # The first ReLU keeps its input, which is added to the result.
        self.layers = nn.Sequential(nn.ReLU(), convolutions[0], nn.ReLU(inplace=True), convolutions[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class DictEncoder(nn.Module):
    """One encoder per part of a dict observation; features are concatenated."""

    def __init__(self, space: spaces.Dict, config: EncoderConfig) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: build_encoder(part, config) for name, part in space.spaces.items()})
        self.features = sum(part.features for part in self.parts.values())  # type: ignore[misc]

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return torch.cat([encode(obs[name]) for name, encode in self.parts.items()], dim=-1)  # [N, D]


def image_kind(space: spaces.Box, config: EncoderConfig) -> str:
    """Return the type of encoder of an image: that of the settings, or with `auto` the one for its size and values."""
    if config.kind != "auto":
        return config.kind
    _, height, width = _planes_first(space)
    is_camera = space.dtype == np.uint8 and np.max(space.high) > 1  # boards of uint8 have values 0 and 1
    too_large = (height // 2) * (width // 2) * config.widths[-1] > MAX_INPUTS["cnn"]
    return "nature" if min(height, width) >= NATURE_SIDE and (is_camera or too_large) else "cnn"


def linear_inputs(space: spaces.Box, config: EncoderConfig) -> int:
    """Return the number of inputs of the linear layer that sees a whole image."""
    planes, *sides = _planes_first(space)
    match image_kind(space, config):
        case "mlp":
            return planes * math.prod(sides)
        case "nature":
            for _, kernel, stride in NATURE:
                sides = [(side - kernel) // stride + 1 for side in sides]
            return NATURE[-1][0] * math.prod(sides)
        case "impala":
            for _ in IMPALA:
                sides = [(side + 1) // 2 for side in sides]
            return IMPALA[-1] * math.prod(sides)
    return config.widths[-1] * math.prod(side // 2 for side in sides)


def _planes_first(space: spaces.Box) -> tuple[int, int, int]:
    """Return channels, height and width of an image."""
    a, b, c = space.shape
    return (c, a, b) if is_channels_last(space.shape) else (a, b, c)


def _scale(space: spaces.Box) -> float:
    """Return the factor that scales uint8 observations (0..255 from cameras, 0..1 from boards) to 0..1."""
    return 1.0 / float(np.max(space.high)) if space.dtype == np.uint8 else 1.0


def _input_dtype(obs: Tensor, scale: float) -> torch.dtype:
    """Return the dtype of the first layer's input.

    Unscaled bytes are cast directly to the autocast dtype, which represents them exactly, instead of through fp32.
    """
    device = obs.device.type
    direct = obs.dtype == torch.uint8 and scale == 1.0 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if direct else torch.float32


def build_encoder(space: Space, config: EncoderConfig) -> nn.Module:
    """Build the encoder for an observation space. Its attribute `features` is the output width."""
    if isinstance(space, spaces.Dict):
        return DictEncoder(space, config)
    if isinstance(space, spaces.Box):
        if config.kind == "cnn" and len(space.shape) != 3:  # the others also encode the vectors of a dict
            raise ConfigError(
                f"encoder.kind is cnn, but observations of shape {space.shape} are not images.", "Use auto or mlp."
            )
        return CNN(space, config) if len(space.shape) == 3 and config.kind != "mlp" else MLP(space, config)
    raise ConfigError(f"observations of {space} have no encoder.", "Use Box or Dict spaces, or write a custom network.")
