"""The scripted teams, each level on boards made by hand, how levels rise, and what they are known to score."""

import numpy as np
import pytest

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
from team_games import arrange, build, cell

RUNS_RIGHT = [(2, 5), (2, 4), (2, 3)]


def decide(games, level, snake=0, wrapped=False):
    """What a snake of a scripted team does."""
    actions, marks = np.full(SNAKES, -1), np.zeros((2, CELLS + 1), np.int64)
    first = snake // TEAM * TEAM
    choose(games[0], first, level, wrapped, marks, actions)
    assert (actions[first : first + TEAM] >= 0).all()
    assert (np.delete(actions, range(first, first + TEAM)) == -1).all()  # only its own team
    return int(actions[snake])


# ---------------------------------------------------------------------------------------------------------- the levels


def test_level_0_does_anything_each_as_often_by_the_luck_of_game_and_step():
    went = []
    for key in range(400):
        games = arrange({0: RUNS_RIGHT}, key=key)
        went.append(decide(games, RANDOM))
        assert decide(games, RANDOM) == went[-1]
    assert (np.abs(np.bincount(went, minlength=4) - 100) < 40).all()


@pytest.mark.parametrize(("bean", "action"), [((0, 5), UP), ((3, 5), DOWN), ((2, 8), RIGHT), ((1, 0), UP)])
def test_level_1_goes_to_the_nearest_bean_and_never_back(bean, action):
    assert decide(arrange({0: RUNS_RIGHT}, beans=[bean]), BLIND) == action


def test_level_1_is_blind_to_what_lies_between_and_level_2_is_not():
    games = arrange({0: RUNS_RIGHT, 4: [(1, 6), (2, 6), (3, 6)]}, beans=[(2, 8)])
    assert decide(games, BLIND) == RIGHT
    assert decide(games, GREEDY) in (UP, DOWN)


def test_from_level_2_on_every_snake_of_a_team_has_a_bean_of_its_own():
    games = arrange({0: RUNS_RIGHT, 1: [(3, 7), (3, 6), (3, 5)]}, beans=[(2, 8), (3, 11)])
    assert [decide(games, level, snake=1) for level in (BLIND, GREEDY, WARY)] == [UP, RIGHT, RIGHT]


def test_a_snake_that_is_shut_in_moves_on_all_the_same():
    games = arrange({0: RUNS_RIGHT, 4: [(1, 4), (1, 5), (1, 6), (2, 6), (3, 6), (3, 5), (3, 4)]}, beans=[(0, 5)])
    for level in (GREEDY, WARY, CAUTIOUS, EVADER):
        assert decide(games, level) in (UP, DOWN, RIGHT)


@pytest.mark.parametrize("level", [BLIND, GREEDY, WARY, CAUTIOUS, EVADER])
def test_distances_are_flat_unless_they_are_to_be_wrapped(level):
    games = arrange({0: [(2, 2), (3, 2), (3, 3)]}, beans=[(2, 18)])
    assert decide(games, level) == RIGHT
    assert decide(games, level, wrapped=True) == LEFT


def test_level_3_takes_the_way_with_fewer_blocked_sides_and_level_2_does_not_look():
    games = arrange({0: RUNS_RIGHT, 3: [(0, 6), (0, 5), (0, 4)]}, beans=[(1, 6)])
    assert decide(games, GREEDY) == UP
    assert decide(games, WARY) == RIGHT


def test_level_4_does_not_go_into_a_pocket_for_a_bean():
    walls = [(0, 6), (0, 7), (0, 8), (1, 8), (2, 8), (2, 7), (2, 6)]
    games = arrange({0: [(1, 5), (1, 4), (1, 3)], 3: walls}, beans=[(1, 6)])
    assert [decide(games, level) for level in (BLIND, GREEDY, WARY)] == [RIGHT] * 3
    assert decide(games, CAUTIOUS) in (UP, DOWN)


def test_level_4_is_the_more_cautious_the_longer_it_is():
    def short_cut(length):
        body = [(2, 5 - behind) for behind in range(length)]
        return decide(arrange({0: body, 3: [(3, 6), (3, 7), (3, 8)]}, beans=[(2, 7)]), CAUTIOUS) == RIGHT

    assert [short_cut(length) for length in (3, 6)] == [True, False]


def test_the_evader_goes_nowhere_another_head_may_come():
    games = arrange({0: RUNS_RIGHT, 3: [(3, 6), (3, 7), (3, 8)]}, beans=[(2, 7)])
    assert decide(games, GREEDY) == RIGHT
    assert decide(games, EVADER) == UP


