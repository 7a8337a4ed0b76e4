"""Actors that choose and critics that judge: networks for DDPG, and how outputs become actions and back.

An action has two forms: the one that is stored, and a vector that critics see and gradients pass through. They stand
for each other exactly, so the action that was chosen, stored and executed is one.

Shapes: N samples (those of a team's agents side by side), K choices or action features, A agents.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from gymnasium import Space, spaces
from torch import Tensor, nn

from lockstep.config import ConfigError
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.initialization import orthogonal_init
from lockstep.ops.philox.draws import Device
from lockstep.pytree import Tree, tree_map
from lockstep.rng import LaneStreams


class ActionCodec(Protocol):
    """How outputs of an actor become actions, [N, K] vectors."""

    width: int
    """K: numbers of a vector, and outputs of the actor."""
    example: Tensor
    """An action as it is stored."""
    spread: float
    """What noise is multiplied with while exploring."""

    def noise(self, streams: LaneStreams, counter: int, *shape: int, device: Device = "cpu") -> Tensor:
        """What `act` explores with, [L, *shape, K]."""

    def act(self, outputs: Tensor, noise: Tensor | None, legal: Tensor | None) -> Tensor:
        """The vectors that outputs stand for, with noise or without; gradients pass through to the outputs."""

    def target_noise(self, noise: Tensor, scale: float) -> Tensor:
        """Noise for the actions of targets."""

    def random(self, uniform: Tensor, legal: Tensor | None) -> Tensor:
        """Any action, from uniform numbers [N, K]."""

    def encode(self, vector: Tensor) -> Tensor:
        """Vectors as they are stored."""

    def vector(self, stored: Tensor) -> Tensor:
        """The same backwards."""

    def to_env(self, stored: Tensor) -> Tensor:
        """What the environment is given."""


class DiscreteCodec:
    """One of K, as a one-hot vector: the largest output wins, and Gumbel noise makes it a draw from their softmax."""

    example = torch.zeros((), dtype=torch.int64)
    spread = 1.0

    def __init__(self, choices: int, temperature: float) -> None:
        self.width, self.temperature = choices, temperature

    def noise(self, streams: LaneStreams, counter: int, *shape: int, device: Device = "cpu") -> Tensor:
        return streams.gumbel(counter, *shape, self.width, device=device)

    def act(self, outputs: Tensor, noise: Tensor | None, legal: Tensor | None) -> Tensor:
        scores = outputs.float() if noise is None else outputs.float() + noise
        if legal is not None:
            scores = scores.masked_fill(legal == 0, -torch.inf)
        chosen = F.one_hot(scores.argmax(-1), self.width).float()
        if not scores.requires_grad:
            return chosen
        # Straight through: the choice forwards, the gradient of a softmax backwards. Their difference is exactly 0.
        soft = (scores / self.temperature).softmax(-1)
        return chosen + (soft - soft.detach())

    def target_noise(self, noise: Tensor, scale: float) -> Tensor:
        return noise * scale

    def random(self, uniform: Tensor, legal: Tensor | None) -> Tensor:
        scores = uniform if legal is None else uniform.masked_fill(legal == 0, -1.0)
        return F.one_hot(scores.argmax(-1), self.width).float()

    def encode(self, vector: Tensor) -> Tensor:
        return vector.argmax(-1)

    def vector(self, stored: Tensor) -> Tensor:
        return F.one_hot(stored, self.width).float()

    def to_env(self, stored: Tensor) -> Tensor:
        return stored


class ContinuousCodec:
    """K numbers between bounds, as a vector between -1 and 1."""

    def __init__(self, space: spaces.Box, spread: float) -> None:
        self.width, self.spread = int(space.shape[0]), spread
        self.example = torch.zeros(self.width)
        self.middle = torch.from_numpy((space.high + space.low) / 2).float()
        self.reach = torch.from_numpy((space.high - space.low) / 2).float()

    def noise(self, streams: LaneStreams, counter: int, *shape: int, device: Device = "cpu") -> Tensor:
        return streams.normal(counter, *shape, self.width, device=device)

    def act(self, outputs: Tensor, noise: Tensor | None, legal: Tensor | None) -> Tensor:
        vector = outputs.float().tanh()
        return vector if noise is None else (vector + noise).clamp(-1.0, 1.0)

    def target_noise(self, noise: Tensor, scale: float) -> Tensor:
        return (noise * scale).clamp(-0.5, 0.5)

    def random(self, uniform: Tensor, legal: Tensor | None) -> Tensor:
        return 2.0 * uniform - 1.0

    def encode(self, vector: Tensor) -> Tensor:
        return vector

    def vector(self, stored: Tensor) -> Tensor:
        return stored

    def to_env(self, stored: Tensor) -> Tensor:
        if self.reach.device != stored.device:  # once: bringing them to a GPU makes the host wait
            self.reach, self.middle = self.reach.to(stored.device), self.middle.to(stored.device)
        return stored * self.reach + self.middle


def make_action_codec(space: Space, temperature: float, spread: float) -> ActionCodec:
    """How actions of one agent's space are made."""
    if isinstance(space, spaces.Discrete):
        return DiscreteCodec(int(space.n), temperature)
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.is_bounded():
        return ContinuousCodec(space, spread)
    raise ConfigError(
        f"actions of {space} are not supported.", "DDPG acts by one choice (Discrete), or in a Box that has bounds."
    )


