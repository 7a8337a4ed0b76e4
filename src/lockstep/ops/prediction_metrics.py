"""Measures of predictions: pure arithmetic over all of them at once, in float64 and in the order of the data.

Shapes: N examples.
"""

from collections.abc import Mapping

import numpy as np

BINS = 15
"""Equal-width bins of the calibration error."""


def regression_metrics(prediction: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """How far predicted numbers [N] are from the true ones: MAE, RMSE and R2."""
    error = prediction.astype(np.float64) - target.astype(np.float64)
    spread = np.square(target - target.astype(np.float64).mean()).sum()
    squares = np.square(error).sum()
    r2 = 1.0 - squares / spread if spread else float("nan")
    return {"mae": float(np.abs(error).mean()), "rmse": float(np.sqrt(squares / len(error))), "r2": float(r2)}


def classification_metrics(logit: np.ndarray, label: np.ndarray) -> dict[str, float]:
    """How good the predicted log-odds [N] of labels 0 and 1 are: log-loss, Brier, accuracy, AUC and calibration."""
    logit, label = logit.astype(np.float64), label.astype(np.float64)
    chance = sigmoid(logit)
    return {
        "log_loss": float((np.logaddexp(0.0, logit) - label * logit).mean()),
        "brier": float(np.square(chance - label).mean()),
        "accuracy": float(((logit > 0) == (label > 0.5)).mean()),
        "auc": area_under_curve(logit, label),
        "calibration": calibration_error(chance, label),
    }


def overall_metrics(result: Mapping[str, float]) -> dict[str, float]:
    """The measures of all examples in what a data set measures: neither those of parts, nor score and count."""
    return {name: value for name, value in result.items() if "/" not in name and name not in ("score", "examples")}


def sigmoid(logit: np.ndarray) -> np.ndarray:
    """Log-odds as probabilities."""
    return np.exp(-np.logaddexp(0.0, -logit.astype(np.float64)))


def area_under_curve(score: np.ndarray, label: np.ndarray) -> float:
    """The chance that a 1 is scored above a 0, ties counting half; not a number where there is only one of them."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2.0)[place]  # equal scores share the mean of their ranks
    ones = label > 0.5
    many, few = int(ones.sum()), int((~ones).sum())
    if not many or not few:
        return float("nan")
    return float((rank[ones].sum() - many * (many + 1) / 2.0) / (many * few))


def calibration_bins(chance: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of the bins: how many examples it has, and the sums of their chances and of their labels."""
    place = np.minimum((chance * BINS).astype(np.int64), BINS - 1)
    count = np.bincount(place, minlength=BINS)
    return count, np.bincount(place, chance, BINS), np.bincount(place, label, BINS)


def calibration_error(chance: np.ndarray, label: np.ndarray) -> float:
    """How far what was said is from what came, bin by bin, weighted by their counts."""
    _, said, came = calibration_bins(chance, label.astype(np.float64))
    return float(np.abs(said - came).sum() / len(chance))
