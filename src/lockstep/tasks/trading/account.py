"""Trading accounts: effects of orders on cash and positions, and the results of closed trades.

A target is a fraction of equity, from -1 (short) to 1 (long). An order is placed when the target changes, and is filled
at the next bar's open. While the target stays, nothing is bought or sold, and the fraction drifts with the price. A
trade runs from flat, or from a flip of the position, to flat or to the next flip. Its result is the sum of all payments
for it, costs included, which equals the result by average cost.

Shapes: B local accounts.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

FIELDS = (
    "target",  # fraction of equity last requested
    "cash",  # in units of the equity at the start
    "units",  # of the symbol; negative when short
    "flow",  # net payments of the open trade
    "trades",  # closed trades
    "wins",  # closed trades with a profit
    "turnover",  # value bought and sold, relative to the equity at that time
    "fees",  # fees and slippage paid for orders, in units of the equity at the start
    "exposed",  # bars with a position
)
ACCOUNT = np.dtype([(name, np.float64) for name in FIELDS])
BANKRUPTCY = 1e-4
"""Fraction of equity that a bankrupt account is assumed to keep, so that the log return is finite."""


class Costs(NamedTuple):
    """Trading costs, as fractions of the traded or borrowed value."""

    fee: float
    slippage: float
    borrow: float


@njit(cache=True, nogil=True)
def open_account(account: Any) -> None:
    """Start with one unit of cash and no position."""
    account.target = account.units = account.flow = account.trades = account.wins = 0.0
    account.turnover = account.fees = account.exposed = 0.0
    account.cash = 1.0


@njit(cache=True, nogil=True)
def _fill(account: Any, units: float, price: float, costs: Costs) -> None:
    """Buy or sell at a price; fee and slippage are fractions of the traded value."""
    paid = units * price
    cost = abs(paid) * (costs.fee + costs.slippage)
    account.cash -= paid + cost
    account.flow -= paid + cost
    account.fees += cost
    account.units += units


@njit(cache=True, nogil=True)
def _close(account: Any, price: float, costs: Costs) -> None:
    _fill(account, -account.units, price, costs)
    account.units = 0.0  # removes the rounding error
    account.trades += 1.0
    account.wins += account.flow > 0.0
    account.flow = 0.0


@njit(cache=True, nogil=True)
def rebalance(account: Any, target: float, price: float, next_price: float, costs: Costs) -> float:
    """Trade at one bar's open and hold to the next open. Return the change of log equity; -inf if nothing is left."""
    equity = account.cash + account.units * price
    if target != account.target:
        account.target = target
        target_units = target * equity / price
        account.turnover += abs(target_units - account.units) * price / equity
        if account.units != 0.0 and target_units * account.units <= 0.0:
            _close(account, price, costs)
        if target_units != account.units:
            _fill(account, target_units - account.units, price, costs)
    if account.units < 0.0:
        borrow_cost = -account.units * price * costs.borrow
        account.cash -= borrow_cost
        account.flow -= borrow_cost
    account.exposed += account.units != 0.0
    next_equity = account.cash + account.units * next_price
    return math.log(next_equity / equity) if next_equity > 0.0 else -math.inf
