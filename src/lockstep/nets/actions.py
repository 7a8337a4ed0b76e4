"""Action distributions as pure functions of the network's output; the noise to sample with is handed in.

Shapes: N samples, K parts of a multi-discrete action, D action features. Outputs are [N, outputs].
"""

import math
from typing import Protocol

import torch
from gymnasium import Space, spaces
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.streams import LaneStreams


class Actions(Protocol):
    """How outputs of a network become actions."""

    outputs: int
    """Numbers the network gives for each action."""
    spread: int
    """Free parameters beside the network (the Gaussian's log standard deviations)."""

    def noise(self, streams: LaneStreams, counter: int, *shape: int) -> Tensor:
        """What `sample` needs, [L, *shape, ...]."""

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor: ...
    def mode(self, outputs: Tensor) -> Tensor: ...
    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor: ...
    def entropy(self, outputs: Tensor) -> Tensor: ...


class Categorical:
    """One of `outputs` choices."""

    spread = 0

    def __init__(self, choices: int) -> None:
        self.outputs = choices

    def noise(self, streams: LaneStreams, counter: int, *shape: int) -> Tensor:
        return streams.uniform(counter, *shape)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        # Inverse of the cumulative distribution. Rounding may leave the last sum below one, hence the clamp.
        reached = outputs.float().softmax(-1).cumsum(-1) <= noise.unsqueeze(-1)
        return reached.sum(-1).clamp(max=self.outputs - 1)

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        return outputs.float().log_softmax(-1).gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        logs = outputs.float().log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)


class MultiCategorical:
    """Several independent choices at once."""

    spread = 0

    def __init__(self, choices: list[int]) -> None:
        self.parts = [Categorical(count) for count in choices]
        self.sizes = choices
        self.outputs = sum(choices)

    def noise(self, streams: LaneStreams, counter: int, *shape: int) -> Tensor:
        return streams.uniform(counter, *shape, len(self.parts))

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        pairs = zip(self.parts, outputs.split(self.sizes, -1), noise.unbind(-1), strict=True)
        return torch.stack([part.sample(logits, draw) for part, logits, draw in pairs], dim=-1)  # [N, K]

    def mode(self, outputs: Tensor) -> Tensor:
        return torch.stack([logits.argmax(-1) for logits in outputs.split(self.sizes, -1)], dim=-1)

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        pairs = zip(self.parts, outputs.split(self.sizes, -1), action.unbind(-1), strict=True)
        return torch.stack([part.log_prob(logits, choice) for part, logits, choice in pairs]).sum(0)

    def entropy(self, outputs: Tensor) -> Tensor:
        pairs = zip(self.parts, outputs.split(self.sizes, -1), strict=True)
        return torch.stack([part.entropy(logits) for part, logits in pairs]).sum(0)


class Gaussian:
    """A continuous action; outputs are means and log standard deviations side by side."""

    def __init__(self, features: int) -> None:
        self.outputs = self.spread = features

    def noise(self, streams: LaneStreams, counter: int, *shape: int) -> Tensor:
        return streams.normal(counter, *shape, self.spread)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = outputs.float().chunk(2, -1)
        return mean + log_std.exp() * noise

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs.float().chunk(2, -1)[0]

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        mean, log_std = outputs.float().chunk(2, -1)
        distance = (action - mean) * (-log_std).exp()
        return (-0.5 * distance.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        log_std = outputs.float().chunk(2, -1)[1]
        return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def build_actions(space: Space) -> Actions:
    """The distribution that fits an action space."""
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical([int(count) for count in space.nvec])
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return Gaussian(space.shape[0])
    raise ConfigError(f"actions of {space} are not supported.", "Use Discrete, MultiDiscrete or one-dimensional Box.")
