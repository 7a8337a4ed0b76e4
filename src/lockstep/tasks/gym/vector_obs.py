"""Observations of vector environments: encoding of a batch, selection of one row, and images.

Shapes: E environments of an instance, H height, W width.
"""

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, MultiBinary, Tuple

from lockstep.tasks.gym.obs_encoding import encode_obs
from lockstep.tasks.rendering.image import enlarge


def encode_batch(space: Space[Any], batch: Any, arrays: Any, rows: range) -> None:
    """Write a batch of observations of `space` [E, ...] to consecutive rows of the arrays of its encoded space."""
    match space:
        case Box() | MultiBinary():
            arrays[rows.start : rows.stop] = batch
        case Dict():
            for name, part in space.items():
                encode_batch(part, batch[name], arrays[name], rows)
        case Tuple():
            for index, part in enumerate(space):
                encode_batch(part, batch[index], arrays[str(index)], rows)
        case _:
            for row, value in zip(rows, batch, strict=True):
                encode_obs(space, value, arrays, row)


def select_row(space: Space[Any], batch: Any, index: int) -> Any:
    """Return one observation of a batch, which may also be an array of objects."""
    if isinstance(batch, np.ndarray) and batch.dtype == object:
        return batch[index]
    match space:
        case Dict():
            return {name: select_row(part, batch[name], index) for name, part in space.items()}
        case Tuple():
            return tuple(select_row(part, batch[place], index) for place, part in enumerate(space))
    return batch[index]


def is_image(space: Space[Any]) -> bool:
    """Return whether observations can be shown: pixels, or a stack of frames."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) in (3, 4)


def image_of(obs: np.ndarray) -> np.ndarray:
    """Return the newest frame of an observation as an image, uint8 [H, W, 3], enlarged to a visible size."""
    if obs.ndim == 4 or obs.shape[-1] not in (1, 3):
        obs = obs[-1]  # [H, W] or [H, W, 3]: the last of a stack
    obs = obs[..., None] if obs.ndim == 2 else obs
    image = np.broadcast_to(obs, (*obs.shape[:2], 3))
    return enlarge(image)
