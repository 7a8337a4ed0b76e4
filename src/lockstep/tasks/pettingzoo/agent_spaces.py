"""Common spaces of the agents of a game, which share one policy. Does not import torch.

Observations that are vectors, or become vectors when they are encoded, are padded with zeros to the longest of them.
Discrete actions are padded with choices that the action mask forbids, continuous actions with features that are
ignored. Agents with other spaces need equal ones.

Shapes: A agents of a game, W features of the longest observation.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete

from lockstep.config import ConfigError
from lockstep.space_layout import ACTION_MASK, CRITIC, action_columns, split_mask
from lockstep.task_spec import same_form
from lockstep.tasks.gym.obs_encoding import encode_obs, encoded_space
from lockstep.tasks.gym.spaces import allocate
from lockstep.tasks.gym.wrappers import flatten_mask

OBSERVATION, AGENT = "observation", "agent"
"""Names of the parts of a dict observation: what the agent observes, and a one-hot vector of its index."""


class AgentSpaces:
    """The spaces of a policy for all agents, and conversions between its form and that of each agent."""

    def __init__(self, id: str, env: Any, agent_id: bool, masks: bool) -> None:
        """`masks`: whether agents have action masks that the policy follows."""
        self._id, self.agents = id, [str(agent) for agent in env.possible_agents]
        self._seen = [split_mask(env.observation_space(agent))[0] for agent in env.possible_agents]
        self._actions = [env.action_space(agent) for agent in env.possible_agents]
        self.actions = _common_actions(id, self._actions)
        """Common action space."""
        self._columns = [count for count in action_columns(self.actions) if count]
        self._masked = masks or any(action_columns(space) != action_columns(self.actions) for space in self._actions)
        self._masked = self._masked and bool(self._columns)
        encoded = [encoded_space(space) for space in self._seen]
        self._scratch = [allocate(space, 1) for space in encoded]
        count = len(self.agents)
        self._one_hot = np.eye(count) if agent_id and count > 1 else np.zeros((count, 0))
        self.width = max((math.prod(space.shape or ()) for space in encoded), default=0) if _are_vectors(encoded) else 0
        """W; 0 if observations are images or dicts."""
        self._parts = self._observation_parts(encoded)

    @property
    def observations(self) -> Space[Any]:
        """Common observation space."""
        # A list of pairs, because Dict would sort a mapping.
        names = [name for name, _ in self._parts]
        return self._parts[0][1] if names == [OBSERVATION] else Dict(self._parts)

    def add_critic(self, space: Space[Any]) -> None:
        """Add the critic part to observations."""
        self._parts.append((CRITIC, space))

    def _observation_parts(self, encoded: Sequence[Space[Any]]) -> list[tuple[str, Space[Any]]]:
        if len({type(space) for space in self._seen}) > 1 or (
            not self.width and not all(same_form(encoded[0], space) for space in encoded)
        ):
            spaces = ", ".join(f"{agent}: {space}" for agent, space in zip(self.agents, self._seen, strict=True))
            raise ConfigError(
                f"{self._id}: one policy cannot see the observations of all agents, which differ ({spaces}).",
                "Give them equal spaces in a wrapper, or vectors, which are padded to a common length.",
            )
        ids = self._one_hot.shape[1]
        parts: list[tuple[str, Space[Any]]]
        if self.width:
            low, high = (np.zeros(self.width + ids, np.float32) for _ in range(2))
            high[self.width :] = 1
            for space in encoded:  # zero is the padding, and the observation of an absent agent
                size = math.prod(space.shape or ())
                low[:size] = np.minimum(low[:size], space.low.ravel())  # type: ignore[attr-defined]
                high[:size] = np.maximum(high[:size], space.high.ravel())  # type: ignore[attr-defined]
            parts = [(OBSERVATION, Box(low, high, dtype=np.float32))]
        else:
            first = encoded[0]
            parts = [*first.items()] if isinstance(first, Dict) else [(OBSERVATION, first)]
            if ids:
                parts.append((AGENT, Box(0, 1, (ids,), np.uint8)))
        if self._masked:
            parts.append((ACTION_MASK, Box(0, 1, (sum(self._columns),), np.uint8)))
        return parts

    def write_obs(
        self, agent: int, obs: Any, info: Mapping[str, Any], arrays: Any, row: int, ended: bool = False
    ) -> None:
        """Write what an agent observes to a row of the arrays of the common space."""
        seen, mask = split_mask(obs) if isinstance(obs, dict) else (obs, None)
        parts = arrays if isinstance(arrays, dict) else {OBSERVATION: arrays}
        if self.width:
            encode_obs(self._seen[agent], seen, self._scratch[agent], 0)
            vector, target = self._scratch[agent][0].ravel(), parts[OBSERVATION][row]
            target[: len(vector)], target[len(vector) : self.width] = vector, 0
            target[self.width :] = self._one_hot[agent]
        else:
            is_dict = isinstance(self._seen[agent], Dict)
            encode_obs(self._seen[agent], seen, arrays if is_dict else parts[OBSERVATION], row)
            if AGENT in parts:
                parts[AGENT][row] = self._one_hot[agent]
        if self._masked:
            parts[ACTION_MASK][row] = self._mask(agent, info.get(ACTION_MASK) if mask is None else mask, ended)

    def clear_obs(self, arrays: Any, row: int) -> None:
        """Write the observation of an absent agent: zeros, and a mask that allows everything."""
        for name, part in (arrays if isinstance(arrays, dict) else {OBSERVATION: arrays}).items():
            part[row] = name == ACTION_MASK

    def env_action(self, agent: int, action: Any) -> Any:
        """Convert an action of the common space to one of the agent."""
        space = self._actions[agent]
        if space == self.actions:
            return action
        if isinstance(space, Discrete):
            return int(space.start) + min(int(action), int(space.n) - 1)
        size = math.prod(space.shape)
        return np.clip(action[:size], space.low, space.high).astype(space.dtype)

    def _mask(self, agent: int, mask: Any, ended: bool) -> np.ndarray:
        """Return the mask of an agent as a row: padded choices are illegal."""
        space, row = self._actions[agent], np.zeros(sum(self._columns), np.uint8)
        legal = flatten_mask(space, mask)
        if len(legal) != sum(action_columns(space)):
            raise ConfigError(
                f"{self._id} returned an {ACTION_MASK} of {len(legal)} values to {self.agents[agent]}, but its actions "
                f"have {sum(action_columns(space))} choices.",
                "Return one value for every choice, or use --task.use-action-mask false.",
            )
        row[: len(legal)] = legal
        if not row.any() and not ended:  # no action follows the last observation
            raise ConfigError(
                f"{self._id} has no legal action: all choices of {self.agents[agent]} are 0 in its {ACTION_MASK}.",
                "Terminate the agent in this state, or allow an action.",
            )
        return row


def has_masks(env: Any, infos: Mapping[Any, Any]) -> bool:
    """Return whether agents have action masks: in their observations, or in the infos of a reset."""
    spaces = [env.observation_space(agent) for agent in env.possible_agents]
    in_obs = any(isinstance(space, Dict) and ACTION_MASK in space.spaces for space in spaces)
    return in_obs or any(ACTION_MASK in info for info in infos.values())


def _are_vectors(encoded: Sequence[Space[Any]]) -> bool:
    """Return whether all observations can be written as vectors of floats. Images keep their shape."""
    return all(isinstance(x, Box) and x.dtype == np.float32 and len(x.shape) != 3 for x in encoded)


def _common_actions(id: str, spaces: Sequence[Space[Any]]) -> Space[Any]:
    """Return the space that contains the actions of all agents."""
    if all(space == spaces[0] for space in spaces):
        return spaces[0]
    if all(isinstance(space, Discrete) for space in spaces):
        return Discrete(max(int(space.n) for space in spaces))  # type: ignore[attr-defined]
    boxes = [space for space in spaces if isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f"]
    if len(boxes) == len(spaces):
        size = max(len(box.low) for box in boxes)
        low, high = (np.zeros(size, np.float32) for _ in range(2))
        for box in boxes:
            low[: len(box.low)] = np.minimum(low[: len(box.low)], box.low)
            high[: len(box.low)] = np.maximum(high[: len(box.low)], box.high)
        return Box(low, high, dtype=np.float32)
    raise ConfigError(
        f"{id}: one policy cannot act for all agents, whose action spaces differ: {', '.join(map(str, spaces))}.",
        "Give them equal spaces in a wrapper, or only Discrete spaces, or only vectors of floats.",
    )
