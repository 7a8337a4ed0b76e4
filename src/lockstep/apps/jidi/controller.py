"""The function the platform calls for each snake and step. It needs numpy alone.

This file and those it imports are copied into a submission, where nothing is compiled: see `submission.py`. The network
lies beside it as plain arrays.
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
    """Layers of an actor, and how it sees."""

    weights: list[np.ndarray]
    biases: list[np.ndarray]
    tanh: bool
    """Between the layers; otherwise ReLU."""
    turned: bool
    """Whether it sees ahead, so that up is its heading."""

    def outputs(self, seen: np.ndarray) -> np.ndarray:
        """A number for each action, [4]."""
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            seen = weight @ seen + bias
            seen = np.tanh(seen) if self.tanh else np.maximum(seen, 0.0)
        return np.asarray(self.weights[-1] @ seen + self.biases[-1])


def read_network(path: Path) -> ControllerNetwork:
    with np.load(path, allow_pickle=False) as saved:
        count = sum(name.startswith("weight") for name in saved)
        weights, biases = ([saved[f"{kind}{layer}"] for layer in range(count)] for kind in ("weight", "bias"))
        return ControllerNetwork(weights, biases, bool(saved["tanh"]), bool(saved["turned"]))


@cache
def _own_network() -> ControllerNetwork:
    return read_network(Path(__file__).with_name(NETWORK))


def my_controller(observation: dict[Any, Any], action_space: Any, is_act_continuous: bool = False) -> list[list[int]]:
    """What the platform asks for: the direction of one snake, as a one-hot list in a list."""
    return as_one_hot(choose_direction(_own_network(), observation))


def as_one_hot(action: int) -> list[list[int]]:
    return [[int(direction == action) for direction in range(4)]]


def choose_direction(network: ControllerNetwork, observation: dict[Any, Any]) -> int:
    """The direction on the board, 0 to 3, that a network finds best for the snake it is asked for."""
    game, snake = read_game(observation), int(observation["controlled_snake_index"]) - FIRST
    facing = int(game.heading[snake]) if network.turned else UP
    seen, legal = np.zeros(FEATURES, np.float32), np.zeros(4, np.uint8)
    show_features(game, snake, facing, np.zeros((2, CELLS + 1), np.int64), seen)
    show_legal(game, snake, facing, legal)
    outputs = np.where(legal == 1, network.outputs(seen), -np.inf)
    return int(ON_BOARD[facing, outputs.argmax()])


def read_game(observation: dict[Any, Any]) -> Game:
    """The game as the rules keep it, from what the platform shows: snakes as lists of [row, column], head first."""
    if (observation["board_height"], observation["board_width"]) != (HEIGHT, WIDTH):
        raise ValueError(f"this team plays on {HEIGHT} x {WIDTH} cells.")
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
    """The way from neck to head, round the torus. The platform's own `last_direction` is that of the step before."""
    down = (ROW[head] - ROW[neck]) % HEIGHT
    if down:
        return DOWN if down == 1 else UP
    return RIGHT if (COLUMN[head] - COLUMN[neck]) % WIDTH == 1 else LEFT
