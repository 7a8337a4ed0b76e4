"""Performance metrics of an equity curve: pure functions of its changes.

Shapes: T traded bars.
"""

import math
from typing import NamedTuple

import numpy as np

SUSPICIOUS = 3.0
"""Out-of-sample Sharpe ratio over a year or more that suggests a data leak."""


class Measures(NamedTuple):
    """Performance of one strategy over one period. NaN: not defined, such as a ratio to a drawdown of zero."""

    total: float
    """Total return."""
    cagr: float
    """Compound annual growth rate."""
    volatility: float
    """Annualized standard deviation of the returns per bar."""
    sharpe: float
    """Annualized Sharpe ratio: mean over standard deviation of the returns per bar, without a risk-free rate."""
    sortino: float
    """Annualized Sortino ratio: mean return over the downside deviation."""
    drawdown: float
    """Maximum drawdown, as a fraction of the previous peak of equity."""
    calmar: float
    """Calmar ratio: compound annual growth rate over maximum drawdown."""
    beta: float
    """Beta to buy and hold: covariance of the returns per bar over the variance of those of buy and hold."""
    alpha: float
    """Annualized mean return per bar that beta does not explain: mean return, less beta times that of buy and hold."""
    turnover: float
    """Traded value per year, over the equity at the time of each trade."""
    exposure: float
    """Fraction of bars with an open position."""
    win_rate: float
    """Fraction of closed trades with a profit."""
    trades: int
    """Number of closed trades."""
    fees: float
    """Fees and slippage, over the initial equity."""
    years: float
    """Length of the period in years."""


class Counts(NamedTuple):
    """Counters of an account over a period."""

    turnover: float = 0.0
    """Traded value, over the equity at the time of each trade."""
    exposed: float = 0.0
    """Bars with an open position."""
    trades: float = 0.0
    wins: float = 0.0
    fees: float = 0.0
    """Fees and slippage, over the initial equity."""


def measure(changes: np.ndarray, hold: np.ndarray, bars_per_year: float, counts: Counts) -> Measures:
    """Compute metrics from changes of log equity [T].

    Args:
        changes: Changes of log equity per bar.
        hold: Those of buy and hold over the same bars.
        bars_per_year: Bars per year, for annualized metrics.
        counts: Counters of the account.
    """
    returns, years = np.expm1(changes), float(len(changes) / bars_per_year)
    hold_returns = np.expm1(hold)
    slope = beta(returns, hold_returns)
    growth, drawdown = annual_growth(changes, bars_per_year), float(drawdowns(changes).max(initial=0.0))
    return Measures(
        total=math.expm1(changes.sum()),
        cagr=growth,
        volatility=volatility(returns, bars_per_year),
        sharpe=ratio(returns, returns.std(), bars_per_year),
        sortino=ratio(returns, math.sqrt(np.mean(np.minimum(returns, 0.0) ** 2)), bars_per_year),
        drawdown=drawdown,
        calmar=growth / drawdown if drawdown > 0 else math.nan,
        beta=slope,
        alpha=float((returns.mean() - slope * hold_returns.mean()) * bars_per_year),
        turnover=counts.turnover / years,
        exposure=counts.exposed / len(changes),
        win_rate=counts.wins / counts.trades if counts.trades else math.nan,
        trades=int(counts.trades),
        fees=counts.fees,
        years=years,
    )


def annual_growth(changes: np.ndarray, bars_per_year: float) -> float:
    """Return the compound annual growth rate of changes of log equity [T]."""
    return math.expm1(min(changes.mean() * bars_per_year, 700.0))  # exp(710) overflows


def volatility(returns: np.ndarray, bars_per_year: float) -> float:
    """Return the annualized standard deviation of returns per bar [T]."""
    return float(returns.std() * math.sqrt(bars_per_year))


def ratio(returns: np.ndarray, risk: float, bars_per_year: float) -> float:
    """Return annualized mean return over risk, or 0 if the risk is 0."""
    return float(returns.mean() / risk * math.sqrt(bars_per_year)) if risk > 0 else 0.0


def beta(returns: np.ndarray, hold: np.ndarray) -> float:
    """Return the beta of returns per bar [T] to those of buy and hold [T]. NaN if buy and hold does not vary."""
    variance = float(hold.var())
    return float(np.mean((returns - returns.mean()) * (hold - hold.mean())) / variance) if variance > 0 else math.nan


def drawdowns(changes: np.ndarray) -> np.ndarray:
    """Return the drawdown after each bar [T], relative to the running maximum. The initial equity counts."""
    equity = np.exp(np.concatenate([[0.0], np.cumsum(changes)]))
    drawdown: np.ndarray = 1.0 - equity / np.maximum.accumulate(equity)
    return drawdown[1:]


def possible_leak(measures: Measures) -> bool:
    """Return whether the metrics are so good that a data leak is likely."""
    return measures.sharpe > SUSPICIOUS and measures.years >= 1.0
