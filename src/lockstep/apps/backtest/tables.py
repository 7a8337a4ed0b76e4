"""Figures of a backtest as text: metrics, folds and significance, for the terminal and the page."""

import math
from collections.abc import Sequence

from lockstep.apps.backtest.baselines import HOLD, RANDOM_STRATEGIES
from lockstep.apps.backtest.metrics import Measures
from lockstep.apps.backtest.results import AGENT, BacktestReport
from lockstep.apps.backtest.significance import BOOTSTRAP_SAMPLES, CONFIDENCE, block_length
from lockstep.tasks.trading.price_data import format_time

SEEDS = "seeds, from to"

FORMATS = {
    "total": ("return", "{:.1%}"),
    "cagr": ("CAGR", "{:.1%}"),
    "volatility": ("volatility", "{:.1%}"),
    "sharpe": ("Sharpe", "{:.2f}"),
    "sortino": ("Sortino", "{:.2f}"),
    "drawdown": ("max drawdown", "{:.1%}"),
    "calmar": ("Calmar", "{:.2f}"),
    "beta": ("beta to hold", "{:.2f}"),
    "alpha": ("alpha a year", "{:+.1%}"),
    "turnover": ("turnover a year", "{:.1f}x"),
    "exposure": ("exposure", "{:.1%}"),
    "win_rate": ("win rate", "{:.1%}"),
    "trades": ("closed trades", "{:,}"),
    "fees": ("fees and slippage", "{:.1%}"),
}
"""Displayed name and format of each metric."""


def format_metric(name: str, value: float) -> str:
    """Format a metric for display."""
    return "-" if math.isnan(value) else FORMATS[name][1].format(value)


def metric_columns(report: BacktestReport) -> dict[str, list[str]]:
    """Return the metrics of the agent, of its seeds and of the baselines: formatted values by column."""
    columns = {name: _column(measures) for name, measures in report.measures.items()}
    if len(report.seeds) == 1:
        return columns
    ranges = []
    for name in FORMATS:
        values = [getattr(measures, name) for measures in report.seed_measures]
        low, high = (format_metric(name, choose(values)) for choose in (min, max))
        ranges.append(low if low == high else f"{low} to {high}")
    return {AGENT: columns.pop(AGENT), SEEDS: ranges, **columns}


def _column(measures: Measures) -> list[str]:
    return [format_metric(name, getattr(measures, name)) for name in FORMATS]


FOLD_HEADS = ("fold", "train from", "test from", "test to", "agent", "Sharpe", "drawdown", "trades", "hold")


def fold_rows(report: BacktestReport) -> Sequence[Sequence[str]]:
    """Return one row per fold: dates, and the results of the agent and of buy and hold."""
    rows = []
    for number, (fold, bars, measures) in enumerate(
        zip(report.folds, report.fold_slices, report.fold_measures, strict=True), 1
    ):
        agent, hold = measures[AGENT], measures[HOLD]
        times = fold.train_start, float(report.time[bars.start]), float(report.time[bars.stop - 1])
        rows.append(
            (
                str(number),
                *(format_time(time)[:10] for time in times),  # days only, so that the table fits 80 columns
                f"{agent.total:+.1%}",
                f"{agent.sharpe:.2f}",
                f"{agent.drawdown:.1%}",
                f"{agent.trades:,}",
                f"{hold.total:+.1%}",
            )
        )
    return rows


def describe(report: BacktestReport) -> list[str]:
    """Return what was tested, and how certain the result is, one sentence each."""
    first, last = report.dates
    agent, intervals = report.measures[AGENT], report.intervals
    shares = zip(report.weights, report.symbols, strict=True)
    weights = ", ".join(f"{weight:.0%} {bars.name}" for weight, bars in shares)
    capital = f" The capital is split at the start: {weights}." if len(report.symbols) > 1 else ""
    seeds = f" The agent splits the capital equally over {len(report.seeds)} seeds." if len(report.seeds) > 1 else ""
    formats = {"Sharpe": "{:.2f}"}
    bounds = "; ".join(
        f"{name} {formats.get(name, '{:+.1%}').format(low)} to {formats.get(name, '{:+.1%}').format(high)}"
        for name, (low, high) in intervals.items()
    )
    costs = [
        f"{bars.name} {cost.fee:.3%} fee and {cost.slippage:.3%} slippage per order, "
        f"{cost.borrow * bars.bars_per_year:.1%} a year for short positions"
        for bars, cost in zip(report.symbols, report.costs, strict=True)
    ]
    return [
        f"{report.name}, {first} to {last}: out of sample, {len(report.time):,} bars in {agent.years:.1f} years "
        f"({report.bars_per_year:,.0f} bars a year), {report.description}.{capital}{seeds}",
        f"Costs: {'; '.join(costs)}.",
        f"{CONFIDENCE:.0%} intervals of the agent: {bounds} ({BOOTSTRAP_SAMPLES:,} stationary bootstrap samples with "
        f"blocks of {block_length(len(report.time))} bars on average).",
        f"Deflated Sharpe ratio: {report.deflated_sharpe:.2f} with {report.trials} "
        f"{'trial' if report.trials == 1 else 'trials'}. It is the probability of skill; {CONFIDENCE} is significant.",
        f"The agent earns more than {report.random_rank:.0%} of {RANDOM_STRATEGIES} random strategies with the same "
        "turnover.",
        *report.notes,
    ]
