"""Moves that a team snake can survive after a move, on constructed boards."""

import numpy as np
import pytest

from helpers.team_games import arrange, build, cell
from lockstep.tasks.team_snakes.features import ON_BOARD
from lockstep.tasks.team_snakes.rules import AROUND, CELLS, DOWN, LEFT, RIGHT, SNAKES, UP
from lockstep.tasks.team_snakes.survival import (
    MAX_SURVIVAL,
    new_search_buffers,
    survival,
    write_occupied_moves,
)


def moves(games, snake=0):
    """The moves that a snake survives, by direction of its first move."""
    game = games[0]
    occupied, entered = new_search_buffers()
    write_occupied_moves(game, snake, occupied)
    head = cell(tuple(divmod(int(game.body[snake, game.front[snake]]), 20)))
    found = [survival(AROUND[head, way], game.length[snake], ON_BOARD[UP], occupied, entered) for way in range(4)]
    assert not entered.any()  # the buffer is clean for the next search
    return found


def test_open_board_is_survived_to_the_limit_and_reverse_not_at_all():
    assert moves(arrange({0: [(1, 5), (1, 4), (1, 3)]})) == [MAX_SURVIVAL, MAX_SURVIVAL, 0, MAX_SURVIVAL]


def test_snake_in_a_loop_of_four_cells_follows_its_own_tail():
    loop = [(1, 5), (1, 4), (2, 4), (2, 5)]  # the tail is below the head
    assert moves(arrange({0: loop}))[DOWN] == MAX_SURVIVAL


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_dead_end_is_survived_for_its_depth(depth):
    # A corridor of `depth` cells to the right of the head, between bodies that stay longer than it lasts.
    above, below = ([(row, column) for column in range(4, 20)] for row in (0, 2))
    plug = [(9, 0), (9, 1), (1, 6 + depth), *((9, column) for column in range(2, 18))]
    games = arrange({0: [(1, 5), (1, 4), (1, 3)], 3: above, 4: below, 5: plug})
    assert moves(games)[RIGHT] == depth


def test_own_body_frees_its_cells_in_time_and_another_body_one_move_later():
    # The only way on leads to the cell where a tail is now: the own one is left in time, another one might not be.
    own = [(1, 5), (1, 6), (2, 6), (2, 5)]
    assert moves(arrange({0: own}))[DOWN] == MAX_SURVIVAL
    other = {0: [(1, 5), (1, 4), (1, 3)], 3: [(2, 7), (2, 6), (2, 5)]}
    assert moves(arrange(other))[DOWN] == 0


def test_exit_that_another_head_can_close_does_not_count():
    walls = [(0, 5), (0, 6), (0, 7), (0, 8), (0, 9), (0, 10)]
    floor = [(2, 5), (2, 6), (2, 7), (2, 8), (2, 9), (2, 10)]
    snakes = {0: [(1, 5), (1, 4), (1, 3)], 3: walls, 4: floor}
    is_open = moves(arrange(snakes))[RIGHT]
    closed = moves(arrange(snakes | {5: [(1, 9), (1, 10), (1, 11)]}))[RIGHT]
    assert is_open == MAX_SURVIVAL
    assert closed < MAX_SURVIVAL


def test_first_move_may_be_to_a_threatened_cell():
    games = arrange({0: [(1, 5), (1, 4), (1, 3)], 3: [(1, 7), (1, 8), (1, 9)]})
    assert moves(games)[RIGHT] == MAX_SURVIVAL


def test_survival_is_zero_exactly_where_a_body_stays():
    env = build(4, seed=3, opponent_level=2)
    for _ in range(60):
        env.step(env.scripted_actions(4, wrapped=True))
    for game in env.games:
        occupied, entered = new_search_buffers()
        for snake in range(SNAKES):
            write_occupied_moves(game, snake, occupied)
            for place in range(CELLS):
                found = survival(place, game.length[snake], ON_BOARD[LEFT], occupied, entered)
                stays = game.owner[place] >= 2 and occupied[place] > 1
                assert (found == 0) == stays
    assert np.array_equal(entered, np.zeros(CELLS))
