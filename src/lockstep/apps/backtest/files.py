"""Files of a backtest: equity.csv, trades.csv and backtest.json. They contain no times of the computation.

Shapes: T traded bars, R random strategies.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.apps.backtest.results import AGENT, BacktestReport
from lockstep.config import ConfigError

RANDOM_QUANTILES = {"random 5 %": 0.05, "random median": 0.5, "random 95 %": 0.95}


def equity_of(changes: np.ndarray) -> np.ndarray:
    """Return the equity after each bar [..., T], 1 at the start, from changes of log equity [..., T]."""
    return np.asarray(np.exp(np.cumsum(changes, axis=-1)))


def random_bands(report: BacktestReport) -> dict[str, np.ndarray]:
    """Return quantiles [T] of the equity of the random strategies, by name."""
    equity = equity_of(report.random)
    return {name: np.quantile(equity, quantile, axis=0) for name, quantile in RANDOM_QUANTILES.items()}


def write_files(report: BacktestReport, directory: Path) -> list[Path]:
    """Write all files. Return their paths."""
    contents = {
        "equity.csv": _to_csv(*_equity_table(report)),
        "trades.csv": _to_csv(*_trade_table(report)),
        "backtest.json": json.dumps(as_json(report), indent=1) + "\n",
    }
    paths = []
    for name, content in contents.items():
        path = directory / name
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}.", "Choose another --out.") from None
        paths.append(path)
    return paths


def _equity_table(report: BacktestReport) -> tuple[list[str], Iterable[Sequence[Any]]]:
    folds = np.zeros(len(report.time), int)
    for number, bars in enumerate(report.fold_slices, 1):
        folds[bars] = number
    columns = {AGENT: equity_of(report.agent.changes), "position": report.agent.positions}
    columns |= {f"seed {seed.seed}": equity_of(seed.curve.changes) for seed in report.seeds}
    columns |= {name: equity_of(curve.changes) for name, curve in report.baselines.items()}
    columns |= random_bands(report)
    rows = zip(map(_iso, report.time), folds.tolist(), *columns.values(), strict=True)
    return ["time", "fold", *columns], ([time, fold, *map(_number, values)] for time, fold, *values in rows)


def _trade_table(report: BacktestReport) -> tuple[list[str], Iterable[Sequence[Any]]]:
    heads = ["seed", "fold", "symbol", "side", "entry_time", "exit_time", "bars", "entry_price", "exit_price", "result"]
    rows = [
        [seed, fold, symbol, trade.side, _iso(trade.entry_time), _iso(trade.exit_time), trade.bars]
        + [_number(value) for value in (trade.entry_price, trade.exit_price, trade.result)]
        for seed, fold, symbol, trade in report.trades()
    ]
    return heads, rows


def as_json(report: BacktestReport) -> dict[str, Any]:
    """Return all figures as plain values. A value that is not defined is null."""
    first, last = report.dates
    symbols = [
        {"symbol": bars.name, "weight": weight, **cost._asdict()}
        for bars, weight, cost in zip(report.symbols, report.weights, report.costs, strict=True)
    ]
    folds = [
        {
            "train_start": _iso(fold.train_start),
            "test_start": _iso(fold.start),
            "test_stop": _iso(fold.stop),
            **{name: measures._asdict() for name, measures in both.items()},
        }
        for fold, both in zip(report.folds, report.fold_measures, strict=True)
    ]
    figures = {
        "part": "out of sample",
        "first": first,
        "last": last,
        "bars": len(report.time),
        "bars_per_year": report.bars_per_year,
        "symbols": symbols,
        "measures": {name: measures._asdict() for name, measures in report.measures.items()},
        "seeds": {str(seed.seed): m._asdict() for seed, m in zip(report.seeds, report.seed_measures, strict=True)},
        "intervals": {name: list(interval) for name, interval in report.intervals.items()},
        "trials": report.trials,
        "deflated_sharpe": report.deflated_sharpe,
        "beats_random": report.random_rank,
        "folds": folds,
        "warnings": report.warnings(),
        "notes": report.notes,
    }
    plain: dict[str, Any] = _without_nan(figures)
    return plain


def _without_nan(value: Any) -> Any:
    """Replace NaN, which is not valid JSON, by None."""
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _to_csv(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    return text.getvalue()


def _number(value: float) -> str:
    return f"{value:.10g}"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
