"""Replay of target positions through the account of the trading task: equity, counters and closed trades.

Shapes: T traded bars, D closed trades.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from lockstep.apps.backtest.metrics import Counts
from lockstep.tasks.trading.account import ACCOUNT, BANKRUPTCY, Costs, open_account, rebalance
from lockstep.tasks.trading.price_data import OPEN, PriceSeries


class Trade(NamedTuple):
    """A closed trade: from flat, or from a flip of the position, to flat or to the next flip."""

    entry_time: float
    exit_time: float
    side: str
    bars: int
    """Bars from entry to exit."""
    entry_price: float
    exit_price: float
    result: float
    """Profit after all costs, over the equity at the entry."""


@dataclass
class AccountCurve:
    """One account over one period."""

    time: np.ndarray
    """[T] time of each change: the open at which equity is marked."""
    changes: np.ndarray
    """[T] changes of log equity."""
    positions: np.ndarray
    """[T] target position as a fraction of equity."""
    counts: Counts
    trades: list[Trade]


def replay(
    bars: PriceSeries, test_bars: range, targets: np.ndarray, costs: Costs, record_trades: bool = True
) -> AccountCurve:
    """Trade target positions [T], each decided at the close of a test bar. The last order always closes the position.

    An order is filled at the next open, and the equity is marked at the open after it.
    """
    targets = np.append(targets[:-1], 0.0)
    opens = bars.prices[test_bars.start + 1 : test_bars.stop + 2, OPEN]
    times = bars.time[test_bars.start + 1 : test_bars.stop + 2]
    changes, closed = np.zeros(len(targets)), np.zeros((len(targets), 4))
    account = np.zeros(1, ACCOUNT).view(np.recarray)
    num_closed = _trade(targets, opens, costs, account, changes, closed)
    trades = [
        Trade(
            float(times[int(entry)]),
            float(times[int(exit)]),
            "long" if side > 0 else "short",
            int(exit - entry),
            float(opens[int(entry)]),
            float(opens[int(exit)]),
            float(result),
        )
        for entry, exit, side, result in (closed[:num_closed] if record_trades else ())
    ]
    counts = Counts(*(float(account[0][name]) for name in ("turnover", "exposed", "trades", "wins", "fees")))
    return AccountCurve(times[1:], changes, targets, counts, trades)


@njit(cache=True, nogil=True)
def _trade(targets: Any, opens: Any, costs: Costs, accounts: Any, changes: Any, closed: Any) -> int:
    """Fill changes [T] and closed trades [D, (entry, exit, side, result)]. Return D."""
    account = accounts[0]
    open_account(account)
    entry, entry_equity, num_closed = 0, 1.0, 0
    for t in range(len(targets)):
        price, units, flow = opens[t], account.units, account.flow
        equity, trades = account.cash + units * price, account.trades
        change = rebalance(account, targets[t], price, opens[t + 1], costs)
        if account.trades > trades:
            # The result of the closed trade: earlier payments, and the closing order after its costs.
            value = units * price
            result = flow + value - abs(value) * (costs.fee + costs.slippage)
            closed[num_closed, 0], closed[num_closed, 1] = entry, t
            closed[num_closed, 2], closed[num_closed, 3] = units, result / entry_equity
            num_closed += 1
        if account.units != 0.0 and (units == 0.0 or account.trades > trades):
            entry, entry_equity = t, equity
        if change == -math.inf:  # equity is lost: later changes stay 0
            changes[t] = math.log(BANKRUPTCY)
            break
        changes[t] = change
    return num_closed


def join(parts: Sequence[AccountCurve]) -> AccountCurve:
    """Concatenate the curves of consecutive periods."""
    return AccountCurve(
        time=np.concatenate([part.time for part in parts]),
        changes=np.concatenate([part.changes for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        counts=Counts(*(sum(values) for values in zip(*(part.counts for part in parts), strict=True))),
        trades=[trade for part in parts for trade in part.trades],
    )


def combine(accounts: Sequence[AccountCurve], weights: Sequence[float]) -> AccountCurve:
    """Split the capital over accounts at the start of a period, and return the curve of their sum.

    Accounts may have different bars. The sum is marked whenever one of them is.
    """
    time = np.unique(np.concatenate([account.time for account in accounts]))
    equity, positions = np.zeros(len(time)), np.zeros(len(time))
    for account, weight in zip(accounts, weights, strict=True):
        index = np.searchsorted(account.time, time, side="right")
        curve = np.exp(np.concatenate([[0.0], np.cumsum(account.changes)]))
        equity += weight * curve[index]
        positions += weight * np.concatenate([[0.0], account.positions])[index]
    trades = [trade for account in accounts for trade in account.trades]
    return AccountCurve(
        time, np.diff(np.log(equity), prepend=0.0), positions, combined_counts(accounts, weights, len(time)), trades
    )


def combined_counts(accounts: Sequence[AccountCurve], weights: Sequence[float], bars: int) -> Counts:
    """Return the counters of accounts that share a capital. `bars` is the number of bars of their sum."""
    shares = list(zip((account.counts for account in accounts), weights, strict=True))
    exposure = [account.counts.exposed / len(account.time) for account in accounts]
    return Counts(
        turnover=sum(weight * counts.turnover for counts, weight in shares),
        exposed=bars * sum(weight * value for value, weight in zip(exposure, weights, strict=True)),
        trades=sum(counts.trades for counts, _ in shares),
        wins=sum(counts.wins for counts, _ in shares),
        fees=sum(weight * counts.fees for counts, weight in shares),
    )
