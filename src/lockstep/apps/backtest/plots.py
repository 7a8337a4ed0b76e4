"""Plot (PNG) and self-contained page (HTML) of a walk-forward backtest."""

import base64
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from lockstep.apps.backtest.metrics import Measures, drawdowns
from lockstep.apps.backtest.walk_forward import BacktestReport
from lockstep.config import ConfigError
from lockstep.tasks.trading.price_data import OPEN
from lockstep.tools.report.html import render

COLORS = {"agent": "#1f6fb4", "buy and hold": "#8a8f98"}


def format_metrics(measures: Measures) -> dict[str, str]:
    """Format metrics for display, by display name."""
    return {
        "return": f"{measures.total:.1%}",
        "Sharpe": f"{measures.sharpe:.2f}",
        "Sortino": f"{measures.sortino:.2f}",
        "max drawdown": f"{measures.drawdown:.1%}",
        "turnover a year": f"{measures.turnover:.1f}x",
        "exposure": f"{measures.exposure:.1%}",
        "win rate": f"{measures.win_rate:.1%}" if measures.trades else "-",
        "closed trades": f"{measures.trades:,}",
        "fees paid": f"{measures.fees:.1%}",
    }


def draw(report: BacktestReport, path: Path) -> bytes:
    """Write and return the plot as PNG: equity with folds marked, drawdown and positions."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib.", "pip install 'lockstep-rl[trading]'") from error
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    equity, drawdown, position = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    first = report.folds[0].first
    dates = _dates(np.concatenate([[report.bars.time[first + 1]], report.time]))
    prices = report.bars.prices[: first + 2, OPEN]
    dates_before = _dates(report.bars.time[: first + 2])
    equity.plot(dates_before, prices / prices[-1], color="#c9ccd1", linewidth=1, label="price before the test")
    for name, color in COLORS.items():
        changes = report.curves[name].changes
        values = np.exp(np.concatenate([[0.0], np.cumsum(changes)]))
        equity.plot(dates, values, color=color, linewidth=1.5, label=f"{name} {values[-1] - 1:+.1%}")
        drawdown.plot(dates[1:], -100 * drawdowns(changes), color=color, linewidth=1)
    equity.set_yscale("log")
    equity.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    equity.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if math.isclose(value * 10 % 5, 0) else "")
    for axis in (equity, drawdown, position):
        for number, fold in enumerate(report.folds):
            start = _dates(report.bars.time[fold.first + 1 : fold.first + 2])[0]
            axis.axvline(start, color="#b3261e", linewidth=1.2 if number == 0 else 0.6, linestyle="--", alpha=0.7)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    positions, color = report.curves["agent"].positions, COLORS["agent"]
    position.fill_between(dates[1:], positions, step="pre", color=color, alpha=0.5, linewidth=0)
    equity.set_ylabel("equity")
    drawdown.set_ylabel("drawdown, %")
    position.set_ylabel("position")
    position.set_ylim(-1.1, 1.1)
    equity.legend(loc="upper left", frameon=False)
    equity.set_title(
        f"{report.bars.name}: walk forward, {len(report.folds)} folds (dashed), after all costs", loc="left"
    )
    figure.savefig(path, dpi=130)
    return path.read_bytes()


def write_page(report: BacktestReport, path: Path, plot: bytes, notes: list[str], warnings: list[str]) -> None:
    """Write the HTML page: warnings, notes, metrics and the plot."""
    columns = {name: format_metrics(curve.measures(report.bars.bars_per_year)) for name, curve in report.curves.items()}
    image = Markup(f"data:image/png;base64,{base64.b64encode(plot).decode()}")
    page = render(
        "backtest.html.j2", name=report.bars.name, columns=columns, notes=notes, warnings=warnings, image=image
    )
    path.write_text(page, encoding="utf-8")


def _dates(seconds: np.ndarray) -> Any:
    return [datetime.fromtimestamp(value, UTC) for value in seconds]