def test_the_evader_goes_nowhere_it_cannot_go_on_from():
    walls = [(3, 6), (2, 6), (2, 7), (1, 7), (0, 7), (0, 6), (9, 6)]
    games = arrange({0: [(1, 5), (1, 4), (1, 3)], 3: walls}, beans=[(1, 6)])
    assert decide(games, GREEDY) == RIGHT
    assert decide(games, EVADER) in (UP, DOWN)


def test_the_evader_takes_what_is_free_where_nothing_is_safe():
    games = arrange({0: RUNS_RIGHT, 3: [(1, 6), (0, 6), (0, 5)], 4: [(3, 6), (3, 7), (3, 8)]}, beans=[(2, 7)])
    assert decide(games, EVADER) == RIGHT


# ---------------------------------------------------------------------------------------------------------- its senses


def test_distance_is_the_short_way_round_where_it_wraps():
    assert distance(cell((0, 0)), cell((9, 19)), True) == 2
    assert distance(cell((0, 0)), cell((9, 19)), False) == 28
    assert distance(cell((2, 3)), cell((7, 13)), True) == 15


def test_blocked_sides_leave_out_where_the_snake_comes_from():
    games = arrange({0: RUNS_RIGHT, 3: [(1, 6), (1, 7), (2, 7)]})
    assert blocked_sides(games[0], 0, cell((2, 6))) == 2
    assert blocked_sides(games[0], 1, cell((2, 6))) == 3


def test_a_cell_is_threatened_by_other_heads_round_the_torus_too():
    games = arrange({0: [(0, 5), (0, 6), (0, 7)], 3: [(9, 5), (9, 6), (9, 7)]})
    assert is_threatened(games[0], 0, cell((9, 4)))
    assert not is_threatened(games[0], 0, cell((1, 5)))


def test_room_is_counted_through_free_cells_and_beans_up_to_enough():
    walls = [(0, 6), (0, 7), (0, 8), (1, 8), (2, 8), (2, 7), (2, 6)]
    games, marks = arrange({0: [(1, 5), (1, 4), (1, 3)], 3: walls}, beans=[(1, 6)]), np.zeros((2, CELLS + 1), np.int64)
    for _ in range(2):  # what one search leaves does not disturb the next
        assert room(games[0], cell((1, 6)), 10, marks) == 2
        assert room(games[0], cell((1, 6)), 1, marks) == 1
        assert room(games[0], cell((0, 5)), 10, marks) == 10
        assert room(games[0], cell((0, 6)), 10, marks) == 0
    bodies = int(games[0].length.sum())
    assert room(games[0], cell((0, 5)), CELLS, marks) == CELLS - bodies - 2


# ---------------------------------------------------------------------------------------------------------- the rise


@pytest.mark.parametrize(
    ("rise", "levels"),
    [
        ("fixed", [2, 2, 2, 2, 2, 2, 2, 2]),
        ("linear", [0, 0, 0, 1, 2, 2, 3, 4]),
        ("exponential", [0, 0, 0, 0, 1, 1, 3, 4]),
        ("curriculum", [0, 0, 1, 1, 2, 3, 4, 4]),
    ],
)
def test_levels_rise_over_the_run_as_named(rise, levels):
    points = [0.0, 0.09, 0.1, 0.25, 0.5, 0.6, 0.85, 1.0]
    assert [level_at(rise, GREEDY, point) for point in points] == levels


# ---------------------------------------------------------------------------------------------------------- the anchors


def compete(ours, theirs, wrapped=False, games=400):
    """Shares of games that we win and lose, and mean scores, over as many games on either side."""
    env = build(games, opponent_level=theirs, observation="grid", grid_shape=(1, 1))
    for _ in range(200):
        step = env.step(env.scripted_actions(ours, wrapped))
    assert step.truncated.all()
    result = {name: float(values.mean()) for name, values in step.episode_info.items()}
    return result | {"lost": 1 - result["won"] - result["drawn"]}


def test_level_2_beats_random_in_97_games_of_100():
    result = compete(GREEDY, RANDOM)
    assert result["won"] >= 0.97  # the reference: 99 of 100, score 19.8 to 0.5
    assert 17 < result["score"] < 23
    assert result["conceded"] < 1.5


def test_level_2_with_wrapped_distances_beats_plain_level_2():
    result = compete(GREEDY, GREEDY, wrapped=True)
    assert result["won"] > 0.5  # the reference: 58 to 39
    assert result["lost"] < 0.45


def test_the_ladder_rises():
    assert compete(BLIND, RANDOM)["won"] > 0.7
    assert compete(GREEDY, BLIND)["won"] > 0.8
    assert compete(CAUTIOUS, GREEDY)["won"] > 0.7
    assert compete(EVADER, GREEDY)["won"] > 0.6
    wary = compete(WARY, GREEDY)
    assert wary["score"] > wary["conceded"] - 0.5  # a little better, or as good
