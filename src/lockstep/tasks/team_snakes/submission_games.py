"""Training games against submissions: the last environments of every lane.

Which file plays, and with which seed, is a function of the run's seed, the environment's global index and the number of
its game. The moves of a game are saved, so that after a resume it is replayed to the submission.

Shapes: B local games, E games per lane, S steps of a game at most.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lockstep.config import ConfigError
from lockstep.tasks.team_snakes.features import AS_SEEN, ON_BOARD
from lockstep.tasks.team_snakes.kernel import SCRIPTED, side_of
from lockstep.tasks.team_snakes.rules import SNAKES, TEAM, UP
from lockstep.tasks.team_snakes.submission_teams import Seat, SubmissionTeams

if TYPE_CHECKING:
    from lockstep.tasks.team_snakes.env import TeamSnakes


class SubmissionGames:
    """Submissions as the other team. They play from the first `enable` on, which evaluations do not call."""

    def __init__(self, env: "TeamSnakes") -> None:
        config = env.config
        self._env, self._files = env, [Path(file) for file in config.submissions]
        self._streams = env.env_streams("team-snakes.submission")
        self._teams, self._enabled = SubmissionTeams(config.submission_timeout), False
        count = round(config.submission_fraction * env.envs_per_lane)
        self._is_played = np.arange(env.num_envs) % env.envs_per_lane >= env.envs_per_lane - count  # [B]
        self.moves = np.zeros((env.num_envs, config.max_episode_steps, SNAKES), np.uint8)
        """[B, S, SNAKES] moves of the current games, 0 from the current step on."""

    def enable(self) -> None:
        config = self._env.config
        if not self._is_played.any():
            raise ConfigError(
                f"task.submission_fraction is {config.submission_fraction}, which is none of the "
                f"{self._env.envs_per_lane} environments of a lane.",
                "Use a larger --task.submission-fraction or more --task.num-envs.",
            )
        self._enabled = True

    def fill(self, actions: np.ndarray) -> np.ndarray:
        """Return actions [B, SNAKES] with those of submissions in place of those of the script."""
        rows: list[int] = np.flatnonzero(self._is_played & (actions[:, TEAM:] == SCRIPTED).all(1)).tolist()
        if not rows or not self._enabled:
            return actions
        seats = [seat_of(self._env, row, 1, self._file(row), self._seed(row), self.moves[row]) for row in rows]
        actions = actions.copy()
        actions[rows, TEAM:] = seen_actions(self._env, seats, self._teams.choose(seats))
        for row in rows:
            game = self._env.games[row]
            snakes = (side_of(game) * TEAM + np.arange(SNAKES)) % SNAKES  # ours first, as the actions are
            facing = game.heading[snakes] if self._env.egocentric else np.full(SNAKES, UP)
            self.moves[row, game.step, snakes] = ON_BOARD[facing, actions[row]]
        return actions

    def end_games(self, ended: np.ndarray) -> np.ndarray:
        """Forget the moves of games that ended, [B]. Return which games submissions play, [B]."""
        self.moves[ended] = 0
        return self._is_played & self._enabled

    def restart(self) -> None:
        """End all processes: the games have changed. The next step replays the games."""
        self._teams.close()

    def is_valid_state(self, moves: np.ndarray) -> bool:
        return bool((moves < SCRIPTED).all())

    def _file(self, row: int) -> Path:
        # Two consecutive games have the same opponent, because sides alternate from game to game.
        game = self._env.games[row]
        return self._files[(game.place + game.episode) // 2 % len(self._files)]

    def _seed(self, row: int) -> int:
        return self._streams[row].draw_seed(int(self._env.games[row].episode), bits=31)


def seat_of(env: "TeamSnakes", row: int, number: int, file: Path, seed: int, moves: np.ndarray) -> Seat:
    """Return the seat of a submission in a game: in place of our team (`number` 0) or of the other team (1)."""
    game = env.games[row]
    place = f"game {game.episode} of environment {env.env_indices[row]}"
    return Seat(row, place, file, seed, game, int(side_of(game)) ^ number, moves)


def seen_actions(env: "TeamSnakes", seats: list[Seat], moves: np.ndarray) -> np.ndarray:
    """Convert directions on the board [seats, TEAM] to actions as the snakes of the seats see them."""
    snakes = np.array([[seat.team * TEAM + number for number in range(TEAM)] for seat in seats])
    headings = np.array([seat.game.heading for seat in seats])
    facing = np.take_along_axis(headings, snakes, axis=1) if env.egocentric else np.full_like(snakes, UP)
    return AS_SEEN[facing, moves]
