"""Measures of predictions, against numbers worked by hand and against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.ops.prediction_metrics import (
    area_under_curve,
    calibration_bins,
    calibration_error,
    classification_metrics,
    regression_metrics,
    sigmoid,
)


def test_numbers_are_measured_by_mae_rmse_and_r2():
    # Errors 1, -1 and 4; targets 1, 2, 3 have a spread of 2 about their mean.
    found = regression_metrics(np.array([2.0, 1.0, 7.0]), np.array([1.0, 2.0, 3.0]))
    assert found == pytest.approx({"mae": 2.0, "rmse": math.sqrt(6.0), "r2": 1.0 - 18.0 / 2.0})


def test_targets_that_are_all_the_same_have_no_r2():
    assert math.isnan(regression_metrics(np.array([1.0, 2.0]), np.array([3.0, 3.0]))["r2"])


def test_chances_are_measured_by_log_loss_brier_and_accuracy():
    logits = np.log(np.array([0.8, 0.4, 0.1]) / np.array([0.2, 0.6, 0.9]))
    found = classification_metrics(logits, np.array([1.0, 1.0, 0.0]))
    assert found["log_loss"] == pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.9)) / 3)
    assert found["brier"] == pytest.approx((0.04 + 0.36 + 0.01) / 3)
    assert found["accuracy"] == pytest.approx(2 / 3)


def test_log_odds_beyond_all_measure_still_have_a_loss():
    found = classification_metrics(np.array([1e4, -1e4]), np.array([0.0, 0.0]))
    assert found["log_loss"] == pytest.approx(5e3)
    assert sigmoid(np.array([-1e4, 1e4])).tolist() == [0.0, 1.0]


def test_equal_scores_count_half():
    # Pairs (1, 0): 0.5 > 0.1 is right, 0.5 = 0.5 half, 0.9 right twice.
    assert area_under_curve(np.array([0.1, 0.5, 0.5, 0.9]), np.array([0, 0, 1, 1])) == pytest.approx(3.5 / 4)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_the_area_is_the_chance_that_a_one_is_scored_above_a_zero(pairs):
    score, label = np.array([float(s) for s, _ in pairs]), np.array([float(one) for _, one in pairs])
    ones, zeros = score[label == 1], score[label == 0]
    if not len(ones) or not len(zeros):
        assert math.isnan(area_under_curve(score, label))
        return
    wins = sum((one > zero) + 0.5 * (one == zero) for one in ones for zero in zeros)
    assert area_under_curve(score, label) == pytest.approx(wins / len(ones) / len(zeros))


def test_calibration_compares_what_was_said_with_what_came_in_fifteen_bins():
    chance, label = np.array([0.01, 0.03, 0.95, 1.0]), np.array([0.0, 1.0, 1.0, 1.0])
    count, said, came = calibration_bins(chance, label)
    assert len(count) == 15
    assert (count[0], count[14]) == (2, 2)  # a chance of 1 belongs to the last bin
    assert (said[0], came[0]) == pytest.approx((0.04, 1.0))
    assert calibration_error(chance, label) == pytest.approx((0.96 + 0.05) / 4)
