"""Gymnasium spaces: arrays for their values, conversion between policy and environment actions, sampling.

Shapes: B environments.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from lockstep.config import ConfigError
from lockstep.rng import RandomStream
from lockstep.tasks.obs_encoding import float_box


def allocate(space: Space[Any], count: int) -> Any:
    """Allocate arrays of zeros for `count` values of a space."""
    if isinstance(space, Dict):
        return {name: allocate(part, count) for name, part in space.items()}
    return np.zeros((count, *(space.shape or ())), space.dtype)  # [B, ...]


def policy_space(space: Space[Any]) -> Space[Any]:
    """Return the action space of the policy: discrete actions counted from 0, continuous actions in float32."""
    match space:
        case Discrete():
            return Discrete(int(space.n))
        case MultiDiscrete():
            return MultiDiscrete(space.nvec)
        case Box() if np.issubdtype(space.dtype, np.floating):
            return float_box(space)
    raise ConfigError(
        f"{space} is not an action space that policies support.",
        "Register the environment with a wrapper whose actions are Discrete, MultiDiscrete or a Box of floats.",
    )


def env_actions(space: Space[Any], actions: np.ndarray) -> np.ndarray:
    """Convert policy actions to environment actions: clipped to the bounds, in its dtype. Always a copy. [B, ...]"""
    match space:
        case Discrete() | MultiDiscrete():
            return actions.astype(space.dtype) + space.start
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
        case Box():
            return bool(((actions >= space.low) & (actions <= space.high)).all())
    return False


def sample_action(space: Space[Any], stream: RandomStream, counter: int, count: int) -> torch.Tensor:
    """Sample `count` actions [count, ...]. A missing Box bound is -1 or 1, or lies 2 beyond the other bound."""
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


def tensor_dtype(space: Space[Any]) -> torch.dtype:
    """Return the dtype of a tensor that holds values of a space."""
    return torch.from_numpy(np.empty(0, space.dtype)).dtype
