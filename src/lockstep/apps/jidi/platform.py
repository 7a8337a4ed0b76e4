"""Local emulation of the platform: call controllers and record replays in its formats."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from lockstep.tasks.team_snakes.opponents import choose
from lockstep.tasks.team_snakes.platform_observations import directions_of, observation_of, positions_of
from lockstep.tasks.team_snakes.rules import (
    CELLS,
    FIRST,
    GAME,
    HEIGHT,
    SNAKES,
    START_LENGTH,
    TEAM,
    WIDTH,
    Game,
    start,
    step,
)

Controller: TypeAlias = Callable[[dict[Any, Any], Any, bool], list[list[int]]]
"""Function that a team submits. It is called for one snake at a time."""
Watcher: TypeAlias = Callable[[Game, np.ndarray], None]
"""Function that receives a game and the moves of all snakes, [SNAKES], before each step."""


def play_game(
    teams: Sequence[Controller | int],
    names: Sequence[str],
    key: int,
    steps: int = 200,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Play a game of two teams, each a controller or a script level. Return a replay in the format of the platform."""
    game = np.zeros(1, GAME).view(np.recarray)[0]
    game.key = key
    start(game)
    rewards, died = np.zeros(SNAKES), np.zeros(SNAKES, np.bool_)
    returns, recorded, directions, over = np.zeros(SNAKES), [], None, False
    replay: dict[str, Any] = {"game_name": "snakes_3v3", "n_player": SNAKES}
    replay |= {"board_height": HEIGHT, "board_width": WIDTH, "start_time": _now(), "mode": "terminal", "seed": key}
    replay["init_info"] = {**positions_of(game), "directions": directions_of(game)}
    while game.step < steps and not over:
        moves = _choose_moves(teams, game, directions)
        if watcher is not None:
            watcher(game, moves)
        directions = directions_of(game)
        over = bool(step(game, moves, rewards, died))
        returns += rewards
        after = {**positions_of(game), "hit": died.astype(int).tolist(), "score": _scores(game)}
        record = {"time": _now(), "info_before": {"directions": directions}, "reward": rewards.astype(int).tolist()}
        recorded.append(record | {"info_after": after})
    scores = _scores(game)
    replay |= {"steps": recorded, "winner": scores.index(max(scores)) + FIRST, "winner_information": scores}
    return replay | {"n_return": returns.astype(int).tolist(), "names": list(names), "end_time": _now()}


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


def _scores(game: Game) -> list[int]:
    return [int(length) - START_LENGTH for length in game.length]


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
