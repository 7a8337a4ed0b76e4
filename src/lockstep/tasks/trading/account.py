"""Accounts: what orders do to cash and positions, and what a trade was worth when it is over.

A target is a part of equity, from -1 (short) to 1 (long). An order is placed where the target changes, and is filled at
the next bar's open; where it stays, nothing is bought or sold, and the part drifts with the price. A trade runs from
flat, or from a flip, to flat or to a flip; its result is all that was paid and received for it, costs included: what
its average cost would say, too.

Shapes: B local accounts.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

FIELDS = (
    "target",  # part of equity last asked for
    "cash",  # in units of the equity at the start
    "units",  # of the symbol; below zero when short
    "flow",  # paid and received for the trade under way
    "trades",  # that are over
    "wins",  # of those, with more received than paid
    "turnover",  # value bought and sold, over the equity it was traded with
    "fees",  # paid for orders: fee and slippage; in units of the equity at the start
    "exposed",  # bars with a position
)
ACCOUNT = np.dtype([(name, np.float64) for name in FIELDS])
BANKRUPTCY = 1e-4
"""Part of its equity that an account is counted as having kept when it lost all of it: a logarithm needs one."""


class Costs(NamedTuple):
    """What trading costs."""

    fee: float
    slippage: float
    borrow: float


@njit(cache=True, nogil=True)
def open_account(account: Any) -> None:
    """Start with one unit of cash, and flat."""
    account.target = account.units = account.flow = account.trades = account.wins = 0.0
    account.turnover = account.fees = account.exposed = 0.0
    account.cash = 1.0


@njit(cache=True, nogil=True)
def _fill(account: Any, units: float, price: float, costs: Costs) -> None:
    """Buy or sell; the fee is on what is paid, and slippage makes a price worse by its part."""
    paid = units * price
    cost = abs(paid) * (costs.fee + costs.slippage)
    account.cash -= paid + cost
    account.flow -= paid + cost
    account.fees += cost
    account.units += units


@njit(cache=True, nogil=True)
def _close(account: Any, price: float, costs: Costs) -> None:
    _fill(account, -account.units, price, costs)
    account.units = 0.0  # exactly
    account.trades += 1.0
    account.wins += account.flow > 0.0
    account.flow = 0.0


@njit(cache=True, nogil=True)
def rebalance(account: Any, target: float, price: float, following: float, costs: Costs) -> float:
    """Trade at one bar's open and keep it to the next one's: the change of log equity, -inf if nothing is left."""
    equity = account.cash + account.units * price
    if target != account.target:
        account.target = target
        wanted = target * equity / price
        account.turnover += abs(wanted - account.units) * price / equity
        if account.units != 0.0 and wanted * account.units <= 0.0:
            _close(account, price, costs)
        if wanted != account.units:
            _fill(account, wanted - account.units, price, costs)
    if account.units < 0.0:
        rent = -account.units * price * costs.borrow
        account.cash -= rent
        account.flow -= rent
    account.exposed += account.units != 0.0
    after = account.cash + account.units * following
    return math.log(after / equity) if after > 0.0 else -math.inf
