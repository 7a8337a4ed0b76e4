"""Actions of Dict and Tuple spaces as one row of numbers. Does not import torch, which workers do not need.

The parts of such an action follow one another in the order of the space; discrete choices are whole numbers. Policies
count choices from 0, in float32. Environments and checkpoints use float64, which also holds float64 and int64 parts.

Shapes: B environments, W columns of a row.
"""

import math
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple


def leaf_spaces(space: Space[Any]) -> list[Space[Any]]:
    """Return the parts of nested Dict and Tuple spaces, in order."""
    match space:
        case Dict():
            return [leaf for part in space.values() for leaf in leaf_spaces(part)]
        case Tuple():
            return [leaf for part in space for leaf in leaf_spaces(part)]
    return [space]


def stored_space(space: Space[Any]) -> Space[Any]:
    """Return the space of the array that holds an environment's action: its own, or a row for Dict and Tuple."""
    if not isinstance(space, Dict | Tuple):
        return space
    bounds = [_bounds(leaf) for leaf in leaf_spaces(space)]
    low, high = (np.concatenate([np.ravel(bound[end]) for bound in bounds]) for end in (0, 1))
    return Box(low, high, dtype=np.float64)


def _bounds(space: Space[Any]) -> tuple[Any, Any]:
    match space:
        case Discrete():
            return np.float64(space.start), np.float64(space.start + space.n - 1)
        case MultiDiscrete():
            return space.start.astype(np.float64), (space.start + space.nvec - 1).astype(np.float64)
        case MultiBinary():
            return np.zeros(space.shape), np.ones(space.shape)
        case Box():
            return space.low.astype(np.float64), space.high.astype(np.float64)
    raise TypeError(f"{space} is not an action space that policies support")


def split_columns(space: Space[Any], rows: np.ndarray) -> list[tuple[Space[Any], np.ndarray]]:
    """Return the parts of a Dict or Tuple space with their columns of rows [B, W], in the shape of the part."""
    leaves = leaf_spaces(space)
    widths = [math.prod(leaf.shape or ()) for leaf in leaves]
    columns = np.split(rows, np.cumsum(widths)[:-1], axis=1)
    pairs = zip(leaves, columns, strict=True)
    return [(leaf, part.reshape(len(rows), *(leaf.shape or ()))) for leaf, part in pairs]


def unflatten_actions(space: Space[Any], rows: np.ndarray) -> Any:
    """Return rows [B, W] in the form of a Dict or Tuple space: nested arrays [B, ...] in the dtypes of their parts."""
    parts = iter([part.astype(leaf.dtype) for leaf, part in split_columns(space, rows)])
    return _nest(space, parts)


def split_actions(space: Space[Any], actions: np.ndarray) -> list[Any]:
    """Return actions one by one. A discrete action is a plain int, since some environments use it as a dict key."""
    if isinstance(space, Dict | Tuple):
        parts = [split_actions(leaf, part.astype(leaf.dtype)) for leaf, part in split_columns(space, actions)]
        return [_nest(space, iter(row)) for row in zip(*parts, strict=True)]
    # A copy, because an environment may scale its action in place, or keep it after the table changed.
    return actions.tolist() if isinstance(space, Discrete) else list(actions.copy())


def _nest(space: Space[Any], parts: Any) -> Any:
    """Return the next parts in the structure of a space."""
    match space:
        case Dict():
            return {name: _nest(part, parts) for name, part in space.items()}
        case Tuple():
            return tuple(_nest(part, parts) for part in space)
    return next(parts)
