"""The rules of team snakes, each on a board made by hand, and all of them against the same rules said plainly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

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
from team_games import Plainly, arrange, beans_of, cell, heading_of, lies, place, play, winding


def new_games(count, seed=0):
    games = np.zeros(count, GAME).view(np.recarray)
    games.key = np.random.default_rng(seed).integers(2**62, size=count)
    for game in games:
        start(game)
    return games


# ---------------------------------------------------------------------------------------------------------- the start


def test_a_game_starts_with_six_straight_snakes_of_three_and_five_beans():
    games = new_games(200)
    assert is_valid_state(games, steps=1)
    for game in games:
        for snake in range(SNAKES):
            body = lies([game], snake)
            assert len(body) == START_LENGTH
            assert heading_of(body) == heading_of(body[1:]) == game.heading[snake]


def test_snakes_start_anywhere_and_in_any_direction():
    games = new_games(2000)
    heads = np.array([[cell(lies([game], snake)[0]) for snake in range(SNAKES)] for game in games])
    counts = np.bincount(heads.ravel(), minlength=CELLS)
    expected = heads.size / CELLS
    assert 130 < ((counts - expected) ** 2 / expected).sum() < 290  # 199 degrees of freedom: 99.99 %
    assert (np.bincount(games.heading.ravel()) > 0.23 * heads.size).all()


# ---------------------------------------------------------------------------------------------------------- moving


@pytest.mark.parametrize(
    ("action", "arrives"), [(UP, (1, 5)), (DOWN, (3, 5)), (RIGHT, (2, 6))], ids=["up", "down", "right"]
)
def test_an_action_names_a_direction_of_the_board(action, arrives):
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
def test_the_board_is_a_torus(body, arrives):
    games = arrange({0: body})
    _, died, _ = play(games)
    assert lies(games, 0) == [arrives, *body[:2]]
    assert not died


def test_a_reverse_becomes_one_of_the_three_other_moves_each_as_likely():
    went = []
    for key in range(600):
        games = arrange({0: [(2, 5), (2, 4), (2, 3)]}, key=key)
        play(games, {0: LEFT})
        went.append(int(games[0].heading[0]))
    counts = np.bincount(went, minlength=4)
    assert counts[LEFT] == 0
    assert (np.abs(counts[[UP, DOWN, RIGHT]] - 200) < 50).all()


def test_the_luck_of_a_reverse_belongs_to_game_episode_step_and_snake():
    def went(key=1, episode=0, steps=0, snake=0):
        games = arrange({snake: [(2, 5), (2, 4), (2, 3)]}, key=key)
        games.episode, games.step = episode, steps
        play(games, {snake: LEFT})
        return int(games[0].heading[snake])

    for name in ("key", "episode", "steps"):
        assert len({went(**{name: number}) for number in range(20)}) == 3, name
    assert len({tuple(went(key=key, snake=snake) for key in range(20)) for snake in range(3)}) == 3


# ---------------------------------------------------------------------------------------------------------- beans


def test_a_bean_makes_a_snake_longer_by_its_cell_and_another_is_served():
    games = arrange({0: [(2, 5), (2, 4), (2, 3)]}, beans=[(2, 6)])
    rewards, died, _ = play(games)
    assert lies(games, 0) == [(2, 6), (2, 5), (2, 4), (2, 3)]
    assert rewards == [1.0, 0, 0, 0, 0, 0]
    assert not died
    assert len(set(beans_of(games))) == BEANS
    assert is_valid_state(games, steps=200)


def test_beans_are_served_on_free_cells_each_as_likely_and_listed_last():
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
def test_a_contested_bean_goes_to_the_lower_number_whose_tail_therefore_stays(left, right):
    # Snakes 1 and 3 meet on a bean and die. Snake 0 enters the cell of the left one's tail, 5 that of the right one's.
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
    assert rewards == [0.0] * SNAKES  # the bean counts for nothing where its eater dies
    assert is_valid_state(games, steps=200)


# ---------------------------------------------------------------------------------------------------------- deaths


def test_heads_that_meet_kill_both():
    games = arrange({0: [(2, 4), (2, 3), (2, 2)], 3: [(2, 6), (2, 7), (2, 8), (2, 9)]})
    rewards, died, _ = play(games)
    assert died == [0, 3]
    assert rewards == [0, 0, 0, -1.0, 0, 0]
    assert games[0].length.tolist() == [START_LENGTH] * SNAKES


def test_heads_that_pass_through_each_other_kill_both():
    games = arrange({0: [(2, 4), (2, 3), (2, 2)], 3: [(2, 5), (2, 6), (2, 7)]})
    assert play(games)[1] == [0, 3]


def test_three_heads_that_meet_kill_all_three():
    games = arrange({0: [(2, 4), (2, 3), (2, 2)], 3: [(2, 6), (2, 7), (2, 8)], 5: [(1, 5), (0, 5), (0, 6)]})
    assert play(games)[1] == [0, 3, 5]


@pytest.mark.parametrize(("runs", "lies_there"), [(0, 3), (3, 0), (0, 1)])
def test_a_head_on_a_body_dies_and_the_body_lives(runs, lies_there):
    games = arrange({runs: [(2, 4), (2, 3), (2, 2)], lies_there: [(1, 5), (2, 5), (3, 5), (3, 6)]})
    rewards, died, _ = play(games)
    assert died == [runs]
    assert lies(games, lies_there) == [(0, 5), (1, 5), (2, 5), (3, 5)]
    assert rewards == [0.0] * SNAKES


def test_a_head_on_its_own_body_dies():
    games = arrange({0: [(2, 4), (3, 4), (3, 5), (2, 5), (1, 5), (1, 4), (0, 4)]}, headings={0: UP})
    rewards, died, _ = play(games, {0: RIGHT})
    assert died == [0]
    assert rewards == [-4.0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("first", [0, 3])
def test_a_cell_that_a_tail_leaves_may_be_entered_whoever_moves_first(first):
    games = arrange({first: [(2, 4), (2, 3), (2, 2)], 1: [(1, 6), (1, 5), (2, 5)]})
    assert not play(games)[1]
    assert lies(games, first)[0] == (2, 5)


def test_a_tail_that_stays_because_its_snake_eats_kills():
    games = arrange({3: [(2, 4), (2, 3), (2, 2)], 1: [(1, 6), (1, 5), (2, 5)]}, beans=[(1, 7)])
    rewards, died, _ = play(games)
    assert died == [3]
    assert rewards == [0, 1.0, 0, 0, 0, 0]


def test_a_snake_of_four_may_follow_its_own_tail():
    games = arrange({0: [(1, 1), (1, 2), (2, 2), (2, 1)]}, headings={0: LEFT})
    for action in (DOWN, RIGHT, UP, LEFT) * 3:
        assert not play(games, {0: action})[1]
    assert set(lies(games, 0)) == {(1, 1), (1, 2), (2, 2), (2, 1)}


def test_what_is_eaten_in_the_step_of_a_death_counts_for_nothing():
    body = [(2, 4), (2, 3), (2, 2), (1, 2)]  # both meet on a bean
    games = arrange({0: body, 3: [(2, 6), (2, 7), (2, 8)]}, beans=[(2, 5)])
    assert play(games)[0] == [-1.0, 0, 0, 0, 0, 0]


def test_the_dead_leave_the_board_before_anybody_returns():
    # Snakes 0 and 5 meet; 5 lies in the corner where 0 returns.
    games = arrange({0: [(1, 3), (1, 4), (1, 5)], 5: [(1, 1), (1, 0), (0, 0), (0, 1)]})
    assert play(games)[1] == [0, 5]
    assert lies(games, 0) == [(0, 1), (0, 0), (1, 0)]
    assert lies(games, 5) == [(0, 3), (0, 2), (1, 2)]
    assert is_valid_state(games, steps=200)


# ---------------------------------------------------------------------------------------------------------- returning


def die(beans=(), **others):
    """Snake 0 dies on snake 1, beans lying around; where it returns, from head to tail, and where it looks."""
    snakes = {0: [(3, 4), (3, 3), (3, 2)], 1: [(2, 5), (3, 5), (4, 5), (4, 4)]}
    games = arrange(snakes | {int(name.removeprefix("snake_")): body for name, body in others.items()}, beans)
    _, died, over = play(games)
    assert (died, over) == ([0], False)
    assert is_valid_state(games, steps=200)
    return lies(games, 0), int(games[0].heading[0])


def test_the_dead_return_at_once_in_the_upper_left_corner():
    assert die() == ([(0, 1), (0, 0), (1, 0)], RIGHT)


def test_beans_are_in_the_way_of_those_who_return():
    assert die(beans=[(0, 0), (0, 1)]) == ([(0, 3), (0, 2), (1, 2)], RIGHT)


def test_the_head_is_the_first_cell_where_only_one_is_free_beside_it():
    around = [(1, 0), (9, 0), (0, 19)]
    assert die(beans=around) == ([(0, 0), (0, 1), (0, 2)], LEFT)
    assert die(beans=[*around, (0, 2)]) == ([(0, 0), (0, 1), (1, 1)], LEFT)


def test_a_pocket_of_two_cells_is_passed_over():
    # (0, 0) and (0, 1) are free; above them, round the torus, is snake 2, which has moved by one cell.
    wall = [(9, 4), (9, 3), (9, 2), (9, 1), (9, 0), (9, 19)]
    assert die(beans=[(1, 0), (1, 1), (0, 2), (0, 19)], snake_2=wall) == ([(0, 4), (0, 3), (1, 3)], RIGHT)


def test_over_a_seam_the_platform_lays_a_snake_in_pieces_and_so_do_we():
    # Beside (0, 0), right of it and, round the torus, left of it is free.
    assert die(beans=[(1, 0), (9, 0)]) == ([(0, 0), (0, 1), (0, 19)], LEFT)


def test_over_a_seam_a_head_may_look_back_at_its_neck_as_on_the_platform():
    # Beside (0, 0), above and left of it is free, both round the torus; going down leads back to it.
    assert die(beans=[(0, 1), (1, 0)]) == ([(9, 0), (0, 0), (0, 19)], DOWN)


def test_all_who_died_return_in_the_order_of_their_numbers():
    games = arrange({4: [(2, 4), (2, 3), (2, 2)], 2: [(2, 6), (2, 7), (2, 8)]})
    assert play(games)[1] == [2, 4]
    assert lies(games, 2) == [(0, 1), (0, 0), (1, 0)]
    assert lies(games, 4) == [(0, 3), (0, 2), (1, 2)]


# ---------------------------------------------------------------------------------------------------------- the end


def test_a_board_without_room_for_the_dead_ends_the_game():
    # All snakes follow each other on one way over the board; only snake 3 turns aside, and leaves two cells free.
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
def test_a_game_is_over_when_snakes_and_beans_no_longer_fit_on_the_board(length, ends):
    # Five snakes turn round in the two columns on the left; the sixth winds over all others and eats.
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


# ---------------------------------------------------------------------------------------------------- over many games


@njit
def return_and_gain(games, returns, deaths):
    """Play each game once, all snakes at random; the sum of rewards by snake, and final lengths less three."""
    moves, rewards, died = np.zeros(SNAKES, np.int64), np.zeros(SNAKES), np.zeros(SNAKES, np.bool_)
    marks = np.zeros((2, CELLS + 1), np.int64)
    for b in range(games.size):
        game = games[b]
        start(game)
        for _ in range(200):
            for first in (0, 3):
                choose(game, first, b % 3, False, marks, moves)  # random, blind or greedy
            if step(game, moves, rewards, died):
                break
            returns[b] += rewards
            deaths[b] += died


def test_the_return_of_every_snake_is_its_final_length_less_three_over_ten_thousand_games():
    games = np.zeros(10_000, GAME).view(np.recarray)
    games.key = np.arange(10_000)
    returns, deaths = np.zeros((10_000, SNAKES)), np.zeros((10_000, SNAKES))
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
def test_the_rules_are_those_said_plainly(seed, length, level, crowd):
    # From a crowded upper left corner, where those who return meet seams and pockets, or from anywhere.
    snakes = {0: winding(length), **{snake: winding(3, 198 - 4 * snake) for snake in range(1, SNAKES)}}
    beans = [place(number) for number in (162, 163, 165, 168, 169)]
    games = arrange(snakes, beans, key=seed) if crowd else new_games(1, seed)
    game, plainly = games[0], Plainly(games[0])
    luck, marks = np.random.default_rng(seed), np.zeros((2, CELLS + 1), np.int64)
    moves, rewards, died = np.zeros(SNAKES, np.int64), np.zeros(SNAKES), np.zeros(SNAKES, np.bool_)
    for _ in range(60):
        for first in (0, 3):
            choose(game, first, level, False, marks, moves)
        moves = np.where(luck.random(SNAKES) < 0.2, luck.integers(4, size=SNAKES), moves)
        over = step(game, moves, rewards, died)
        expected = plainly.step(moves.tolist())
        assert (rewards.tolist(), np.flatnonzero(died).tolist(), over) == expected
        assert [lies(games, snake) for snake in range(SNAKES)] == plainly.snakes
        assert game.heading.tolist() == plainly.headings
        assert beans_of(games) == plainly.beans
        if over:
            return
        assert is_valid_state(games, steps=201)
