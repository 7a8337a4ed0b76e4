"""What tasks and networks agree on about spaces: columns of an action, the action mask, the critic part, images.

Does not import torch, which workers of environments do not need.
"""

import math
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from lockstep.config import ConfigError

ACTION_MASK = "action_mask"
"""Part of a dict observation that is the action mask: 1 for every legal choice, 0 for every illegal one."""
CRITIC = "critic"
"""Part of a dict observation that only the value function sees (asymmetric actor-critic). May be a dict itself."""


def action_columns(space: Space[Any]) -> list[int]:
    """Return the number of choices of each column of an action that is written as one row; 0: a continuous column."""
    match space:
        case Discrete():
            return [int(space.n)]
        case MultiDiscrete():
            return [int(count) for count in space.nvec.ravel()]
        case MultiBinary():
            return [2] * math.prod(space.shape)
        case Box():
            return [0] * math.prod(space.shape)
        case Dict():
            return [column for part in space.values() for column in action_columns(part)]
        case Tuple():
            return [column for part in space for column in action_columns(part)]
    raise ConfigError(
        f"actions of {space} are not supported.",
        "Use Discrete, MultiDiscrete, MultiBinary, a Box of floats, or a Dict or Tuple of them.",
    )


def split_mask(obs: Any) -> tuple[Any, Any]:
    """Return an observation without its action mask, and the mask or None. Also splits the space of an observation.

    A part that remains alone is not in a dict.
    """
    if not isinstance(obs, dict | Dict) or ACTION_MASK not in obs.keys():  # noqa: SIM118
        return obs, None
    parts = {name: part for name, part in obs.items() if name != ACTION_MASK}
    if len(parts) == 1:
        return next(iter(parts.values())), obs[ACTION_MASK]
    return (Dict(list(parts.items())) if isinstance(obs, Dict) else parts), obs[ACTION_MASK]


def policy_obs(obs: Any) -> Any:
    """Return what the policy sees of an observation, or of the space of one: all but the critic part.

    A part that remains alone stays in its dict, so that a policy takes the same input with and without the critic part.
    """
    if not isinstance(obs, dict | Dict) or CRITIC not in obs.keys():  # noqa: SIM118
        return obs
    parts = {name: part for name, part in obs.items() if name != CRITIC}
    if not parts:
        raise ConfigError(f"observations have no part but {CRITIC}.", "Add a part that the policy can see.")
    return Dict(list(parts.items())) if isinstance(obs, Dict) else parts


def refuse_critic_part(observations: Space[Any], algorithm: str) -> None:
    """Raise ConfigError if observations have a critic part, which an algorithm would show to its policy."""
    if policy_obs(observations) is not observations:
        raise ConfigError(
            f"{algorithm} does not support the part {CRITIC} of observations, which only a value function may see.",
            "Use PPO, or rename the part to show it to the policy, too.",
        )


def network_space(observations: Space[Any], choices: int) -> Space[Any]:
    """Return the space of the observations that a network sees: all but the action mask, which its outputs follow.

    `choices` is the number of choices of all discrete columns of an action. Raises ConfigError if a mask has another
    size or dtype, or if nothing else is observed.
    """
    space, mask = split_mask(observations)
    if mask is None:
        return observations
    if mask.shape != (choices,) or np.dtype(mask.dtype).kind not in "biu":
        raise ConfigError(
            f"the part {ACTION_MASK} of observations is {mask}, but actions have {choices} discrete choices.",
            f"Make it Box(0, 1, ({choices},), np.uint8), with the masks of several actions one after another."
            if choices
            else "Rename the part: continuous actions have no mask.",
        )
    if isinstance(space, Dict) and not space.spaces:
        raise ConfigError(f"observations have no part but {ACTION_MASK}.", "Add a part that the network can see.")
    return space  # type: ignore[no-any-return]


def is_channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether an image is height x width x channels, as from many cameras. Boards are channels-first."""
    return shape[2] in (1, 3, 4) and min(shape[:2]) >= 8
