"""Observations of a team snake: translation-invariant on the torus, and correct on constructed boards."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.team_games import arrange, build, cell, place
from lockstep.tasks.team_snakes.features import (
    BEAN_PLANE,
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
    show_features,
    show_grid,
    show_legal,
)
from lockstep.tasks.team_snakes.opponents import nearest_bean
from lockstep.tasks.team_snakes.rules import BEANS, CELLS, DOWN, HEIGHT, LEFT, RIGHT, SNAKES, UP, WIDTH

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
    """Offsets from the head of all marked cells of a plane."""
    middle = np.array(plane.shape) // 2
    return {tuple(int(part) for part in where - middle) for where in np.argwhere(plane)}


def shifted(games, rows, columns):
    """The same game translated on the torus."""
    moved = games.copy()
    move = np.array([cell((place(number)[0] + rows, place(number)[1] + columns)) for number in range(CELLS)])
    moved.body, moved.beans = move[np.minimum(games.body, CELLS - 1)], move[games.beans]
    moved.owner[:, move] = games.owner
    return moved


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, HEIGHT - 1), st.integers(0, WIDTH - 1), st.integers(1, 80))
def test_features_do_not_depend_on_position_on_torus(seed, rows, columns, steps):
    env = build(1, seed=seed, opponent_level=2)
    for _ in range(steps):
        env.step(env.scripted_actions(4, wrapped=True))
    games = env.games
    moved = shifted(games, rows, columns)
    for snake in range(SNAKES):
        assert np.array_equal(features(games[0], snake), features(moved[0], snake))
        assert np.array_equal(grid(games[0], snake), grid(moved[0], snake))
        assert np.array_equal(grid(games[0], snake, 5, 7), grid(moved[0], snake, 5, 7))
        assert np.abs(features(games[0], snake)).max() <= 1


def test_legal_mask_excludes_only_the_reverse_action():
    legal = np.full(4, 9, np.uint8)
    for heading, expected in ((UP, [1, 0, 1, 1]), (DOWN, [0, 1, 1, 1]), (LEFT, [1, 1, 1, 0]), (RIGHT, [1, 1, 0, 1])):
        games = arrange({0: RUNS_RIGHT}, headings={0: heading})
        show_legal(games[0], 0, UP, legal)
        assert legal.tolist() == expected
        show_legal(games[0], 0, heading, legal)
        assert legal.tolist() == [1, 0, 1, 1]  # in egocentric coordinates, backwards is always DOWN


def test_direction_features_give_free_distance_threat_bean_and_room():
    walls = [(0, 6), (0, 7), (0, 8), (1, 8), (2, 8), (2, 7), (2, 6)]  # around (1, 6) and (1, 7), open on the left
    games = arrange({0: [(1, 5), (1, 4), (1, 3)], 3: walls}, beans=[(1, 7)])
    by_direction = features(games[0])[:BEANS_AT].reshape(4, BY_DIRECTION)
    free, far, threatened, near, nearest_of_team, space, moves = by_direction.T
    assert free.tolist() == [1, 1, 0, 1]
    assert far[RIGHT] == np.float32(2 / 19)
    assert far[LEFT] == 0
    assert far[UP] == 1  # all the way around the torus, to the cell below itself
    assert threatened.tolist() == [1, 0, 0, 1]  # the head at (0, 6) reaches (0, 5) and (1, 6)
    assert near[RIGHT] == np.float32(1 - 1 / 15)
    assert near[UP] == np.float32(1 - 3 / 15)
    assert nearest_of_team.tolist() == near.tolist()  # its teammates are farther away
    assert space.tolist() == [1, 1, 0, 2 / 32]
    assert moves.tolist() == [1, 1, 0, 1]  # to the right, the walls retreat in time


def test_bean_features_are_sorted_by_distance_with_reachability():
    games = arrange({0: RUNS_RIGHT, 3: [(3, 9), (3, 10), (3, 11)]}, beans=[(2, 9), (1, 5), (9, 5), (2, 18)])
    beans = features(games[0])[BEANS_AT:SNAKES_AT].reshape(BEANS, BY_BEAN)
    assert beans[0].tolist() == [np.float32(-1 / 5), 0, np.float32(1 - 1 / 15), 1]  # (1, 5)
    assert beans[1].tolist() == [np.float32(-3 / 5), 0, np.float32(1 - 3 / 15), 1]  # (9, 5), over the seam
    assert beans[2].tolist() == [0, np.float32(4 / 10), np.float32(1 - 4 / 15), 0]  # (2, 9), where snake 3 is nearer
    assert beans[3].tolist()[:2] == [0, np.float32(-7 / 10)]  # (2, 18), shortest way across the seam
    assert nearest_bean(games[0], cell((2, 5)), 0, True)[1] == 1
    assert nearest_bean(games[0], cell((2, 5)), 0b10, True)[1] == 3  # without the one at (1, 5)


def test_nearest_team_bean_feature_skips_beans_closer_to_teammate():
    near, far = (2, 7), (2, 12)  # snake 0 is two steps from the first and seven from the second
    mate, rival = [(2, 8), (1, 8), (0, 8)], [(3, 7), (3, 8), (3, 9)]
    beans = [near, far, *[(7, 5)] * 3]
    ahead = 4 * BY_DIRECTION - 3  # of the direction right

    def seen(others):
        return features(arrange({0: RUNS_RIGHT} | others, beans=beans)[0])[ahead]

    assert seen({}) == np.float32(1 - 1 / 15)
    assert seen({3: rival}) == np.float32(1 - 1 / 15)  # only teammates count
    assert seen({1: mate}) < np.float32(1 - 1 / 15)
    both_two_away = [(2, 9), (1, 9), (0, 9)]
    assert features(arrange({0: RUNS_RIGHT, 1: both_two_away}, beans=beans)[0])[ahead] == np.float32(1 - 1 / 15)
    later = arrange({1: RUNS_RIGHT, 0: both_two_away}, beans=beans)[0]
    assert features(later, 1)[ahead] < np.float32(1 - 1 / 15)  # on ties the lower-numbered snake has priority


def turned(cells):
    """Positions after rotating the board by 180 degrees around (5, 10)."""
    return [(10 - row, 20 - column) for row, column in cells]


def test_egocentric_features_do_not_change_under_half_turn():
    layout = {0: [(5, 10), (6, 10), (7, 10)], 1: [(3, 12), (3, 13), (3, 14)], 3: [(6, 7), (6, 6), (6, 5)]}
    layout |= {2: [(1, 1), (1, 2), (1, 3)], 4: [(8, 16), (8, 17), (8, 18)], 5: [(9, 2), (9, 3), (9, 4)]}
    beans = [(4, 11), (2, 9), (5, 14), (1, 11), (8, 8)]
    up = arrange(layout, beans=beans)[0]
    down = arrange({snake: turned(lies) for snake, lies in layout.items()}, beans=turned(beans))[0]
    assert up.heading[0] == UP
    assert down.heading[0] == DOWN
    one, other = features(up, 0, UP), features(down, 0, DOWN)
    assert np.array_equal(one[:OWN_AT], other[:OWN_AT])
    assert not np.array_equal(features(down, 0, UP)[:OWN_AT], other[:OWN_AT])  # board view differs


def test_egocentric_features_place_ahead_above_for_every_heading():
    for heading, neck, tail, ahead, aside in (
        (UP, (3, 8), (4, 8), (9, 8), (2, 9)),
        (DOWN, (1, 8), (0, 8), (5, 8), (2, 7)),
        (LEFT, (2, 9), (2, 10), (2, 5), (1, 8)),
        (RIGHT, (2, 7), (2, 6), (2, 11), (3, 8)),
    ):
        game = arrange({0: [(2, 8), neck, tail]}, beans=[ahead, aside])[0]
        beans = features(game, 0, heading)[BEANS_AT:SNAKES_AT].reshape(BEANS, BY_BEAN)
        assert beans[0, 0] == 0  # the nearest bean is to the side, neither ahead nor behind
        assert beans[0, 1] > 0  # to its right
        assert beans[1, 0] < 0  # the other bean is ahead, which is above
        assert beans[1, 1] == 0
        by_direction = features(game, 0, heading)[:BEANS_AT].reshape(4, BY_DIRECTION)
        assert by_direction[RIGHT, 3] == 1  # turning right reaches the bean


def test_snake_features_list_team_first_and_nearest_first():
    games = arrange({0: RUNS_RIGHT, 2: [(3, 5), (3, 4), (3, 3), (3, 2)], 5: [(1, 5), (1, 6), (1, 7)]})
    others = features(games[0])[SNAKES_AT:OWN_AT].reshape(SNAKES - 1, BY_SNAKE)
    assert others[0].tolist() == [np.float32(1 / 5), 0, np.float32(4 / 20), 0, 0, 0, 1]  # snake 2, heading right
    assert others[2].tolist() == [np.float32(-1 / 5), 0, np.float32(3 / 20), 0, 0, 1, 0]  # snake 5, heading left
    own = features(games[0])[OWN_AT:]
    assert own.tolist() == [0, 0, 0, 1, np.float32(3 / 20), 1, 0, 0, 0]
    assert features(games[0], 5)[OWN_AT:].tolist() == [0, 0, 1, 0, np.float32(3 / 20), 0, 0, 1, 1]


def test_grid_shows_bodies_beans_heads_and_tails_around_head():
    games = arrange({0: RUNS_RIGHT, 1: [(1, 7), (1, 8), (1, 9)], 3: [(2, 19), (2, 18), (2, 17)]}, beans=[(3, 5)])
    planes = grid(games[0], 0, 5, 15)
    assert marked(planes[OWN_BODY]) == {(0, 0), (0, -1), (0, -2)}
    assert marked(planes[TEAM_BODIES]) == {(-1, 2), (-1, 3), (-1, 4)}
    assert marked(planes[OTHER_BODIES]) == {(0, -6), (0, -7)}  # across the seam, and clipped by the window
    assert marked(planes[BEAN_PLANE]) == {(1, 0), (2, -6)}
    assert marked(planes[TEAM_HEADS]) == {(-1, 2)}
    assert marked(planes[OTHER_HEADS]) == {(0, -6)}
    assert marked(planes[TAILS]) == {(0, -2), (-1, 4)}
    whole = grid(games[0])
    assert whole[:3].sum() == games[0].length.sum()
    assert whole[BEAN_PLANE].sum() == BEANS
    assert whole[TAILS].sum() == SNAKES


def test_snake_without_body_has_zero_features_and_is_hidden():
    games = arrange({0: RUNS_RIGHT, 1: [(1, 7), (1, 8), (1, 9)]})
    for where in [(1, 7), (1, 8), (1, 9)]:
        games[0].owner[cell(where)] = 0
    games[0].length[1] = 0
    assert not features(games[0], 1).any()
    assert not grid(games[0], 1).any()
    assert not features(games[0])[SNAKES_AT + BY_SNAKE :][:BY_SNAKE].any()  # sorted last within its team
    assert grid(games[0])[TEAM_HEADS].sum() == 1
