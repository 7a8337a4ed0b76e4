"""Default plots of predictions: a confusion matrix, or predicted against true numbers.

Shapes: N examples, T outputs, C classes; `...` are the axes of one target.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import ConfigError
from lockstep.ops.prediction_metrics import confusion_matrix
from lockstep.protocols import TargetType

MAX_NUMBERED = 20
"""Largest number of classes whose counts are written into the plot."""
MAX_PANELS = 9
"""Largest number of outputs that are plotted."""


def plot_predictions(
    target_type: TargetType, targets: np.ndarray, predictions: np.ndarray, names: Sequence[str], directory: Path
) -> list[Path]:
    """Plot predictions [N, ...] of a split against its targets [N, ...] and return the paths of the files.

    With classes, `confusion.csv` has the counts of the confusion matrix: true classes in rows, predicted in columns.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib, which is not installed.", "pip install matplotlib") from None
    directory.mkdir(parents=True, exist_ok=True)
    if target_type == "regression":
        figure = Figure(figsize=(6.4, 6.0), layout="constrained")
        _scatter(figure, targets.reshape(len(targets), -1), predictions.reshape(len(predictions), -1), names)
        figure.savefig(directory / "predictions.png", dpi=150)
        return [directory / "predictions.png"]
    if target_type == "binary":  # two classes: the logit of the label 1, against 0
        scores = np.stack([np.zeros(predictions.size), predictions.reshape(-1)], axis=1)
        predictions, targets, names = scores, targets.reshape(-1), ()
    counts = confusion_matrix(predictions, targets)
    figure = Figure(figsize=(6.4, 6.0), layout="constrained")
    _heat_map(figure, counts, list(names) or [str(number) for number in range(len(counts))])
    figure.savefig(directory / "confusion.png", dpi=150)
    np.savetxt(directory / "confusion.csv", counts, fmt="%d", delimiter=",")
    return [directory / "confusion.png", directory / "confusion.csv"]


def _heat_map(figure: Any, counts: np.ndarray, names: Sequence[str]) -> None:
    """Draw the share of each true class that is predicted as each class."""
    axes = figure.add_subplot()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set(xlabel="predicted class", ylabel="true class", title="Confusion matrix")
    if len(names) <= MAX_NUMBERED:
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count}", ha="center", va="center", color=color, fontsize=8)


def _scatter(figure: Any, targets: np.ndarray, predictions: np.ndarray, names: Sequence[str]) -> None:
    """Draw predicted against true numbers [N, T], one panel for each output."""
    outputs = min(targets.shape[1], MAX_PANELS)
    side = int(np.ceil(np.sqrt(outputs)))
    for index in range(outputs):
        axes = figure.add_subplot(side, side, index + 1)
        axes.scatter(targets[:, index], predictions[:, index], s=6, alpha=0.5, color="#1f5fa8")
        limits = [targets[:, index].min(), targets[:, index].max()]
        axes.plot(limits, limits, color="#8a8f98", linewidth=1)
        axes.set(xlabel="target", ylabel="prediction", title=names[index] if len(names) > index else "")
