"""Results of a backtest: curves of the agent, its seeds and the baselines, with their metrics.

Shapes: T traded bars, R random strategies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from lockstep.apps.backtest.baselines import HOLD
from lockstep.apps.backtest.folds import Fold
from lockstep.apps.backtest.metrics import Counts, Measures, measure, possible_leak
from lockstep.apps.backtest.replay import AccountCurve, Trade, combined_counts
from lockstep.apps.backtest.significance import (
    CONFIDENCE,
    Interval,
    deflated_sharpe,
    growth_interval,
    sharpe_interval,
)
from lockstep.tasks.trading.account import Costs
from lockstep.tasks.trading.price_data import SECONDS_PER_YEAR, PriceSeries, format_time

AGENT = "agent"


@dataclass
class SeedResult:
    """One seed."""

    seed: int
    accounts: list[list[AccountCurve]]
    """[folds][symbols]."""
    curve: AccountCurve
    """The sum of all symbols over all folds."""


@dataclass
class BacktestReport:
    """Backtest of one or several symbols, out of sample."""

    symbols: Sequence[PriceSeries]
    weights: Sequence[float]
    """Fraction of the capital for each symbol, at the start of the first fold."""
    costs: Sequence[Costs]
    """Costs of each symbol."""
    folds: Sequence[Fold]
    seeds: Sequence[SeedResult]
    agent: AccountCurve
    """The sum of all seeds: each gets the same fraction of the capital."""
    baselines: dict[str, AccountCurve]
    """Curves over all folds, by name."""
    random: np.ndarray
    """[R, T] changes of log equity of random strategies with the agent's turnover."""
    trials: int
    """Number of strategies tried, for the deflated Sharpe ratio."""
    description: str = ""
    """How the agents were trained."""
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " + ".join(bars.name for bars in self.symbols)

    @property
    def time(self) -> np.ndarray:
        """[T] time of each change of equity."""
        return self.agent.time

    @cached_property
    def dates(self) -> tuple[str, str]:
        """First and last date of the test."""
        return format_time(float(self.time[0])), format_time(float(self.time[-1]))

    @cached_property
    def bars_per_year(self) -> float:
        """Bars per year: of the file, or of the bars of all symbols together."""
        if len(self.symbols) == 1:
            return self.symbols[0].bars_per_year
        return float((len(self.time) - 1) / (self.time[-1] - self.time[0]) * SECONDS_PER_YEAR)

    @cached_property
    def measures(self) -> dict[str, Measures]:
        """Metrics of the agent and of the baselines, by name."""
        curves = {AGENT: self.agent} | self.baselines
        return {name: self.measure(curve.changes, curve.counts) for name, curve in curves.items()}

    @cached_property
    def seed_measures(self) -> list[Measures]:
        return [self.measure(seed.curve.changes, seed.curve.counts) for seed in self.seeds]

    def measure(self, changes: np.ndarray, counts: Counts, bars: slice = slice(None)) -> Measures:
        """Compute metrics of changes that belong to a slice of the traded bars."""
        return measure(changes, self.baselines[HOLD].changes[bars], self.bars_per_year, counts)

    @cached_property
    def fold_slices(self) -> list[slice]:
        """The traded bars of each fold."""
        # Equity is marked two bars after a decision.
        firsts = [min(bars.time[fold.test_bars(bars).start + 2] for bars in self.symbols) for fold in self.folds]
        edges = [*np.searchsorted(self.time, firsts).tolist(), len(self.time)]
        return [slice(start, stop) for start, stop in pairwise(edges)]

    @cached_property
    def fold_measures(self) -> list[dict[str, Measures]]:
        """Metrics of the agent and of buy and hold in each fold."""
        measures = []
        for number, bars in enumerate(self.fold_slices):
            accounts = [account for seed in self.seeds for account in seed.accounts[number]]
            weights = [weight / len(self.seeds) for _ in self.seeds for weight in self.weights]
            counts = combined_counts(accounts, weights, bars.stop - bars.start)
            agent = self.measure(self.agent.changes[bars], counts, bars)
            measures.append({AGENT: agent, HOLD: self.measure(self.baselines[HOLD].changes[bars], Counts(), bars)})
        return measures

    def trades(self) -> list[tuple[int, int, str, Trade]]:
        """Return seed, fold, symbol and each closed trade."""
        return [
            (seed.seed, number, bars.name, trade)
            for seed in self.seeds
            for number, accounts in enumerate(seed.accounts, 1)
            for bars, account in zip(self.symbols, accounts, strict=True)
            for trade in account.trades
        ]

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Bootstrap intervals of the agent: Sharpe ratio, growth, and growth above buy and hold."""
        changes, hold = self.agent.changes, self.baselines[HOLD].changes
        return {
            "Sharpe": sharpe_interval(np.expm1(changes), self.bars_per_year),
            "growth a year": growth_interval(changes, self.bars_per_year),
            "growth a year relative to buy and hold": growth_interval(changes - hold, self.bars_per_year),
        }

    @cached_property
    def deflated_sharpe(self) -> float:
        """Probability that the agent has skill, given the number of trials."""
        returns = [np.expm1(seed.curve.changes) for seed in self.seeds]
        sharpes = np.array([values.mean() / values.std() if values.std() > 0 else 0.0 for values in returns])
        return deflated_sharpe(np.expm1(self.agent.changes), self.trials, sharpes)

    @property
    def random_rank(self) -> float:
        """Fraction of the random strategies with the same turnover that the agent beats."""
        return float((self.random.sum(axis=1) < self.agent.changes.sum()).mean())

    def warnings(self) -> list[str]:
        """Return what a reader must know before the figures."""
        agent, found = self.measures[AGENT], []
        if possible_leak(agent):
            found.append(f"possible leak: a Sharpe ratio of {agent.sharpe:.1f} over a year or more.")
        if self.deflated_sharpe < CONFIDENCE:
            found.append(
                f"not significant: the deflated Sharpe ratio is {self.deflated_sharpe:.2f} with {self.trials} "
                f"{'trial' if self.trials == 1 else 'trials'}, below {CONFIDENCE}. Luck can explain the result."
            )
        return found
