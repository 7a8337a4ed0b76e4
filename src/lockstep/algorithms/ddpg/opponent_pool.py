"""Opponent pool: snapshots of the actor that it plays against.

Snapshots are part of the state of the algorithm. They are neither trained nor reduced.

Shapes: L lanes in the given observations, E environments per lane, N = L x E, R opponents per environment.
"""

import copy

import torch
from torch import Tensor, nn

from lockstep.algorithms.ddpg.networks import ActionCodec, AgentAxis
from lockstep.nn.q_networks import Actor
from lockstep.protocols import StateDict
from lockstep.pytree import Tree, tree_map


class OpponentPool:
    """Ring buffer of snapshots. The first `games` environments of each lane play against them."""

    def __init__(self, actor: Actor, codec: ActionCodec, team: AgentAxis, count: int, games: int, envs: int) -> None:
        self.codec, self.team, self.games, self.envs = codec, team, games, envs
        self.copies = nn.ModuleList(copy.deepcopy(actor) for _ in range(count)).requires_grad_(False)

    def add_snapshot(self, actor: Actor, number: int) -> None:
        """Store the actor as the `number`th snapshot. It replaces the oldest one."""
        self.copies[number % len(self.copies)].load_state_dict(actor.state_dict())

    def shared_state(self) -> StateDict:
        return self.copies.state_dict(keep_vars=True)

    def act(self, obs: Tree, opponents: Tensor | None = None) -> Tensor:
        """Return the opponents' actions [N, R]: those of a snapshot without noise, or in other games the script's.

        `opponents` [N] is the snapshot of each environment. None: the environments of a lane take them in rotation.
        """
        rivals = tree_map(lambda x: x.unflatten(0, (-1, self.envs)), self.team.only_rivals(obs))  # [L, E, R, ...]
        first = next(iter(rivals.values()))
        actions = torch.full(first.shape[:3], self.team.idle, device=first.device)
        if opponents is not None:
            agent_obs, legal = self.team.agent_inputs(tree_map(lambda x: x[:, : self.games].flatten(0, 1), rivals))
            part = actions[:, : self.games]  # [L, games, R]
            # Every snapshot acts in every game, so that shapes do not depend on the draw.
            choices = [self.codec.encode(self.codec.act(actor(agent_obs), None, legal)) for actor in self.copies]
            drawn = opponents.view(-1, self.envs)[:, : self.games, None].expand_as(part).clamp(0, len(choices) - 1)
            actions[:, : self.games] = torch.stack(choices).view(-1, *part.shape).gather(0, drawn.unsqueeze(0))[0]
            return actions.flatten(0, 1)
        for number, actor in enumerate(self.copies):
            envs = slice(number, self.games, len(self.copies))
            part = actions[:, envs]
            if not part.numel():
                break
            agent_obs, legal = self.team.agent_inputs(tree_map(lambda x, envs=envs: x[:, envs].flatten(0, 1), rivals))
            actions[:, envs] = self.codec.encode(self.codec.act(actor(agent_obs), None, legal)).view_as(part)
        return actions.flatten(0, 1)
