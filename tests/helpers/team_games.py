"""Team-snakes games in hand-made situations, and a plain Python reference implementation of the rules.

Places are (row, column); a snake is listed from head to tail.
"""

import numpy as np
import torch

from lockstep.lanes import Lanes
from lockstep.tasks.kernels import random_below
from lockstep.tasks.team_snakes.env import TeamSnakesConfig
from lockstep.tasks.team_snakes.rules import (
    AROUND,
    BEAN,
    BEANS,
    CELLS,
    DOWN,
    DRAWS,
    FIRST,
    GAME,
    HEIGHT,
    LEFT,
    RIGHT,
    RING,
    SERVE,
    SNAKES,
    TEAM,
    TURN,
    UP,
    WIDTH,
    cell_of,
    step,
)

PARKED = [[(4 + snake, column) for column in (14, 13, 12)] for snake in range(SNAKES)]
"""Positions of snakes that a test does not place: in the lower rows, heading right, away from the upper four rows."""
SPARE = [(4 + row, 19) for row in range(BEANS)]
"""Beans that no snake reaches in a step or two."""
WAYS = {(-1, 0): UP, (1, 0): DOWN, (0, -1): LEFT, (0, 1): RIGHT}


def random_actions(steps, count, agents=TEAM, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(4, size=(steps, count, agents)))


def cell(place):
    return place[0] % HEIGHT * WIDTH + place[1] % WIDTH


def place(number):
    return tuple(int(part) for part in divmod(int(number), WIDTH))


def arrange(snakes, beans=(), *, headings=(), key=1, number=0):
    """Return a game with the given snakes (by number) and beans, the rest parked. `number` is the environment index."""
    games = np.zeros(1, GAME).view(np.recarray)
    game = games[0]
    game.key, game.place, game.served = key, number, BEANS
    for snake in range(SNAKES):
        lies = snakes.get(snake, PARKED[snake])
        for behind, where in enumerate(lies):
            game.body[snake, (len(lies) - 1 - behind) % RING] = cell(where)
            game.owner[cell(where)] = FIRST + snake
        game.length[snake], game.front[snake] = len(lies), len(lies) - 1
        game.heading[snake] = dict(headings).get(snake, heading_of(lies))
    for index, where in enumerate([*beans, *SPARE][:BEANS]):
        game.beans[index] = cell(where)
        game.owner[cell(where)] = BEAN
    return games


def heading_of(lies):
    """Return the direction from neck to head on the torus."""
    (row, column), (neck_row, neck_column) = lies[:2]
    down = (row - neck_row + 1) % HEIGHT - 1
    right = (column - neck_column + 1) % WIDTH - 1
    return WAYS[down, right]


def play(games, actions=(), times=1):
    """Step a game with actions by snake, others go straight; return rewards, dead snakes and whether it is over."""
    rewards, died = np.zeros(SNAKES), np.zeros(SNAKES, np.bool_)
    for _ in range(times):
        moves = games[0].heading.copy()
        for snake, action in dict(actions).items():
            moves[snake] = action
        over = step(games[0], moves, rewards, died)
    return rewards.tolist(), [snake for snake in range(SNAKES) if died[snake]], over


def lies(games, snake):
    """Return the positions of a snake, from head to tail."""
    return [place(cell_of(games[0], snake, behind)) for behind in range(games[0].length[snake])]


def beans_of(games):
    return [place(bean) for bean in games[0].beans[: games[0].served]]


def winding(count, first=0):
    """Return `count` positions on a path that winds over the board row by row, from last to first."""
    way = [(row, column) for row in range(HEIGHT) for column in range(WIDTH)[:: -1 if row % 2 else 1]]
    return way[first : first + count][::-1]


def build(count=8, *, lanes=1, local=None, seed=0, **settings):
    local = range(lanes) if local is None else local
    return TeamSnakesConfig(num_envs=count, **settings).build(Lanes(lanes, local, seed), torch.device("cpu"))


def put(env, games):
    """Load an arranged game into an environment with one game."""
    env.load_lane_state(0, {name: torch.from_numpy(games[name].copy()) for name in GAME.names})
    return env


# ------------------------------------------------------------------------------------------- reference implementation


class Plainly:
    """Reference implementation of the rules with lists and loops; random numbers are drawn as in the kernels."""

    def __init__(self, game):
        self.key, self.episode, self.steps = int(game.key), int(game.episode), int(game.step)
        self.snakes = [
            [place(cell_of(game, snake, behind)) for behind in range(game.length[snake])] for snake in range(SNAKES)
        ]
        self.headings = game.heading.tolist()
        self.beans = [place(bean) for bean in game.beans[: game.served]]

    def luck(self, choices, draw):
        return int(random_below(choices, self.key, self.episode, self.steps * DRAWS + draw))

    def step(self, actions):
        self.steps += 1
        before, ate = [len(snake) for snake in self.snakes], [False] * SNAKES
        for number, snake in enumerate(self.snakes):
            allowed = [action for action in range(4) if action != self.headings[number] ^ 1]
            action = actions[number] if actions[number] in allowed else allowed[self.luck(3, TURN + number)]
            self.headings[number] = action
            snake.insert(0, place(AROUND[cell(snake[0]), action]))
            ate[number] = snake[0] in self.beans
            if ate[number]:
                self.beans.remove(snake[0])
            else:
                snake.pop()
        everything = [where for snake in self.snakes for where in snake]
        died = [number for number, snake in enumerate(self.snakes) if everything.count(snake[0]) > 1]
        rewards = [3 - before[number] if number in died else int(ate[number]) for number in range(SNAKES)]
        for number in died:
            self.snakes[number] = []
        found = [self.come_back(number) for number in died]
        free = self.free()
        while len(self.beans) < BEANS and free:
            self.beans.append(free.pop(self.luck(len(free), SERVE + len(self.beans))))
        over = not all(found) or sum(map(len, self.snakes)) + BEANS > CELLS
        return rewards, died, over

    def free(self):
        taken = {*self.beans, *(where for snake in self.snakes for where in snake)}
        return [place(number) for number in range(CELLS) if place(number) not in taken]

    def come_back(self, number):
        """Search breadth-first from each free cell; the first three cells found become the snake."""
        free = self.free()
        for first in free:
            met = [first]
            for here in met:
                ways = ((0, 1), (1, 0), (-1, 0), (0, -1))
                beside = [place(cell((here[0] + down, here[1] + right))) for down, right in ways]
                met += [where for where in beside if where in free and where not in met]
            if len(met) >= 3:
                head, neck, tail = met[:3]
                if head in ((neck[0], tail[1]), (tail[0], neck[1])):
                    head, neck = neck, head
                self.snakes[number] = [head, neck, tail]
                along = head[1] != neck[1]
                forward = head > neck
                self.headings[number] = (RIGHT if forward else LEFT) if along else (DOWN if forward else UP)
                return True
        return False
