"""Metrics of predictions: pure functions over all examples at once, in float64 and in the order of the data.

Shapes: N examples, T outputs of a target, C classes; `...` are the axes of one target.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

BINS = 15
"""Equal-width bins of the calibration error."""
TOP = 5
"""Classes with the highest scores among which `top5_accuracy` looks for the true one."""
MAX_PARTS = 100
"""Largest number of outputs or classes for which separate metrics are reported."""


def regression_metrics(prediction: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Compute MAE, RMSE and R2 of predicted numbers [N]."""
    error = prediction.astype(np.float64) - target.astype(np.float64)
    total_squares = np.square(target - target.astype(np.float64).mean()).sum()
    squares = np.square(error).sum()
    r2 = 1.0 - squares / total_squares if total_squares else float("nan")
    return {"mae": float(np.abs(error).mean()), "rmse": float(np.sqrt(squares / len(error))), "r2": float(r2)}


def binary_metrics(logit: np.ndarray, label: np.ndarray) -> dict[str, float]:
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


def multiclass_metrics(logits: np.ndarray, label: np.ndarray, names: Sequence[str] = ()) -> dict[str, float]:
    """Compute metrics of predicted logits [N, C, ...] of classes [N, ...], numbered from 0.

    Args:
        logits: Network outputs.
        label: True classes.
        names: Names of the classes. Empty: their numbers.

    Returns:
        Log-loss, accuracy, macro F1 and, with more than five classes, top-5 accuracy. Precision and recall of each
        class as `precision/NAME` and `recall/NAME`. The macro F1 is the mean over the classes that occur in the
        targets or predictions. A class that was never predicted, or does not occur, has no precision or no recall.
    """
    classes = logits.shape[1]
    logits, label = _flat_logits(logits), label.reshape(-1).astype(np.int64)  # [N x ..., C] and [N x ...]
    rows = np.arange(len(label))
    highest = logits.max(axis=1)
    log_sum = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    counts = confusion_matrix(logits, label)
    correct, actual, predicted = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    occurs = actual + predicted > 0
    f1 = 2.0 * correct[occurs] / (actual + predicted)[occurs]
    result = {
        "log_loss": float((log_sum - logits[rows, label]).mean()),
        "accuracy": float(correct.sum() / len(label)),
        "macro_f1": float(f1.mean()),
    }
    if classes > TOP:
        better = (logits > logits[rows, label][:, None]).sum(axis=1)
        ties = (logits == logits[rows, label][:, None]) & (np.arange(classes) < label[:, None])  # lower numbers first
        result["top5_accuracy"] = float((better + ties.sum(axis=1) < TOP).mean())
    if classes <= MAX_PARTS:
        for number in range(classes):
            name = names[number] if names else str(number)
            if predicted[number]:
                result[f"precision/{name}"] = float(correct[number] / predicted[number])
            if actual[number]:
                result[f"recall/{name}"] = float(correct[number] / actual[number])
    return result


def confusion_matrix(logits: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Count the examples of each true class (row) that are predicted as each class (column), [C, C] int64."""
    classes = logits.shape[1]
    predicted = _flat_logits(logits).argmax(axis=1)
    pairs = label.reshape(-1).astype(np.int64) * classes + predicted
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def mean_metrics(
    metrics: Callable[[np.ndarray, np.ndarray], dict[str, float]],
    prediction: np.ndarray,
    target: np.ndarray,
    names: Sequence[str] = (),
) -> dict[str, float]:
    """Compute metrics of targets of any shape: means over the outputs, and `METRIC/OUTPUT` for each of several.

    Args:
        metrics: Function of predictions [N] and targets [N] of one output.
        prediction: Predictions [N, ...].
        target: Targets [N, ...].
        names: Names of the outputs, in the order of the flattened target. Empty: output0, output1, ...

    Returns:
        Metrics by name. The mean excludes outputs for which a metric is not defined (NaN).
    """
    if target.ndim == 1:
        return metrics(prediction.reshape(-1), target)
    columns, targets = prediction.reshape(len(prediction), -1), target.reshape(len(target), -1)  # [N, T]
    parts = [metrics(columns[:, index], targets[:, index]) for index in range(targets.shape[1])]
    result = {}
    for name in parts[0]:
        defined = [part[name] for part in parts if np.isfinite(part[name])]
        result[name] = float(np.mean(defined)) if defined else float("nan")
    if 1 < len(parts) <= MAX_PARTS:
        for index, part in enumerate(parts):
            output = names[index] if names else f"output{index}"
            result |= {f"{name}/{output}": value for name, value in part.items()}
    return result


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


def _flat_logits(logits: np.ndarray) -> np.ndarray:
    """Move the classes of logits [N, C, ...] to the last axis and flatten the others: [N x ..., C] float64."""
    return np.moveaxis(logits, 1, -1).reshape(-1, logits.shape[1]).astype(np.float64)
