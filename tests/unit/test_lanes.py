"""Lanes: dealt to processes without gaps, and told in words when a number cannot be shared."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import ConfigError
from lockstep.lanes import Lanes, partition_lanes


def numbers_in(text):
    return [int(word) for word in re.findall(r"-?\d+", text)]


@pytest.mark.parametrize(
    ("lanes", "processes", "shares"),
    [
        (8, 1, [range(0, 8)]),
        (8, 2, [range(0, 4), range(4, 8)]),
        (8, 3, [range(0, 3), range(3, 6), range(6, 8)]),
        (3, 3, [range(0, 1), range(1, 2), range(2, 3)]),
    ],
)
def test_lanes_are_dealt_as_worked_by_hand(lanes, processes, shares):
    assert partition_lanes(lanes, processes) == shares


@given(st.data(), st.integers(1, 300))
def test_every_lane_has_one_host_in_order_and_shares_differ_by_one_at_most(data, lanes):
    processes = data.draw(st.integers(1, lanes))
    shares = partition_lanes(lanes, processes)
    assert [lane for share in shares for lane in share] == list(range(lanes))
    sizes = [len(share) for share in shares]
    assert len(sizes) == processes
    assert min(sizes) >= 1
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("processes", [0, -1, 9, 100])
def test_processes_that_would_host_nothing_are_refused_in_words(processes):
    with pytest.raises(ConfigError, match=rf"{processes} processes cannot host 8 lanes") as caught:
        partition_lanes(8, processes)
    assert "at most 8 processes" in str(caught.value)


def test_a_share_that_comes_out_even_is_the_quotient():
    assert Lanes(8, range(2, 4), 0).per_lane(96, "num_envs") == 12


def test_a_number_that_lanes_cannot_share_is_refused_as_the_style_guide_says():
    with pytest.raises(ConfigError) as caught:
        Lanes(8, range(8), 0).per_lane(100, "num_envs")
    wanted = "num_envs is 100, which 8 lanes cannot share evenly.\nUse 96 or 104, or set --run.lanes 5."
    assert str(caught.value) == wanted


@given(st.integers(1, 64), st.integers(-50, 500))
def test_whatever_is_suggested_instead_works(count, total):
    lanes = Lanes(count, range(count), 0)
    try:
        share = lanes.per_lane(total, "num_envs")
    except ConfigError as error:
        problem, advice = str(error).split("\n")
        assert numbers_in(problem) == [total, count]
        choices, _, other = advice.partition("--run.lanes")
        assert numbers_in(choices)
        for choice in numbers_in(choices):
            assert lanes.per_lane(choice, "num_envs") * count == choice
        for fewer in numbers_in(other):
            assert Lanes(fewer, range(fewer), 0).per_lane(total, "num_envs") * fewer == total
    else:
        assert share * count == total
        assert share >= 1


def test_lanes_know_how_many_live_here():
    assert len(Lanes(8, range(3, 6), 0)) == 3


def test_the_rows_of_a_lane_are_counted_among_the_local_ones():
    lanes = Lanes(8, range(3, 6), 0)
    assert [lanes.lane_slice(lane, 4) for lane in lanes.local] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    with pytest.raises(ValueError, match="not in range"):
        lanes.lane_slice(2, 4)  # it lives elsewhere
