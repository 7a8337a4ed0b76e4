"""Features of a board, compiled: what a search from the head finds in each direction, and the cells near the head.

A cell of the body is free again after as many moves as it has cells behind it. The search therefore knows when it may
enter a cell, on the assumption that the snake eats nothing on the way.

Shapes: C = size x size cells.
"""

from typing import Any, TypeAlias

import numpy as np
from numba import njit

from lockstep.tasks.snake.board import COLUMN_STEP, ROW_STEP

BY_DIRECTION, OWN, VIEW = 10, 15, 7
FEATURES = 4 * BY_DIRECTION + OWN + VIEW * VIEW
"""Per direction: open, food, open directions after it, straight free cells, connected free cells, these compared with
the moves until a cell around them is free, cells that the search reaches, whether it reaches the food, closeness of
food and of tail. Own: heading (4), length, moves since the last food, offsets of food and tail (4), position of the
head (2) and its parity (2), whether the board is half full. Then the cells around the head: 0 for free, 1 for walls,
and the fraction of the snake that leaves before it for the body."""

Board: TypeAlias = Any
"""A record with the fields of a board. numba knows them, mypy does not."""


@njit(cache=True, nogil=True)
def new_search_buffers(cells: int) -> np.ndarray:
    """Return the buffers [3, C] of a search: moves until a cell is free, arrival at it, and the queue."""
    return np.zeros((3, cells), np.int32)


@njit(cache=True, nogil=True)
def show_features(
    board: Board, body: np.ndarray, size: int, max_steps: int, buffers: np.ndarray, out: np.ndarray
) -> None:
    """Write the features [FEATURES], from -1 to 1."""
    out[:] = 0.0
    freed = buffers[0]
    freed[:] = 0
    for moves in range(1, board.length + 1):  # the tail, which leaves with the next move, first
        freed[body[(board.front - board.length + moves) % body.size]] = moves
    head, tail = body[board.front], body[(board.front - board.length + 1) % body.size]
    for direction in range(4):
        cell = _neighbor(head, direction, size)
        if cell >= 0 and freed[cell] <= 1:
            _search(board, cell, tail, size, buffers, out[direction * BY_DIRECTION :])
            out[direction * BY_DIRECTION + 3] = _straight(cell, direction, size, freed)
    own = out[4 * BY_DIRECTION :]
    own[board.heading] = 1.0
    own[4] = board.length / body.size
    own[5] = board.hungry / max_steps
    row, column = head // size, head % size
    own[6], own[7] = (board.food // size - row) / size, (board.food % size - column) / size
    own[8], own[9] = (tail // size - row) / size, (tail % size - column) / size
    own[10], own[11] = 2 * row / (size - 1) - 1, 2 * column / (size - 1) - 1
    own[12], own[13] = row % 2, column % 2
    own[14] = 2 * board.length > body.size
    index = 4 * BY_DIRECTION + OWN
    for y in range(row - VIEW // 2, row + VIEW // 2 + 1):
        for x in range(column - VIEW // 2, column + VIEW // 2 + 1):
            inside = 0 <= y < size and 0 <= x < size
            out[index] = freed[y * size + x] / board.length if inside else 1.0
            index += 1


@njit(cache=True, nogil=True)
def _search(board: Board, start: int, tail: int, size: int, buffers: np.ndarray, out: np.ndarray) -> None:
    """Write the features of the direction that leads to the cell `start`, except for its straight free cells."""
    grown = start == board.food  # the tail then waits for one move
    area, first_exit = _connected_area(start, grown, size, buffers)
    count, neighbors = _reachable(start, grown, size, buffers)
    arrival = buffers[1]
    out[0] = 1.0
    out[1] = grown
    out[2] = neighbors / 3
    out[4] = min(area / max(arrival.size - board.length, 1), 1.0)
    out[5] = min(area / first_exit, 1.0)
    out[6] = count / arrival.size
    if arrival[board.food]:
        out[7] = 1.0
        out[8] = 1.0 - min(arrival[board.food] / (4 * size), 1.0)
    if arrival[tail]:
        out[9] = 1.0 - min(arrival[tail] / (4 * size), 1.0)


@njit(cache=True, nogil=True)
def _connected_area(start: int, grown: bool, size: int, buffers: np.ndarray) -> tuple[int, int]:
    """Return how many free cells are connected to a cell, and the moves until the first cell around them is free."""
    freed, seen, queue = buffers[0], buffers[1], buffers[2]
    seen[:] = 0
    seen[start] = 1
    queue[0], count, served, first_exit = start, 1, 0, freed.size
    while served < count:
        cell = queue[served]
        served += 1
        for direction in range(4):
            other = _neighbor(cell, direction, size)
            if other < 0 or seen[other]:
                continue
            if freed[other]:
                first_exit = min(first_exit, freed[other] + grown)
            else:
                seen[other] = 1
                queue[count] = other
                count += 1
    return count, first_exit


@njit(cache=True, nogil=True)
def _reachable(start: int, grown: bool, size: int, buffers: np.ndarray) -> tuple[int, int]:
    """Search with moving body; return the number of reached cells, and of cells that can be entered from `start`.

    Writes the move at which each cell is entered, 0 for cells that are not reached.
    """
    freed, arrival, queue = buffers[0], buffers[1], buffers[2]
    arrival[:] = 0
    arrival[start] = 1
    queue[0], count, served, neighbors = start, 1, 0, 0
    while served < count:
        cell = queue[served]
        moves = arrival[cell] + 1
        for direction in range(4):
            other = _neighbor(cell, direction, size)
            if other >= 0 and not arrival[other] and (not freed[other] or freed[other] + grown <= moves):
                neighbors += served == 0
                arrival[other] = moves
                queue[count] = other
                count += 1
        served += 1
    return count, neighbors


@njit(cache=True, nogil=True)
def _neighbor(cell: int, direction: int, size: int) -> int:
    """Return the next cell in a direction. -1: a wall."""
    row, column = cell // size + ROW_STEP[direction], cell % size + COLUMN_STEP[direction]
    return row * size + column if 0 <= row < size and 0 <= column < size else -1


@njit(cache=True, nogil=True)
def _straight(cell: int, direction: int, size: int, freed: np.ndarray) -> float:
    """Return how many cells are free in a direction, from `cell` on, as a fraction of the board size."""
    moves = 0
    while cell >= 0 and freed[cell] == 0:
        cell = _neighbor(cell, direction, size)
        moves += 1
    return moves / size
