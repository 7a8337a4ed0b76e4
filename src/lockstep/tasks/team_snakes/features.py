"""Observation of a snake, compiled: a vector of features, or a grid with its head in the middle.

Both are translation invariant on the torus: positions are offsets from the head, the short way around. Directions are
those of the board, or egocentric: then the snake's heading is up, in observations and in actions.
"""

import numpy as np
from numba import njit

from lockstep.tasks.team_snakes.opponents import MAX_DISTANCE, distance, is_threatened, nearest_bean, room
from lockstep.tasks.team_snakes.rules import (
    AROUND,
    BEAN,
    BEANS,
    CELLS,
    COLUMN,
    DOWN,
    FIRST,
    HEIGHT,
    LEFT,
    RIGHT,
    ROW,
    SNAKES,
    TEAM,
    UP,
    WIDTH,
    Game,
    cell_of,
)
from lockstep.tasks.team_snakes.survival import MAX_SURVIVAL, new_search_buffers, survival, write_occupied_moves

BY_DIRECTION, BY_BEAN, BY_SNAKE, OWN = 7, 4, 7, 9
FEATURES = 4 * BY_DIRECTION + BEANS * BY_BEAN + (SNAKES - 1) * BY_SNAKE + OWN
"""Per direction: free, free distance, whether another head may come there, closeness of a bean from there, closeness of
a bean that no teammate is nearer to, reachable room, moves to survive. Per bean, nearest first: offset, closeness,
whether this snake is nearest. Per other snake, teammates first, nearest first: offset, length, heading. Own heading on
the board, length, index in the team, and side."""
PLANES = 7
OWN_BODY, TEAM_BODIES, OTHER_BODIES, BEAN_PLANE, TEAM_HEADS, OTHER_HEADS, TAILS = range(PLANES)
ON_BOARD = np.array(
    [[UP, DOWN, LEFT, RIGHT], [DOWN, UP, RIGHT, LEFT], [LEFT, RIGHT, DOWN, UP], [RIGHT, LEFT, UP, DOWN]]
)
"""[4, 4] the board direction of each seen direction, by the direction the snake faces (up for a fixed view)."""
AS_SEEN = np.argsort(ON_BOARD, axis=1)
"""[4, 4] the inverse of ON_BOARD."""
_LENGTH_SCALE, _MAX_ROOM = 20, 32


@njit(cache=True, nogil=True)
def show_legal(game: Game, snake: int, facing: int, legal: np.ndarray) -> None:
    """Write the action mask [4]: 0 for the reverse."""
    legal[:] = 1
    legal[AS_SEEN[facing, game.heading[snake] ^ 1]] = 0


@njit(cache=True, nogil=True)
def show_features(game: Game, snake: int, facing: int, marks: np.ndarray, out: np.ndarray) -> None:
    """Write the features [FEATURES], from -1 to 1; all 0 for a snake off the board. `marks` is the buffer of `room`."""
    out[:] = 0.0
    if game.length[snake] == 0:
        return
    head, index = cell_of(game, snake, 0), 0
    claimed = _claimed_beans(game, snake)
    occupied, entered = new_search_buffers()
    write_occupied_moves(game, snake, occupied)
    for direction in ON_BOARD[facing]:
        cell = AROUND[head, direction]
        out[index] = game.owner[cell] < FIRST
        out[index + 1] = _free_fraction(game, head, direction)
        out[index + 2] = is_threatened(game, snake, cell)
        out[index + 3] = 1.0 - nearest_bean(game, cell, 0, True)[1] / MAX_DISTANCE
        out[index + 4] = 1.0 - nearest_bean(game, cell, claimed, True)[1] / MAX_DISTANCE
        moves = survival(cell, game.length[snake], ON_BOARD[facing], occupied, entered)
        out[index + 6] = moves / MAX_SURVIVAL
        index += BY_DIRECTION
    _measure_rooms(game, head, facing, marks, out)
    used = 0
    for _ in range(game.served):
        bean, steps = nearest_bean(game, head, used, True)
        used |= 1 << bean
        cell = game.beans[bean]
        _offset(head, cell, facing, out[index:])
        out[index + 2] = 1.0 - steps / MAX_DISTANCE
        out[index + 3] = _is_nearest(game, snake, cell, steps)
        index += BY_BEAN
    index = 4 * BY_DIRECTION + BEANS * BY_BEAN
    used = 1 << snake
    for rank in range(SNAKES - 1):
        team = snake // TEAM if rank < TEAM - 1 else 1 - snake // TEAM
        other = _next_snake(game, head, team, used)
        used |= 1 << other
        if game.length[other]:
            _offset(head, cell_of(game, other, 0), facing, out[index:])
            out[index + 2] = min(game.length[other] / _LENGTH_SCALE, 1.0)
            out[index + 3 + AS_SEEN[facing, game.heading[other]]] = 1.0
        index += BY_SNAKE
    out[index + game.heading[snake]] = 1.0
    out[index + 4] = min(game.length[snake] / _LENGTH_SCALE, 1.0)
    out[index + 5 + snake % TEAM] = 1.0
    out[index + 8] = snake // TEAM


