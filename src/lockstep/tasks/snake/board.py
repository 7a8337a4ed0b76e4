"""State of a Snake board: its fields, their validation, and rendering. Shared by both backends.

Shapes: E boards of a lane, G size, C = G x G cells; a cell's number is row x G + column.
"""

from collections.abc import Mapping
from typing import NamedTuple, Self

import numpy as np

from lockstep.lanes import Lanes
from lockstep.rng import RandomStream
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
    hunger: int
    food: float
    death: float
    step: float


def start_cells(size: int) -> list[int]:
    """Return the cells of the snake at the start of an episode, from tail to head: in the middle, heading right."""
    middle = size // 2 * size + size // 2
    return [middle - (START_LENGTH - 1) + slot for slot in range(START_LENGTH)]


def board_keys(lanes: Lanes, share: int) -> list[int]:
    """Return the keys of the local boards. They depend on a board's global index, not on the process that hosts it."""
    indices = [lane * share + board for lane in lanes.local for board in range(share)]
    return [RandomStream(lanes.seed, "snake", index).draw_seed(0) for index in indices]


def actions_error(problem: str, boards: int) -> ValueError:
    return ValueError(f"{problem}.\nGive each of the {boards} boards 0 (left), 1 (right), 2 (up) or 3 (down).")


def is_valid(state: Mapping[str, np.ndarray]) -> bool:
    """Whether boards are valid game states. Steps check no index: on other states they could write out of bounds."""
    body, planes = state["body"], state["planes"]
    count, cells = body.shape
    length, front, heading, food = (state[name] for name in ("length", "front", "heading", "food"))
    limits = ((length, 2, cells), (front, 0, cells), (heading, 0, 4), (food, 0, cells), (body, 0, cells))
    if any((values < least).any() or (values >= limit).any() for values, least, limit in limits):
        return False
    rows, behind = np.nonzero(np.arange(cells) < length[:, None])  # every cell of every snake, head first
    lies = body[rows, (front[rows] - behind) % cells]
    shown, each = np.zeros_like(planes), np.arange(count)
    shown[rows, BODY, lies] = 1
    shown[each, HEAD, body[each, front]] = shown[each, FOOD, food] = 1
    distinct = (shown[:, BODY].sum(axis=1) == length).all()  # no cell twice
    free = not shown[each, BODY, food].any()
    return bool(distinct and free and (shown == planes).all())


# -- rendering ---------------------------------------------------------------------------------------------------------


class Picture(NamedTuple):
    """One board, ready to be drawn."""

    size: int
    snake: np.ndarray
    """[length, 2] rows and columns, from tail to head."""
    food: np.ndarray
    """[2] row and column."""
    heading: int

    @classmethod
    def of(cls, size: int, board: Mapping[str, int], body: np.ndarray) -> Self:
        """Build from the scalars of a board by name and the ring buffer of its body [C]."""
        slots = np.arange(board["front"] - board["length"] + 1, board["front"] + 1) % body.size
        snake = np.stack(np.divmod(body[slots], size), axis=-1)
        return cls(size, snake, np.array(np.divmod(board["food"], size)), board["heading"])

    def render_text(self) -> str:
        image = np.full((self.size, self.size), " .")
        image[tuple(self.food)] = " *"
        image[tuple(self.snake.T)] = " o"
        image[tuple(self.snake[-1])] = " @"
        wall = "+" + "-" * (2 * self.size + 1) + "+"
        return "\n".join([wall, *("|" + "".join(cells) + " |" for cells in image), wall])

    def render(self) -> np.ndarray:
        """RGB image, uint8 [height, width, 3]."""
        snake, image = self.snake, draw_board(self.size, self.size)
        blend(image, self.food, rounded_square(8, 8), _APPLE)
        blend(image, self.food - 0.12, rounded_square(2, 2), _SHINE)
        cells, skin = np.arange(len(snake)), rounded_square(9, 6)
        for along in np.linspace(0, len(snake) - 1, 4 * len(snake) - 3):  # four shapes per cell make a smooth body
            place = np.array([np.interp(along, cells, axis) for axis in snake.T])
            blend(image, place, skin, _TAIL + along / len(snake) * (_NECK - _TAIL))
        blend(image, snake[-1], rounded_square(10, 7), _FACE)
        ahead = np.array([ROW_STEP[self.heading], COLUMN_STEP[self.heading]])
        for side in (-1, 1):
            blend(image, snake[-1] + 0.12 * ahead + 0.2 * side * ahead[::-1], rounded_square(2.5, 2.5), _EYE)
        return image.astype(np.uint8)


# Colors of a frame, in RGB.
_APPLE, _SHINE, _EYE = np.array([[236.0, 84, 80], [255, 190, 180], [20, 24, 28]])
_TAIL, _NECK, _FACE = np.array([[28.0, 110, 84], [82, 196, 124], [150, 230, 150]])
