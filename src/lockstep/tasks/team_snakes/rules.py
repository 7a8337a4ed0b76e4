"""The rules of team snakes: one game of two teams of three on a torus, as compiled functions of one record.

They are those of the Jidi competition "snakes 3v3", of its last published environment: snakes move in the order of
their numbers, whoever's head lies on another part of a snake dies, and the dead return at once, near the upper left.
Luck is a pure function of a game's key, its episode's number and the step, so a game plays the same in any batch.

A cell's number is row x WIDTH + column. A snake is a ring of RING slots; its head lies in slot `front`.
"""

from typing import Any, TypeAlias

import numpy as np
from numba import njit

from lockstep.tasks.kernels import Integer, random_below

HEIGHT, WIDTH = 10, 20
CELLS = HEIGHT * WIDTH
TEAM, SNAKES, BEANS, START_LENGTH = 3, 6, 5, 3
UP, DOWN, LEFT, RIGHT = range(4)  # opposite directions differ in the last bit
FREE, BEAN, FIRST = 0, 1, 2  # what lies on a cell; snake s is FIRST + s, as the platform numbers them
RING = 256  # slots: more than a snake can be long, and a power of two

ROW, COLUMN = np.divmod(np.arange(CELLS), WIDTH)
AROUND = np.stack(
    [
        (ROW + down) % HEIGHT * WIDTH + (COLUMN + right) % WIDTH
        for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right
    ],
    axis=1,
)
"""[CELLS, 4] the cell beside each, in each direction, round the torus."""
_SEARCH = (RIGHT, DOWN, UP, LEFT)  # in which order the platform looks around for room

FIELDS = {
    "key": (np.int64, ()),  # of the game's luck
    "place": (np.int64, ()),  # of the environment in the whole run; its parity says which side is ours at first
    "episode": (np.int64, ()),  # number of the game being played
    "step": (np.int64, ()),  # steps taken in it
    "length": (np.int64, (SNAKES,)),
    "front": (np.int64, (SNAKES,)),  # slot of the head; the tail is length - 1 slots before it
    "heading": (np.int64, (SNAKES,)),  # the direction last moved in
    "beans": (np.int64, (BEANS,)),  # their cells, oldest first, as the platform lists them
    "served": (np.int64, ()),  # how many beans there are
    "body": (np.uint8, (SNAKES, RING)),
    "owner": (np.uint8, (CELLS,)),  # what lies on each cell
}
GAME = np.dtype([(name, kind, shape) for name, (kind, shape) in FIELDS.items()], align=True)
"""One game. A record, because numba hands it on as a bare pointer: no counting of references."""

Game: TypeAlias = Any
"""A record of GAME: numba knows its fields, mypy cannot."""

# Draws of a step, from DRAWS x step on: a turn for each snake, a random player's move for each, a cell for each bean.
TURN, MOVE, SERVE, DRAWS = 0, 8, 16, 32
_PLACING = 1 << 40  # draws that place the snakes of a new game


@njit(cache=True, nogil=True)
def cell_of(game: Game, snake: int, behind: int) -> Any:
    """The cell of a snake so many places behind its head."""
    return np.int64(game.body[snake, (game.front[snake] - behind) & (RING - 1)])


@njit(cache=True, nogil=True)
def start(game: Game) -> None:
    """Lay out a new game: six straight snakes anywhere, no two on one cell, and the beans."""
    game.owner[:] = FREE
    game.step = game.served = 0
    tries = _PLACING
    for snake in range(SNAKES):
        while True:
            draw = random_below(4 * CELLS, game.key, game.episode, tries)
            tries += 1
            tail, heading = draw // 4, draw % 4
            middle = AROUND[tail, heading]
            head = AROUND[middle, heading]
            if game.owner[tail] == FREE and game.owner[middle] == FREE and game.owner[head] == FREE:
                break
        _lay(game, snake, head, middle, tail, heading)
    spawn_beans(game)


@njit(cache=True, nogil=True)
def step(game: Game, actions: np.ndarray, rewards: np.ndarray, died: np.ndarray) -> bool:
    """Move all snakes, [SNAKES] each: what they are told, what they earned, who died. Whether the game is over."""
    game.step += 1
    _advance(game, actions, rewards)
    _judge(game, rewards, died)
    over = False
    for snake in range(SNAKES):
        if died[snake]:
            over |= not _return(game, snake)
    spawn_beans(game)
    return over or game.length.sum() + BEANS > CELLS