class Actor(nn.Module):
    """Observations of one agent to the outputs that its action is made of."""

    def __init__(self, space: Space, moves: ActionCodec, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = config.build(space)
        self.head = orthogonal_init(nn.Linear(int(self.encoder.features), moves.width), 0.01)  # type: ignore[arg-type]

    def forward(self, obs: Tree) -> Tensor:
        return self.head(self.encoder(obs)).float()  # [N, K]


class Critic(nn.Module):
    """What actions are worth: one value for an agent's own, or A values for those of a whole team."""

    def __init__(self, space: Space, width: int, values: int, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = config.build(space)
        features = int(self.encoder.features)  # type: ignore[arg-type]
        hidden = orthogonal_init(nn.Linear(features + width, features), 2**0.5)
        self.head = nn.Sequential(hidden, nn.ReLU(inplace=True), orthogonal_init(nn.Linear(features, values), 1.0))

    def forward(self, obs: Tree, vector: Tensor) -> Tensor:
        return self.head(torch.cat([self.encoder(obs), vector], dim=-1)).float()


class AgentAxis:
    """Who acts in an environment: one agent, or several that lie along the first axis of its observations.

    The last may be rivals, for whom somebody else acts, or nobody: then they are given the last of their choices.
    `legal`, a part of an observation where choices are not always obeyed, says which are; networks do not see it.
    """

    def __init__(self, task: Any) -> None:
        agents, self.rivals = getattr(task, "agents", None), getattr(task, "rivals", 0)
        self.several, self.agents = agents is not None, (agents or 1) - self.rivals
        self.whole_space = _visible(task.observation_space)
        self.own_space, self.action_space = self.whole_space, task.action_space
        if self.several:
            self.own_space, self.whole_space = _of_agents(self.whole_space, 0), _of_agents(self.whole_space, self.ours)
            self.action_space = spaces.Discrete(int(task.action_space.nvec[0]))
            self.idle = int(task.action_space.nvec[-1]) - 1

    @property
    def ours(self) -> slice:
        return slice(0, self.agents)

    def ours_of(self, tree: Any) -> Any:
        """The part of observations, actions or rewards [B, A + R, ...] that is ours."""
        return tree_map(lambda x: x[:, self.ours], tree) if self.rivals else tree

    def rivals_of(self, tree: Any) -> Any:
        """The part [B, R, ...] that is not."""
        return tree_map(lambda x: x[:, self.agents :], tree)

    def with_rivals(self, action: Tensor) -> Tensor:
        """Our actions [B, A] as an environment wants them: beside them rivals for whom nobody acts."""
        idle = action.new_full((action.shape[0], self.rivals), self.idle) if self.rivals else None
        return action if idle is None else torch.cat([action, idle], dim=1)

    def own(self, obs: Tree) -> tuple[Tree, Tensor | None]:
        """What each agent sees and may do, [N, ...] each, from observations of N / A environments."""
        flat: Any = tree_map(lambda x: x.flatten(0, 1), obs) if self.several else obs
        return _seen(flat), flat["legal"] if _has_legal(flat) else None

    def apart(self, rows: Tensor) -> Tensor:
        """Rows of all agents [N, ...] as those of each environment's, [N / A, A, ...]; one agent's stay as they are."""
        return rows.unflatten(0, (-1, self.agents)) if self.several else rows

    def whole(self, obs: Tree) -> Tree:
        """What all agents of each environment see."""
        return _seen(obs)


def _has_legal(obs: Any) -> bool:
    return isinstance(obs, dict | spaces.Dict) and "legal" in obs.keys()  # noqa: SIM118


def _seen(obs: Any) -> Any:
    """An observation or its space without what is legal; the rest alone where it is one part."""
    if not _has_legal(obs):
        return obs
    parts = {name: part for name, part in obs.items() if name != "legal"}
    return next(iter(parts.values())) if len(parts) == 1 else parts


def _visible(space: Space) -> Space:
    seen = _seen(space)
    return spaces.Dict(list(seen.items())) if isinstance(seen, dict) else seen


def _of_agents(space: Space, which: int | slice) -> Space:
    """The space of one agent or some, out of several."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(name, _of_agents(part, which)) for name, part in space.items()])
    if not isinstance(space, spaces.Box):
        raise ConfigError(f"observations of {space} have no agents.", "Use a Box, or a Dict of them.")
    return spaces.Box(space.low[which], space.high[which], dtype=space.dtype.type)
