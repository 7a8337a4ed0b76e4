"""Drawing of game boards: a tiled floor, and shapes with smooth edges blended into it.

Positions are rows and columns of cells, and may lie between cells. Sizes are in pixels, colors in RGB.
"""

import numpy as np

CELL, WALL = 24, 12
_TILES = np.array([[26.0, 29, 37], [31, 35, 44]])


def draw_board(rows: int, columns: int) -> np.ndarray:
    """Return an image of an empty board with its wall, float64 [height, width, 3]."""
    tiles = _TILES[np.indices((rows, columns)).sum(axis=0) % 2].repeat(CELL, axis=0).repeat(CELL, axis=1)
    return np.pad(tiles, ((WALL, WALL), (WALL, WALL), (0, 0)), constant_values=14)


def rounded_square(half_width: float, radius: float) -> np.ndarray:
    """Return the coverage [CELL, CELL, 1] of each pixel by a square with round corners, so that its edge is smooth."""
    outside = np.maximum(np.abs(np.arange(CELL) - (CELL - 1) / 2) - (half_width - radius), 0)
    return np.clip(radius + 0.5 - np.hypot(outside[:, None], outside), 0, 1)[..., None]


def blend(image: np.ndarray, position: np.ndarray, shape: np.ndarray, color: np.ndarray) -> None:
    """Blend a colored shape into the image at a row and column, half a cell beyond the board at most."""
    top, left = np.rint(position * CELL).astype(int) + WALL
    patch = image[top : top + CELL, left : left + CELL]
    patch += shape * (color - patch)
