"""A walk forward as a picture (PNG) and as a page (HTML) that needs nothing but itself."""

import base64
import html
import io
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.apps.backtest.metrics import Measures, drawdowns
from lockstep.apps.backtest.walk_forward import BacktestReport
from lockstep.config import ConfigError
from lockstep.tasks.trading.price_data import OPEN

COLOURS = {"agent": "#1f6fb4", "buy and hold": "#8a8f98"}
WORDS = {
    "total": "return",
    "sharpe": "Sharpe",
    "sortino": "Sortino",
    "drawdown": "max drawdown",
    "turnover": "turnover a year",
    "exposure": "exposure",
    "win_rate": "win rate",
    "trades": "closed trades",
    "fees": "fees paid",
}
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.3em .9em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}img{width:100%}.warning{color:#b3261e;font-weight:bold}"""


def shown(measures: Measures) -> dict[str, str]:
    """Measures by what people call them, as people write them."""
    parts = measures._asdict()
    percent = {name: f"{parts[name]:.1%}" for name in ("total", "drawdown", "exposure", "win_rate", "fees")}
    plain = {name: f"{parts[name]:.2f}" for name in ("sharpe", "sortino")}
    written = percent | plain | {"turnover": f"{measures.turnover:.1f}x", "trades": f"{measures.trades:,}"}
    return {WORDS[name]: "-" if written[name] == "nan%" else written[name] for name in WORDS}


def draw(report: BacktestReport, path: Path) -> bytes:
    """Write the picture: equity against buy-and-hold with the splits marked, drawdown, and positions."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("pictures need matplotlib.", "pip install 'lockstep-rl[trading]'") from error
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    equity, falls, held = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    first = report.folds[0].first
    when = _dates(np.concatenate([[report.bars.time[first + 1]], report.time]))
    prices = report.bars.prices[: first + 2, OPEN]
    before = _dates(report.bars.time[: first + 2])
    equity.plot(before, prices / prices[-1], color="#c9ccd1", linewidth=1, label="price before the test")
    for name, colour in COLOURS.items():
        changes = report.curves[name].changes
        wealth = np.exp(np.concatenate([[0.0], np.cumsum(changes)]))
        equity.plot(when, wealth, color=colour, linewidth=1.5, label=f"{name} {wealth[-1] - 1:+.1%}")
        falls.plot(when[1:], -100 * drawdowns(changes), color=colour, linewidth=1)
    equity.set_yscale("log")
    equity.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    equity.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if math.isclose(value * 10 % 5, 0) else "")
    for axis in (equity, falls, held):
        for number, fold in enumerate(report.folds):
            place = _dates(report.bars.time[fold.first + 1 : fold.first + 2])[0]
            axis.axvline(place, color="#b3261e", linewidth=1.2 if number == 0 else 0.6, linestyle="--", alpha=0.7)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    held.fill_between(when[1:], report.curves["agent"].held, step="pre", color=COLOURS["agent"], alpha=0.5, linewidth=0)
    equity.set_ylabel("equity")
    falls.set_ylabel("drawdown, %")
    held.set_ylabel("position")
    held.set_ylim(-1.1, 1.1)
    equity.legend(loc="upper left", frameon=False)
    equity.set_title(
        f"{report.bars.name}: walk forward, {len(report.folds)} folds (dashed), after all costs", loc="left"
    )
    figure.savefig(path, dpi=130)
    memory = io.BytesIO()
    figure.savefig(memory, dpi=130, format="png")
    return memory.getvalue()


def write_page(report: BacktestReport, path: Path, picture: bytes, notes: list[str], warnings: list[str]) -> None:
    """Write the page: what was measured, the picture, and how it was measured."""
    columns = {name: shown(curve.measures(report.bars.bars_per_year)) for name, curve in report.curves.items()}
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    rows = "".join(
        f"<tr><td>{word}</td>{''.join(f'<td>{column[word]}</td>' for column in columns.values())}</tr>"
        for word in WORDS.values()
    )
    told = "".join(f"<p class='warning'>{html.escape(words)}</p>" for words in warnings)
    told += "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    image = base64.b64encode(picture).decode()
    path.write_text(
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(report.bars.name)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(report.bars.name)}: walk forward</h1>{told}"
        f"<table><tr><th></th>{head}</tr>{rows}</table>"
        f"<img alt='equity, drawdown and positions' src='data:image/png;base64,{image}'>",
        encoding="utf-8",
    )


def _dates(seconds: np.ndarray) -> Any:
    return [datetime.fromtimestamp(value, UTC) for value in seconds]
