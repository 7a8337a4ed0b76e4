"""Plot (PNG) and self-contained page (HTML) of a backtest."""

import base64
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from lockstep.apps.backtest.baselines import AVERAGE, HOLD, MOMENTUM
from lockstep.apps.backtest.files import equity_of, random_bands
from lockstep.apps.backtest.metrics import drawdowns
from lockstep.apps.backtest.results import AGENT, BacktestReport
from lockstep.apps.backtest.tables import FOLD_HEADS, FORMATS, describe, fold_rows, metric_columns
from lockstep.config import ConfigError
from lockstep.tasks.trading.price_data import OPEN
from lockstep.tools.report.html import render

COLORS = {AGENT: "#1f6fb4", HOLD: "#5f6670", AVERAGE: "#c77700", MOMENTUM: "#7b4fa3"}
RANDOM_COLOR, FOLD_COLOR, PRICE_COLOR, IN_SAMPLE_COLOR = "#d9dbe0", "#b3261e", "#a7acb5", "#d97706"
LOG_RATIO = 3.0
"""Ratio of the highest to the lowest equity above which the axis is logarithmic."""


def draw(report: BacktestReport, path: Path) -> bytes:
    """Write and return the plot as PNG: equity with folds, band of seeds and baselines, drawdown and positions."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib.", "pip install 'lockstep-rl[trading]'") from error
    figure = Figure(figsize=(11, 8), layout="constrained")
    equity, drawdown, position = figure.subplots(3, 1, sharex=True, height_ratios=(3.2, 1, 1))
    start = report.folds[0].start
    dates = _dates(np.concatenate([[start], report.time]))
    _draw_training_prices(equity, report, start)
    low, _, high = (np.append(1.0, band) for band in random_bands(report).values())
    equity.fill_between(dates, low, high, color=RANDOM_COLOR, linewidth=0, label="random, equal turnover, 5 to 95 %")
    if len(report.seeds) > 1:
        curves = np.stack([np.append(1.0, equity_of(seed.curve.changes)) for seed in report.seeds])
        label = f"{len(report.seeds)} seeds, lowest to highest"
        low, high = curves.min(axis=0), curves.max(axis=0)
        equity.fill_between(dates, low, high, color=COLORS[AGENT], alpha=0.25, linewidth=0, label=label)
    for name, curve in ({AGENT: report.agent} | report.baselines).items():
        values, width = np.append(1.0, equity_of(curve.changes)), 1.8 if name == AGENT else 1.0
        label = f"{name} {values[-1] - 1:+.1%}"
        equity.plot(dates, values, color=COLORS[name], linewidth=width, label=label, zorder=3 if name == AGENT else 2)
        if name in (AGENT, HOLD):
            drawdown.plot(dates[1:], -100 * drawdowns(curve.changes), color=COLORS[name], linewidth=1)
    low, high = equity.get_ylim()
    if high > LOG_RATIO * max(low, 1e-9):  # a logarithmic axis of a small range has one label
        equity.set_yscale("log")
        equity.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        equity.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    for axis in (equity, drawdown, position):
        for number, fold in enumerate(report.folds):
            width = 1.2 if number == 0 else 0.6
            axis.axvline(_dates([fold.start])[0], color=FOLD_COLOR, linewidth=width, linestyle="--", alpha=0.7)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    position.fill_between(dates[1:], report.agent.positions, step="pre", color=COLORS[AGENT], alpha=0.5, linewidth=0)
    equity.set_ylabel("equity")
    drawdown.set_ylabel("drawdown, %")
    position.set_ylabel("position")
    position.set_ylim(-1.1, 1.1)
    equity.legend(loc="upper left", frameon=False, fontsize=9)
    first, last = report.dates
    folds = f"{len(report.folds)} folds (dashed)" if len(report.folds) > 1 else "test part"
    equity.set_title(f"{report.name}, {first} to {last}: OUT OF SAMPLE, {folds}, after all costs", loc="left")
    figure.savefig(path, dpi=130)
    return path.read_bytes()


def _draw_training_prices(axis: Any, report: BacktestReport, start: float) -> None:
    """Draw the price before the first fold, at most half as long as the test, and mark it as in sample."""
    bars = report.symbols[0]
    stop = int(np.searchsorted(bars.time, start)) + 1
    first = max(0, stop - len(report.time) // 2)
    prices, dates = bars.prices[first:stop, OPEN], _dates(bars.time[first:stop])
    if len(report.symbols) == 1 and len(prices) > 1:
        axis.plot(dates, prices / prices[-1], color=PRICE_COLOR, linewidth=1, label="price before the test")
        axis.axvspan(dates[0], dates[-1], color=IN_SAMPLE_COLOR, alpha=0.07, linewidth=0)
        place = {"xy": (dates[len(dates) // 2], 0.02), "xycoords": ("data", "axes fraction"), "ha": "center"}
        axis.annotate("IN SAMPLE", **place, color=IN_SAMPLE_COLOR, weight="bold")


def write_page(report: BacktestReport, path: Path, plot: bytes) -> None:
    """Write the HTML page: warnings, description, metrics, folds and the plot."""
    columns = metric_columns(report)
    metric_rows = [
        [label, *(column[index] for column in columns.values())] for index, (label, _) in enumerate(FORMATS.values())
    ]
    page = render(
        "backtest.html.j2",
        name=report.name,
        dates=report.dates,
        warnings=report.warnings(),
        notes=describe(report),
        heads=list(columns),
        rows=metric_rows,
        fold_heads=FOLD_HEADS,
        fold_rows=fold_rows(report),
        image=Markup(f"data:image/png;base64,{base64.b64encode(plot).decode()}"),
    )
    path.write_text(page, encoding="utf-8")


def _dates(seconds: Any) -> Any:
    return [datetime.fromtimestamp(value, UTC) for value in seconds]
