"""Controller that the platform calls for each snake and step. It only needs numpy.

`flat_file.py` copies the functions of this file and of its imports into one file, where nothing is compiled. That file
runs on Python 3.7: keep to its syntax and its standard library here and in what is imported.
"""

from typing import Any

import numpy as np

from lockstep.tasks.team_snakes.features import FEATURES, ON_BOARD, show_features, show_legal
from lockstep.tasks.team_snakes.rules import (
    AROUND,
    BEAN,
    BEANS,
    CELLS,
    COLUMN,
    DOWN,
    FIRST,
    GAME,
    HEIGHT,
    LEFT,
    RIGHT,
    ROW,
    SNAKES,
    UP,
    WIDTH,
    Game,
)


class ControllerNetwork:
    """Layers of an actor and the orientation of its observations."""

    def __init__(self, weights: list[np.ndarray], biases: list[np.ndarray], tanh: bool, egocentric: bool) -> None:
        """`tanh`: the activation is tanh, not ReLU. `egocentric`: observations are rotated to the snake's heading."""
        self.weights, self.biases, self.tanh, self.egocentric = weights, biases, tanh, egocentric

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """Return the actor outputs, one per action, [4]."""
        last = len(self.weights) - 1
        for layer in range(last):
            x = self.weights[layer] @ x + self.biases[layer]
            x = np.tanh(x) if self.tanh else np.maximum(x, 0.0)
        return np.asarray(self.weights[last] @ x + self.biases[last])


def unpack_network(sizes: list[int], values: bytes, tanh: bool, egocentric: bool) -> ControllerNetwork:
    """Return the network with layers of these sizes; `values` are its weights and biases, little-endian float32."""
    numbers, weights, biases, start = np.frombuffer(values, "<f4"), [], [], 0
    for layer in range(len(sizes) - 1):
        rows, columns = sizes[layer + 1], sizes[layer]
        weights.append(numbers[start : start + rows * columns].reshape(rows, columns))
        start += rows * columns
        biases.append(numbers[start : start + rows])
        start += rows
    return ControllerNetwork(weights, biases, tanh, egocentric)


class TeamController:
    """Controller of the three snakes of a team, with `network` as their policy."""

    def __init__(self, network: ControllerNetwork) -> None:
        self.network, self.tracker = network, HeadingTracker()

    def choose(self, observation: dict[Any, Any]) -> list[list[int]]:
        """Return the direction of the controlled snake as a nested one-hot list, the format of the platform."""
        direction = self.choose_direction(observation)
        return [[int(direction == one) for one in range(4)]]

    def choose_direction(self, observation: dict[Any, Any]) -> int:
        """Return the best legal direction on the board, 0 to 3, for the controlled snake."""
        game, snake = read_game(observation, self.tracker), int(observation["controlled_snake_index"]) - FIRST
        facing = int(game.heading[snake]) if self.network.egocentric else UP
        features, legal = np.zeros(FEATURES, np.float32), np.zeros(4, np.uint8)
        show_features(game, snake, facing, np.zeros((2, CELLS + 1), np.int64), features)
        show_legal(game, snake, facing, legal)
        outputs = np.where(legal == 1, self.network.outputs(features), -np.inf)
        direction = int(ON_BOARD[facing, outputs.argmax()])
        self.tracker.moves[snake] = direction
        return direction


class HeadingTracker:
    """Headings of all snakes, from the successive observations of a game. An observation contains no headings.

    The heading of a snake that moved is the direction from neck to head on the torus. A snake that has just returned to
    the board was placed by rules that ignore the torus, so its heading may be the opposite one. The two cases are told
    apart by the previous observation, and by the last moves of the controlled snakes: a snake may return to cells to
    which another move would have taken it. For other snakes, the heading is then a guess. `last_direction` of the
    platform is one step old and does not help.
    """

    def __init__(self) -> None:
        self.moves: dict[int, int] = {}
        """Directions chosen for snakes in the newest observation."""
        self._bodies: list[list[int]] = []
        self._headings = [UP] * SNAKES

    def update(self, bodies: list[list[int]]) -> list[int]:
        """Return the headings of all snakes, whose bodies are lists of cells from the head. Once per step or more."""
        if bodies != self._bodies:
            before = self._bodies or bodies
            # A snake that has died may return to where its neck was, but it is shorter then.
            moved = [
                bodies[snake][1:3] == before[snake][:2]
                and len(bodies[snake]) >= len(before[snake])
                and (snake not in self.moves or bodies[snake][0] == AROUND[before[snake][0], self.moves[snake]])
                for snake in range(SNAKES)
            ]
            self.moves = {}
            if not any(moved):  # a new game
                moved = [True] * SNAKES
            self._headings = [_heading(bodies[snake][:2], moved[snake]) for snake in range(SNAKES)]
            self._bodies = bodies
        return self._headings


def new_game() -> Game:
    """Return a game state without snakes and beans. The flat file has another form of it, which is faster there."""
    return np.zeros(1, GAME).view(np.recarray)[0]


def read_game(observation: dict[Any, Any], tracker: HeadingTracker) -> Game:
    """Convert an observation of the platform, with snakes as lists of [row, column] from the head, to a game state."""
    if (observation["board_height"], observation["board_width"]) != (HEIGHT, WIDTH):
        raise ValueError(f"the board is not {HEIGHT} x {WIDTH} cells, the only size that this team supports.")
    game = new_game()
    bodies = [[row * WIDTH + column for row, column in observation[FIRST + snake]] for snake in range(SNAKES)]
    game.heading[:] = tracker.update(bodies)
    for snake in range(SNAKES):
        body = bodies[snake]
        game.length[snake], game.front[snake] = len(body), max(len(body) - 1, 0)
        game.body[snake, : len(body)] = body[::-1]
        game.owner[body] = FIRST + snake
    beans = [row * WIDTH + column for row, column in observation[BEAN]][:BEANS]
    game.beans[: len(beans)], game.served = beans, len(beans)
    game.owner[beans] = BEAN
    return game


def _heading(front: list[int], on_torus: bool) -> int:
    """Return the direction from neck to head. `front`: the first two cells of a snake."""
    if len(front) < 2:  # off the board
        return UP
    down, right = int(ROW[front[0]] - ROW[front[1]]), int(COLUMN[front[0]] - COLUMN[front[1]])
    if on_torus and abs(down) + abs(right) > 1:  # across an edge of the board
        down, right = -down, -right
    if down:
        return DOWN if down > 0 else UP
    return RIGHT if right > 0 else LEFT
