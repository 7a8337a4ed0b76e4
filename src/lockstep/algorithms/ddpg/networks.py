"""Agents of a team, and the conversion between outputs of the DDPG actor and actions.

An action has two forms: a stored form, and a vector that critics see and gradients pass through. The conversion is
exact in both directions, so the environment executes the action that is stored.

Shapes: N samples (agents of a team in consecutive rows), K choices or action features, A agents.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from gymnasium import Space, spaces
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.nn.action_bounds import ActionBounds
from lockstep.ops.philox.draws import Device
from lockstep.pytree import Tree, tree_map
from lockstep.rng import LaneStreams
from lockstep.space_layout import ACTION_MASK, network_space, refuse_critic_part


class ActionCodec(Protocol):
    """Conversion between outputs of the actor, action vectors [N, K] and stored actions.

    By default, all three forms of an action are the same, and noise of target actions has no bounds.
    """

    width: int
    """K: size of an action vector, and number of outputs of the actor."""
    example: Tensor
    """A stored action."""
    noise_scale: float
    """Scale of exploration noise."""

    def noise(self, streams: LaneStreams, counter: int, *shape: int, device: Device = "cpu") -> Tensor:
        """Draw noise for `act`, [L, *shape, K]."""

    def act(self, outputs: Tensor, noise: Tensor | None, legal: Tensor | None) -> Tensor:
        """Return the action vectors for outputs, with noise or without. Gradients pass through to the outputs."""

    def target_noise(self, noise: Tensor, scale: float) -> Tensor:
        """Scale noise for target actions."""
        return noise * scale

    def random(self, uniform: Tensor, legal: Tensor | None) -> Tensor:
        """Return the vectors of random actions, from uniform draws [N, K]."""

    def encode(self, vector: Tensor) -> Tensor:
        """Convert vectors to stored actions."""
        return vector

    def vector(self, stored: Tensor) -> Tensor:
        """Convert stored actions to vectors."""
        return stored

    def to_env(self, stored: Tensor) -> Tensor:
        """Convert stored actions to actions of the environment."""
        return stored


class DiscreteCodec(ActionCodec):
    """One of K choices as a one-hot vector: the argmax of the logits. With Gumbel noise it samples their softmax."""

    example = torch.zeros((), dtype=torch.int64)
    noise_scale = 1.0

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
        # Straight-through estimator: one-hot forward, gradient of the softmax backward. The added term is exactly 0.
        soft = (scores / self.temperature).softmax(-1)
        return chosen + (soft - soft.detach())

    def random(self, uniform: Tensor, legal: Tensor | None) -> Tensor:
        scores = uniform if legal is None else uniform.masked_fill(legal == 0, -1.0)
        return F.one_hot(scores.argmax(-1), self.width).float()

    def encode(self, vector: Tensor) -> Tensor:
        return vector.argmax(-1)

    def vector(self, stored: Tensor) -> Tensor:
        return F.one_hot(stored, self.width).float()


class ContinuousCodec(ActionCodec):
    """K bounded numbers as a vector between -1 and 1."""

    def __init__(self, space: spaces.Box, noise_scale: float) -> None:
        self.width, self.noise_scale = int(space.shape[0]), noise_scale
        self.example = torch.zeros(self.width)
        self.bounds = ActionBounds(space)

    def noise(self, streams: LaneStreams, counter: int, *shape: int, device: Device = "cpu") -> Tensor:
        return streams.normal(counter, *shape, self.width, device=device)

    def act(self, outputs: Tensor, noise: Tensor | None, legal: Tensor | None) -> Tensor:
        vector = outputs.float().tanh()
        return vector if noise is None else (vector + noise).clamp(-1.0, 1.0)

    def target_noise(self, noise: Tensor, scale: float) -> Tensor:
        return (noise * scale).clamp(-0.5, 0.5)

    def random(self, uniform: Tensor, legal: Tensor | None) -> Tensor:
        return 2.0 * uniform - 1.0

    def to_env(self, stored: Tensor) -> Tensor:
        return self.bounds.to_env(stored)


def make_action_codec(space: Space, temperature: float, noise_scale: float) -> ActionCodec:
    """Return the codec for the action space of one agent."""
    if isinstance(space, spaces.Discrete):
        return DiscreteCodec(int(space.n), temperature)
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.is_bounded():
        return ContinuousCodec(space, noise_scale)
    raise ConfigError(f"actions of {space} are not supported.", "Use Discrete or a bounded one-dimensional Box.")


class AgentAxis:
    """Agents of an environment: one, or several along the first axis of its observations.

    The last R agents may be opponents (rivals). The last of their choices lets the task act for them. `legal` or
    `action_mask`, an optional part of an observation, is the mask of discrete actions that the environment executes.
    Networks do not see it.
    """

    def __init__(self, task: Any) -> None:
        agents, self.rivals = getattr(task, "agents", None), getattr(task, "rivals", 0)
        self.multi_agent, self.agents = agents is not None, (agents or 1) - self.rivals
        refuse_critic_part(task.observation_space, "DDPG")
        space = _without_legal(task.observation_space)
        if isinstance(space, dict):
            space = spaces.Dict(list(space.items()))
        self.agent_space, self.joint_space, self.action_space = space, space, task.action_space
        if self.multi_agent:
            self.agent_space, self.joint_space = _agent_space(space, 0), _agent_space(space, slice(self.agents))
            self.action_space = spaces.Discrete(int(task.action_space.nvec[0]))
            self.idle = int(task.action_space.nvec[-1]) - 1
        elif isinstance(task.action_space, spaces.Box):
            network_space(task.observation_space, 0)  # raises if there is a mask

    def drop_rivals(self, tree: Any) -> Any:
        """Return the part [B, A, ...] of observations, actions or rewards [B, A + R, ...] that is of our agents."""
        return tree_map(lambda x: x[:, : self.agents], tree) if self.rivals else tree

    def only_rivals(self, tree: Any) -> Any:
        """Return the part [B, R, ...] that belongs to the opponents."""
        return tree_map(lambda x: x[:, self.agents :], tree)

    def add_rivals(self, action: Tensor) -> Tensor:
        """Append to our actions [B, A] the choice that lets the task act for the opponents."""
        idle = action.new_full((action.shape[0], self.rivals), self.idle) if self.rivals else None
        return action if idle is None else torch.cat([action, idle], dim=1)

    def agent_inputs(self, obs: Tree) -> tuple[Tree, Tensor | None]:
        """Return what each agent sees and its legal actions, [N, ...] each, from observations of N / A environments."""
        flat: Any = tree_map(lambda x: x.flatten(0, 1), obs) if self.multi_agent else obs
        legal = [flat[name] for name in _MASKS if name in flat] if isinstance(flat, dict) else []
        return _without_legal(flat), legal[0] if legal else None

    def group_by_env(self, rows: Tensor) -> Tensor:
        """Group rows of agents [N, ...] by environment, [N / A, A, ...]. Rows of a single agent are not changed."""
        return rows.unflatten(0, (-1, self.agents)) if self.multi_agent else rows

    def joint_obs(self, obs: Tree) -> Tree:
        """Return what all agents of each environment see."""
        return _without_legal(obs)


_MASKS = ("legal", ACTION_MASK)


def _without_legal(obs: Any) -> Any:
    """Return an observation, or the parts of a space, without its mask. A single remaining part is not in a dict."""
    if not isinstance(obs, dict | spaces.Dict) or not set(_MASKS) & obs.keys():
        return obs
    parts = {name: part for name, part in obs.items() if name not in _MASKS}
    return next(iter(parts.values())) if len(parts) == 1 else parts


def _agent_space(space: Space, index: int | slice) -> Space:
    """Return the space of one agent or of a slice of agents."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(name, _agent_space(part, index)) for name, part in space.items()])
    if not isinstance(space, spaces.Box):
        raise ConfigError(f"{space} has no axis of agents.", "Use a Box, or a Dict of Boxes, for observations.")
    return spaces.Box(space.low[index], space.high[index], dtype=space.dtype.type)
