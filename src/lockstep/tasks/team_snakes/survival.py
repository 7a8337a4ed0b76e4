"""How long a snake can survive after each move: a search over its own paths, compiled.

A body cell becomes free when its snake has moved on. The search assumes that each other snake eats in the next move and
then continues without eating, and never enters a cell that another head can reach in one step. It finds dead ends that
a count of free cells does not show, and exits that another snake can close.
"""

import numpy as np
from numba import njit

from lockstep.tasks.team_snakes.rules import AROUND, CELLS, SNAKES, Game, cell_of

MAX_SURVIVAL = 20
"""Moves after which the search stops. Few snakes are longer: one that moves for its length can follow its own tail."""
_MAX_TRIES = 240
"""Cells that a search tries. In the open it needs a few per move; only in a labyrinth it ends early."""
_THREATENED = CELLS + 1
"""Mark of a free cell that another head can enter in the next move."""


@njit(cache=True, nogil=True)
def write_occupied_moves(game: Game, snake: int, occupied: np.ndarray) -> None:
    """Write for how many moves each cell remains a body or another snake's, [CELLS], as a snake sees it.

    0: free. 1: a head can enter it in the move in which the tail leaves it.
    """
    occupied[:] = 0
    for other in range(SNAKES):
        length = game.length[other]
        for behind in range(length):
            occupied[cell_of(game, other, behind)] = length - behind + (other != snake)
    for other in range(SNAKES):
        if other != snake and game.length[other]:
            for direction in range(4):
                cell = AROUND[cell_of(game, other, 0), direction]
                if occupied[cell] == 0:
                    occupied[cell] = _THREATENED


@njit(cache=True, nogil=True)
def survival(cell: int, length: int, order: np.ndarray, occupied: np.ndarray, entered: np.ndarray) -> int:
    """Return the number of moves, up to MAX_SURVIVAL, of the longest path found that begins with a move to `cell`.

    `order` [4] are the directions in the order in which they are tried. `entered` [CELLS] is a buffer of zeros.
    """
    if 1 < occupied[cell] < _THREATENED:  # whether the first cell is threatened is a feature of its own
        return 0
    path, tried = np.zeros(MAX_SURVIVAL + 1, np.int64), np.zeros(MAX_SURVIVAL + 1, np.int64)
    replaced = np.zeros(MAX_SURVIVAL + 1, np.int64)  # move at which the path had entered the same cell before
    path[1], entered[cell] = cell, 1
    move = longest = 1  # depth-first search
    tries = 0
    while move > 0 and longest < MAX_SURVIVAL:
        if tried[move] == 4 or tries == _MAX_TRIES:
            entered[path[move]] = replaced[move]
            move -= 1
            continue
        following = AROUND[path[move], order[tried[move]]]
        tried[move] += 1
        tries += 1
        since = move + 1 - entered[following]
        if occupied[following] <= move + 1 and (entered[following] == 0 or since >= length):
            move += 1
            path[move], tried[move], replaced[move] = following, 0, entered[following]
            entered[following] = move
            longest = max(longest, move)
    while move > 0:
        entered[path[move]] = replaced[move]
        move -= 1
    return longest


@njit(cache=True, nogil=True)
def new_search_buffers() -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays `occupied` and `entered`, [CELLS]."""
    return np.zeros(CELLS, np.int64), np.zeros(CELLS, np.int64)
