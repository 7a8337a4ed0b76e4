"""What a quant asks of an equity curve. Pure arithmetic.

Shapes: T bars that were traded.
"""

import math
from typing import NamedTuple

import numpy as np

SUSPICIOUS = 3.0
"""A Sharpe ratio that nobody has out of sample over a year or more, unless something leaks."""


class Measures(NamedTuple):
    """Of one way to trade over one stretch of time."""

    total: float
    """Return over all of it."""
    sharpe: float
    """Mean over deviation of the bars' returns, times the square root of the bars in a year; without interest."""
    sortino: float
    """The same over the deviation of losses alone."""
    drawdown: float
    """The deepest fall of equity from its highest point before, as a part of that."""
    turnover: float
    """Value bought and sold in a year, over the equity it was traded with."""
    exposure: float
    """Part of the bars with a position."""
    win_rate: float
    """Closed trades that gained, over all closed trades."""
    trades: int
    """Closed trades."""
    fees: float
    """Paid for orders, over the equity at the start."""
    years: float
    """How long it was."""


def measure(
    changes: np.ndarray, a_year: float, turnover: float, exposed: float, trades: float, wins: float, fees: float
) -> Measures:
    """From the changes of log equity [T], how many bars make a year, and what the account counted."""
    returns, years = np.expm1(changes), float(len(changes) / a_year)
    return Measures(
        total=math.expm1(changes.sum()),
        sharpe=ratio(returns, returns.std(), a_year),
        sortino=ratio(returns, math.sqrt(np.mean(np.minimum(returns, 0.0) ** 2)), a_year),
        drawdown=float(drawdowns(changes).max()),
        turnover=turnover / years,
        exposure=exposed / len(changes),
        win_rate=wins / trades if trades else math.nan,
        trades=int(trades),
        fees=fees,
        years=years,
    )


def ratio(returns: np.ndarray, risk: float, a_year: float) -> float:
    """Annualised mean over risk; 0 where nothing was ever at risk."""
    return float(returns.mean() / risk * math.sqrt(a_year)) if risk > 0 else 0.0


def drawdowns(changes: np.ndarray) -> np.ndarray:
    """How far below its highest point so far equity stands after each bar, [T]; it starts at its first high."""
    equity = np.exp(np.concatenate([[0.0], np.cumsum(changes)]))
    falls: np.ndarray = 1.0 - equity / np.maximum.accumulate(equity)
    return falls[1:]


def possible_leak(measures: Measures) -> bool:
    """Whether these are too good to be true."""
    return measures.sharpe > SUSPICIOUS and measures.years >= 1.0
