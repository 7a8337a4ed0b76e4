"""Opponent pool: snapshots of the actor that it plays against.

Snapshots are part of the state of the algorithm. They are neither trained nor reduced.

Shapes: L lanes in the given observations, E environments per lane, N = L x E, R opponents per environment.
"""

import copy

import torch
from torch import Tensor, nn

from lockstep.algorithms.ddpg.networks import ActionCodec, Actor, AgentAxis
from lockstep.protocols import StateDict
from lockstep.pytree import Tree, tree_map


class OpponentPool:
    """Ring buffer of snapshots. The first `games` environments of each lane play against them in rotation."""

    def __init__(self, actor: Actor, codec: ActionCodec, team: AgentAxis, count: int, games: int, envs: int) -> None:
        self.codec, self.team, self.games, self.envs = codec, team, games, envs
        self.copies = nn.ModuleList(copy.deepcopy(actor) for _ in range(count)).requires_grad_(False)

    def add_snapshot(self, actor: Actor, number: int) -> None:
        """Store the actor as the `number`th snapshot. It replaces the oldest one."""
        self.copies[number % len(self.copies)].load_state_dict(actor.state_dict())

    def shared_state(self) -> StateDict:
        return self.copies.state_dict(keep_vars=True)

    def act(self, obs: Tree) -> Tensor:
        """Return the opponents' actions [N, R]: those of a snapshot without noise, or in other games the script's."""
        rivals = tree_map(lambda x: x.unflatten(0, (-1, self.envs)), self.team.only_rivals(obs))  # [L, E, R, ...]
        first = next(iter(rivals.values()))
        actions = torch.full(first.shape[:3], self.team.idle, device=first.device)
        for number, actor in enumerate(self.copies):
            envs = slice(number, self.games, len(self.copies))
            part = actions[:, envs]
            if not part.numel():
                break
            agent_obs, legal = self.team.agent_inputs(tree_map(lambda x, envs=envs: x[:, envs].flatten(0, 1), rivals))
            actions[:, envs] = self.codec.encode(self.codec.act(actor(agent_obs), None, legal)).view_as(part)
        return actions.flatten(0, 1)
