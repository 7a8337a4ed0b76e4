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


def rounded_square(half: float, corner: float) -> np.ndarray:
    """Return the coverage [CELL, CELL, 1] of each pixel by a square with round corners, so that its edge is smooth."""
    beyond = np.maximum(np.abs(np.arange(CELL) - (CELL - 1) / 2) - (half - corner), 0)
    return np.clip(corner + 0.5 - np.hypot(beyond[:, None], beyond), 0, 1)[..., None]


def blend(image: np.ndarray, place: np.ndarray, shape: np.ndarray, colour: np.ndarray) -> None:
    """Blend a colored shape into the image at a row and column, half a cell beyond the board at most."""
    top, left = np.rint(place * CELL).astype(int) + WALL
    patch = image[top : top + CELL, left : left + CELL]
    patch += shape * (colour - patch)
