"""Scripted teams, compiled, from random to cautious and evader, and the schedule of their level.

A level assigns a cost to each of the three moves of a snake: the distance to its target bean plus a risk. Distances are
measured on the flat board, as well-known players do, or around the torus (`wrapped`), which is stronger.
"""

from typing import Literal

import numpy as np
from numba import njit

from lockstep.tasks.kernels import random_below
from lockstep.tasks.team_snakes.rules import (
    AROUND,
    CELLS,
    COLUMN,
    DRAWS,
    FIRST,
    HEIGHT,
    MOVE,
    ROW,
    SNAKES,
    TEAM,
    WIDTH,
    Game,
    cell_of,
)

RANDOM, BLIND, GREEDY, WARY, CAUTIOUS, EVADER = range(6)
"""Levels. RANDOM: any move. BLIND: to the nearest bean, ignoring bodies. GREEDY: avoids bodies, a bean for each snake.
WARY: avoids blocked sides. CAUTIOUS: more so with length, avoids dead ends. EVADER: only where two steps are safe."""
LEVELS = ("random", "1", "2", "3", "4", "evader")

LevelSchedule = Literal["fixed", "linear", "exponential", "curriculum", "gate"]
CURRICULUM = (0.10, 0.30, 0.60, 0.85)
"""Fractions of a run after which the level of the curriculum rises by one."""

MAX_DISTANCE = HEIGHT // 2 + WIDTH // 2
"""Largest distance of two cells around the torus."""
# Costs of a step, of too little room or danger, and of hitting a body.
_STEP_COST, _DANGER_COST, _BODY_COST = 10, 5_000, 10_000


def name_of(level: int) -> str:
    """Return the name of a level for messages."""
    return f"level {LEVELS[level]}" if LEVELS[level].isdigit() else LEVELS[level]


def level_at(schedule: LevelSchedule, fixed: int, progress: float) -> int | None:
    """Return the level of the scripted team at a progress from 0 to 1; None if it depends on results."""
    match schedule:
        case "linear":
            return int(CAUTIOUS * progress)
        case "exponential":
            return int(CAUTIOUS * progress**1.5)
        case "curriculum":
            return sum(progress >= point for point in CURRICULUM)
        case "gate":
            return None
    return fixed


@njit(cache=True, nogil=True)
def distance(one: int, other: int, wrapped: bool) -> int:
    """Return the steps between two cells of an empty board."""
    rows, columns = abs(ROW[one] - ROW[other]), abs(COLUMN[one] - COLUMN[other])
    if wrapped:
        rows, columns = min(rows, HEIGHT - rows), min(columns, WIDTH - columns)
    return rows + columns


@njit(cache=True, nogil=True)
def nearest_bean(game: Game, cell: int, used: int, wrapped: bool) -> tuple[int, int]:
    """Return the bean nearest to a cell, without the bit set `used`, and its distance; -1 and MAX_DISTANCE if none."""
    found, nearest = -1, CELLS
    for bean in range(game.served):
        steps = distance(cell, game.beans[bean], wrapped)
        if not used >> bean & 1 and steps < nearest:
            found, nearest = bean, steps
    return found, min(nearest, MAX_DISTANCE)


@njit(cache=True, nogil=True)
def choose(game: Game, first: int, level: int, wrapped: bool, marks: np.ndarray, actions: np.ndarray) -> None:
    """Write the actions of a scripted team, the snakes from `first` on, into actions [SNAKES].

    `marks` [2, CELLS + 1] int64 is a buffer for `room`, initially zeros.
    """
    targeted = 0  # bit set of beans that teammates target
    for snake in range(first, first + TEAM):
        if level == RANDOM:
            actions[snake] = random_below(4, game.key, game.episode, game.step * DRAWS + MOVE + snake)
            continue
        head, reverse = cell_of(game, snake, 0), game.heading[snake] ^ 1
        target, _ = nearest_bean(game, head, targeted, wrapped)
        if level >= GREEDY and target >= 0:
            targeted |= 1 << target
        best, best_cost = game.heading[snake], -1
        for action in range(4):
            if action == reverse:
                continue
            cell = AROUND[head, action]
            cost = distance(cell, game.beans[target], wrapped) if target >= 0 else 0
            cost = _STEP_COST * cost + _risk(game, snake, cell, level, marks)
            if best_cost < 0 or cost < best_cost:
                best, best_cost = action, cost
        actions[snake] = best


@njit(cache=True, nogil=True)
def _risk(game: Game, snake: int, cell: int, level: int, marks: np.ndarray) -> int:
    """Return the risk cost of a cell."""
    if level < GREEDY:
        return 0
    cost = _BODY_COST if game.owner[cell] >= FIRST else 0
    if level == WARY:
        cost += 5 * blocked_sides(game, snake, cell)
    elif level == CAUTIOUS:
        length = game.length[snake]
        cost += (5 + length) * blocked_sides(game, snake, cell)
        cost += 3 * length * is_threatened(game, snake, cell)
        if room(game, cell, length + 1, marks) <= length:
            cost += _DANGER_COST
    elif level == EVADER and not _is_safe(game, snake, cell):
        cost += _DANGER_COST
    return cost


@njit(cache=True, nogil=True)
def blocked_sides(game: Game, snake: int, cell: int) -> int:
    """Return the number of sides of a cell with a body, without the side that the snake comes from."""
    sides, head = 0, cell_of(game, snake, 0)
    for direction in range(4):
        neighbor = AROUND[cell, direction]
        sides += neighbor != head and game.owner[neighbor] >= FIRST
    return sides


@njit(cache=True, nogil=True)
def is_threatened(game: Game, snake: int, cell: int) -> bool:
    """Whether another snake's head can be on a cell after one step."""
    for other in range(SNAKES):
        if other != snake and game.length[other] and distance(cell_of(game, other, 0), cell, True) == 1:
            return True
    return False


@njit(cache=True, nogil=True)
def _is_safe(game: Game, snake: int, cell: int) -> bool:
    """Whether a cell is safe from all other snakes and has a safe neighbor."""
    if game.owner[cell] >= FIRST or is_threatened(game, snake, cell):
        return False
    for direction in range(4):
        neighbor = AROUND[cell, direction]
        if game.owner[neighbor] < FIRST and not is_threatened(game, snake, neighbor):
            return True
    return False


@njit(cache=True, nogil=True)
def room(game: Game, cell: int, limit: int, marks: np.ndarray) -> int:
    """Count the free cells connected to a cell, itself included, up to `limit` (breadth-first search)."""
    if game.owner[cell] >= FIRST:
        return 0
    # Seen cells hold the number of this search, so that the buffer need not be cleared between searches.
    visited, queue = marks[0], marks[1]
    visited[CELLS] += 1
    search = visited[CELLS]
    visited[cell], queue[0] = search, cell
    found, done = 1, 0
    while done < found and found < limit:
        for direction in range(4):
            neighbor = AROUND[queue[done], direction]
            if visited[neighbor] != search and game.owner[neighbor] < FIRST:
                visited[neighbor], queue[found] = search, neighbor
                found += 1
        done += 1
    return min(found, limit)
