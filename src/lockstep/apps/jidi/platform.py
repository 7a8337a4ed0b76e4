"""Local emulation of the platform: call controllers and record replays in its formats."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from lockstep.tasks.team_snakes.opponents import choose
from lockstep.tasks.team_snakes.rules import (
    BEAN,
    CELLS,
    FIRST,
    GAME,
    HEIGHT,
    SNAKES,
    START_LENGTH,
    TEAM,
    WIDTH,
    Game,
    cell_of,
    start,
    step,
)

Controller: TypeAlias = Callable[[dict[Any, Any], Any, bool], list[list[int]]]
"""Function that a team submits. It is called for one snake at a time."""

NAMES = ("up", "down", "left", "right")


def play_game(teams: Sequence[Controller | int], names: Sequence[str], key: int, steps: int = 200) -> dict[str, Any]:
    """Play a game of two teams, each a controller or a script level. Return a replay in the format of the platform."""
    game = np.zeros(1, GAME).view(np.recarray)[0]
    game.key = key
    start(game)
    rewards, died = np.zeros(SNAKES), np.zeros(SNAKES, np.bool_)
    returns, recorded, directions, over = np.zeros(SNAKES), [], None, False
    replay: dict[str, Any] = {"game_name": "snakes_3v3", "n_player": SNAKES}
    replay |= {"board_height": HEIGHT, "board_width": WIDTH, "start_time": _now(), "mode": "terminal", "seed": key}
    replay["init_info"] = {**_positions(game), "directions": _directions(game)}
    while game.step < steps and not over:
        moves = _choose_moves(teams, game, directions)
        directions = _directions(game)
        over = bool(step(game, moves, rewards, died))
        returns += rewards
        after = {**_positions(game), "hit": died.astype(int).tolist(), "score": _scores(game)}
        record = {"time": _now(), "info_before": {"directions": directions}, "reward": rewards.astype(int).tolist()}
        recorded.append(record | {"info_after": after})
    scores = _scores(game)
    replay |= {"steps": recorded, "winner": scores.index(max(scores)) + FIRST, "winner_information": scores}
    return replay | {"n_return": returns.astype(int).tolist(), "names": list(names), "end_time": _now()}


def observation_of(game: Game, snake: int, last_directions: list[str] | None) -> dict[Any, Any]:
    """Return the observation of one snake as the platform gives it. `last_directions`: those before the last step."""
    positions = _positions(game)
    observation: dict[Any, Any] = {BEAN: positions["beans_position"]}
    observation |= {FIRST + number: body for number, body in enumerate(positions["snakes_position"])}
    observation |= {"board_width": WIDTH, "board_height": HEIGHT, "last_direction": last_directions}
    return observation | {"controlled_snake_index": FIRST + snake}


def _choose_moves(teams: Sequence[Controller | int], game: Game, last_directions: list[str] | None) -> np.ndarray:
    """Return the moves of all snakes, [SNAKES]."""
    moves = np.zeros(SNAKES, np.int64)
    for number, team in enumerate(teams):
        if isinstance(team, int):
            choose(game, number * TEAM, team, False, np.zeros((2, CELLS + 1), np.int64), moves)
            continue
        for snake in range(number * TEAM, number * TEAM + TEAM):
            action = team(observation_of(game, snake, last_directions), ["Discrete(4)"], False)
            moves[snake] = action[0].index(1)  # as the platform reads it
    return moves


def _positions(game: Game) -> dict[str, list[Any]]:
    bodies = [[cell_of(game, snake, behind) for behind in range(game.length[snake])] for snake in range(SNAKES)]
    return {
        "snakes_position": [[[*divmod(int(cell), WIDTH)] for cell in body] for body in bodies],
        "beans_position": [[*divmod(int(cell), WIDTH)] for cell in game.beans[: game.served]],
    }


def _directions(game: Game) -> list[str]:
    return [NAMES[heading] for heading in game.heading]


def _scores(game: Game) -> list[int]:
    return [int(length) - START_LENGTH for length in game.length]


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
