"""Arithmetic that algorithms with a replay buffer share: learning rates."""

import pytest

from lockstep.algorithms.off_policy import scaled_rate


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 2.0), ("linear", 4.0)])
def test_scaled_rate_rises_to_the_scaled_rate(rule, factor):
    assert scaled_rate(rule, 1e-3, 1024, 256, progress=0.025) == pytest.approx(0.5 * factor * 1e-3)
    assert scaled_rate(rule, 1e-3, 1024, 256, progress=0.5) == pytest.approx(factor * 1e-3)


@pytest.mark.parametrize(
    ("rule", "batch", "reference"), [("none", 1024, 256), ("sqrt", 128, 256), ("sqrt", 1024, None)]
)
def test_rate_that_is_not_scaled_is_none(rule, batch, reference):
    assert scaled_rate(rule, 1e-3, batch, reference, progress=0.5) is None


def test_rate_with_schedule_falls_to_zero():
    rates = [scaled_rate("none", 1e-3, 256, None, progress, "linear") for progress in (0.0, 0.25, 1.0)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 0.0])
    scaled = [scaled_rate("sqrt", 1e-3, 1024, 256, progress, "linear") for progress in (0.025, 0.05, 1.0)]
    assert scaled == pytest.approx([1e-3, 2e-3, 0.0])
