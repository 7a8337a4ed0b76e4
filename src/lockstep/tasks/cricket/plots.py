"""Plots of cricket predictions: calibration, error by over, and one match."""

from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import ConfigError
from lockstep.ops import prediction_metrics
from lockstep.tasks.cricket.cricsheet import BALL, MatchArchive

BLUE, ORANGE, GRAY = "#1f5fa8", "#d9822b", "#8a8f98"


def plot_all(
    archive: MatchArchive,
    deliveries: np.ndarray,
    targets: np.ndarray,
    predictions: np.ndarray,
    classify: bool,
    directory: Path,
) -> list[Path]:
    """Plot the predictions for some deliveries next to their targets. Returns the files.

    Args:
        archive: All matches.
        deliveries: Rows of `archive.balls` that were predicted, by date.
        targets: [N] targets of these deliveries.
        predictions: [N] runs, or logits of winning where `classify`.
        classify: Whether targets are labels.
        directory: Directory of the files.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib, which is not installed.", 'pip install "lockstep-rl[gnn]"') from None
    matplotlib.use("agg")
    directory.mkdir(parents=True, exist_ok=True)
    over = archive.balls[deliveries, BALL.index("over")]
    plots = {"error-by-over.png": _error_by_over(classify, predictions, targets, over)}
    if classify:
        plots["calibration.png"] = _calibration(predictions, targets)
        plots["match.png"] = _match(archive, deliveries, predictions)
    else:
        plots["calibration.png"] = _predicted_and_observed(predictions, targets)
    for name, figure in plots.items():
        figure.savefig(directory / name, dpi=150, bbox_inches="tight")
    return [directory / name for name in plots]


def _figure(title: str, x: str, y: str, width: float = 6.4, height: float = 4.4) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _calibration(predictions: np.ndarray, targets: np.ndarray) -> Any:
    probability = prediction_metrics.sigmoid(predictions)
    count, predicted, observed = prediction_metrics.calibration_bins(probability, targets.astype(np.float64))
    filled = count > 0
    count, predicted, observed = count[filled], predicted[filled] / count[filled], observed[filled] / count[filled]
    error = prediction_metrics.calibration_error(probability, targets)
    figure, axes = _figure("Calibration", "predicted win probability of the chase", "observed frequency")
    axes.plot([0, 1], [0, 1], color=GRAY, linestyle="--", linewidth=1, label="perfect")
    axes.plot(predicted, observed, color=BLUE, linewidth=1.5)
    axes.scatter(predicted, observed, s=200 * count / count.max(), color=BLUE)
    label = f"{len(probability):,} deliveries in 15 bins (area: count)\ncalibration error {error:.3f}"
    axes.text(0.03, 0.97, label, transform=axes.transAxes, va="top")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right", frameon=False)
    return figure


def _predicted_and_observed(predictions: np.ndarray, targets: np.ndarray) -> Any:
    bins = np.array_split(np.argsort(predictions, kind="stable"), 20)
    predicted, observed = (np.array([values[part].mean() for part in bins]) for values in (predictions, targets))
    low, high = (np.array([np.percentile(targets[part], p) for part in bins]) for p in (10, 90))
    figure, axes = _figure("Predicted and observed runs", "predicted runs to the mark", "observed runs")
    axes.fill_between(predicted, low, high, color=BLUE, alpha=0.15, linewidth=0, label="10th to 90th percentile")
    ends = [predicted[0], predicted[-1]]
    axes.plot(ends, ends, color=GRAY, linestyle="--", linewidth=1, label="perfect")
    axes.plot(predicted, observed, color=BLUE, marker="o", markersize=4, label="mean of each of 20 bins")
    axes.legend(loc="upper left", frameon=False)
    return figure


def _error_by_over(classify: bool, predictions: np.ndarray, targets: np.ndarray, over: np.ndarray) -> Any:
    regression = not classify
    y_label, name = ("mean absolute error, runs", "mae") if regression else ("log-loss", "log_loss")
    metrics = prediction_metrics.regression_metrics if regression else prediction_metrics.binary_metrics
    overs = np.unique(over)
    errors, baseline = [], []
    for number in overs:
        predicted, observed = predictions[over == number], targets[over == number]
        mean = float(np.clip(observed.mean(), 1e-6, None if regression else 1 - 1e-6))
        constant = mean if regression else np.log(mean / (1 - mean))
        errors.append(metrics(predicted, observed)[name])
        baseline.append(metrics(np.full(len(observed), constant), observed)[name])
    title = "Error by over: runs to the mark" if regression else "Error by over: winner of the chase"
    figure, axes = _figure(title, "over", y_label)
    axes.bar(overs + 1.0, errors, color=BLUE, width=0.7, label="the network")
    axes.plot(overs + 1.0, baseline, color=ORANGE, marker="o", markersize=4, label="baseline: mean of the over")
    axes.set_xticks([1, 5, 10, 15, 20])
    axes.legend(loc="best", frameon=False)
    return figure


def _match(archive: MatchArchive, rows: np.ndarray, predictions: np.ndarray) -> Any:
    """Plot the chase in which the predicted probability changed most."""
    match = archive.innings[archive.innings_of[rows], 2]
    probability = prediction_metrics.sigmoid(predictions)
    swings = np.bincount(match[1:], np.abs(np.diff(probability)) * (match[1:] == match[:-1]))
    chosen = int(np.argmax(swings))
    selected = match == chosen
    deliveries, line = rows[selected], 100 * probability[selected]
    # The x axis counts all balls bowled, wides and no-balls included, so that each delivery has its own position.
    ball = np.arange(1, len(line) + 1)
    won = archive.matches[chosen, 1] == 1
    title = archive.title(archive.innings_of[deliveries[0]]).replace("$", r"\$")  # no formulas in names of teams
    figure, axes = _figure(title, "delivery of the chase", "win probability, %", width=8.0)
    axes.axhline(50, color=GRAY, linewidth=1, linestyle="--")
    axes.plot(ball, line, color=BLUE, linewidth=1.8)
    # The last prediction was made before the last ball; the dotted line leads to the result.
    axes.plot([ball[-1], ball[-1] + 1], [line[-1], 100 if won else 0], color=BLUE, linewidth=1.8, linestyle=":")
    out = archive.balls[deliveries, BALL.index("wicket")] > 0
    axes.scatter(ball[out], line[out], color="#c0392b", zorder=3, s=36, label="wicket")
    six = archive.balls[deliveries, BALL.index("bat")] == 6
    axes.scatter(ball[six], line[six], color=ORANGE, zorder=3, s=22, marker="^", label="six")
    axes.set_ylim(0, 100)
    axes.set_xlim(0, len(ball) + 2)
    axes.text(0.99, 0.02, "the chase succeeded" if won else "the chase failed", transform=axes.transAxes, ha="right")
    axes.legend(loc="upper left", frameon=False)
    return figure
