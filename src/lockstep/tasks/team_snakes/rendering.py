"""Team snakes as text and as images. The trained team is A, B, C and green; the other X, Y, Z and orange."""

from collections.abc import Mapping

import numpy as np

from lockstep.tasks.rendering.board import blend, draw_board, rounded_square
from lockstep.tasks.team_snakes.rules import COLUMN, HEIGHT, RING, ROW, SNAKES, START_LENGTH, TEAM, WIDTH, Game

_LETTERS = "ABCXYZ"
_STEPS = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])  # up, down, left, right
_BEAN, _SHINE, _EYE = np.array([[236.0, 196, 80], [255, 236, 180], [20, 24, 28]])
_SKINS = np.array(
    [
        [[28.0, 110, 84], [82, 196, 124], [150, 230, 150]],  # ours: tail, neck, face
        [[128, 62, 32], [214, 120, 62], [244, 172, 116]],
    ]
)


def as_text(game: Game, side: int) -> str:
    """Draw the board as text; `side` is our team, 0 or 1."""
    image = np.full((HEIGHT, WIDTH), " .")
    for position in _positions(game["beans"][: game["served"]]):
        image[tuple(position)] = " *"
    for snake, cells in enumerate(_snakes(game)):
        letter = _LETTERS[(snake - side * TEAM) % SNAKES]
        image[tuple(cells.T)] = f" {letter.lower()}"
        image[tuple(cells[:1].T)] = f" {letter}"
    edge = "+" + "-" * (2 * WIDTH + 1) + "+"
    rows = ["|" + "".join(cells) + " |" for cells in image]
    return "\n".join([edge, *rows, edge])


def score(game: Game, side: int) -> str:
    """Return the score of a game, ours first."""
    # A snake that could not return to the board has no gain.
    gains = np.maximum(game["length"] - START_LENGTH, 0).reshape(2, TEAM).sum(axis=1)
    return f"score {gains[side]} : {gains[1 - side]}"


def winner(info: Mapping[str, float]) -> str:
    """Return the final score and the winner from the metrics of a game."""
    outcome = "draw" if info["drawn"] else "green wins" if info["won"] else "orange wins"
    return f"score {info['score']:.0f} : {info['conceded']:.0f}  {outcome}"


def as_frame(game: Game, side: int) -> np.ndarray:
    """Draw the board as an image, uint8 [height, width, 3]."""
    image = draw_board(HEIGHT, WIDTH)
    for position in _positions(game["beans"][: game["served"]]):
        blend(image, position, rounded_square(6, 6), _BEAN)
        blend(image, position - 0.1, rounded_square(2, 2), _SHINE)
    for snake, cells in enumerate(_snakes(game)):
        tail, neck, face = _SKINS[int(snake // TEAM != side)]
        for index in range(len(cells) - 1, -1, -1):
            color = neck + index / len(cells) * (tail - neck)
            for neighbor in (index - 1, index + 1):
                if 0 <= neighbor < len(cells):
                    _paint_half(image, cells[index], cells[neighbor], color)
        if len(cells):
            blend(image, cells[0], rounded_square(10, 7), face)
            ahead = _STEPS[game["heading"][snake]]
            for eye in (-1, 1):
                blend(image, cells[0] + 0.12 * ahead + 0.2 * eye * ahead[::-1], rounded_square(2.5, 2.5), _EYE)
    return image.astype(np.uint8)


def _paint_half(image: np.ndarray, cell: np.ndarray, neighbor: np.ndarray, color: np.ndarray) -> None:
    """Draw the body from a cell half of the way to the next one, the short way around the torus."""
    size = np.array([HEIGHT, WIDTH])
    offset = (neighbor - cell + size + size // 2) % size - size // 2
    for fraction in (0.0, 0.25, 0.5) if np.abs(offset).sum() == 1 else (0.0,):
        blend(image, cell + fraction * offset, rounded_square(9, 6), color)


def _snakes(game: Game) -> list[np.ndarray]:
    """Return the rows and columns [length, 2] of each snake, head first."""
    slots = [(front - np.arange(length)) % RING for front, length in zip(game["front"], game["length"], strict=True)]
    return [_positions(body[snake]) for body, snake in zip(game["body"], slots, strict=True)]


def _positions(cells: np.ndarray) -> np.ndarray:
    return np.stack([ROW[cells], COLUMN[cells]], axis=-1)
