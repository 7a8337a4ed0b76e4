"""Rules of team snakes: one game of two teams of three on a torus, as compiled functions of one record.

They follow the last published environment of the Jidi competition "snakes 3v3". Snakes move in the order of their
numbers. A snake whose head is on another part of a snake dies, and returns at once, near the upper left. Random draws
are a pure function of a game's key, its episode's number and the step, so a game is the same in any batch.

A cell's number is row x WIDTH + column. A snake is a ring buffer of RING slots; its head is in slot `front`.
"""

from typing import Any, TypeAlias

import numpy as np
from numba import njit

from lockstep.tasks.kernels import Integer, random_below

HEIGHT, WIDTH = 10, 20
CELLS = HEIGHT * WIDTH
TEAM, SNAKES, BEANS, START_LENGTH = 3, 6, 5, 3
UP, DOWN, LEFT, RIGHT = range(4)  # opposite directions differ in the last bit
FREE, BEAN, FIRST = 0, 1, 2  # contents of a cell; snake s is FIRST + s, as the platform numbers them
RING = 256  # slots: more than the longest snake, and a power of two

ROW, COLUMN = np.divmod(np.arange(CELLS), WIDTH)
AROUND = np.stack(
    [
        (ROW + down) % HEIGHT * WIDTH + (COLUMN + right) % WIDTH
        for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right
    ],
    axis=1,
)
"""[CELLS, 4] the neighbor of each cell in each direction, on the torus."""
_SEARCH_ORDER = (RIGHT, DOWN, UP, LEFT)  # order in which the platform searches neighbors for free cells

FIELDS = {
    "key": (np.int64, ()),  # of the random draws
    "place": (np.int64, ()),  # global index of the environment; its parity says which side is ours at first
    "episode": (np.int64, ()),  # number of the current game
    "step": (np.int64, ()),  # steps taken in the game
    "length": (np.int64, (SNAKES,)),
    "front": (np.int64, (SNAKES,)),  # slot of the head; the tail is length - 1 slots before it
    "heading": (np.int64, (SNAKES,)),  # direction of the last move
    "beans": (np.int64, (BEANS,)),  # cells of the beans, oldest first, as on the platform
    "served": (np.int64, ()),  # number of beans on the board
    "body": (np.uint8, (SNAKES, RING)),
    "owner": (np.uint8, (CELLS,)),  # content of each cell
}
GAME = np.dtype([(name, kind, shape) for name, (kind, shape) in FIELDS.items()], align=True)
"""One game. A record, because numba passes it as a bare pointer without reference counting."""

Game: TypeAlias = Any
"""A record of GAME. numba knows its fields, mypy does not."""

# Counters of the draws of a step, from DRAWS x step on: turns and random moves per snake, cells per bean.
TURN, MOVE, SERVE, DRAWS = 0, 8, 16, 32
_START_DRAWS = 1 << 40  # draws that place the snakes of a new game


@njit(cache=True, nogil=True)
def cell_of(game: Game, snake: int, behind: int) -> Any:
    """Return the cell of a snake at a distance behind its head."""
    return np.int64(game.body[snake, (game.front[snake] - behind) & (RING - 1)])


@njit(cache=True, nogil=True)
def start(game: Game) -> None:
    """Start a new game: six straight snakes at random positions without overlap, and the beans."""
    game.owner[:] = FREE
    game.step = game.served = 0
    counter = _START_DRAWS
    for snake in range(SNAKES):
        while True:
            draw = random_below(4 * CELLS, game.key, game.episode, counter)
            counter += 1
            tail, heading = draw // 4, draw % 4
            middle = AROUND[tail, heading]
            head = AROUND[middle, heading]
            if game.owner[tail] == FREE and game.owner[middle] == FREE and game.owner[head] == FREE:
                break
        _place_snake(game, snake, head, middle, tail, heading)
    spawn_beans(game)


@njit(cache=True, nogil=True)
def step(game: Game, actions: np.ndarray, rewards: np.ndarray, died: np.ndarray) -> bool:
    """Move all snakes, [SNAKES] each: actions in, rewards and deaths out. Return whether the game is over."""
    game.step += 1
    _advance(game, actions, rewards)
    _remove_dead(game, rewards, died)
    over = False
    for snake in range(SNAKES):
        if died[snake]:
            over |= not _respawn(game, snake)
    spawn_beans(game)
    return over or game.length.sum() + BEANS > CELLS


@njit(cache=True, nogil=True)
def _advance(game: Game, actions: np.ndarray, rewards: np.ndarray) -> None:
    """Move every snake one cell, in the order of their numbers: the first snake gets a contested bean."""
    for snake in range(SNAKES):
        heading, reverse = actions[snake], game.heading[snake] ^ 1
        if heading == reverse:  # a reverse: one of the three other directions at random
            draw = random_below(3, game.key, game.episode, game.step * DRAWS + TURN + snake)
            heading = draw + (draw >= reverse)
        tail = cell_of(game, snake, game.length[snake] - 1)
        head = AROUND[cell_of(game, snake, 0), heading]
        game.heading[snake] = heading
        game.front[snake] = (game.front[snake] + 1) & (RING - 1)
        game.body[snake, game.front[snake]] = head
        if game.owner[head] == BEAN:
            _take_bean(game, head)
            game.length[snake] += 1
            rewards[snake] = 1.0
        else:
            game.owner[tail] = FREE
            rewards[snake] = 0.0


