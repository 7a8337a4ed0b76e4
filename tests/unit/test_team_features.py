"""What a snake of a team sees: the same wherever on the torus it is, and true on boards made by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.tasks.team_snakes.features import (
    BEAN_PLACES,
    BY_BEAN,
    BY_DIRECTION,
    BY_SNAKE,
    FEATURES,
    OTHER_BODIES,
    OTHER_HEADS,
    OWN_BODY,
    PLANES,
    TAILS,
    TEAM_BODIES,
    TEAM_HEADS,
    nearest_bean,
    show_features,
    show_grid,
    show_legal,
)
from lockstep.tasks.team_snakes.rules import BEANS, CELLS, DOWN, HEIGHT, LEFT, RIGHT, SNAKES, UP, WIDTH
from team_games import arrange, build, cell, place

BEANS_AT, SNAKES_AT = 4 * BY_DIRECTION, 4 * BY_DIRECTION + BEANS * BY_BEAN
OWN_AT = SNAKES_AT + (SNAKES - 1) * BY_SNAKE
RUNS_RIGHT = [(2, 5), (2, 4), (2, 3)]


def features(game, snake=0, facing=UP):
    out = np.full(FEATURES, np.nan, np.float32)
    show_features(game, snake, facing, np.zeros((2, CELLS + 1), np.int64), out)
    return out


def grid(game, snake=0, rows=HEIGHT, columns=WIDTH):
    out = np.full((PLANES, rows, columns), 7, np.uint8)
    show_grid(game, snake, out)
    return out


def marked(plane):
    """Offsets from the head of what is marked in a plane."""
    middle = np.array(plane.shape) // 2
    return {tuple(int(part) for part in where - middle) for where in np.argwhere(plane)}


def shifted(games, rows, columns):
    """The same game with everything moved over the torus."""
    moved = games.copy()
    move = np.array([cell((place(number)[0] + rows, place(number)[1] + columns)) for number in range(CELLS)])
    moved.body, moved.beans = move[np.minimum(games.body, CELLS - 1)], move[games.beans]
    moved.owner[:, move] = games.owner
    return moved


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, HEIGHT - 1), st.integers(0, WIDTH - 1), st.integers(1, 80))
def test_what_is_seen_does_not_depend_on_where_on_the_torus_it_is(seed, rows, columns, steps):
    env = build(1, seed=seed, opponent_level=2)
    for _ in range(steps):
        env.step(env.scripted_actions(4, wrapped=True))
    games = env._games
    moved = shifted(games, rows, columns)
    for snake in range(SNAKES):
        assert np.array_equal(features(games[0], snake), features(moved[0], snake))
        assert np.array_equal(grid(games[0], snake), grid(moved[0], snake))
        assert np.array_equal(grid(games[0], snake, 5, 7), grid(moved[0], snake, 5, 7))
        assert np.abs(features(games[0], snake)).max() <= 1


def test_the_legal_actions_are_all_but_the_reverse():
    legal = np.full(4, 9, np.uint8)
    for heading, expected in ((UP, [1, 0, 1, 1]), (DOWN, [0, 1, 1, 1]), (LEFT, [1, 1, 1, 0]), (RIGHT, [1, 1, 0, 1])):
        games = arrange({0: RUNS_RIGHT}, headings={0: heading})
        show_legal(games[0], 0, UP, legal)
        assert legal.tolist() == expected
        show_legal(games[0], 0, heading, legal)
        assert legal.tolist() == [1, 0, 1, 1]  # what lies behind is always below


def test_directions_tell_what_is_free_how_far_who_comes_and_how_much_room_there_is():
    walls = [(0, 6), (0, 7), (0, 8), (1, 8), (2, 8), (2, 7), (2, 6)]  # round (1, 6) and (1, 7), open to the left
    games = arrange({0: [(1, 5), (1, 4), (1, 3)], 3: walls}, beans=[(1, 7)])
    by_direction = features(games[0])[:BEANS_AT].reshape(4, BY_DIRECTION)
    free, far, threatened, near, nearest_of_team, space = by_direction.T
    assert free.tolist() == [1, 1, 0, 1]
    assert far[RIGHT] == np.float32(2 / 19)
    assert far[LEFT] == 0
    assert far[UP] == 1  # all the way round, to just below itself
    assert threatened.tolist() == [1, 0, 0, 1]  # the head at (0, 6) reaches (0, 5) and (1, 6)
    assert near[RIGHT] == np.float32(1 - 1 / 15)
    assert near[UP] == np.float32(1 - 3 / 15)
    assert nearest_of_team.tolist() == near.tolist()  # all of its team are farther away
    assert space.tolist() == [1, 1, 0, 2 / 32]


def test_beans_come_nearest_first_with_their_place_and_whether_they_can_be_had():
    games = arrange({0: RUNS_RIGHT, 3: [(3, 9), (3, 10), (3, 11)]}, beans=[(2, 9), (1, 5), (9, 5), (2, 18)])
    beans = features(games[0])[BEANS_AT:SNAKES_AT].reshape(BEANS, BY_BEAN)
    assert beans[0].tolist() == [np.float32(-1 / 5), 0, np.float32(1 - 1 / 15), 1]  # (1, 5)
    assert beans[1].tolist() == [np.float32(-3 / 5), 0, np.float32(1 - 3 / 15), 1]  # (9, 5), over the seam
    assert beans[2].tolist() == [0, np.float32(4 / 10), np.float32(1 - 4 / 15), 0]  # (2, 9), where snake 3 is nearer
    assert beans[3].tolist()[:2] == [0, np.float32(-7 / 10)]  # (2, 18), the short way round
    assert nearest_bean(games[0], cell((2, 5)), 0) == 1
    assert nearest_bean(games[0], cell((2, 5)), 0b10) == 3  # without the one at (1, 5)


def test_a_bean_that_another_of_the_team_is_nearer_to_is_left_to_it():
    near, far = (2, 7), (2, 12)  # snake 0 is two steps from the first and seven from the second
    mate, rival = [(2, 8), (1, 8), (0, 8)], [(3, 7), (3, 8), (3, 9)]
    beans = [near, far, *[(7, 5)] * 3]
    ahead = 4 * BY_DIRECTION - 2  # of the direction right

    def seen(others):
        return features(arrange({0: RUNS_RIGHT} | others, beans=beans)[0])[ahead]

    assert seen({}) == np.float32(1 - 1 / 15)
    assert seen({3: rival}) == np.float32(1 - 1 / 15)  # a rival has no claim
    assert seen({1: mate}) < np.float32(1 - 1 / 15)
    both_two_away = [(2, 9), (1, 9), (0, 9)]
    assert features(arrange({0: RUNS_RIGHT, 1: both_two_away}, beans=beans)[0])[ahead] == np.float32(1 - 1 / 15)
    later = arrange({1: RUNS_RIGHT, 0: both_two_away}, beans=beans)[0]
    assert features(later, 1)[ahead] < np.float32(1 - 1 / 15)  # of two as near, the one that moves first has it


def turned(cells):
    """Places on a board that is turned by half round (5, 10)."""
    return [(10 - row, 20 - column) for row, column in cells]


def test_a_snake_that_sees_ahead_sees_the_same_when_all_is_turned_by_half():
    layout = {0: [(5, 10), (6, 10), (7, 10)], 1: [(3, 12), (3, 13), (3, 14)], 3: [(6, 7), (6, 6), (6, 5)]}
    layout |= {2: [(1, 1), (1, 2), (1, 3)], 4: [(8, 16), (8, 17), (8, 18)], 5: [(9, 2), (9, 3), (9, 4)]}
    beans = [(4, 11), (2, 9), (5, 14), (1, 11), (8, 8)]
    up = arrange(layout, beans=beans)[0]
    down = arrange({snake: turned(lies) for snake, lies in layout.items()}, beans=turned(beans))[0]
    assert up.heading[0] == UP
    assert down.heading[0] == DOWN
    one, other = features(up, 0, UP), features(down, 0, DOWN)
    assert np.array_equal(one[:OWN_AT], other[:OWN_AT])
    assert not np.array_equal(features(down, 0, UP)[:OWN_AT], other[:OWN_AT])  # as the board lies it looks otherwise


def test_what_lies_ahead_is_above_whichever_way_a_snake_heads():
    for heading, neck, tail, ahead, aside in (
        (UP, (3, 8), (4, 8), (9, 8), (2, 9)),
        (DOWN, (1, 8), (0, 8), (5, 8), (2, 7)),
        (LEFT, (2, 9), (2, 10), (2, 5), (1, 8)),
        (RIGHT, (2, 7), (2, 6), (2, 11), (3, 8)),
    ):
        game = arrange({0: [(2, 8), neck, tail]}, beans=[ahead, aside])[0]
        beans = features(game, 0, heading)[BEANS_AT:SNAKES_AT].reshape(BEANS, BY_BEAN)
        assert beans[0, 0] == 0  # the one beside it is nearest, and neither ahead nor behind
        assert beans[0, 1] > 0  # but to its right
        assert beans[1, 0] < 0  # the other lies ahead, so above
        assert beans[1, 1] == 0
        by_direction = features(game, 0, heading)[:BEANS_AT].reshape(4, BY_DIRECTION)
        assert by_direction[RIGHT, 3] == 1  # turning right takes the bean there


def test_other_snakes_come_team_first_and_nearest_first():
    games = arrange({0: RUNS_RIGHT, 2: [(3, 5), (3, 4), (3, 3), (3, 2)], 5: [(1, 5), (1, 6), (1, 7)]})
    others = features(games[0])[SNAKES_AT:OWN_AT].reshape(SNAKES - 1, BY_SNAKE)
    assert others[0].tolist() == [np.float32(1 / 5), 0, np.float32(4 / 20), 0, 0, 0, 1]  # snake 2, heading right
    assert others[2].tolist() == [np.float32(-1 / 5), 0, np.float32(3 / 20), 0, 0, 1, 0]  # snake 5, heading left
    own = features(games[0])[OWN_AT:]
    assert own.tolist() == [0, 0, 0, 1, np.float32(3 / 20), 1, 0, 0, 0]
    assert features(games[0], 5)[OWN_AT:].tolist() == [0, 0, 1, 0, np.float32(3 / 20), 0, 0, 1, 1]


def test_the_grid_shows_bodies_beans_heads_and_tails_around_the_head():
    games = arrange({0: RUNS_RIGHT, 1: [(1, 7), (1, 8), (1, 9)], 3: [(2, 19), (2, 18), (2, 17)]}, beans=[(3, 5)])
    planes = grid(games[0], 0, 5, 15)
    assert marked(planes[OWN_BODY]) == {(0, 0), (0, -1), (0, -2)}
    assert marked(planes[TEAM_BODIES]) == {(-1, 2), (-1, 3), (-1, 4)}
    assert marked(planes[OTHER_BODIES]) == {(0, -6), (0, -7)}  # over the seam, and cut off by the window
    assert marked(planes[BEAN_PLACES]) == {(1, 0), (2, -6)}
    assert marked(planes[TEAM_HEADS]) == {(-1, 2)}
    assert marked(planes[OTHER_HEADS]) == {(0, -6)}
    assert marked(planes[TAILS]) == {(0, -2), (-1, 4)}
    whole = grid(games[0])
    assert whole[:3].sum() == games[0].length.sum()
    assert whole[BEAN_PLACES].sum() == BEANS
    assert whole[TAILS].sum() == SNAKES


def test_a_snake_that_has_no_place_sees_nothing_and_is_not_seen():
    games = arrange({0: RUNS_RIGHT, 1: [(1, 7), (1, 8), (1, 9)]})
    for where in [(1, 7), (1, 8), (1, 9)]:
        games[0].owner[cell(where)] = 0
    games[0].length[1] = 0
    assert not features(games[0], 1).any()
    assert not grid(games[0], 1).any()
    assert not features(games[0])[SNAKES_AT + BY_SNAKE :][:BY_SNAKE].any()  # last of its team
    assert grid(games[0])[TEAM_HEADS].sum() == 1
