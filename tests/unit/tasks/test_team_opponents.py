"""Scripted opponents: each level on constructed boards, level schedules, and reference scores."""

import numpy as np
import pytest

from helpers.team_games import arrange, build, cell
from lockstep.tasks.team_snakes.opponents import (
    BLIND,
    CAUTIOUS,
    EVADER,
    GREEDY,
    RANDOM,
    WARY,
    blocked_sides,
    choose,
    distance,
    is_threatened,
    level_at,
    room,
)
from lockstep.tasks.team_snakes.rules import CELLS, DOWN, LEFT, RIGHT, SNAKES, TEAM, UP

RUNS_RIGHT = [(2, 5), (2, 4), (2, 3)]


def decide(games, level, snake=0, wrapped=False):
    """Return the action of one snake of a scripted team."""
    actions, marks = np.full(SNAKES, -1), np.zeros((2, CELLS + 1), np.int64)
    first = snake // TEAM * TEAM
    choose(games[0], first, level, wrapped, marks, actions)
    assert (actions[first : first + TEAM] >= 0).all()
    assert (np.delete(actions, range(first, first + TEAM)) == -1).all()  # only actions of its own team are set
    return int(actions[snake])


# --------------------------------------------------------------------------------------------------------------- levels


def test_level_0_chooses_uniformly_and_deterministically_per_step():
    went = []
    for key in range(400):
        games = arrange({0: RUNS_RIGHT}, key=key)
        went.append(decide(games, RANDOM))
        assert decide(games, RANDOM) == went[-1]
    assert (np.abs(np.bincount(went, minlength=4) - 100) < 40).all()


@pytest.mark.parametrize(("bean", "action"), [((0, 5), UP), ((3, 5), DOWN), ((2, 8), RIGHT), ((1, 0), UP)])
def test_level_1_moves_to_nearest_bean_without_reversing(bean, action):
    assert decide(arrange({0: RUNS_RIGHT}, beans=[bean]), BLIND) == action


def test_level_1_ignores_obstacles_and_level_2_avoids_them():
    games = arrange({0: RUNS_RIGHT, 4: [(1, 6), (2, 6), (3, 6)]}, beans=[(2, 8)])
    assert decide(games, BLIND) == RIGHT
    assert decide(games, GREEDY) in (UP, DOWN)


def test_level_2_and_above_assign_one_bean_per_snake():
    games = arrange({0: RUNS_RIGHT, 1: [(3, 7), (3, 6), (3, 5)]}, beans=[(2, 8), (3, 11)])
    assert [decide(games, level, snake=1) for level in (BLIND, GREEDY, WARY)] == [UP, RIGHT, RIGHT]


def test_enclosed_snake_still_chooses_a_legal_move():
    games = arrange({0: RUNS_RIGHT, 4: [(1, 4), (1, 5), (1, 6), (2, 6), (3, 6), (3, 5), (3, 4)]}, beans=[(0, 5)])
    for level in (GREEDY, WARY, CAUTIOUS, EVADER):
        assert decide(games, level) in (UP, DOWN, RIGHT)


@pytest.mark.parametrize("level", [BLIND, GREEDY, WARY, CAUTIOUS, EVADER])
def test_bean_distance_is_flat_unless_wrapped_is_set(level):
    games = arrange({0: [(2, 2), (3, 2), (3, 3)]}, beans=[(2, 18)])
    assert decide(games, level) == RIGHT
    assert decide(games, level, wrapped=True) == LEFT


def test_level_3_prefers_fewer_blocked_sides_unlike_level_2():
    games = arrange({0: RUNS_RIGHT, 3: [(0, 6), (0, 5), (0, 4)]}, beans=[(1, 6)])
    assert decide(games, GREEDY) == UP
    assert decide(games, WARY) == RIGHT


def test_level_4_does_not_enter_dead_end_for_a_bean():
    walls = [(0, 6), (0, 7), (0, 8), (1, 8), (2, 8), (2, 7), (2, 6)]
    games = arrange({0: [(1, 5), (1, 4), (1, 3)], 3: walls}, beans=[(1, 6)])
    assert [decide(games, level) for level in (BLIND, GREEDY, WARY)] == [RIGHT] * 3
    assert decide(games, CAUTIOUS) in (UP, DOWN)


def test_level_4_is_more_cautious_when_longer():
    def short_cut(length):
        body = [(2, 5 - behind) for behind in range(length)]
        return decide(arrange({0: body, 3: [(3, 6), (3, 7), (3, 8)]}, beans=[(2, 7)]), CAUTIOUS) == RIGHT

    assert [short_cut(length) for length in (3, 6)] == [True, False]


def test_evader_avoids_cells_reachable_by_other_heads():
    games = arrange({0: RUNS_RIGHT, 3: [(3, 6), (3, 7), (3, 8)]}, beans=[(2, 7)])
    assert decide(games, GREEDY) == RIGHT
    assert decide(games, EVADER) == UP


