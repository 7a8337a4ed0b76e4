"""Teams of a batch of games that submissions play: one process per game, which is given the game so far if needed.

A decision depends on the file, the seed of the game and the observations since its start only. It does not depend on
the process that hosts the game, or on whether the game was interrupted.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.config import ConfigError
from lockstep.tasks.team_snakes.platform_observations import directions_of, observation_of
from lockstep.tasks.team_snakes.rules import FIELDS, FIRST, GAME, SNAKES, TEAM, Game, start, step
from lockstep.tasks.team_snakes.submission_process import SubmissionProcess


class Seat(NamedTuple):
    """Team of a game that a submission plays."""

    row: int
    """Index of the game in the batch."""
    place: str
    """Name of the game for messages."""
    file: Path
    seed: int
    """Seed of the submission's random numbers."""
    game: Game
    team: int
    """0 or 1: the first or the last three snakes."""
    moves: np.ndarray
    """[steps, SNAKES] moves of all snakes since the start of the game."""


class _Player:
    """Process of a submission, and the position in its current game."""

    def __init__(self, file: Path, timeout: float, python: str) -> None:
        self.process = SubmissionProcess(file, timeout, python)
        self.file = file
        self.seed, self.step = -1, 0
        self.last_directions: list[str] | None = None
        self.observation: dict[Any, Any] = {}

    def start_game(self, seat: Seat) -> None:
        self.process.start_game(seat.seed, seat.place)
        self.seed, self.step, self.last_directions = seat.seed, 0, None

    def start_step(self, game: Game) -> None:
        """Make the observation of a step. Those of the three snakes differ in one number."""
        self.observation = observation_of(game, 0, self.last_directions)

    def ask(self, snake: int) -> None:
        self.process.ask(self.observation | {"controlled_snake_index": FIRST + snake}, self.step)

    def end_step(self, game: Game) -> None:
        self.step += 1
        self.last_directions = directions_of(game)


class SubmissionTeams:
    """Submissions that play one team of some games. All of them decide in parallel."""

    def __init__(self, timeout: float, python: str = sys.executable) -> None:
        """`timeout`: seconds per decision. `python`: the interpreter of the submissions."""
        self._timeout, self._python = timeout, python
        self._players: dict[int, _Player] = {}

    def choose(self, seats: Sequence[Seat]) -> np.ndarray:
        """Return the directions on the board that the submissions choose, [seats, TEAM]."""
        players = [self._player_of(seat) for seat in seats]
        moves = np.zeros((len(seats), TEAM), np.int64)
        for seat, player in zip(seats, players, strict=True):
            player.start_step(seat.game)
        for number in range(TEAM):
            for seat, player in zip(seats, players, strict=True):
                player.ask(seat.team * TEAM + number)
            moves[:, number] = [player.process.direction() for player in players]
        for seat, player in zip(seats, players, strict=True):
            player.end_step(seat.game)
        return moves

    def close(self) -> None:
        """End all processes."""
        for player in self._players.values():
            player.process.close()
        self._players.clear()

    def _player_of(self, seat: Seat) -> _Player:
        """Return the player of a seat, after it has been given all earlier observations of the game."""
        player = self._players.get(seat.row)
        if player is not None and player.file == seat.file:
            if player.seed == seat.seed and player.step == seat.game.step:
                return player
        else:
            if player is not None:
                player.process.close()
            player = self._players[seat.row] = _Player(seat.file, self._timeout, self._python)
        player.start_game(seat)
        if seat.game.step:
            _replay(seat, player)
        return player


def _replay(seat: Seat, player: _Player) -> None:
    """Give a player the observations of a game from its start, and ignore its decisions: the game has taken place."""
    game = np.zeros(1, GAME).view(np.recarray)[0]
    game.key, game.place, game.episode = seat.game.key, seat.game.place, seat.game.episode
    start(game)
    rewards, died, differences = np.zeros(SNAKES), np.zeros(SNAKES, np.bool_), 0
    for moves in seat.moves[: seat.game.step]:
        player.start_step(game)
        for snake in range(seat.team * TEAM, seat.team * TEAM + TEAM):
            player.ask(snake)
            differences += player.process.direction() != moves[snake]
        player.end_step(game)
        step(game, moves.astype(np.int64), rewards, died)
    # Not `body`: its unused slots hold cells of earlier games.
    if any((game[name] != seat.game[name]).any() for name in FIELDS if name != "body"):
        raise ConfigError(
            f"{seat.place}: the saved moves do not lead to the saved game.", "Resume from another checkpoint."
        )
    if differences:
        warnings.warn(
            f"{seat.file}: {differences} of the {TEAM * seat.game.step} decisions of {seat.place} differ when the game "
            "is replayed. The submission depends on something else than its observations and random numbers. Training "
            "continues correctly, but not exactly as the uninterrupted run would have.",
            stacklevel=2,
        )
