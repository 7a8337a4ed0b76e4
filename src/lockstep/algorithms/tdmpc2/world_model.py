"""World model: encode observations as latents; predict next latents, rewards, values and actions from them.

Latents are simplicial: each group of eight features is a point of a simplex. Rewards and values are logits of bins.
With several tasks, every network also gets a learned embedding of the task.

Shapes: any leading axes `...`; D observation, Z latent and K action features, C critics, Y bins, U units.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import Space
from gymnasium.spaces import Box, Dict
from torch import Tensor, nn

from lockstep.config import ConfigError
from lockstep.nn.activations import mish, simplicial
from lockstep.ops.two_hot import two_hot_inverse
from lockstep.space_layout import is_channels_last, refuse_critic_part

SIMPLEX_SIZE = 8
"""Features per simplex."""
LOG_STD_MIN, LOG_STD_MAX = -10.0, 2.0
"""Bounds of the policy's log standard deviation."""
CHANNELS = 32
"""Channels of each convolution of the image encoder."""
IMAGE_SIDES = (44, 128)
"""Smallest and largest side of an image in pixels."""


class Size(NamedTuple):
    encoder: int
    width: int
    latent: int
    depth: int
    critics: int


SIZES = {
    1: Size(256, 384, 128, 2, 2),
    5: Size(256, 512, 512, 2, 5),
    19: Size(1024, 1024, 768, 3, 5),
    48: Size(1792, 1792, 768, 4, 5),
    317: Size(4096, 4096, 1376, 5, 8),
}
"""Sizes by the approximate number of parameters, in millions."""


@dataclass(frozen=True, kw_only=True)
class WorldModelConfig:
    """Architecture of a world model: one of five sizes. Single values can be overridden."""

    size: Literal[1, 5, 19, 48, 317] = 5
    """Approximate number of parameters, in millions."""
    encoder: int | None = None
    """Units of the encoder's layers. None: given by `size`."""
    width: int | None = None
    """Units of all other layers. None: given by `size`."""
    latent: int | None = None
    """Features of a latent, a multiple of 8. None: given by `size`."""
    depth: int | None = None
    """Layers of the encoder, including the latent layer. None: given by `size`."""
    num_q: int | None = None
    """Number of critics, of which two are used at a time. None: given by `size`."""
    task_embedding: int = 96
    """Features of a task's embedding, if there are several tasks."""
    bins: int = 101
    """Number of bins of rewards and values."""
    vmax: float = 10.0
    """Upper bound of the bins, in symlog space."""
    dropout: float = 0.01
    """Dropout probability of the critics' first layer in training."""

    def shape(self) -> Size:
        overrides = (self.encoder, self.width, self.latent, self.depth, self.num_q)
        numbers = zip(overrides, SIZES[self.size], strict=True)
        size = Size(*(default if value is None else value for value, default in numbers))
        if size.latent % SIMPLEX_SIZE or min(size) < 1 or size.critics < 2 or self.bins < 2 or self.task_embedding < 1:
            raise ConfigError(
                f"a world model of {size} with {self.bins} bins is invalid.",
                f"Use a latent that is a multiple of {SIMPLEX_SIZE}, and at least two critics (num_q), two bins and a "
                "task_embedding of 1.",
            )
        return size


class NormedLinear(nn.Linear):
    """Linear layer, LayerNorm, and Mish or simplicial normalization."""

    def __init__(self, features: int, units: int, simplex: bool = False) -> None:
        super().__init__(features, units)
        self.ln = nn.LayerNorm(units)
        self.simplex = simplex

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln(super().forward(x))
        return simplicial(x, SIMPLEX_SIZE) if self.simplex else mish(x)


def mlp(features: int, hidden: list[int], outputs: int, simplex: bool = False) -> nn.Sequential:
    """Return normed layers and an output layer, which is linear, or simplicial for latents."""
    sizes = [features, *hidden]
    layers: list[nn.Module] = [NormedLinear(before, after) for before, after in pairwise(sizes)]
    return nn.Sequential(*layers, NormedLinear(sizes[-1], outputs, True) if simplex else nn.Linear(sizes[-1], outputs))


