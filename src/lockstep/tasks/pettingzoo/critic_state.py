"""What only the value function sees of a game: its state, or the observations of all agents. Does not import torch.

Shapes: A agents of a game, W features of the longest observation.
"""

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box

from lockstep.config import ConfigError
from lockstep.tasks.pettingzoo.agent_spaces import AgentSpaces


class CriticState:
    """The critic part of the observations of a game's agents.

    A vector is followed by a one-hot vector of the agent's index, because values differ between agents. Without
    `state()`, it is the observation of each agent, or zeros, and whether the agent is there. An image is left as it is.
    """

    def __init__(self, id: str, env: Any, spaces: AgentSpaces) -> None:
        """`env` was reset."""
        self._agents, self._width = len(spaces.agents), spaces.width
        self._has_state = _has_state(env)
        self.joins_observations = not self._has_state
        state = np.asarray(env.state()) if self._has_state else np.zeros(0, np.float32)
        if not self._has_state and not spaces.width:
            raise ConfigError(
                f"{id} has no state(), and the observations of its agents are not vectors that can be joined.",
                "Implement state() in the environment, or remove --task.centralized-critic.",
            )
        self._is_image = state.ndim == 3
        size = state.size if self._has_state else self._agents * (spaces.width + 1)
        self.space: Space[Any] = Box(-np.inf, np.inf, (size + self._agents,), np.float32)
        """Space of the critic part."""
        if self._is_image:
            self.space = Box(0, 255, state.shape, np.uint8)

    def write(self, env: Any, seen: np.ndarray, present: np.ndarray, critic: np.ndarray) -> None:
        """Write the critic part of all agents of a game, [A, ...].

        Args:
            env: The game.
            seen: Vectors that its agents observe [A, W or more], read where `present` [A] is True.
        """
        if self._is_image:
            critic[:] = env.state()
            return
        if self._has_state:
            state = np.ravel(env.state())
        else:
            vectors = np.where(present[:, np.newaxis], seen[:, : self._width], 0)
            state = np.concatenate([vectors, present[:, np.newaxis]], axis=1).ravel()
        critic[:, : len(state)] = state
        critic[:, len(state) :] = np.eye(self._agents)


def _has_state(env: Any) -> bool:
    """Return whether a game implements `state()`, which is optional."""
    try:
        return env.state() is not None
    except (NotImplementedError, AttributeError):
        return False
