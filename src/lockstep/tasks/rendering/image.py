"""Images of environments in one form.

Shapes: H height, W width.
"""

from typing import Any

import numpy as np

MIN_SIDE = 240
"""Smallest height in pixels of an image that was enlarged."""
GRID_SIDE = 64
"""Height in pixels below which the frame of an environment is a grid, with a pixel for each cell."""


def frame_image(frame: Any) -> np.ndarray:
    """Return what an environment rendered as uint8 [H, W, 3]. Floats are brightness from 0 to 1; grids are enlarged."""
    image = np.asarray(frame)
    if image.dtype.kind == "f":
        image = np.rint(255 * image)
    image = image.astype(np.uint8)
    return enlarge(image) if len(image) < GRID_SIDE else image


def enlarge(image: np.ndarray) -> np.ndarray:
    """Enlarge an image by a whole factor to a visible size."""
    scale = -(-MIN_SIDE // len(image))
    return image.repeat(scale, axis=0).repeat(scale, axis=1)
