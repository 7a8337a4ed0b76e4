"""Spaces as tensors: the form in which observations and actions of any Gymnasium space travel, and random actions.

An observation stays uint8 where it is uint8 (a picture) and is float32 everywhere else. A choice (Discrete,
MultiDiscrete) is a one-hot vector, since its number means nothing to a network. Dict and Tuple are trees by name.

Shapes: B environments.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from lockstep.config import ConfigError
from lockstep.streams import Stream
from lockstep.trees import Tree


def stored_space(space: Space[Any]) -> Space[Any]:
    """The space of an environment's observations once they are stored: Box of uint8 or float32, or a Dict of such."""
    match space:
        case Box() if space.dtype == np.uint8:
            return space
        case Box():
            return _float_box(space)
        case Discrete():
            return Box(0, 1, (int(space.n),), np.float32)
        case MultiDiscrete():
            return Box(0, 1, (int(space.nvec.sum()),), np.float32)
        case MultiBinary():
            return Box(0, 1, space.shape, np.float32)
        case Dict() | Tuple():
            # A list of pairs, because Dict would sort a mapping.
            return Dict([(name, stored_space(part)) for name, part in _parts(space)])
    raise ConfigError(
        f"{space} cannot be stored as a tensor.",
        "Register the environment with a wrapper whose observations are Box, Discrete, MultiDiscrete, MultiBinary, "
        "or a Dict or Tuple of them.",
    )


def allocate(stored: Space[Any], count: int, pinned: bool) -> Tree:
    """Zeros for `count` observations of a stored space; pinned memory can be copied to a GPU without waiting."""
    if isinstance(stored, Dict):
        return {name: allocate(part, count, pinned) for name, part in stored.items()}
    return torch.zeros((count, *(stored.shape or ())), dtype=tensor_dtype(stored), pin_memory=pinned)  # [B, ...]


def store(space: Space[Any], value: Any, arrays: Any, row: int) -> None:
    """Write one observation of `space` to a row of the arrays of its stored space."""
    match space:
        case Box() | MultiBinary():
            arrays[row] = value
        case Discrete():
            arrays[row] = 0
            arrays[row, value - space.start] = 1
        case MultiDiscrete():
            sizes = space.nvec.ravel()
            arrays[row] = 0
            arrays[row, np.cumsum(sizes) - sizes + np.ravel(value - space.start)] = 1
        case Dict():
            for name, part in space.items():
                store(part, value[name], arrays[name], row)
        case Tuple():
            for (name, part), piece in zip(_parts(space), value, strict=True):
                store(part, piece, arrays[name], row)


def policy_space(space: Space[Any]) -> Space[Any]:
    """The space a policy acts in: choices counted from 0, continuous actions in float32."""
    match space:
        case Discrete():
            return Discrete(int(space.n))
        case MultiDiscrete():
            return MultiDiscrete(space.nvec)
        case Box() if np.issubdtype(space.dtype, np.floating):
            return _float_box(space)
    raise ConfigError(
        f"{space} is not a space that policies act in.",
        "Register the environment with a wrapper whose actions are Discrete, MultiDiscrete or a Box of floats.",
    )


def env_actions(space: Space[Any], actions: np.ndarray) -> np.ndarray:
    """A policy's actions as an environment's own: inside the bounds, in its dtype. Always a copy. [B, ...]"""
    match space:
        case Discrete() | MultiDiscrete():
            return actions.astype(space.dtype) + space.start
        case Box():
            return np.clip(actions, space.low, space.high).astype(space.dtype)
    raise TypeError(f"{space} has no actions of a policy")


def sample_action(space: Space[Any], stream: Stream, counter: int, count: int) -> torch.Tensor:
    """`count` random actions; a side on which a Box has no bound reaches to 1, or 2 beyond the other. [count, ...]"""
    draw = stream.generator(counter)
    match space:
        case Discrete():
            return torch.from_numpy(draw.integers(space.n, size=count) + space.start)
        case MultiDiscrete():
            return torch.from_numpy(draw.integers(space.nvec, size=(count, *space.shape)) + space.start)
        case Box():
            low = np.where(np.isfinite(space.low), space.low, np.minimum(space.high, 1) - 2)
            high = np.where(np.isfinite(space.high), space.high, np.maximum(low + 2, 1))
            return torch.from_numpy(draw.uniform(low, high, (count, *space.shape)).astype(np.float32))
    raise TypeError(f"no random actions are known for {space}")


def tensor_dtype(space: Space[Any]) -> torch.dtype:
    """The dtype of a tensor that holds values of a space."""
    return torch.from_numpy(np.empty(0, space.dtype)).dtype


def _float_box(space: Box) -> Box:
    with np.errstate(over="ignore"):  # a bound beyond float32 is no bound
        return Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)


def _parts(space: Dict | Tuple) -> list[tuple[str, Space[Any]]]:
    if isinstance(space, Dict):
        return list(space.items())
    return [(str(place), part) for place, part in enumerate(space)]
