"""Gymnasium spaces: arrays for their values, conversion between policy and environment actions, sampling.

Shapes: B environments, C choices of all discrete parts of an action.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from lockstep.action_encoding import leaf_spaces, split_columns
from lockstep.config import ConfigError
from lockstep.rng import RandomStream
from lockstep.space_layout import action_columns
from lockstep.tasks.gym.obs_encoding import float_box


def allocate(space: Space[Any], count: int) -> Any:
    """Allocate arrays of zeros for `count` values of a space."""
    if isinstance(space, Dict):
        return {name: allocate(part, count) for name, part in space.items()}
    return np.zeros((count, *(space.shape or ())), space.dtype)  # [B, ...]


def policy_space(space: Space[Any]) -> Space[Any]:
    """Return the action space of the policy: discrete actions counted from 0, continuous actions in float32.

    The actions of a policy with a Dict or Tuple space are rows: see `action_encoding.py`.
    """
    match space:
        case Discrete():
            return Discrete(int(space.n))
        case MultiDiscrete() | MultiBinary():
            return MultiDiscrete(action_columns(space))
        case Box() if np.issubdtype(space.dtype, np.floating):
            return float_box(space)
        case Dict() if space.spaces:
            return Dict([(name, policy_space(part)) for name, part in space.items()])
        case Tuple() if space.spaces:
            return Tuple([policy_space(part) for part in space])
    raise ConfigError(
        f"{space} is not an action space that policies support.",
        "Register the environment with a wrapper whose actions are Discrete, MultiDiscrete, MultiBinary, a Box of "
        "floats, or a Dict or Tuple of them.",
    )


def env_actions(space: Space[Any], actions: np.ndarray) -> np.ndarray:
    """Convert policy actions to environment actions: clipped to the bounds, in its dtype. Always a copy. [B, ...]

    Actions of a Dict or Tuple space are rows in both forms.
    """
    match space:
        case Discrete() | MultiDiscrete():
            return actions.reshape(-1, *(space.shape or ())).astype(space.dtype) + space.start
        case MultiBinary():
            return actions.reshape(-1, *space.shape).astype(space.dtype)
        case Dict() | Tuple():
            parts = [env_actions(leaf, part) for leaf, part in split_columns(space, actions)]
            return np.concatenate([part.reshape(len(actions), -1) for part in parts], axis=1, dtype=np.float64)
        case Box():
            return np.clip(actions, space.low, space.high).astype(space.dtype)
    raise TypeError(f"{space} is not an action space that policies support")


def actions_valid(space: Space[Any], actions: np.ndarray) -> bool:
    """Whether actions [N, ...] have the dtype and shape of the space and all lie within its bounds."""
    if actions.dtype != space.dtype or actions.shape[1:] != (space.shape or ()):
        return False
    match space:
        case Discrete() | MultiDiscrete():
            choices = space.n if isinstance(space, Discrete) else space.nvec
            return bool(((actions >= space.start) & (actions < space.start + choices)).all())
        case MultiBinary():
            return bool(((actions == 0) | (actions == 1)).all())
        case Box():
            return bool(((actions >= space.low) & (actions <= space.high)).all())
    return False


def sample_action(space: Space[Any], stream: RandomStream, counter: int, count: int) -> torch.Tensor:
    """Sample `count` actions [count, ...]. A missing Box bound is -1 or 1, or lies 2 beyond the other bound."""
    if isinstance(space, Dict | Tuple):
        leaves = enumerate(leaf_spaces(space))
        # The counter of a part lies beyond the counters of steps.
        parts = [sample_action(leaf, stream, counter + (index << 40), count) for index, leaf in leaves]
        return torch.cat([part.reshape(count, -1) for part in parts], dim=1)  # float32 if a part is
    generator = stream.generator(counter)
    match space:
        case Discrete():
            return torch.from_numpy(generator.integers(space.n, size=count) + space.start)
        case MultiDiscrete():
            return torch.from_numpy(generator.integers(space.nvec, size=(count, *space.shape)) + space.start)
        case Box():
            low = np.where(np.isfinite(space.low), space.low, np.minimum(space.high, 1) - 2)
            high = np.where(np.isfinite(space.high), space.high, np.maximum(low + 2, 1))
            return torch.from_numpy(generator.uniform(low, high, (count, *space.shape)).astype(np.float32))
    raise TypeError(f"cannot sample actions of {space}")


def make_legal(space: Space[Any], actions: torch.Tensor, mask: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Replace the discrete parts of actions [B, ...] by the legal choices with the highest scores [B, C]."""
    columns = action_columns(space)
    parts = scores.masked_fill(mask == 0, -torch.inf).split([count for count in columns if count], dim=1)
    choices = torch.stack([part.argmax(1) for part in parts], dim=1).to(actions.dtype)
    if isinstance(space, Discrete):
        return choices[:, 0]
    return actions.index_copy(1, torch.tensor([i for i, count in enumerate(columns) if count]), choices)


def tensor_dtype(space: Space[Any]) -> torch.dtype:
    """Return the dtype of a tensor that holds values of a space."""
    return torch.from_numpy(np.empty(0, space.dtype)).dtype