class PixelEncoder(nn.Module):
    """Convolutional encoder from images to latents."""

    def __init__(self, space: Box) -> None:
        super().__init__()
        self.channels_last = is_channels_last(space.shape)
        shape = np.roll(space.shape, 1) if self.channels_last else space.shape
        channels, height, width = map(int, shape)
        if not IMAGE_SIDES[0] <= min(height, width) <= max(height, width) <= IMAGE_SIDES[1]:
            raise ConfigError(
                f"images of {height} x {width} are not supported: a side must have {IMAGE_SIDES[0]} to "
                f"{IMAGE_SIDES[1]} pixels.",
                "Resize them with a wrapper, such as gymnasium.wrappers.ResizeObservation(env, (64, 64)).",
            )
        layers = list[nn.Module]()
        for kernel, stride in ((7, 2), (5, 2), (3, 2), (3, 1)):
            layers += [nn.Conv2d(channels, CHANNELS, kernel, stride), nn.ReLU()]
            channels, height, width = CHANNELS, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.layers = nn.Sequential(*layers[:-1], nn.Flatten())
        self.latent = CHANNELS * height * width

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(-1, -3) if self.channels_last else x
        images = x.flatten(0, -4).float() / 255.0 - 0.5
        return simplicial(self.layers(images), SIMPLEX_SIZE).unflatten(0, x.shape[:-3])


class BatchedLinear(nn.Module):
    """Linear layers of C critics as one batched product, [C, N, features] to [C, N, units]."""

    def __init__(self, critics: int, features: int, units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(critics, units, features))
        self.bias = nn.Parameter(torch.zeros(critics, units))

    def forward(self, x: Tensor, pair: Tensor | None) -> Tensor:
        weight, bias = (self.weight, self.bias) if pair is None else (self.weight[pair], self.bias[pair])
        return torch.baddbmm(bias.unsqueeze(1), x.expand(len(weight), -1, -1), weight.transpose(1, 2))


class Affine(nn.Module):
    """Learned scale and shift of a LayerNorm, for C critics."""

    def __init__(self, critics: int, units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(critics, units))
        self.bias = nn.Parameter(torch.zeros(critics, units))

    def forward(self, x: Tensor, pair: Tensor | None) -> Tensor:
        weight, bias = (self.weight, self.bias) if pair is None else (self.weight[pair], self.bias[pair])
        return torch.addcmul(bias.unsqueeze(1), x, weight.unsqueeze(1))


class EnsembleNormedLinear(BatchedLinear):
    """Linear layer, LayerNorm and Mish for C critics."""

    def __init__(self, critics: int, features: int, units: int) -> None:
        super().__init__(critics, features, units)
        self.ln = Affine(critics, units)

    def forward(self, x: Tensor, pair: Tensor | None, kept: Tensor | None = None) -> Tensor:
        x = super().forward(x, pair)
        if kept is not None:
            x = x * kept
        return mish(self.ln(F.layer_norm(x, x.shape[-1:]), pair))


