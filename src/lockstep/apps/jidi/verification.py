"""Compare a submission with the policy it was made from: in whole games, decision by decision.

The submission runs in its own process, as on the platform, and computes its own features from the platform's
observations. The policy gets the observations of training.
"""

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.apps.jidi.platform import Controller, play_game
from lockstep.config import ConfigError
from lockstep.inference import LoadedPolicy
from lockstep.lanes import Lanes
from lockstep.tasks.team_snakes.features import ON_BOARD
from lockstep.tasks.team_snakes.opponents import LEVELS, RANDOM
from lockstep.tasks.team_snakes.rules import FIELDS, TEAM, UP, Game
from lockstep.tasks.team_snakes.submission_process import SubmissionProcess

TIMEOUT = 30.0
"""Seconds per decision. A decision takes milliseconds, but the machine may be busy."""
TIE = 1e-5
"""Relative difference of two actor outputs within which rounding may decide which is larger."""


def verify(policy: LoadedPolicy, file: Path, games: int, python: str = sys.executable) -> int:
    """Play `games` games, half of them on each side, against scripts of all levels but random.

    Returns:
        The number of decisions that were compared.

    Raises:
        ConfigError: A decision of the submission is not that of the policy.
    """
    compared = 0
    with closing(SubmissionProcess(file, TIMEOUT, python)) as process:
        expected = PolicyDirections(policy)
        for number in range(games):
            process.start_game(number, f"game {number}")
            compared += _play_and_compare(process, expected, number)
    return compared


def _play_and_compare(process: SubmissionProcess, expected: "PolicyDirections", number: int) -> int:
    team, level = number % 2, RANDOM + 1 + number % (len(LEVELS) - 1)
    snakes = slice(team * TEAM, team * TEAM + TEAM)
    compared = 0

    def submission(observation: dict[Any, Any], action_space: Any, is_act_continuous: bool) -> list[list[int]]:
        process.ask(observation, compared // TEAM)
        direction = process.direction()
        return [[int(direction == one) for one in range(4)]]

    def compare(game: Game, moves: np.ndarray) -> None:
        nonlocal compared
        if not expected.agree(game, team, moves[snakes]):
            raise ConfigError(
                f"game {number}, step {game.step}: the submission moves {moves[snakes].tolist()}, but the policy moves "
                f"{expected(game, team).tolist()} (0 up, 1 down, 2 left, 3 right).",
                "Report this as a bug in Lockstep.",
            )
        compared += TEAM

    teams: list[Controller | int] = [submission, level] if team == 0 else [level, submission]
    play_game(teams, ["", ""], key=number, watcher=compare)
    return compared


class PolicyDirections:
    """Directions on the board that a policy chooses in single games, with the observations of training."""

    def __init__(self, policy: LoadedPolicy) -> None:
        self._policy = policy
        config = replace(policy.recipe.task, num_envs=1, max_episode_steps=10**6)
        self._egocentric = config.observation == "egocentric"
        self._env = config.build(Lanes(1, range(1), 0), torch.device("cpu"))

    def __call__(self, game: Game, team: int) -> np.ndarray:
        """Return the directions of the snakes of a team, [TEAM]."""
        return np.asarray(self._directions(game, team)[np.arange(TEAM), self._outputs(game, team).argmax(1)])

    def agree(self, game: Game, team: int, moves: np.ndarray) -> bool:
        """Return whether the policy chooses these moves [TEAM], or others whose outputs are equal up to rounding."""
        outputs, directions = self._outputs(game, team), self._directions(game, team)
        chosen = outputs[np.arange(TEAM), (directions == moves[:, None]).argmax(1)]
        return bool((chosen >= outputs.max(1) - TIE * np.abs(outputs).max(1, where=outputs > -np.inf, initial=0)).all())

    @torch.no_grad()
    def _outputs(self, game: Game, team: int) -> np.ndarray:
        """Return the outputs of the actor with -inf for illegal actions, [TEAM, 4]."""
        state = {name: torch.from_numpy(np.array(game[name])[None]) for name in FIELDS}
        state["place"], state["episode"] = torch.tensor([team]), torch.tensor([0])  # their sum's parity is our side
        self._env.load_lane_state(0, self._env.lane_state(0) | state)
        obs = self._env.observations()
        policy: Any = self._policy.policy
        _, outputs, _ = policy.forward(obs, {})
        return np.asarray(outputs[0].masked_fill(obs["legal"][0, :TEAM] == 0, -torch.inf))

    def _directions(self, game: Game, team: int) -> np.ndarray:
        """Return the direction on the board of each action, [TEAM, 4]."""
        headings = game.heading[team * TEAM : team * TEAM + TEAM]
        return np.asarray(ON_BOARD[headings if self._egocentric else np.full(TEAM, UP)])
