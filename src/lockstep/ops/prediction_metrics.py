"""Metrics of predictions: pure functions over all examples at once, in float64 and in the order of the data.

Shapes: N examples.
"""

from collections.abc import Mapping

import numpy as np

BINS = 15
"""Equal-width bins of the calibration error."""


def regression_metrics(prediction: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Compute MAE, RMSE and R2 of predicted numbers [N]."""
    error = prediction.astype(np.float64) - target.astype(np.float64)
    total_squares = np.square(target - target.astype(np.float64).mean()).sum()
    squares = np.square(error).sum()
    r2 = 1.0 - squares / total_squares if total_squares else float("nan")
    return {"mae": float(np.abs(error).mean()), "rmse": float(np.sqrt(squares / len(error))), "r2": float(r2)}


def classification_metrics(logit: np.ndarray, label: np.ndarray) -> dict[str, float]:
    """Compute log-loss, Brier score, accuracy, AUC and calibration error of predicted logits [N] of labels 0 and 1."""
    logit, label = logit.astype(np.float64), label.astype(np.float64)
    probability = sigmoid(logit)
    return {
        "log_loss": float((np.logaddexp(0.0, logit) - label * logit).mean()),
        "brier": float(np.square(probability - label).mean()),
        "accuracy": float(((logit > 0) == (label > 0.5)).mean()),
        "auc": area_under_curve(logit, label),
        "calibration": calibration_error(probability, label),
    }


def overall_metrics(result: Mapping[str, float]) -> dict[str, float]:
    """Select the metrics over all examples: without those of subsets, the score and the count."""
    return {name: value for name, value in result.items() if "/" not in name and name not in ("score", "examples")}


def sigmoid(logit: np.ndarray) -> np.ndarray:
    """Convert logits to probabilities."""
    return np.exp(-np.logaddexp(0.0, -logit.astype(np.float64)))


def area_under_curve(score: np.ndarray, label: np.ndarray) -> float:
    """Compute the area under the ROC curve (AUC); ties count half. NaN if all labels are equal."""
    _, index, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2.0)[index]  # equal scores share the mean of their ranks
    ones = label > 0.5
    positives, negatives = int(ones.sum()), int((~ones).sum())
    if not positives or not negatives:
        return float("nan")
    return float((rank[ones].sum() - positives * (positives + 1) / 2.0) / (positives * negatives))


def calibration_bins(probability: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the number of examples of each bin, and the sums of their predicted probabilities and labels."""
    index = np.minimum((probability * BINS).astype(np.int64), BINS - 1)
    count = np.bincount(index, minlength=BINS)
    return count, np.bincount(index, probability, BINS), np.bincount(index, label, BINS)


def calibration_error(probability: np.ndarray, label: np.ndarray) -> float:
    """Compute the expected calibration error: predicted against observed frequency, weighted by bin counts."""
    _, predicted, observed = calibration_bins(probability, label.astype(np.float64))
    return float(np.abs(predicted - observed).sum() / len(probability))
