"""Team snakes rules: each on a constructed board, and all against the reference implementation Plainly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from helpers.team_games import Plainly, arrange, beans_of, cell, heading_of, lies, place, play, winding
from lockstep.tasks.team_snakes.opponents import GREEDY, RANDOM, choose
from lockstep.tasks.team_snakes.rules import (
    BEANS,
    CELLS,
    DOWN,
    FREE,
    GAME,
    HEIGHT,
    LEFT,
    RIGHT,
    SNAKES,
    START_LENGTH,
    UP,
    WIDTH,
    is_valid_state,
    start,
    step,
)


def new_games(count, seed=0):
    games = np.zeros(count, GAME).view(np.recarray)
    games.key = np.random.default_rng(seed).integers(2**62, size=count)
    for game in games:
        start(game)
    return games


# ----------------------------------------------------------------------------------------------------------- game start


def test_start_places_six_straight_snakes_and_five_beans():
    games = new_games(200)
    assert is_valid_state(games, steps=1)
    for game in games:
        for snake in range(SNAKES):
            body = lies([game], snake)
            assert len(body) == START_LENGTH
            assert heading_of(body) == heading_of(body[1:]) == game.heading[snake]


def test_start_positions_and_headings_are_uniform():
    games = new_games(2000)
    heads = np.array([[cell(lies([game], snake)[0]) for snake in range(SNAKES)] for game in games])
    counts = np.bincount(heads.ravel(), minlength=CELLS)
    expected = heads.size / CELLS
    assert 130 < ((counts - expected) ** 2 / expected).sum() < 290  # 199 degrees of freedom: 99.99 %
    assert (np.bincount(games.heading.ravel()) > 0.23 * heads.size).all()


# ------------------------------------------------------------------------------------------------------------- movement


@pytest.mark.parametrize(
    ("action", "arrives"), [(UP, (1, 5)), (DOWN, (3, 5)), (RIGHT, (2, 6))], ids=["up", "down", "right"]
)
def test_step_action_is_absolute_board_direction(action, arrives):
    games = arrange({0: [(2, 5), (2, 4), (2, 3)]})
    rewards, died, over = play(games, {0: action})
    assert lies(games, 0) == [arrives, (2, 5), (2, 4)]
    assert games[0].heading[0] == action
    assert (rewards, died, over) == ([0.0] * SNAKES, [], False)


@pytest.mark.parametrize(
    ("body", "arrives"),
    [
        ([(0, 5), (1, 5), (2, 5)], (9, 5)),
        ([(9, 5), (8, 5), (7, 5)], (0, 5)),
        ([(2, 0), (2, 1), (2, 2)], (2, 19)),
        ([(2, 19), (2, 18), (2, 17)], (2, 0)),
    ],
    ids=["up", "down", "left", "right"],
)
def test_step_over_edge_wraps_around(body, arrives):
    games = arrange({0: body})
    _, died, _ = play(games)
    assert lies(games, 0) == [arrives, *body[:2]]
    assert not died


def test_reverse_action_becomes_uniform_random_other_move():
    went = []
    for key in range(600):
        games = arrange({0: [(2, 5), (2, 4), (2, 3)]}, key=key)
        play(games, {0: LEFT})
        went.append(int(games[0].heading[0]))
    counts = np.bincount(went, minlength=4)
    assert counts[LEFT] == 0
    assert (np.abs(counts[[UP, DOWN, RIGHT]] - 200) < 50).all()


def test_reverse_action_draw_depends_on_game_episode_step_and_snake():
    def went(key=1, episode=0, steps=0, snake=0):
        games = arrange({snake: [(2, 5), (2, 4), (2, 3)]}, key=key)
        games.episode, games.step = episode, steps
        play(games, {snake: LEFT})
        return int(games[0].heading[snake])

    for name in ("key", "episode", "steps"):
        assert len({went(**{name: number}) for number in range(20)}) == 3, name
    assert len({tuple(went(key=key, snake=snake) for key in range(20)) for snake in range(3)}) == 3


# ---------------------------------------------------------------------------------------------------------- beans


def test_eating_grows_snake_and_places_new_bean():
    games = arrange({0: [(2, 5), (2, 4), (2, 3)]}, beans=[(2, 6)])
    rewards, died, _ = play(games)
    assert lies(games, 0) == [(2, 6), (2, 5), (2, 4), (2, 3)]
    assert rewards == [1.0, 0, 0, 0, 0, 0]
    assert not died
    assert len(set(beans_of(games))) == BEANS
    assert is_valid_state(games, steps=200)


def test_new_bean_is_uniform_over_free_cells_and_listed_last():
    counts = np.zeros(CELLS)
    for key in range(3000):
        games = arrange({0: [(2, 5), (2, 4), (2, 3)]}, beans=[(2, 6)], key=key)
        play(games)
        *others, new = beans_of(games)
        assert len(others) == BEANS - 1
        counts[cell(new)] += 1
    free = games[0].owner == FREE
    free[cell(new)] = True
    expected = 3000 / free.sum()
    assert not counts[~free].any()
    assert ((counts[free] - expected) ** 2 / expected).sum() < 260  # 176 degrees of freedom: 99.99 %


@pytest.mark.parametrize(("left", "right"), [(1, 3), (3, 1)])
def test_contested_bean_counts_as_eaten_by_lower_numbered_snake(left, right):
    # Snakes 1 and 3 collide on a bean. Snake 0 enters the tail cell of the left one, snake 5 that of the right one.
    games = arrange(
        {
            left: [(1, 4), (1, 3), (1, 2)],
            right: [(1, 6), (1, 7), (1, 8)],
            0: [(0, 2), (0, 3), (0, 4)],
            5: [(0, 8), (0, 7), (0, 6)],
        },
        beans=[(1, 5)],
    )
    rewards, died, _ = play(games, {0: DOWN, 5: DOWN})
    assert died == ([0, 1, 3] if left < right else [1, 3, 5])
    assert rewards == [0.0] * SNAKES  # a bean is not rewarded if its eater dies in the same step
    assert is_valid_state(games, steps=200)


# ---------------------------------------------------------------------------------------------------------- deaths


def test_head_to_head_collision_kills_both():
    games = arrange({0: [(2, 4), (2, 3), (2, 2)], 3: [(2, 6), (2, 7), (2, 8), (2, 9)]})
    rewards, died, _ = play(games)
    assert died == [0, 3]
    assert rewards == [0, 0, 0, -1.0, 0, 0]
    assert games[0].length.tolist() == [START_LENGTH] * SNAKES


def test_heads_swapping_cells_kills_both():
    games = arrange({0: [(2, 4), (2, 3), (2, 2)], 3: [(2, 5), (2, 6), (2, 7)]})
    assert play(games)[1] == [0, 3]


def test_three_heads_in_one_cell_kills_all_three():
    games = arrange({0: [(2, 4), (2, 3), (2, 2)], 3: [(2, 6), (2, 7), (2, 8)], 5: [(1, 5), (0, 5), (0, 6)]})
    assert play(games)[1] == [0, 3, 5]


@pytest.mark.parametrize(("runs", "lies_there"), [(0, 3), (3, 0), (0, 1)])
def test_head_into_body_kills_only_the_moving_snake(runs, lies_there):
    games = arrange({runs: [(2, 4), (2, 3), (2, 2)], lies_there: [(1, 5), (2, 5), (3, 5), (3, 6)]})
    rewards, died, _ = play(games)
    assert died == [runs]
    assert lies(games, lies_there) == [(0, 5), (1, 5), (2, 5), (3, 5)]
    assert rewards == [0.0] * SNAKES


def test_head_into_own_body_kills_snake():
    games = arrange({0: [(2, 4), (3, 4), (3, 5), (2, 5), (1, 5), (1, 4), (0, 4)]}, headings={0: UP})
    rewards, died, _ = play(games, {0: RIGHT})
    assert died == [0]
    assert rewards == [-4.0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("first", [0, 3])
def test_cell_vacated_by_tail_can_be_entered_in_any_move_order(first):
    games = arrange({first: [(2, 4), (2, 3), (2, 2)], 1: [(1, 6), (1, 5), (2, 5)]})
    assert not play(games)[1]
    assert lies(games, first)[0] == (2, 5)


def test_tail_of_eating_snake_stays_and_kills():
    games = arrange({3: [(2, 4), (2, 3), (2, 2)], 1: [(1, 6), (1, 5), (2, 5)]}, beans=[(1, 7)])
    rewards, died, _ = play(games)
    assert died == [3]
    assert rewards == [0, 1.0, 0, 0, 0, 0]


def test_snake_of_four_can_follow_its_own_tail():
    games = arrange({0: [(1, 1), (1, 2), (2, 2), (2, 1)]}, headings={0: LEFT})
    for action in (DOWN, RIGHT, UP, LEFT) * 3:
        assert not play(games, {0: action})[1]
    assert set(lies(games, 0)) == {(1, 1), (1, 2), (2, 2), (2, 1)}


def test_bean_eaten_in_step_of_death_is_not_rewarded():
    body = [(2, 4), (2, 3), (2, 2), (1, 2)]  # both heads enter the bean's cell
    games = arrange({0: body, 3: [(2, 6), (2, 7), (2, 8)]}, beans=[(2, 5)])
    assert play(games)[0] == [-1.0, 0, 0, 0, 0, 0]


def test_dead_snakes_are_removed_before_any_respawn():
    # Snakes 0 and 5 collide. Snake 5 occupies the corner where snake 0 respawns.
    games = arrange({0: [(1, 3), (1, 4), (1, 5)], 5: [(1, 1), (1, 0), (0, 0), (0, 1)]})
    assert play(games)[1] == [0, 5]
    assert lies(games, 0) == [(0, 1), (0, 0), (1, 0)]
    assert lies(games, 5) == [(0, 3), (0, 2), (1, 2)]
    assert is_valid_state(games, steps=200)


# -------------------------------------------------------------------------------------------------------------- respawn


def die(beans=(), **others):
    """Let snake 0 die on snake 1; return its respawned body (head to tail) and heading."""
    snakes = {0: [(3, 4), (3, 3), (3, 2)], 1: [(2, 5), (3, 5), (4, 5), (4, 4)]}
    games = arrange(snakes | {int(name.removeprefix("snake_")): body for name, body in others.items()}, beans)
    _, died, over = play(games)
    assert (died, over) == ([0], False)
    assert is_valid_state(games, steps=200)
    return lies(games, 0), int(games[0].heading[0])


def test_respawn_is_immediate_at_upper_left_corner():
    assert die() == ([(0, 1), (0, 0), (1, 0)], RIGHT)


def test_respawn_avoids_beans():
    assert die(beans=[(0, 0), (0, 1)]) == ([(0, 3), (0, 2), (1, 2)], RIGHT)


def test_respawn_with_one_free_neighbor_puts_head_on_first_cell():
    around = [(1, 0), (9, 0), (0, 19)]
    assert die(beans=around) == ([(0, 0), (0, 1), (0, 2)], LEFT)
    assert die(beans=[*around, (0, 2)]) == ([(0, 0), (0, 1), (1, 1)], LEFT)


def test_respawn_skips_pocket_of_two_cells():
    # (0, 0) and (0, 1) are free. Snake 2, which has moved by one cell, is above them across the seam.
    wall = [(9, 4), (9, 3), (9, 2), (9, 1), (9, 0), (9, 19)]
    assert die(beans=[(1, 0), (1, 1), (0, 2), (0, 19)], snake_2=wall) == ([(0, 4), (0, 3), (1, 3)], RIGHT)


def test_respawn_over_seam_splits_body_like_the_platform():
    # The free neighbors of (0, 0) are on its right and, across the seam, on its left.
    assert die(beans=[(1, 0), (9, 0)]) == ([(0, 0), (0, 1), (0, 19)], LEFT)


def test_respawn_over_seam_may_face_own_neck_like_the_platform():
    # The free neighbors of (0, 0) are above and left, both across the seam; moving down leads back to it.
    assert die(beans=[(0, 1), (1, 0)]) == ([(9, 0), (0, 0), (0, 19)], DOWN)


def test_respawn_order_follows_snake_numbers():
    games = arrange({4: [(2, 4), (2, 3), (2, 2)], 2: [(2, 6), (2, 7), (2, 8)]})
    assert play(games)[1] == [2, 4]
    assert lies(games, 2) == [(0, 1), (0, 0), (1, 0)]
    assert lies(games, 4) == [(0, 3), (0, 2), (1, 2)]


# ------------------------------------------------------------------------------------------------------------- game end


def test_game_ends_when_dead_snake_cannot_respawn():
    # All snakes follow one path over the board. Only snake 3 turns off and leaves two cells free.
    starts = {5: 4, 4: 7, 3: 10, 2: 14, 1: 17}
    snakes = {snake: winding(3, first) for snake, first in starts.items()} | {0: winding(178, 20)}
    beans = [*winding(4, 0), *winding(1, 13)]
    games = arrange(snakes, beans)
    assert is_valid_state(games, steps=200)
    rewards, died, over = play(games, {1: DOWN, 3: DOWN})
    assert (died, over) == ([3], True)
    assert games[0].length.tolist() == [178, 3, 3, 0, 3, 3]
    assert rewards == [0.0] * SNAKES


@pytest.mark.parametrize(("length", "ends"), [(174, False), (175, True)])
def test_game_ends_when_snakes_and_beans_fill_the_board(length, ends):
    # Five snakes circle in the two left columns. The sixth covers the other columns and eats.
    turning = {n: [(2 * n - 2, 0), (2 * n - 2, 1), (2 * n - 1, 1), (2 * n - 1, 0)] for n in range(1, SNAKES)}
    way = [(row, column) for row in range(HEIGHT) for column in range(2, WIDTH)[:: -1 if row % 2 else 1]]
    games = arrange(turning | {0: way[:length][::-1]}, beans=way[length : length + BEANS])
    assert is_valid_state(games, steps=200)
    rewards, died, over = play(games, dict.fromkeys(turning, DOWN))
    assert (died, over) == ([], ends)
    assert rewards[0] == 1.0
    assert games[0].length.sum() == 20 + length + 1
    if not ends:
        assert is_valid_state(games, steps=200)
        assert not (games[0].owner == FREE).any()


# ----------------------------------------------------------------------------------------------------------- many games


@njit
def return_and_gain(games, returns, deaths):
    """Play each game once with scripted snakes; accumulate rewards and deaths per snake."""
    moves, rewards, died = np.zeros(SNAKES, np.int64), np.zeros(SNAKES), np.zeros(SNAKES, np.bool_)
    marks = np.zeros((2, CELLS + 1), np.int64)
    for b in range(games.size):
        game = games[b]
        start(game)
        for _ in range(200):
            for first in (0, 3):
                choose(game, first, b % 3, False, marks, moves)  # RANDOM, BLIND or GREEDY
            if step(game, moves, rewards, died):
                break
            returns[b] += rewards
            deaths[b] += died


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_return_equals_final_length_minus_three(count):
    games = np.zeros(count, GAME).view(np.recarray)
    games.key = np.arange(count)
    returns, deaths = np.zeros((count, SNAKES)), np.zeros((count, SNAKES))
    return_and_gain(games, returns, deaths)
    assert (games.step == 200).all()
    assert (returns == games.length - START_LENGTH).all()
    assert deaths.min(axis=1).max() > 0
    assert returns.max() > 10
    assert is_valid_state(games[::50], steps=201)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32), length=st.integers(3, 150), level=st.sampled_from([RANDOM, GREEDY]), crowd=st.booleans()
)
def test_step_matches_reference_implementation(seed, length, level, crowd):
    # Start in a crowded upper left corner, where respawns hit seams and pockets, or from a random start.
    snakes = {0: winding(length), **{snake: winding(3, 198 - 4 * snake) for snake in range(1, SNAKES)}}
    beans = [place(number) for number in (162, 163, 165, 168, 169)]
    games = arrange(snakes, beans, key=seed) if crowd else new_games(1, seed)
    game, plainly = games[0], Plainly(games[0])
    rng, marks = np.random.default_rng(seed), np.zeros((2, CELLS + 1), np.int64)
    moves, rewards, died = np.zeros(SNAKES, np.int64), np.zeros(SNAKES), np.zeros(SNAKES, np.bool_)
    for _ in range(60):
        for first in (0, 3):
            choose(game, first, level, False, marks, moves)
        moves = np.where(rng.random(SNAKES) < 0.2, rng.integers(4, size=SNAKES), moves)
        over = step(game, moves, rewards, died)
        expected = plainly.step(moves.tolist())
        assert (rewards.tolist(), np.flatnonzero(died).tolist(), over) == expected
        assert [lies(games, snake) for snake in range(SNAKES)] == plainly.snakes
        assert game.heading.tolist() == plainly.headings
        assert beans_of(games) == plainly.beans
        if over:
            return
        assert is_valid_state(games, steps=201)
