"""Controller that the platform calls for each snake and step. It only needs numpy.

This file and its imports are copied into a submission, where nothing is compiled: see `submission.py`. The network is
stored next to it as plain arrays.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.tasks.team_snakes.features import FEATURES, ON_BOARD, show_features, show_legal
from lockstep.tasks.team_snakes.rules import (
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

NETWORK = "actor.npz"


class ControllerNetwork(NamedTuple):
    """Layers of an actor and the orientation of its observations."""

    weights: list[np.ndarray]
    biases: list[np.ndarray]
    tanh: bool
    """Whether the activation is tanh. False: ReLU."""
    turned: bool
    """Whether observations are rotated so that up is the heading of the snake."""

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """Return the actor outputs, one per action, [4]."""
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = weight @ x + bias
            x = np.tanh(x) if self.tanh else np.maximum(x, 0.0)
        return np.asarray(self.weights[-1] @ x + self.biases[-1])


def read_network(path: Path) -> ControllerNetwork:
    with np.load(path, allow_pickle=False) as saved:
        count = sum(name.startswith("weight") for name in saved)
        weights, biases = ([saved[f"{kind}{layer}"] for layer in range(count)] for kind in ("weight", "bias"))
        return ControllerNetwork(weights, biases, bool(saved["tanh"]), bool(saved["turned"]))


@cache
def _own_network() -> ControllerNetwork:
    return read_network(Path(__file__).with_name(NETWORK))


def my_controller(observation: dict[Any, Any], action_space: Any, is_act_continuous: bool = False) -> list[list[int]]:
    """Return the direction of one snake as a nested one-hot list, the format of the platform."""
    return as_one_hot(choose_direction(_own_network(), observation))


def as_one_hot(action: int) -> list[list[int]]:
    return [[int(direction == action) for direction in range(4)]]


def choose_direction(network: ControllerNetwork, observation: dict[Any, Any]) -> int:
    """Return the best legal direction on the board, 0 to 3, for the controlled snake."""
    game, snake = read_game(observation), int(observation["controlled_snake_index"]) - FIRST
    facing = int(game.heading[snake]) if network.turned else UP
    features, legal = np.zeros(FEATURES, np.float32), np.zeros(4, np.uint8)
    show_features(game, snake, facing, np.zeros((2, CELLS + 1), np.int64), features)
    show_legal(game, snake, facing, legal)
    outputs = np.where(legal == 1, network.outputs(features), -np.inf)
    return int(ON_BOARD[facing, outputs.argmax()])


def read_game(observation: dict[Any, Any]) -> Game:
    """Convert an observation of the platform, with snakes as lists of [row, column] from the head, to a game state."""
    if (observation["board_height"], observation["board_width"]) != (HEIGHT, WIDTH):
        raise ValueError(f"the board is not {HEIGHT} x {WIDTH} cells, the only size that this team supports.")
    game = np.zeros(1, GAME).view(np.recarray)[0]
    for snake in range(SNAKES):
        body = [row * WIDTH + column for row, column in observation[FIRST + snake]]
        game.length[snake], game.front[snake] = len(body), max(len(body) - 1, 0)
        game.body[snake, : len(body)] = body[::-1]
        game.owner[body] = FIRST + snake
        game.heading[snake] = _heading(*body[:2]) if len(body) > 1 else UP
    beans = [row * WIDTH + column for row, column in observation[BEAN]][:BEANS]
    game.beans[: len(beans)], game.served = beans, len(beans)
    game.owner[beans] = BEAN
    return game


def _heading(head: int, neck: int) -> int:
    """Return the direction from neck to head on the torus. `last_direction` of the platform is one step old."""
    down = (ROW[head] - ROW[neck]) % HEIGHT
    if down:
        return DOWN if down == 1 else UP
    return RIGHT if (COLUMN[head] - COLUMN[neck]) % WIDTH == 1 else LEFT
