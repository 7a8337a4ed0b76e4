"""Greedy policy of an actor-critic network."""

import torch
from torch import Tensor

from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import ActionDistribution
from lockstep.nn.normalization import ObservationNormalizer
from lockstep.pytree import Tree


class GreedyPolicy:
    """The most likely action for each observation."""

    def __init__(self, net: ActorCritic, actions: ActionDistribution, normalizer: ObservationNormalizer) -> None:
        self.net, self.actions, self.normalizer = net, actions, normalizer

    def initial_state(self, count: int) -> Tree:
        return self.net.initial_state(count)

    def act(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tree]:
        action, _, after = self.forward(obs, memory)
        return action, after

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        outputs, _, after = self.net.step(self.normalizer(obs), memory)
        return self.actions.mode(outputs), outputs, after