@njit(cache=True, nogil=True)
def show_grid(game: Game, snake: int, out: np.ndarray) -> None:
    """Write the grid [PLANES, rows, columns] of 0 and 1: the part of the board around the head."""
    out[:] = 0
    if game.length[snake] == 0:
        return
    rows, columns = out.shape[1], out.shape[2]
    head = cell_of(game, snake, 0)
    top, left = ROW[head] - rows // 2 + HEIGHT, COLUMN[head] - columns // 2 + WIDTH
    for row in range(rows):
        line = (top + row) % HEIGHT * WIDTH
        for column in range(columns):
            owner = game.owner[line + (left + column) % WIDTH]
            if owner == BEAN:
                out[BEAN_PLANE, row, column] = 1
            elif owner >= FIRST:
                out[_plane(snake, owner - FIRST), row, column] = 1
    for other in range(SNAKES):
        if game.length[other]:
            heads = TEAM_HEADS if other // TEAM == snake // TEAM else OTHER_HEADS
            if other != snake:  # the own head is always in the middle
                _mark(out[heads], head, cell_of(game, other, 0))
            _mark(out[TAILS], head, cell_of(game, other, game.length[other] - 1))


@njit(cache=True, nogil=True)
def _plane(snake: int, other: int) -> int:
    if other == snake:
        return OWN_BODY
    return TEAM_BODIES if other // TEAM == snake // TEAM else OTHER_BODIES


@njit(cache=True, nogil=True)
def _mark(plane: np.ndarray, head: int, cell: int) -> None:
    """Mark a cell in a plane [rows, columns] if it is in view."""
    row = _wrap_offset(ROW[cell] - ROW[head], HEIGHT) + plane.shape[0] // 2
    column = _wrap_offset(COLUMN[cell] - COLUMN[head], WIDTH) + plane.shape[1] // 2
    if 0 <= row < plane.shape[0] and 0 <= column < plane.shape[1]:
        plane[row, column] = 1


@njit(cache=True, nogil=True)
def _wrap_offset(offset: int, size: int) -> int:
    """Return an offset on the torus, from -size / 2 to size / 2 - 1."""
    return (offset + size + size // 2) % size - size // 2


@njit(cache=True, nogil=True)
def _offset(head: int, cell: int, facing: int, out: np.ndarray) -> None:
    """Write how far below and right of the head a cell is, as fractions of half the board size."""
    below = _wrap_offset(ROW[cell] - ROW[head], HEIGHT) / (HEIGHT // 2)
    right = _wrap_offset(COLUMN[cell] - COLUMN[head], WIDTH) / (WIDTH // 2)
    if facing == UP:
        out[0], out[1] = below, right
    elif facing == DOWN:
        out[0], out[1] = -below, -right
    elif facing == LEFT:
        out[0], out[1] = right, -below
    else:
        out[0], out[1] = -right, below


@njit(cache=True, nogil=True)
def _free_fraction(game: Game, head: int, direction: int) -> float:
    """Return how far a direction is free of bodies, as a fraction of the board size."""
    size = HEIGHT if direction < 2 else WIDTH
    cell, steps = AROUND[head, direction], 0
    while steps < size - 1 and game.owner[cell] < FIRST:
        cell = AROUND[cell, direction]
        steps += 1
    return steps / (size - 1)


@njit(cache=True, nogil=True)
def _measure_rooms(game: Game, head: int, facing: int, marks: np.ndarray, out: np.ndarray) -> None:
    """Write the reachable room of each direction. Connected directions reuse the result of an earlier search."""
    first_number, searches, searched = marks[0, CELLS], 0, 0  # `searched` packs the searched directions, two bits each
    for direction in range(4):
        cell, index = AROUND[head, ON_BOARD[facing, direction]], direction * BY_DIRECTION + 5
        number = marks[0, cell] - first_number
        if number > 0:
            out[index] = out[(searched >> 2 * (number - 1) & 3) * BY_DIRECTION + 5]
            continue
        out[index] = room(game, cell, _MAX_ROOM, marks) / _MAX_ROOM
        if out[index] > 0:
            searched |= direction << 2 * searches
            searches += 1


@njit(cache=True, nogil=True)
def _claimed_beans(game: Game, snake: int) -> int:
    """Return the bit set of beans that a teammate is nearer to. In a tie, the snake that moves first is nearer."""
    claimed, first = 0, snake // TEAM * TEAM
    for bean in range(game.served):
        own = distance(cell_of(game, snake, 0), game.beans[bean], True)
        for other in range(first, first + TEAM):
            if other != snake and game.length[other]:
                steps = distance(cell_of(game, other, 0), game.beans[bean], True)
                if steps < own or (steps == own and other < snake):
                    claimed |= 1 << bean
    return claimed


@njit(cache=True, nogil=True)
def _next_snake(game: Game, head: int, team: int, used: int) -> int:
    """Return the nearest snake of a team that is not in the bit set `used`; snakes off the board come last."""
    found, nearest = 0, MAX_DISTANCE + 2
    for other in range(team * TEAM, team * TEAM + TEAM):
        steps = distance(head, cell_of(game, other, 0), True) if game.length[other] else MAX_DISTANCE + 1
        if not used >> other & 1 and steps < nearest:
            found, nearest = other, steps
    return found


@njit(cache=True, nogil=True)
def _is_nearest(game: Game, snake: int, bean: int, steps: int) -> bool:
    """Whether a snake is nearer to a bean than all others. Two that arrive together both die."""
    for other in range(SNAKES):
        if other != snake and game.length[other] and distance(cell_of(game, other, 0), bean, True) <= steps:
            return False
    return True
