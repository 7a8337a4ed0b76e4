"""A policy and a value function in one module, on one encoder or on one each.

Shapes: N samples, O outputs of the policy.
"""

import torch
from gymnasium import Space
from torch import Tensor, nn

from lockstep.nets.actions import Actions
from lockstep.nets.encoder import CNN, EncoderConfig, build_encoder
from lockstep.nets.init import orthogonal
from lockstep.trees import Tree


class ActorCritic(nn.Module):
    """Pictures share one encoder between policy and value; vectors are cheap, and learn better with one each."""

    def __init__(self, observations: Space, actions: Actions, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = build_encoder(observations, config)
        pictures = any(isinstance(module, CNN) for module in self.encoder.modules())
        shared = pictures if config.shared is None else config.shared
        self.critic_encoder = None if shared else build_encoder(observations, config)
        features = int(self.encoder.features)  # type: ignore[arg-type]
        self.policy_head = orthogonal(nn.Linear(features, actions.outputs), 0.01)
        self.value_head = orthogonal(nn.Linear(features, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(actions.spread)) if actions.spread else None

    def forward(self, obs: Tree) -> tuple[Tensor, Tensor]:
        """Outputs for the action distribution [N, O] and values [N], both fp32 whatever the encoder ran in."""
        features = self.encoder(obs)
        outputs = self.policy_head(features).float()
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], dim=-1)
        seen = features if self.critic_encoder is None else self.critic_encoder(obs)
        return outputs, self.value_head(seen).squeeze(-1).float()

    def value(self, obs: Tree) -> Tensor:
        """Values alone, [N]."""
        encoder = self.encoder if self.critic_encoder is None else self.critic_encoder
        return self.value_head(encoder(obs)).squeeze(-1).float()