class QEnsemble(nn.ModuleList):
    """Action-value networks of C critics, evaluated together."""

    def __init__(self, critics: int, features: int, width: int, bins: int) -> None:
        layers = [EnsembleNormedLinear(critics, features, width), EnsembleNormedLinear(critics, width, width)]
        super().__init__([*layers, BatchedLinear(critics, width, bins)])
        self.count = critics

    def forward(self, x: Tensor, pair: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
        """Return logits of bins [C, ..., Y] for [..., features], of all critics or of a `pair` [2]."""
        first, second, last = self
        flat = x.reshape(1, -1, x.shape[-1])
        hidden = second(first(flat, pair, None if kept is None else kept.flatten(1, -2)), pair)
        return last(hidden, pair).unflatten(1, x.shape[:-1])


def encoder_space(space: Space) -> Box:
    """Return the space of the encoder's input: vectors of a Dict are concatenated, and the task's index is removed."""
    refuse_critic_part(space, "TD-MPC2")
    if isinstance(space, Dict) and set(space) == {"obs", "task"}:
        return encoder_space(space["obs"])
    if isinstance(space, Dict):
        parts = list(space.values())
        if parts and all(isinstance(part, Box) and len(part.shape) == 1 and part.dtype == np.float32 for part in parts):
            return Box(-np.inf, np.inf, (sum(part.shape[0] for part in parts),), np.float32)  # type: ignore[index, misc]
    elif isinstance(space, Box) and (len(space.shape) == 1 or (len(space.shape) == 3 and space.dtype == np.uint8)):
        return space
    raise ConfigError(
        f"observations of {space} are not supported.",
        "Use a one-dimensional Box, a Dict of such boxes, or images of uint8. A wrapper can flatten others: "
        "gymnasium.wrappers.FlattenObservation.",
    )


class PolicySample(NamedTuple):
    """Sampled actions and their entropy."""

    action: Tensor
    """[..., K] between -1 and 1."""
    entropy: Tensor
    """[...] Negative log-probability before tanh, times the number of action features."""


class WorldModel(nn.Module):
    """Encoder, dynamics, reward, termination, policy and critics. Target critics are not part of it."""

    masks: Tensor
    """[tasks, K] 1 for the action features that a task has."""

    def __init__(
        self, config: WorldModelConfig, space: Space, actions: tuple[int, ...], episodic: bool = False
    ) -> None:
        """Create a model. `actions` are the action features of each task; a single task has no embedding."""
        super().__init__()
        space = encoder_space(space)
        size, multitask = config.shape(), len(actions) > 1
        self.vmax, self.dropout = config.vmax, config.dropout
        self.actions, self.multitask = max(actions), multitask
        extra = config.task_embedding if multitask else 0
        width = [size.width] * 2
        if len(space.shape) == 3:
            self.encoder: PixelEncoder | nn.Sequential = PixelEncoder(space)
            self.latent = self.encoder.latent
        else:
            hidden = [size.encoder] * max(size.depth - 1, 1)
            self.encoder = mlp(int(space.shape[0]) + extra, hidden, size.latent, simplex=True)
            self.latent = size.latent
        state_size, joint_size = self.latent + extra, self.latent + self.actions + extra
        self.dynamics = mlp(joint_size, width, self.latent, simplex=True)
        self.reward = mlp(joint_size, width, config.bins)
        self.termination = mlp(state_size, width, 1) if episodic else None
        self.policy = mlp(state_size, width, 2 * self.actions)
        self.critics = QEnsemble(size.critics, joint_size, size.width, config.bins)
        self.task = nn.Embedding(len(actions), extra) if multitask else None
        masks = torch.arange(self.actions) < torch.tensor(actions).unsqueeze(1)
        self.register_buffer("masks", masks.float(), persistent=False)
        self.images = len(space.shape) == 3
        _initialize_weights(self)

    def encode(self, obs: Tensor, task: Tensor | None) -> Tensor:
        """Encode observations [..., D] as latents [..., Z]. `task` are indices [...], or None for a single task."""
        if obs.dtype == torch.uint8 and not self.images:
            obs = obs.float() / 255.0
        return self.encoder(obs if self.images else self._with_task(obs, task))

    def termination_logit(self, z: Tensor, task: Tensor | None) -> Tensor:
        """Return logits that the episode has terminated at latents, [...]."""
        assert self.termination is not None
        return self.termination(self._with_task(z, task)).squeeze(-1).float()

    def act(self, z: Tensor, noise: Tensor, task: Tensor | None) -> PolicySample:
        """Sample actions of the policy with noise [..., K]."""
        mean, log_std = self.policy(self._with_task(z, task)).float().chunk(2, dim=-1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std.tanh() + 1.0)
        features: Tensor | int = self.actions
        if self.multitask:
            mask = self.mask(task)
            mean, log_std, noise, features = mean * mask, log_std * mask, noise * mask, mask.sum(-1)
        log_prob = (-0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        return PolicySample((mean + noise * log_std.exp()).tanh(), -log_prob * features)

    def q_value(
        self,
        critics: QEnsemble,
        z: Tensor,
        action: Tensor,
        task: Tensor | None,
        pair: Tensor | None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Return the values of actions by a pair of critics, [2, ...]."""
        pair = pair if critics.count > 2 else None  # both critics are used: no need to select them
        return two_hot_inverse(critics(self.joint(z, action, task), pair, kept), self.vmax)

    def mask(self, task: Tensor | None) -> Tensor:
        """Return the mask [..., K] of the action features that a task has."""
        return self.masks[0] if task is None else self.masks[task]

    @torch.no_grad()
    def limit_task_norms(self) -> None:
        """Limit the norm of all task embeddings to 1, also of tasks not in the batch, so that all processes agree."""
        if self.task is not None:
            self.task.weight.copy_(self.task.weight.renorm(2, 0, 1.0))

    def joint(self, z: Tensor, action: Tensor, task: Tensor | None) -> Tensor:
        """Return the input of dynamics, reward and critics."""
        return torch.cat([self._with_task(z, task), action.to(z.dtype)], dim=-1)

    def _with_task(self, x: Tensor, task: Tensor | None) -> Tensor:
        return x if self.task is None else torch.cat([x, self.task(task).to(x.dtype)], dim=-1)


def _initialize_weights(model: WorldModel) -> None:
    """Draw truncated normal weights with standard deviation 0.02. Rewards and values start at zero."""
    for part in model.modules():
        if isinstance(part, nn.Linear | BatchedLinear):
            nn.init.trunc_normal_(part.weight, std=0.02)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.uniform_(part.weight, -0.02, 0.02)
    for last in (model.reward[-1], model.critics[-1]):
        nn.init.zeros_(last.get_parameter("weight"))
