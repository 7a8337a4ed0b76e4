"""State of a Snake board: its fields, their validation, and rendering. Shared by both backends.

Shapes: E boards of a lane, G size, C = G x G cells; a cell's number is row x G + column.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lockstep.tasks.rendering.board import blend, draw_board, rounded_square

LEFT, RIGHT, UP, DOWN = range(4)  # opposite headings differ in the last bit
ROW_STEP, COLUMN_STEP = (0, 0, -1, 1), (-1, 1, 0, 0)
BODY, FOOD, HEAD = range(3)  # planes of an observation; the body includes the head
START_LENGTH = 3

FIELDS = (
    "key",  # of the board's random draws
    "episode",  # index of the current episode
    "length",  # of the snake
    "front",  # slot of the head in the ring buffer of the body; the tail is length - 1 slots before it
    "heading",  # direction of the last move
    "food",  # cell of the food
    "hungry",  # steps since the last food
)
"""Scalars of one board, int64 each. A saved state also has `body` and `planes`."""


class SnakeRules(NamedTuple):
    """Settings that a step needs."""

    size: int
    max_steps_without_food: int
    food_reward: float
    death_reward: float
    step_reward: float


def actions_error(problem: str, boards: int) -> ValueError:
    return ValueError(f"{problem}.\nGive each of the {boards} boards 0 (left), 1 (right), 2 (up) or 3 (down).")


def is_valid(state: Mapping[str, np.ndarray]) -> bool:
    """Whether boards are valid game states. Steps check no index: on other states they could write out of bounds."""
    body, planes = state["body"], state["planes"]
    count, cells = body.shape
    length, front, heading, food = (state[name] for name in ("length", "front", "heading", "food"))
    bounds = ((length, 2, cells), (front, 0, cells), (heading, 0, 4), (food, 0, cells), (body, 0, cells))
    if any((values < low).any() or (values >= high).any() for values, low, high in bounds):
        return False
    rows, offsets = np.nonzero(np.arange(cells) < length[:, None])  # every cell of every snake, head first
    occupied = body[rows, (front[rows] - offsets) % cells]
    expected, boards = np.zeros_like(planes), np.arange(count)
    expected[rows, BODY, occupied] = 1
    expected[boards, HEAD, body[boards, front]] = expected[boards, FOOD, food] = 1
    distinct = (expected[:, BODY].sum(axis=1) == length).all()  # no cell twice
    free = not expected[boards, BODY, food].any()
    return bool(distinct and free and (expected == planes).all())


# -- rendering ---------------------------------------------------------------------------------------------------------


# Colors of a frame, in RGB.
_APPLE, _SHINE, _EYE = np.array([[236.0, 84, 80], [255, 190, 180], [20, 24, 28]])
_TAIL, _NECK, _FACE = np.array([[28.0, 110, 84], [82, 196, 124], [150, 230, 150]])


def as_text(size: int, board: Mapping[str, int], body: np.ndarray) -> str:
    """Draw a board as text, from its scalars by name and the ring buffer of its body [C]."""
    image = np.full(size * size, " .")
    image[board["food"]] = " *"
    image[_snake(board, body)] = " o"
    image[body[board["front"]]] = " @"
    wall = "+" + "-" * (2 * size + 1) + "+"
    return "\n".join([wall, *("|" + "".join(cells) + " |" for cells in image.reshape(size, size)), wall])


def as_frame(size: int, board: Mapping[str, int], body: np.ndarray) -> np.ndarray:
    """Draw a board as an image, uint8 [height, width, 3]."""
    snake = np.stack(np.divmod(_snake(board, body), size), axis=-1)  # rows and columns
    image, food = draw_board(size, size), np.array(np.divmod(board["food"], size))
    blend(image, food, rounded_square(8, 8), _APPLE)
    blend(image, food - 0.12, rounded_square(2, 2), _SHINE)
    cells, segment = np.arange(len(snake)), rounded_square(9, 6)
    for position in np.linspace(0, len(snake) - 1, 4 * len(snake) - 3):  # four shapes per cell make a smooth body
        center = np.array([np.interp(position, cells, axis) for axis in snake.T])
        blend(image, center, segment, _TAIL + position / len(snake) * (_NECK - _TAIL))
    blend(image, snake[-1], rounded_square(10, 7), _FACE)
    ahead = np.array([ROW_STEP[board["heading"]], COLUMN_STEP[board["heading"]]])
    for side in (-1, 1):
        blend(image, snake[-1] + 0.12 * ahead + 0.2 * side * ahead[::-1], rounded_square(2.5, 2.5), _EYE)
    return image.astype(np.uint8)


def score(size: int, length: int) -> str:
    """Return the food eaten so far, of all that a board has room for."""
    return f"food {length - START_LENGTH} of {size * size - START_LENGTH}"


def describe_end(info: Mapping[str, float]) -> str:
    """Return the result of an episode from its metrics."""
    return f"food {info['apples']:.0f}, " + ("board filled" if info["full"] else "game over")


def _snake(board: Mapping[str, int], body: np.ndarray) -> np.ndarray:
    """Return the cells [length] of the snake, from tail to head."""
    return body[np.arange(board["front"] - board["length"] + 1, board["front"] + 1) % body.size]
