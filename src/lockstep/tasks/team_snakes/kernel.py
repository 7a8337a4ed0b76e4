"""A batch of team games stepped together: scripts, rules, rewards and observations in one compiled call.

Shapes: B games, A agents of a game (3, or 6 with both teams), F features, P planes.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from lockstep.tasks.team_snakes.features import AS_SEEN, ON_BOARD, show_features, show_grid, show_legal
from lockstep.tasks.team_snakes.opponents import choose, distance
from lockstep.tasks.team_snakes.rules import BEANS, CELLS, SNAKES, START_LENGTH, TEAM, UP, Game, cell_of, start, step

SCRIPTED = 4
"""Action with which the script moves a snake of the other team."""
RESULTS = ("score", "conceded", "won", "drawn", "level", "scripted", "beaten")
"""Metrics of a game: gain of our snakes, gain of the others, whether we won, whether it is a draw, level of the script.
With `control_both_teams` also: whether the script moved the other team, and whether we won against it."""


class RewardTerms(NamedTuple):
    """Settings that the kernel needs."""

    max_episode_steps: int
    egocentric: bool
    toroidal_distance: bool
    approach_reward: float
    death_penalty: float
    team_reward_fraction: float
    opponent_reward_weight: float


class TeamResults(NamedTuple):
    """Outputs of a step. The last three are written only where a game ended."""

    seen: np.ndarray
    """[B, A, F] float32 or [B, A, P, rows, columns] uint8."""
    legal: np.ndarray
    """[B, A, 4] uint8: 0 for the reverse."""
    reward: np.ndarray
    """[B] float32."""
    agent_reward: np.ndarray
    """[B, A] float32."""
    terminated: np.ndarray
    """[B] bool."""
    truncated: np.ndarray
    """[B] bool."""
    final_seen: np.ndarray
    final_legal: np.ndarray
    outcome: np.ndarray
    """[7, B] float32, in the order of RESULTS."""


@njit(cache=True, nogil=True)
def side_of(game: Game) -> int:
    """Return our team, 0 or 1. Neighboring environments start on different sides, and sides alternate every game."""
    return (game.place + game.episode) & 1


@njit(cache=True, nogil=True)
def _facing(game: Game, snake: int, egocentric: bool) -> int:
    """Return the board direction that is up in the observations and actions of a snake."""
    return game.heading[snake] if egocentric else UP


@njit(cache=True, nogil=True)
def _write_obs(game: Game, egocentric: bool, obs: np.ndarray, legal: np.ndarray, marks: np.ndarray) -> None:
    """Write the observations of the agents of a game, ours first."""
    for agent in range(len(obs)):
        snake = (side_of(game) * TEAM + agent) % SNAKES
        facing = _facing(game, snake, egocentric)
        show_legal(game, snake, facing, legal[agent])
        if obs.ndim == 2:
            show_features(game, snake, facing, marks, obs[agent])
        else:
            show_grid(game, snake, obs[agent])


@njit(cache=True, nogil=True)
def observe_all(games: np.recarray, egocentric: bool, results: TeamResults, marks: np.ndarray) -> None:
    for b in range(games.size):
        _write_obs(games[b], egocentric, results.seen[b], results.legal[b], marks)


@njit(cache=True, nogil=True)
def start_all(games: np.recarray) -> None:
    for b in range(games.size):
        games[b].episode = 0
        start(games[b])


@njit(cache=True, nogil=True)
def choose_all(
    games: np.recarray, level: int, wrapped: bool, egocentric: bool, marks: np.ndarray, actions: np.ndarray
) -> None:
    """Write the actions that a script would take in place of our team, [B, TEAM]."""
    moves = np.zeros(SNAKES, np.int64)
    for b in range(games.size):
        first = side_of(games[b]) * TEAM
        choose(games[b], first, level, wrapped, marks, moves)
        for agent in range(TEAM):
            facing = _facing(games[b], first + agent, egocentric)
            actions[b, agent] = AS_SEEN[facing, moves[first + agent]]


@njit(cache=True, nogil=True)
def _actions_valid(actions: np.ndarray) -> bool:
    for b in range(actions.shape[0]):
        for agent in range(actions.shape[1]):
            if not 0 <= actions[b, agent] < SCRIPTED + (agent >= TEAM):
                return False
    return True


@njit(cache=True, nogil=True)
def _add_shaping(
    game: Game, terms: RewardTerms, before: np.ndarray, beans: np.ndarray, died: np.ndarray, own: np.ndarray
) -> None:
    """Add the shaping terms to the own rewards [SNAKES].

    `before` are the heads before the step. Only beans that were on the board before the step count. Circling gains
    nothing: a step away from a bean costs as much as a step towards it earns.
    """
    for snake in range(SNAKES):
        if died[snake]:
            own[snake] += terms.death_penalty
        elif terms.approach_reward:
            distance_before = distance_after = CELLS
            for bean in beans:
                distance_before = min(distance_before, distance(before[snake], bean, True))
                distance_after = min(distance_after, distance(cell_of(game, snake, 0), bean, True))
            own[snake] += terms.approach_reward * (distance_before - distance_after)


@njit(cache=True, nogil=True)
def _write_outcome(game: Game, side: int, level: int, scripted: bool, outcome: np.ndarray) -> None:
    """Write the outcome of a game [7]. A snake that could not return to the board has no gain."""
    gains = np.zeros(2, np.int64)
    for snake in range(SNAKES):
        gains[snake // TEAM] += max(game.length[snake] - START_LENGTH, 0)
    gain, opponent_gain = gains[side], gains[1 - side]
    outcome[0], outcome[1], outcome[2], outcome[3] = gain, opponent_gain, gain > opponent_gain, gain == opponent_gain
    outcome[4], outcome[5], outcome[6] = level, scripted, scripted and gain > opponent_gain


@njit(cache=True, nogil=True)
def step_all(
    games: np.recarray, actions: np.ndarray, level: int, terms: RewardTerms, results: TeamResults, marks: np.ndarray
) -> int:
    """Step every game and start new ones where one ended. Return the truncated count, or -1 for a bad action."""
    if not _actions_valid(actions):
        return -1
    agents, num_truncated = actions.shape[1], 0
    moves, before, died = np.zeros(SNAKES, np.int64), np.zeros(SNAKES, np.int64), np.zeros(SNAKES, np.bool_)
    beans, rewards, shaped = np.zeros(BEANS, np.int64), np.zeros(SNAKES), np.zeros(SNAKES)
    for b in range(games.size):
        game, side = games[b], side_of(games[b])
        first, opponents = side * TEAM, TEAM - side * TEAM
        # Actions of the script and of the agents.
        scripted = agents == TEAM or (actions[b, TEAM:] == SCRIPTED).any()
        if scripted:
            choose(game, opponents, level, terms.toroidal_distance, marks, moves)
        for agent in range(agents):
            if actions[b, agent] != SCRIPTED:
                snake = (first + agent) % SNAKES
                moves[snake] = ON_BOARD[_facing(game, snake, terms.egocentric), actions[b, agent]]
        beans[:] = game.beans
        for snake in range(SNAKES):
            before[snake] = cell_of(game, snake, 0)

        over = step(game, moves, rewards, died)
        # Rewards: own reward with shaping, then the team's and the other team's share.
        shaped[:] = rewards
        _add_shaping(game, terms, before, beans, died, shaped)
        results.reward[b] = rewards[first : first + TEAM].sum() - rewards[opponents : opponents + TEAM].sum()
        for agent in range(agents):
            snake = (first + agent) % SNAKES
            team, other_team = snake // TEAM * TEAM, TEAM - snake // TEAM * TEAM
            team_mean = shaped[team : team + TEAM].sum() / TEAM
            opponent_mean = rewards[other_team : other_team + TEAM].sum() / TEAM
            own = shaped[snake] + terms.team_reward_fraction * (team_mean - shaped[snake])
            results.agent_reward[b, agent] = own - terms.opponent_reward_weight * opponent_mean

        results.terminated[b] = over
        results.truncated[b] = not over and game.step >= terms.max_episode_steps
        if over or results.truncated[b]:
            _write_obs(game, terms.egocentric, results.final_seen[b], results.final_legal[b], marks)
            _write_outcome(game, side, level, scripted, results.outcome[:, b])
            num_truncated += results.truncated[b]
            game.episode += 1
            start(game)
        _write_obs(game, terms.egocentric, results.seen[b], results.legal[b], marks)
    return num_truncated
