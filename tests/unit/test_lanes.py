"""Lanes: contiguous partition across processes and errors for totals that lanes cannot share evenly."""

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
def test_partition_lanes_returns_expected_ranges(lanes, processes, shares):
    assert partition_lanes(lanes, processes) == shares


@given(st.data(), st.integers(1, 300))
def test_partition_lanes_is_ordered_complete_and_balanced(data, lanes):
    processes = data.draw(st.integers(1, lanes))
    shares = partition_lanes(lanes, processes)
    assert [lane for share in shares for lane in share] == list(range(lanes))
    sizes = [len(share) for share in shares]
    assert len(sizes) == processes
    assert min(sizes) >= 1
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("processes", [0, -1, 9, 100])
def test_partition_lanes_with_invalid_process_count_is_rejected(processes):
    with pytest.raises(ConfigError, match=rf"{processes} processes cannot host 8 lanes") as caught:
        partition_lanes(8, processes)
    assert "at most 8 processes" in str(caught.value)


def test_per_lane_of_divisible_total_returns_quotient():
    assert Lanes(8, range(2, 4), 0).per_lane(96, "num_envs") == 12


def test_per_lane_of_indivisible_total_error_suggests_values():
    with pytest.raises(ConfigError) as caught:
        Lanes(8, range(8), 0).per_lane(100, "num_envs")
    wanted = "num_envs is 100, which 8 lanes cannot share evenly.\nUse 96 or 104, or set --run.lanes 5."
    assert str(caught.value) == wanted


@given(st.integers(1, 64), st.integers(-50, 500))
def test_per_lane_error_suggestions_are_valid(count, total):
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


def test_len_of_lanes_is_number_of_local_lanes():
    assert len(Lanes(8, range(3, 6), 0)) == 3


def test_lane_slice_is_relative_to_local_lanes():
    lanes = Lanes(8, range(3, 6), 0)
    assert [lanes.lane_slice(lane, 4) for lane in lanes.local] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    with pytest.raises(ValueError, match="not in range"):
        lanes.lane_slice(2, 4)  # lane 2 is hosted by another process
