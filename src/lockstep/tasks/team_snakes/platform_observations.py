"""Observations of a game in the format of the competition platform."""

from typing import Any

import numpy as np

from lockstep.tasks.team_snakes.rules import BEAN, FIRST, HEIGHT, RING, SNAKES, WIDTH, Game

NAMES = ("up", "down", "left", "right")


def observation_of(game: Game, snake: int, last_directions: list[str] | None) -> dict[Any, Any]:
    """Return the observation of one snake as the platform gives it. `last_directions`: those before the last step."""
    positions = positions_of(game)
    observation: dict[Any, Any] = {BEAN: positions["beans_position"]}
    observation |= {FIRST + number: body for number, body in enumerate(positions["snakes_position"])}
    observation |= {"board_width": WIDTH, "board_height": HEIGHT, "last_direction": last_directions}
    return observation | {"controlled_snake_index": FIRST + snake}


def positions_of(game: Game) -> dict[str, list[Any]]:
    """Return the [row, column] of every cell of the snakes, from their heads, and of the beans."""
    body, lengths, fronts = game.body, game.length.tolist(), game.front.tolist()
    cells = [body[snake, (fronts[snake] - np.arange(lengths[snake])) % RING].tolist() for snake in range(SNAKES)]
    return {
        "snakes_position": [[[*divmod(cell, WIDTH)] for cell in snake] for snake in cells],
        "beans_position": [[*divmod(cell, WIDTH)] for cell in game.beans[: game.served].tolist()],
    }


def directions_of(game: Game) -> list[str]:
    """Return the names of the headings of all snakes."""
    return [NAMES[heading] for heading in game.heading]