@njit(cache=True, nogil=True)
def _remove_dead(game: Game, rewards: np.ndarray, died: np.ndarray) -> None:
    """Find dead snakes and remove them from the board; write the heads of the others, which are not on it yet."""
    for snake in range(SNAKES):
        head = cell_of(game, snake, 0)
        died[snake] = game.owner[head] >= FIRST  # on any body, including its own
        for other in range(SNAKES):
            died[snake] |= other != snake and cell_of(game, other, 0) == head
    for snake in range(SNAKES):
        if died[snake]:
            # Beans eaten in this step do not count: the return of a game is the final length - START_LENGTH.
            rewards[snake] += START_LENGTH - game.length[snake]
            for behind in range(1, game.length[snake]):
                game.owner[cell_of(game, snake, behind)] = FREE
        else:
            game.owner[cell_of(game, snake, 0)] = FIRST + snake


@njit(cache=True, nogil=True)
def _respawn(game: Game, snake: int) -> bool:
    """Put a dead snake on the first three connected free cells. Return False if there are none."""
    for cell in range(CELLS):
        if game.owner[cell] != FREE:
            continue
        second = _free_neighbor(game, cell, -1)
        if second < 0:
            continue
        third = _free_neighbor(game, cell, second)
        if third < 0:  # the cell has no other free neighbor: continue from the second
            third = _free_neighbor(game, second, -1)
            if third == cell:
                third = _free_neighbor(game, second, cell)
        if third >= 0:
            _place_respawned(game, snake, cell, second, third)
            return True
    game.length[snake] = 0
    return False


@njit(cache=True, nogil=True)
def _free_neighbor(game: Game, cell: int, after: int) -> int:
    """Return the first free neighbor of a cell, or the first one after `after`; -1 if there is none."""
    skipping = after >= 0
    for direction in _SEARCH_ORDER:
        neighbor = AROUND[cell, direction]
        if not skipping and game.owner[neighbor] == FREE:
            return neighbor
        skipping &= neighbor != after
    return -1


@njit(cache=True, nogil=True)
def _place_respawned(game: Game, snake: int, cell: int, second: int, third: int) -> None:
    """Lay a snake on three cells as the platform does, which ignores here that the board wraps around.

    Its head is the first cell, or the second if the first is the corner of the three. Across the board's edge, a snake
    may be in pieces, or its head may face its neck. The platform behaves the same way.
    """
    corner = (ROW[cell] == ROW[second] and COLUMN[cell] == COLUMN[third]) or (
        ROW[cell] == ROW[third] and COLUMN[cell] == COLUMN[second]
    )
    head, neck = (second, cell) if corner else (cell, second)
    if ROW[head] == ROW[neck]:
        heading = RIGHT if COLUMN[head] > COLUMN[neck] else LEFT
    else:
        heading = DOWN if ROW[head] > ROW[neck] else UP
    _place_snake(game, snake, head, neck, third, heading)


@njit(cache=True, nogil=True)
def _place_snake(game: Game, snake: int, head: Integer, middle: Integer, tail: Integer, heading: Integer) -> None:
    game.body[snake, 0], game.body[snake, 1], game.body[snake, 2] = tail, middle, head
    game.front[snake], game.length[snake], game.heading[snake] = START_LENGTH - 1, START_LENGTH, heading
    game.owner[tail] = game.owner[middle] = game.owner[head] = FIRST + snake


@njit(cache=True, nogil=True)
def _take_bean(game: Game, cell: int) -> None:
    """Remove a bean from the board and from the list; later beans move up."""
    game.owner[cell] = FREE
    game.served -= 1
    index = 0
    while game.beans[index] != cell:
        index += 1
    for later in range(index, game.served):
        game.beans[later] = game.beans[later + 1]
    game.beans[game.served] = 0


@njit(cache=True, nogil=True)
def spawn_beans(game: Game) -> None:
    """Place beans on uniformly random free cells until there are BEANS or the board is full."""
    free = CELLS - game.length.sum() - game.served
    while game.served < BEANS and free > 0:
        skip = random_below(free, game.key, game.episode, game.step * DRAWS + SERVE + game.served)
        cell = 0
        while game.owner[cell] != FREE or skip:
            skip -= game.owner[cell] == FREE
            cell += 1
        game.owner[cell] = BEAN
        game.beans[game.served] = cell
        game.served += 1
        free -= 1


def is_valid_state(games: np.ndarray, steps: int) -> bool:
    """Whether games are valid states. Kernels check no index: on other states they could write out of bounds."""
    limits = {
        "place": (0, 2**62),
        "episode": (0, 2**62),
        "step": (0, steps),
        "length": (START_LENGTH, CELLS - BEANS + 1),
        "front": (0, RING),
        "heading": (0, 4),
        "beans": (0, CELLS),
        "served": (BEANS, BEANS + 1),  # a running game has room for all beans
        "body": (0, CELLS),
    }
    if any(((games[name] < low) | (games[name] >= high)).any() for name, (low, high) in limits.items()):
        return False
    for game in games:
        total = int(game["length"].sum())
        owner = np.zeros_like(game["owner"])
        owner[game["beans"]] = BEAN
        for snake in range(SNAKES):
            slots = (game["front"][snake] - np.arange(game["length"][snake])) % RING
            owner[game["body"][snake, slots]] = FIRST + snake
        distinct = np.count_nonzero(owner) == total + BEANS  # no cell twice
        if not distinct or (owner != game["owner"]).any():
            return False
    return True