@njit(cache=True, nogil=True)
def _advance(game: Game, actions: np.ndarray, rewards: np.ndarray) -> None:
    """Every snake goes one cell on, in the order of their numbers: a contested bean is the first one's."""
    for snake in range(SNAKES):
        heading, back = actions[snake], game.heading[snake] ^ 1
        if heading == back:  # a reverse: any of the three others instead
            draw = random_below(3, game.key, game.episode, game.step * DRAWS + TURN + snake)
            heading = draw + (draw >= back)
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
def _judge(game: Game, rewards: np.ndarray, died: np.ndarray) -> None:
    """Find the dead and take them off the board; the heads, which lie nowhere yet, settle where they live."""
    for snake in range(SNAKES):
        head = cell_of(game, snake, 0)
        died[snake] = game.owner[head] >= FIRST  # on a body, be it its own
        for other in range(SNAKES):
            died[snake] |= other != snake and cell_of(game, other, 0) == head
    for snake in range(SNAKES):
        if died[snake]:
            # What it ate in this step counts for nothing: a return over a game is the final length - START_LENGTH.
            rewards[snake] += START_LENGTH - game.length[snake]
            for behind in range(1, game.length[snake]):
                game.owner[cell_of(game, snake, behind)] = FREE
        else:
            game.owner[cell_of(game, snake, 0)] = FIRST + snake


@njit(cache=True, nogil=True)
def _return(game: Game, snake: int) -> bool:
    """Bring a dead snake back to the first three free cells that hang together; False where there are none."""
    for cell in range(CELLS):
        if game.owner[cell] != FREE:
            continue
        second = _beside(game, cell, -1)
        third = -1 if second < 0 else _beside(game, cell, second)
        if second >= 0 and third < 0:
            third = _beyond(game, cell, second)
        if third >= 0:
            _lay_found(game, snake, cell, second, third)
            return True
    game.length[snake] = 0
    return False


@njit(cache=True, nogil=True)
def _beside(game: Game, cell: int, after: int) -> int:
    """The first free cell beside one, or the first that follows `after`; -1 where there is none."""
    waiting = after >= 0
    for direction in _SEARCH:
        beside = AROUND[cell, direction]
        if not waiting and game.owner[beside] == FREE:
            return beside
        waiting &= beside != after
    return -1


@njit(cache=True, nogil=True)
def _beyond(game: Game, cell: int, second: int) -> int:
    """The first free cell beside the second one that is not the first; -1 where there is none."""
    found = _beside(game, second, -1)
    return found if found != cell else _beside(game, second, cell)


@njit(cache=True, nogil=True)
def _lay_found(game: Game, snake: int, cell: int, second: int, third: int) -> None:
    """Make a snake of three cells as the platform does, which sees the board without its seams here.

    Its head is the first cell, or the second where the first is the corner of the three. Over a seam, two cells to
    either side of the first become a snake in pieces, and a head may look back at its neck: so they do there.
    """
    corner = (ROW[cell] == ROW[second] and COLUMN[cell] == COLUMN[third]) or (
        ROW[cell] == ROW[third] and COLUMN[cell] == COLUMN[second]
    )
    head, neck = (second, cell) if corner else (cell, second)
    if ROW[head] == ROW[neck]:
        heading = RIGHT if COLUMN[head] > COLUMN[neck] else LEFT
    else:
        heading = DOWN if ROW[head] > ROW[neck] else UP
    _lay(game, snake, head, neck, third, heading)


@njit(cache=True, nogil=True)
def _lay(game: Game, snake: int, head: Integer, middle: Integer, tail: Integer, heading: Integer) -> None:
    game.body[snake, 0], game.body[snake, 1], game.body[snake, 2] = tail, middle, head
    game.front[snake], game.length[snake], game.heading[snake] = START_LENGTH - 1, START_LENGTH, heading
    game.owner[tail] = game.owner[middle] = game.owner[head] = FIRST + snake


@njit(cache=True, nogil=True)
def _take_bean(game: Game, cell: int) -> None:
    """Take a bean off the board and the list, whose others move up."""
    game.owner[cell] = FREE
    game.served -= 1
    place = 0
    while game.beans[place] != cell:
        place += 1
    for later in range(place, game.served):
        game.beans[later] = game.beans[later + 1]
    game.beans[game.served] = 0


@njit(cache=True, nogil=True)
def spawn_beans(game: Game) -> None:
    """Put beans on free cells, each as likely as the others, until there are enough or the board is full."""
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
    """Whether games are such as the rules leave. Kernels check no index: on others they would write anywhere."""
    limits = {
        "place": (0, 2**62),
        "episode": (0, 2**62),
        "step": (0, steps),
        "length": (START_LENGTH, CELLS - BEANS + 1),
        "front": (0, RING),
        "heading": (0, 4),
        "beans": (0, CELLS),
        "served": (BEANS, BEANS + 1),  # a game that goes on has room for all
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
        apart = np.count_nonzero(owner) == total + BEANS  # no cell twice
        if not apart or (owner != game["owner"]).any():
            return False
    return True
