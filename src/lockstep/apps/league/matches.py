"""Matches of team snakes: scripted teams and trained ones, every one against every other, half the games on each side.

Shapes: B games, A snakes of a team.
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
from lockstep.tasks.team_snakes.env import TeamSnakes, TeamSnakesConfig
from lockstep.tasks.team_snakes.kernel import SCRIPTED
from lockstep.tasks.team_snakes.opponents import name_of
from lockstep.tasks.team_snakes.rules import TEAM


class Player(NamedTuple):
    """A team: a script of some level, or a trained policy."""

    name: str
    player: int | LoadedPolicy


def script(level: int) -> Player:
    return Player(name_of(level), level)


def trained(name: str, policy: LoadedPolicy) -> Player:
    """A trained team, or in words why it is none."""
    task = policy.recipe.task
    if not isinstance(task, TeamSnakesConfig):
        raise ConfigError(f"{name} does not play team snakes.", "Name a run of team-ddpg, or of your own such recipe.")
    return Player(name, policy)


@torch.no_grad()
def play_match(one: Player, other: Player, games: int, seed: int) -> MatchRecord:
    """Play so many games, half of them on each side: neighbouring environments begin on different ones."""
    if isinstance(one.player, int) and not isinstance(other.player, int):
        return play_match(other, one, games, seed).reversed()  # a script can be the other side of any team
    config = _rules(one, other, games)
    env = config.build(Lanes(1, range(1), seed), torch.device("cpu"))
    for player in (one.player, other.player):
        if isinstance(player, LoadedPolicy):
            player.reset()
    obs, playing = env.reset(), torch.ones(games, dtype=torch.bool)
    told = {name: torch.zeros(games) for name in ("won", "drawn", "score", "conceded")}
    while playing.any():  # a game that ended starts its next one, which is not counted
        step = env.step(torch.cat([_ours(one.player, env, obs), _theirs(other.player, obs)], dim=1))
        obs, ended = step.obs, playing & (step.terminated | step.truncated)
        told = {name: torch.where(ended, step.episode_info[name], values) for name, values in told.items()}
        playing &= ~ended
    won, drawn = int(told["won"].sum()), int(told["drawn"].sum())
    return MatchRecord(won, drawn, games - won - drawn, float(told["score"].mean()), float(told["conceded"].mean()))


def _rules(one: Player, other: Player, games: int) -> TeamSnakesConfig:
    """The game both play, seen as trained ones are used to."""
    tasks = [who.player.recipe.task for who in (one, other) if isinstance(who.player, LoadedPolicy)]
    config: TeamSnakesConfig = tasks[0] if tasks else TeamSnakesConfig()
    if any((task.observation, task.grid_shape) != (config.observation, config.grid_shape) for task in tasks):
        raise ConfigError(
            f"{one.name} sees the board otherwise than {other.name} does.", "Let runs with one task.observation meet."
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


def _ours(player: int | LoadedPolicy, env: TeamSnakes, obs: Tree) -> Tensor:
    """What the first team does, [B, A]."""
    return env.scripted_actions(player) if isinstance(player, int) else _asked(player, obs)


def _theirs(player: int | LoadedPolicy, obs: Any) -> Tensor:
    """What the other team does, [B, A]: a script is left to the games themselves."""
    if isinstance(player, int):
        return torch.full((len(obs["legal"]), TEAM), SCRIPTED)
    return _asked(player, tree_map(lambda x: x.roll(TEAM, dims=1), obs))


def _asked(policy: LoadedPolicy, obs: Tree) -> Tensor:
    """What a policy does for the first team of observations [B, 2A, ...]."""
    seen = obs if policy.recipe.task.control_both_teams else tree_map(lambda x: x[:, :TEAM], obs)
    return torch.from_numpy(policy.act(seen))[:, :TEAM]
