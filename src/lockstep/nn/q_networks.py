"""Actor and action-value networks (critics) of off-policy algorithms, and their target networks.

Shapes: N samples, K action features.
"""

import math
from typing import Literal, TypeAlias

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from lockstep.nn.encoders import EncoderConfig, orthogonal_init
from lockstep.pytree import Tree

ActionInput: TypeAlias = Literal["first", "last"]
"""Hidden layer of a critic that receives the action."""


class Actor(nn.Module):
    """Network from the observation of one agent to the outputs that define its action."""

    def __init__(self, space: Space, outputs: int, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = config.build(space)
        self.head = orthogonal_init(nn.Linear(int(self.encoder.features), outputs), 0.01)  # type: ignore[arg-type]

    def forward(self, obs: Tree) -> Tensor:
        return self.head(self.encoder(obs)).float()  # [N, outputs]


class Critic(nn.Module):
    """Action-value network: one value for the action of one agent, or A values for the actions of a whole team.

    The last hidden layer receives the action and the features of the observation, which may be an image.
    """

    def __init__(self, space: Space, width: int, values: int, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = config.build(space)
        features = int(self.encoder.features)  # type: ignore[arg-type]
        hidden = orthogonal_init(nn.Linear(features + width, features), 2**0.5)
        self.head = nn.Sequential(hidden, nn.ReLU(inplace=True), orthogonal_init(nn.Linear(features, values), 1.0))

    def forward(self, obs: Tree, vector: Tensor) -> Tensor:
        return self.head(torch.cat([self.encoder(obs), vector], dim=-1)).float()


class VectorCritic(nn.Module):
    """Action-value network on the concatenation of an observation vector and an action."""

    def __init__(self, size: int, width: int, values: int, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = config.build(spaces.Box(-np.inf, np.inf, (size + width,), np.float32))
        self.head = orthogonal_init(nn.Linear(int(self.encoder.features), values), 1.0)  # type: ignore[arg-type]

    def forward(self, obs: Tensor, vector: Tensor) -> Tensor:
        return self.head(self.encoder(torch.cat([obs.flatten(1), vector], dim=-1))).float()


def make_critic(
    space: Space, width: int, values: int, config: EncoderConfig, action_input: ActionInput
) -> Critic | VectorCritic:
    """Build a critic for actions of `width` features.

    With `action_input` first, its layers are those of the encoder. This applies to vectors only: the encoder of an
    image or a dict has no layer that could take an action, and neither has a custom network.
    """
    is_vector = isinstance(space, spaces.Box) and space.dtype == np.float32 and len(space.shape) < 3
    if action_input == "first" and is_vector and type(config).build is EncoderConfig.build:
        return VectorCritic(math.prod(space.shape or ()), width, values, config)
    return Critic(space, width, values, config)


@torch.no_grad()
def soft_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Move the parameters of a target network towards those of its source by a fraction (Polyak averaging)."""
    torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), tau)
