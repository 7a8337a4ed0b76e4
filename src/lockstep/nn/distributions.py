"""Action distributions as pure functions of the network's output. The caller provides the noise for sampling.

Shapes: N samples, K parts of a multi-discrete action, D action features. Outputs are [N, outputs].
"""

import math
from typing import Protocol

import torch
from gymnasium import Space, spaces
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.ops import cpu_kernels, fused_losses
from lockstep.ops.philox.draws import Device
from lockstep.rng import LaneStreams


class ActionDistribution(Protocol):
    """Distribution of actions, parameterized by the outputs of a network."""

    num_params: int
    """Number of network outputs for each action."""
    num_free_params: int
    """Number of parameters that do not depend on the observation (the Gaussian's log standard deviations)."""

    def sample_noise(self, streams: LaneStreams, counter: int, *shape: int, device: Device = "cpu") -> Tensor:
        """Draw the noise that `sample` needs, [L, *shape, ...]."""

    def mode(self, outputs: Tensor) -> Tensor:
        """Return the most likely action."""

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Sample an action."""

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log probability of an action and the entropy of the distribution."""


class Categorical:
    """One discrete action."""

    num_free_params = 0

    def __init__(self, choices: int) -> None:
        self.num_params = choices

    def sample_noise(self, streams: LaneStreams, counter: int, *shape: int, device: Device = "cpu") -> Tensor:
        return streams.gumbel(counter, *shape, self.num_params, device=device)

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return self.mode(outputs + noise)

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        outputs, action = outputs.float(), action.long()
        if cpu_kernels.is_supported(outputs):
            return cpu_kernels.CategoricalCPU.apply(outputs, action)
        if fused_losses.is_supported(outputs):
            return fused_losses.FusedCategorical.apply(outputs, action)
        logs = outputs.log_softmax(-1)
        # A masked action has log probability -inf and contributes 0 to the entropy: 0 x -inf must not become NaN.
        terms = logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)
        return logs.gather(-1, action.unsqueeze(-1)).squeeze(-1), -terms.sum(-1)


class MultiCategorical(Categorical):
    """Several independent discrete actions (MultiDiscrete)."""

    def __init__(self, choices: list[int]) -> None:
        super().__init__(sum(choices))
        self.parts = [Categorical(count) for count in choices]
        self.sizes = choices

    def mode(self, outputs: Tensor) -> Tensor:
        return torch.stack([logits.argmax(-1) for logits in outputs.split(self.sizes, -1)], dim=-1)

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(self.parts, outputs.split(self.sizes, -1), action.unbind(-1), strict=True)
        log_probs, entropies = zip(
            *(part.log_prob_and_entropy(logits, choice) for part, logits, choice in pairs), strict=True
        )
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)


class Gaussian:
    """Continuous action. Outputs are means and log standard deviations, concatenated."""

    def __init__(self, features: int) -> None:
        self.num_params = self.num_free_params = features

    def sample_noise(self, streams: LaneStreams, counter: int, *shape: int, device: Device = "cpu") -> Tensor:
        return streams.normal(counter, *shape, self.num_free_params, device=device)

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs.float().chunk(2, -1)[0]

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = outputs.float().chunk(2, -1)
        return mean + log_std.exp() * noise

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        if fused_losses.is_supported(outputs, action):
            return fused_losses.FusedGaussian.apply(outputs, action)
        mean, log_std = outputs.float().chunk(2, -1)
        distance = (action - mean) * (-log_std).exp()
        log_prob = (-0.5 * distance.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        return log_prob, (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def make_distribution(space: Space) -> ActionDistribution:
    """Return the distribution for an action space."""
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical([int(count) for count in space.nvec])
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return Gaussian(space.shape[0])
    raise ConfigError(f"actions of {space} are not supported.", "Use Discrete, MultiDiscrete or one-dimensional Box.")