def test_evader_avoids_cells_without_exit():
    walls = [(3, 6), (2, 6), (2, 7), (1, 7), (0, 7), (0, 6), (9, 6)]
    games = arrange({0: [(1, 5), (1, 4), (1, 3)], 3: walls}, beans=[(1, 6)])
    assert decide(games, GREEDY) == RIGHT
    assert decide(games, EVADER) in (UP, DOWN)


def test_evader_takes_free_cell_when_none_is_safe():
    games = arrange({0: RUNS_RIGHT, 3: [(1, 6), (0, 6), (0, 5)], 4: [(3, 6), (3, 7), (3, 8)]}, beans=[(2, 7)])
    assert decide(games, EVADER) == RIGHT


# -------------------------------------------------------------------------------------------------------- board queries


def test_distance_wrapped_uses_shortest_way_around():
    assert distance(cell((0, 0)), cell((9, 19)), True) == 2
    assert distance(cell((0, 0)), cell((9, 19)), False) == 28
    assert distance(cell((2, 3)), cell((7, 13)), True) == 15


def test_blocked_sides_excludes_own_neck():
    games = arrange({0: RUNS_RIGHT, 3: [(1, 6), (1, 7), (2, 7)]})
    assert blocked_sides(games[0], 0, cell((2, 6))) == 2
    assert blocked_sides(games[0], 1, cell((2, 6))) == 3


def test_is_threatened_considers_other_heads_across_the_seam():
    games = arrange({0: [(0, 5), (0, 6), (0, 7)], 3: [(9, 5), (9, 6), (9, 7)]})
    assert is_threatened(games[0], 0, cell((9, 4)))
    assert not is_threatened(games[0], 0, cell((1, 5)))


def test_room_counts_reachable_cells_up_to_limit():
    walls = [(0, 6), (0, 7), (0, 8), (1, 8), (2, 8), (2, 7), (2, 6)]
    games, marks = arrange({0: [(1, 5), (1, 4), (1, 3)], 3: walls}, beans=[(1, 6)]), np.zeros((2, CELLS + 1), np.int64)
    for _ in range(2):  # marks of one search must not affect the next
        assert room(games[0], cell((1, 6)), 10, marks) == 2
        assert room(games[0], cell((1, 6)), 1, marks) == 1
        assert room(games[0], cell((0, 5)), 10, marks) == 10
        assert room(games[0], cell((0, 6)), 10, marks) == 0
    bodies = int(games[0].length.sum())
    assert room(games[0], cell((0, 5)), CELLS, marks) == CELLS - bodies - 2


# ------------------------------------------------------------------------------------------------------- level schedule


@pytest.mark.parametrize(
    ("schedule", "levels"),
    [
        ("fixed", [2, 2, 2, 2, 2, 2, 2, 2]),
        ("linear", [0, 0, 0, 1, 2, 2, 3, 4]),
        ("exponential", [0, 0, 0, 0, 1, 1, 3, 4]),
        ("curriculum", [0, 0, 1, 1, 2, 3, 4, 4]),
    ],
)
def test_level_at_follows_schedule(schedule, levels):
    points = [0.0, 0.09, 0.1, 0.25, 0.5, 0.6, 0.85, 1.0]
    assert [level_at(schedule, GREEDY, point) for point in points] == levels


# ----------------------------------------------------------------------------------------------------- reference scores


def compete(ours, theirs, wrapped=False, games=400):
    """Win and loss rates and mean scores, over equally many games on each side."""
    env = build(games, opponent_level=theirs, observation="grid", grid_shape=(1, 1))
    for _ in range(200):
        step = env.step(env.scripted_actions(ours, wrapped))
    assert step.truncated.all()
    result = {name: float(values.mean()) for name, values in step.episode_info.items()}
    return result | {"lost": 1 - result["won"] - result["drawn"]}


def test_level_2_beats_random_in_97_percent_of_games():
    result = compete(GREEDY, RANDOM)
    assert result["won"] >= 0.97  # reference: 99 of 100, score 19.8 to 0.5
    assert 17 < result["score"] < 23
    assert result["conceded"] < 1.5


def test_level_2_with_wrapped_distance_beats_plain_level_2():
    result = compete(GREEDY, GREEDY, wrapped=True)
    assert result["won"] > 0.5  # reference: 58 to 39
    assert result["lost"] < 0.45


def test_higher_levels_beat_lower_levels():
    assert compete(BLIND, RANDOM)["won"] > 0.7
    assert compete(GREEDY, BLIND)["won"] > 0.8
    assert compete(CAUTIOUS, GREEDY)["won"] > 0.7
    assert compete(EVADER, GREEDY)["won"] > 0.6
    wary = compete(WARY, GREEDY)
    assert wary["score"] > wary["conceded"] - 0.5  # at least about equal
