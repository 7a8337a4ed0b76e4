"""Matches of team snakes between scripted and trained teams, half of the games on each side.

Shapes: B games, A snakes per team.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.apps.league.ratings import MatchRecord
from lockstep.config import ConfigError
from lockstep.inference import LoadedPolicy
from lockstep.lanes import Lanes
from lockstep.pytree import Tree, tree_map
from lockstep.tasks.team_snakes.env import TeamSnakesConfig
from lockstep.tasks.team_snakes.kernel import SCRIPTED
from lockstep.tasks.team_snakes.opponents import name_of
from lockstep.tasks.team_snakes.rules import TEAM


class Player(NamedTuple):
    """Team: the level of a script, or a trained policy."""

    name: str
    player: int | LoadedPolicy


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


@torch.no_grad()
def play_match(one: Player, other: Player, games: int, seed: int) -> MatchRecord:
    """Play `games` games, half of them on each side: adjacent environments start on opposite sides."""
    if isinstance(one.player, int) and not isinstance(other.player, int):
        return play_match(other, one, games, seed).reversed()  # against a policy, a script is the second team
    config = _match_config(one, other, games)
    env = config.build(Lanes(1, range(1), seed), torch.device("cpu"))
    for player in (one.player, other.player):
        if isinstance(player, LoadedPolicy):
            player.reset()
    obs, playing = env.reset(), torch.ones(games, dtype=torch.bool)
    results = {name: torch.zeros(games) for name in ("won", "drawn", "score", "conceded")}
    while playing.any():  # environments that finished play another game, which is not counted
        actions = env.scripted_actions(one.player) if isinstance(one.player, int) else _policy_actions(one.player, obs)
        step = env.step(torch.cat([actions, _opponent_actions(other.player, obs)], dim=1))
        obs, ended = step.obs, playing & (step.terminated | step.truncated)
        results = {name: torch.where(ended, step.episode_info[name], values) for name, values in results.items()}
        playing &= ~ended
    won, drawn = int(results["won"].sum()), int(results["drawn"].sum())
    return MatchRecord(
        won, drawn, games - won - drawn, float(results["score"].mean()), float(results["conceded"].mean())
    )


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
    )


def _opponent_actions(player: int | LoadedPolicy, obs: Any) -> Tensor:
    """Return actions of the second team, [B, A]. For a script, the environment chooses them."""
    if isinstance(player, int):
        return torch.full((len(obs["legal"]), TEAM), SCRIPTED)
    return _policy_actions(player, tree_map(lambda x: x.roll(TEAM, dims=1), obs))


def _policy_actions(policy: LoadedPolicy, obs: Tree) -> Tensor:
    """Return actions of a policy for the first team in observations [B, 2A, ...]."""
    own_obs = obs if policy.recipe.task.control_both_teams else tree_map(lambda x: x[:, :TEAM], obs)
    return torch.from_numpy(policy.act(own_obs))[:, :TEAM]
