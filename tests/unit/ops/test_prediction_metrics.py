"""Prediction metrics against manual examples and definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.ops.prediction_metrics import (
    area_under_curve,
    binary_metrics,
    calibration_bins,
    calibration_error,
    confusion_matrix,
    mean_metrics,
    multiclass_metrics,
    regression_metrics,
    sigmoid,
)


def test_regression_metrics_match_manual_mae_rmse_and_r2():
    # Errors 1, -1 and 4; targets 1, 2, 3 have a sum of squared deviations of 2.
    found = regression_metrics(np.array([2.0, 1.0, 7.0]), np.array([1.0, 2.0, 3.0]))
    assert found == pytest.approx({"mae": 2.0, "rmse": math.sqrt(6.0), "r2": 1.0 - 18.0 / 2.0})


def test_regression_r2_of_constant_targets_is_nan():
    assert math.isnan(regression_metrics(np.array([1.0, 2.0]), np.array([3.0, 3.0]))["r2"])


def test_binary_metrics_match_manual_values():
    logits = np.log(np.array([0.8, 0.4, 0.1]) / np.array([0.2, 0.6, 0.9]))
    found = binary_metrics(logits, np.array([1.0, 1.0, 0.0]))
    assert found["log_loss"] == pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.9)) / 3)
    assert found["brier"] == pytest.approx((0.04 + 0.36 + 0.01) / 3)
    assert found["accuracy"] == pytest.approx(2 / 3)


def test_classification_log_loss_of_extreme_logits_is_finite():
    found = binary_metrics(np.array([1e4, -1e4]), np.array([0.0, 0.0]))
    assert found["log_loss"] == pytest.approx(5e3)
    assert sigmoid(np.array([-1e4, 1e4])).tolist() == [0.0, 1.0]


def test_auc_counts_equal_scores_half():
    # Pairs (1, 0): 0.5 > 0.1 counts 1, 0.5 = 0.5 counts 0.5, 0.9 counts 1 twice.
    assert area_under_curve(np.array([0.1, 0.5, 0.5, 0.9]), np.array([0, 0, 1, 1])) == pytest.approx(3.5 / 4)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_auc_is_probability_of_ranking_positive_above_negative(pairs):
    score, label = np.array([float(s) for s, _ in pairs]), np.array([float(one) for _, one in pairs])
    ones, zeros = score[label == 1], score[label == 0]
    if not len(ones) or not len(zeros):
        assert math.isnan(area_under_curve(score, label))
        return
    wins = sum((one > zero) + 0.5 * (one == zero) for one in ones for zero in zeros)
    assert area_under_curve(score, label) == pytest.approx(wins / len(ones) / len(zeros))


def test_calibration_bins_and_error_match_manual_values():
    chance, label = np.array([0.01, 0.03, 0.95, 1.0]), np.array([0.0, 1.0, 1.0, 1.0])
    count, said, came = calibration_bins(chance, label)
    assert len(count) == 15
    assert (count[0], count[14]) == (2, 2)  # a probability of 1 belongs to the last bin
    assert (said[0], came[0]) == pytest.approx((0.04, 1.0))
    assert calibration_error(chance, label) == pytest.approx((0.96 + 0.05) / 4)


LOGITS = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, 0.0], [1.0, 0.5, 0.0], [0.0, 1.0, 0.0]])
"""Predicted classes 0, 1, 0 and 1."""


def test_multiclass_metrics_match_manual_values():
    found = multiclass_metrics(LOGITS, np.array([0, 1, 1, 1]))
    assert found["accuracy"] == 0.75
    assert found["recall/0"] == 1.0
    assert found["recall/1"] == pytest.approx(2 / 3)
    assert found["precision/0"] == 0.5
    assert found["macro_f1"] == pytest.approx((2 / 3 + 0.8) / 2)  # class 2 occurs nowhere
    probability = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    assert found["log_loss"] == pytest.approx(-np.log(probability[range(4), [0, 1, 1, 1]]).mean())
    assert not {"recall/2", "precision/2", "top5_accuracy"} & found.keys()


def test_top5_accuracy_counts_ties_by_class_number():
    logits = np.zeros((2, 7))
    found = multiclass_metrics(logits, np.array([4, 5]))  # equal scores: the first five classes are the best
    assert found["top5_accuracy"] == 0.5


def test_multiclass_log_loss_of_extreme_logits_is_finite():
    assert multiclass_metrics(np.array([[1e4, -1e4]]), np.array([1]))["log_loss"] == pytest.approx(2e4)


def test_confusion_matrix_counts_true_classes_in_rows():
    assert confusion_matrix(LOGITS, np.array([0, 1, 1, 2])).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 0]]


def test_mean_metrics_of_two_outputs_match_single_ones():
    target = np.array([[1.0, 5.0], [2.0, 5.0], [4.0, 5.0]])
    prediction = target + np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0]])
    found = mean_metrics(regression_metrics, prediction, target, ("speed", "height"))
    assert found["mae/speed"] == regression_metrics(prediction[:, 0], target[:, 0])["mae"]
    assert found["mae"] == pytest.approx((2 / 3 + 1.0) / 2)
    assert found["r2"] == found["r2/speed"]  # the other target is constant and has no R2
    assert math.isnan(found["r2/height"])
