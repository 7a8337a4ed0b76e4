"""Exact sums: rounded once, independent of order and grouping, equal to the sum of fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.distributed.exact_sum import from_limbs, local_sum, to_limbs

doubles = st.floats(allow_nan=False, allow_infinity=False)
tables = st.integers(1, 4).flatmap(
    lambda columns: st.lists(st.lists(doubles, min_size=columns, max_size=columns), min_size=1, max_size=9)
)


def fits(rows):
    """Return whether no column sum or partial sum overflows float64."""
    return all(sum(abs(Fraction(x)) for x in column) < Fraction(2**1023) for column in zip(*rows, strict=True))


@given(tables.filter(fits), st.randoms())
def test_exact_sum_equals_sum_of_fractions_for_any_partition(rows, chance):
    wanted = [float(sum(map(Fraction, column))) for column in zip(*rows, strict=True)]
    table = np.array(rows)
    assert local_sum(table) == wanted
    chance.shuffle(rows)
    cut = chance.randrange(len(rows) + 1)
    shares = [np.array(part).reshape(-1, table.shape[1]) for part in (rows[:cut], rows[cut:])]
    assert from_limbs(sum(to_limbs(share) for share in shares)) == wanted


@pytest.mark.parametrize("value", [0.0, 5e-324, -5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, -1 / 3])
def test_limbs_of_one_number_round_trip(value):
    assert from_limbs(to_limbs(np.array([[value]]))) == [value]


def test_exact_sum_with_cancellation_keeps_small_terms():
    table = np.array([[1e308], [1.0], [1e-300], [-1e308], [-1.0]])
    assert from_limbs(to_limbs(table)) == local_sum(table) == [1e-300]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_value_affects_only_its_column(bad):
    table = np.array([[1.0, bad, 2.0], [1.0, 1.0, 2.0]])
    for sums in (local_sum(table), from_limbs(to_limbs(table))):
        assert math.isnan(sums[1])
        assert (sums[0], sums[2]) == (2.0, 4.0)


def test_exact_sum_of_many_lanes_does_not_overflow():
    table = np.full((2**14, 1), -1e304)
    assert from_limbs(to_limbs(table)) == local_sum(table) == [-1e304 * 2**14]


def test_exact_sum_beyond_float64_range_is_nan():
    table = np.full((4, 1), 1.7e308)
    assert all(math.isnan(sums[0]) for sums in (from_limbs(to_limbs(table)), local_sum(table)))
