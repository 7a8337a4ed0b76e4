"""Greedy policy of an actor-critic network."""

from typing import Any

import torch
from torch import Tensor

from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import ActionDistribution
from lockstep.nn.normalization import ObservationNormalizer
from lockstep.protocols import Policy
from lockstep.pytree import Tree
from lockstep.rng import LaneStreams, RandomStream
from lockstep.space_layout import policy_obs


class GreedyPolicy(Policy):
    """The most likely action for each observation. It needs nothing that only the value function needs."""

    def __init__(
        self, net: ActorCritic, actions: ActionDistribution, normalizer: ObservationNormalizer | None = None
    ) -> None:
        self.net, self.actions, self.normalizer = net, actions, normalizer or (lambda obs: obs)

    def initial_state(self, count: int) -> Tree:
        state: Any = self.net.initial_state(count)
        return {"policy": state["policy"]} if state else {}

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        outputs, next_memory = self.net.act(self.normalizer(policy_obs(obs)), memory)
        return self.actions.mode(outputs), outputs, next_memory

    @torch.no_grad()
    def sample(self, obs: Tree, memory: Tree, seed: int, counter: int) -> tuple[Tensor, Tree]:
        _, outputs, next_memory = self.forward(obs, memory)
        streams = LaneStreams((RandomStream(seed, "policy.noise"),))
        noise = self.actions.sample_noise(streams, counter, len(outputs), device=outputs.device)[0]
        return self.actions.sample(outputs, noise), next_memory
