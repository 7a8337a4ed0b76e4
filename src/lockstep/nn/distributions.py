"""Action distributions as pure functions of the network's output. The caller provides the noise for sampling.

Shapes: N samples, K parts of a multi-discrete action, D action features, C choices of all discrete parts. Outputs are
[N, outputs].
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
from lockstep.space_layout import action_columns


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
    """Several independent discrete actions (MultiDiscrete, MultiBinary)."""

    def __init__(self, choices: list[int]) -> None:
        super().__init__(sum(choices))
        self.parts = [Categorical(count) for count in choices]
        self.sizes = choices

    def mode(self, outputs: Tensor) -> Tensor:
        return torch.stack([logits.argmax(-1) for logits in outputs.split(self.sizes, -1)], dim=-1)

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        if len(set(self.sizes)) == 1:  # all parts at once, since a MultiBinary action may have many
            logits = outputs.reshape(-1, self.sizes[0])
            log_prob, entropy = self.parts[0].log_prob_and_entropy(logits, action.reshape(-1))
            return log_prob.view(action.shape).sum(-1), entropy.view(action.shape).sum(-1)
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


class Mixed:
    """Discrete and continuous actions together (Dict, Tuple), as one row of float32 with a column for each.

    Outputs are the logits of all discrete columns, then means, then log standard deviations.
    """

    def __init__(self, columns: list[int]) -> None:
        """`columns` are the choices of each column, 0 for a continuous one. Both kinds must occur."""
        self.discrete = MultiCategorical([count for count in columns if count])
        self.gaussian = Gaussian(columns.count(0))
        self.num_choices = self.discrete.num_params
        self.num_params = self.num_choices + self.gaussian.num_params
        self.num_free_params = self.gaussian.num_free_params
        self.places = [i for i, count in enumerate(columns) if count], [i for i, n in enumerate(columns) if not n]
        """Columns of the discrete and of the continuous actions."""

    def sample_noise(self, streams: LaneStreams, counter: int, *shape: int, device: Device = "cpu") -> Tensor:
        # Two counters, since both draws are functions of the same random bits.
        gumbel = self.discrete.sample_noise(streams, 2 * counter, *shape, device=device)
        return torch.cat([gumbel, self.gaussian.sample_noise(streams, 2 * counter + 1, *shape, device=device)], dim=-1)

    def mode(self, outputs: Tensor) -> Tensor:
        logits, rest = self._split(outputs)
        return self._join(self.discrete.mode(logits), self.gaussian.mode(rest))

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        (logits, rest), (gumbel, normal) = self._split(outputs), self._split(noise)
        return self._join(self.discrete.sample(logits, gumbel), self.gaussian.sample(rest, normal))

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        logits, rest = self._split(outputs)
        columns = action.unbind(-1)
        choices, numbers = (torch.stack([columns[place] for place in places], dim=-1) for places in self.places)
        log_prob, entropy = self.discrete.log_prob_and_entropy(logits, choices)
        gaussian_log_prob, gaussian_entropy = self.gaussian.log_prob_and_entropy(rest, numbers)
        return log_prob + gaussian_log_prob, entropy + gaussian_entropy

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values[..., : self.num_choices], values[..., self.num_choices :]

    def _join(self, choices: Tensor, numbers: Tensor) -> Tensor:
        """Return the actions with their columns in the order of the space. No index tensor: it would be uploaded."""
        columns = [*choices.float().unbind(-1), *numbers.unbind(-1)]
        places = [*self.places[0], *self.places[1]]
        return torch.stack([columns[places.index(place)] for place in range(len(places))], dim=-1)


def mask_logits(outputs: Tensor, mask: Tensor | None) -> Tensor:
    """Set the logits of illegal choices to -inf, where the mask [N, C] is 0. Outputs after the logits do not change.

    An illegal choice is then never sampled and never the mode, its gradient is 0, and entropy counts legal ones only.
    """
    if mask is None:
        return outputs
    logits = outputs[:, : mask.shape[1]].masked_fill(mask == 0, -torch.inf)
    return logits if mask.shape[1] == outputs.shape[1] else torch.cat([logits, outputs[:, mask.shape[1] :]], dim=-1)


def make_distribution(space: Space) -> ActionDistribution:
    """Return the distribution for an action space."""
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical([int(count) for count in space.nvec])
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return Gaussian(space.shape[0])
    if isinstance(space, spaces.Dict | spaces.Tuple):
        columns = action_columns(space)
        if all(columns):
            return MultiCategorical(columns)
        return Mixed(columns) if any(columns) else Gaussian(len(columns))
    raise ConfigError(
        f"actions of {space} are not supported.",
        "Use Discrete, MultiDiscrete, one-dimensional Box, or a Dict or Tuple.",
    )
