"""Matches of team snakes between scripts, trained teams and submissions, half of the games on each side.

Shapes: B games, A snakes per team.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.apps.league.ratings import MatchRecord
from lockstep.config import ConfigError
from lockstep.inference import LoadedPolicy
from lockstep.lanes import Lanes
from lockstep.pytree import Tree, tree_map
from lockstep.tasks.team_snakes.env import TeamSnakes, TeamSnakesConfig
from lockstep.tasks.team_snakes.kernel import SCRIPTED
from lockstep.tasks.team_snakes.opponents import name_of
from lockstep.tasks.team_snakes.rules import SNAKES, TEAM
from lockstep.tasks.team_snakes.submission_games import seat_of, seen_actions
from lockstep.tasks.team_snakes.submission_teams import Seat, SubmissionTeams

MAX_PROCESSES = 16
"""Games with a submission that are played at the same time."""
NO_MOVES = np.zeros((0, SNAKES), np.uint8)
"""Moves of a game so far: a match is not interrupted, so none are replayed."""


class Submission(NamedTuple):
    """File in the form of the competition platform. It is executed in processes of its own."""

    file: Path
    timeout: float
    """Seconds per decision."""


class Player(NamedTuple):
    """Team: the level of a script, a trained policy or a submission."""

    name: str
    player: int | LoadedPolicy | Submission


def script(level: int) -> Player:
    return Player(name_of(level), level)


def trained(name: str, policy: LoadedPolicy) -> Player:
    """Return a trained team. Raise ConfigError if the policy does not play team snakes."""
    task = policy.recipe.task
    if not isinstance(task, TeamSnakesConfig):
        raise ConfigError(
            f"{name} does not play team snakes.", "Use a run of team-ddpg, or of another recipe with this task."
        )
    return Player(name, policy)


def submission(name: str, file: Path, timeout: float) -> Player:
    """Return the team of a submission. Raise ConfigError if there is no such file."""
    if not file.is_file():
        raise ConfigError(f"there is no file {file}.", "Give the path of a submission: a Python file.")
    return Player(name, Submission(file.resolve(), timeout))


@torch.no_grad()
def play_match(one: Player, other: Player, games: int, seed: int) -> MatchRecord:
    """Play `games` games, half of them on each side: adjacent environments start on opposite sides.

    All games are played at once. Games of submissions need processes, so fewer environments play several games each.
    """
    if isinstance(one.player, int) and not isinstance(other.player, int):
        return play_match(other, one, games, seed).reversed()  # against a policy, a script is the second team
    foreign = any(isinstance(player, Submission) for player in (one.player, other.player))
    envs = max(count for count in range(2, MAX_PROCESSES + 1, 2) if games % count == 0) if foreign else games
    env = _match_config(one, other, envs).build(Lanes(1, range(1), seed), torch.device("cpu"))
    for player in (one.player, other.player):
        if isinstance(player, LoadedPolicy):
            player.reset()
    obs, remaining = env.reset(), torch.full((envs,), games // envs)
    results = {name: torch.zeros(envs) for name in ("won", "drawn", "score", "conceded")}
    with closing(_Team(one.player, env, 0)) as first, closing(_Team(other.player, env, 1)) as second:
        while remaining.any():  # environments that finished play another game, which is not counted
            step = env.step(torch.cat([first.actions(obs), second.actions(obs)], dim=1))
            obs, ended = step.obs, (remaining > 0) & (step.terminated | step.truncated)
            for name, values in results.items():
                values += torch.where(ended, step.episode_info[name], 0.0)
            remaining -= ended.long()
    totals = {name: float(values.sum()) for name, values in results.items()}
    won, drawn = int(totals["won"]), int(totals["drawn"])
    return MatchRecord(won, drawn, games - won - drawn, totals["score"] / games, totals["conceded"] / games)


def _match_config(one: Player, other: Player, games: int) -> TeamSnakesConfig:
    """Return the task config of a match, with the observations that trained teams expect."""
    tasks = [team.player.recipe.task for team in (one, other) if isinstance(team.player, LoadedPolicy)]
    config: TeamSnakesConfig = tasks[0] if tasks else TeamSnakesConfig()
    if any((task.observation, task.grid_shape) != (config.observation, config.grid_shape) for task in tasks):
        raise ConfigError(
            f"{one.name} and {other.name} have different observations.", "Use runs with the same task.observation."
        )
    level = other.player if isinstance(other.player, int) else 0
    return replace(
        config,
        num_envs=games,
        control_both_teams=True,
        level_schedule="fixed",
        evade_after_samples=None,
        opponent_level=level,
        toroidal_distance=False,
        submissions=(),
    )


class _Team:
    """Actions of a player in a match: as the first team of the environment (`number` 0) or as the second (1)."""

    def __init__(self, player: int | LoadedPolicy | Submission, env: TeamSnakes, number: int) -> None:
        self.player, self.env, self.number = player, env, number
        self.processes = SubmissionTeams(player.timeout) if isinstance(player, Submission) else None
        self.streams = env.env_streams(f"league.submission.{number}")

    def actions(self, obs: Any) -> Tensor:
        """Return the actions of the team, [B, A]."""
        if isinstance(self.player, int):
            if self.number == 0:
                return self.env.scripted_actions(self.player)
            return torch.full((len(obs["legal"]), TEAM), SCRIPTED)  # the environment chooses them
        if isinstance(self.player, LoadedPolicy):
            return _policy_actions(self.player, tree_map(lambda x: x.roll(TEAM * self.number, dims=1), obs))
        assert self.processes is not None
        seats = [self._seat(row, self.player.file) for row in range(self.env.num_envs)]
        return torch.from_numpy(seen_actions(self.env, seats, self.processes.choose(seats)))

    def _seat(self, row: int, file: Path) -> Seat:
        seed = self.streams[row].draw_seed(int(self.env.games[row].episode), bits=31)
        return seat_of(self.env, row, self.number, file, seed, NO_MOVES)

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()


def _policy_actions(policy: LoadedPolicy, obs: Tree) -> Tensor:
    """Return actions of a policy for the first team in observations [B, 2A, ...]."""
    own_obs = obs if policy.recipe.task.control_both_teams else tree_map(lambda x: x[:, :TEAM], obs)
    return torch.from_numpy(policy.act(own_obs))[:, :TEAM]
