"""Policy of a DDPG actor, for evaluation, export and use in Python."""

import torch
from torch import Tensor

from lockstep.algorithms.ddpg.networks import ActionCodec, AgentAxis
from lockstep.nn.q_networks import Actor
from lockstep.protocols import Policy
from lockstep.pytree import Tree
from lockstep.rng import LaneStreams, RandomStream


class DDPGPolicy(Policy):
    """Actions of the actor without noise."""

    def __init__(self, actor: Actor, codec: ActionCodec, team: AgentAxis) -> None:
        self.actor, self.codec, self.team = actor, codec, team

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        agent_obs, legal = self.team.agent_inputs(self.team.drop_rivals(obs))
        outputs = self.actor(agent_obs)
        return self._to_env(self.codec.act(outputs, None, legal)), self.team.group_by_env(outputs), memory

    @torch.no_grad()
    def sample(self, obs: Tree, memory: Tree, seed: int, counter: int) -> tuple[Tensor, Tree]:
        """Return actions with noise. Random actions (`epsilon`) are not part of it: they end during training."""
        agent_obs, legal = self.team.agent_inputs(self.team.drop_rivals(obs))
        outputs = self.actor(agent_obs)
        streams = LaneStreams((RandomStream(seed, "policy.noise"),))
        noise = self.codec.noise(streams, counter, len(outputs), device=outputs.device)[0] * self.codec.noise_scale
        return self._to_env(self.codec.act(outputs, noise, legal)), memory

    def _to_env(self, vectors: Tensor) -> Tensor:
        action = self.codec.to_env(self.codec.encode(vectors))
        return self.team.add_rivals(self.team.group_by_env(action))
