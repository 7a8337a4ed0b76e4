"""Past selves: copies of an actor as it once was, to play against what it has become.

They are state of the algorithm that learns, and nothing of them is trained or reduced.

Shapes: L lanes of a part, E environments a lane, N = L x E, R rivals of an environment.
"""

import copy

import torch
from torch import Tensor, nn

from lockstep.algorithms.ddpg.networks import ActionCodec, Actor, AgentAxis
from lockstep.pytree import Tree, tree_map


class OpponentPool:
    """A ring of copies, of which the oldest gives way. The first `games` environments of a lane face them in turn."""

    def __init__(self, actor: Actor, moves: ActionCodec, team: AgentAxis, count: int, games: int, envs: int) -> None:
        self.moves, self.team, self.games, self.envs = moves, team, games, envs
        self.copies = nn.ModuleList(copy.deepcopy(actor) for _ in range(count)).requires_grad_(False)

    def add_snapshot(self, actor: Actor, number: int) -> None:
        """Keep what an actor is now, the `number`th that is kept."""
        self.copies[number % len(self.copies)].load_state_dict(actor.state_dict())

    def act(self, obs: Tree) -> Tensor:
        """What the rivals do, [N, R]: what a past self finds best for them, or in other games what the script does."""
        rivals = tree_map(lambda x: x.unflatten(0, (-1, self.envs)), self.team.rivals_of(obs))  # [L, E, R, ...]
        first = next(iter(rivals.values()))
        actions = torch.full(first.shape[:3], self.team.idle, device=first.device)
        for number, actor in enumerate(self.copies):
            turn = slice(number, self.games, len(self.copies))
            faced = actions[:, turn]
            if not faced.numel():
                break
            seen, legal = self.team.own(tree_map(lambda x, turn=turn: x[:, turn].flatten(0, 1), rivals))
            actions[:, turn] = self.moves.encode(self.moves.act(actor(seen), None, legal)).view_as(faced)
        return actions.flatten(0, 1)
