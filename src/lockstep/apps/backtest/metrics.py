"""Performance metrics of an equity curve.

Shapes: T traded bars.
"""

import math
from typing import NamedTuple

import numpy as np

SUSPICIOUS = 3.0
"""Out-of-sample Sharpe ratio over a year or more that suggests a data leak."""


class Measures(NamedTuple):
    """Performance of one strategy over one period."""

    total: float
    """Total return."""
    sharpe: float
    """Annualized Sharpe ratio: mean over standard deviation of the returns per bar, without a risk-free rate."""
    sortino: float
    """Annualized Sortino ratio: mean return over the downside deviation."""
    drawdown: float
    """Maximum drawdown, as a fraction of the previous peak of equity."""
    turnover: float
    """Traded value per year, over the equity at the time of each trade."""
    exposure: float
    """Fraction of bars with an open position."""
    win_rate: float
    """Fraction of closed trades with a profit."""
    trades: int
    """Number of closed trades."""
    fees: float
    """Fees, over the initial equity."""
    years: float
    """Length of the period in years."""


def measure(
    changes: np.ndarray, bars_per_year: float, turnover: float, exposed: float, trades: float, wins: float, fees: float
) -> Measures:
    """Compute metrics from changes of log equity [T], the bars per year and the counters of the account."""
    returns, years = np.expm1(changes), float(len(changes) / bars_per_year)
    return Measures(
        total=math.expm1(changes.sum()),
        sharpe=ratio(returns, returns.std(), bars_per_year),
        sortino=ratio(returns, math.sqrt(np.mean(np.minimum(returns, 0.0) ** 2)), bars_per_year),
        drawdown=float(drawdowns(changes).max()),
        turnover=turnover / years,
        exposure=exposed / len(changes),
        win_rate=wins / trades if trades else math.nan,
        trades=int(trades),
        fees=fees,
        years=years,
    )


def ratio(returns: np.ndarray, risk: float, bars_per_year: float) -> float:
    """Return annualized mean return over risk, or 0 if the risk is 0."""
    return float(returns.mean() / risk * math.sqrt(bars_per_year)) if risk > 0 else 0.0


def drawdowns(changes: np.ndarray) -> np.ndarray:
    """Return the drawdown after each bar [T], relative to the running maximum. The initial equity counts."""
    equity = np.exp(np.concatenate([[0.0], np.cumsum(changes)]))
    drawdown: np.ndarray = 1.0 - equity / np.maximum.accumulate(equity)
    return drawdown[1:]


def possible_leak(measures: Measures) -> bool:
    """Return whether the metrics are so good that a data leak is likely."""
    return measures.sharpe > SUSPICIOUS and measures.years >= 1.0
