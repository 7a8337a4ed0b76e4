"""Encoding of observations of any Gymnasium space for storage. Does not import torch, which workers do not need.

An observation stays uint8 where it is uint8 (an image) and is float32 everywhere else. Discrete and MultiDiscrete
values become one-hot vectors, since their order means nothing to a network. Dict and Tuple become trees by name.
"""

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from lockstep.config import ConfigError


def encoded_space(space: Space[Any]) -> Space[Any]:
    """Return the space of the encoded observations: a Box of uint8 or float32, or a Dict of such boxes."""
    match space:
        case Box() if space.dtype == np.uint8:
            return space
        case Box():
            return float_box(space)
        case Discrete():
            return Box(0, 1, (int(space.n),), np.float32)
        case MultiDiscrete():
            return Box(0, 1, (int(space.nvec.sum()),), np.float32)
        case MultiBinary():
            return Box(0, 1, space.shape, np.float32)
        case Dict() | Tuple():
            # A list of pairs, because Dict would sort a mapping.
            return Dict([(name, encoded_space(part)) for name, part in _parts(space)])
    raise ConfigError(
        f"{space} cannot be stored as a tensor.",
        "Register the environment with a wrapper whose observations are Box, Discrete, MultiDiscrete, MultiBinary, "
        "or a Dict or Tuple of them.",
    )


def encode_obs(space: Space[Any], value: Any, arrays: Any, row: int) -> None:
    """Write one observation of `space` to a row of the arrays of its encoded space."""
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
                encode_obs(part, value[name], arrays[name], row)
        case Tuple():
            for (name, part), piece in zip(_parts(space), value, strict=True):
                encode_obs(part, piece, arrays[name], row)


def float_box(space: Box) -> Box:
    """Return the box with its bounds in float32."""
    with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite
        return Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)


def _parts(space: Dict | Tuple) -> list[tuple[str, Space[Any]]]:
    if isinstance(space, Dict):
        return list(space.items())
    return [(str(index), part) for index, part in enumerate(space)]
