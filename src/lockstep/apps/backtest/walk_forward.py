"""Walk-forward backtest: train a new agent for each fold on the bars before it, join the folds into one curve.

Shapes: T traded bars.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.apps.backtest.metrics import Measures, measure
from lockstep.config import ConfigError, Recipe, apply_overrides
from lockstep.inference import LoadedPolicy, load
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict
from lockstep.pytree import Tree
from lockstep.tasks.trading.env import Trading, TradingConfig
from lockstep.tasks.trading.price_data import CLOSE, PriceSeries, read_bars
from lockstep.training_loop import train

SLOW, FAST = 100, 20
"""Window sizes in bars of the SMA crossover baseline."""
VALIDATION_FRACTION = 0.2
"""Fraction of the bars before a fold, at their end, that selects the best checkpoint."""

Strategy = Callable[[int, Any], int]
"""Strategy: map the index of a bar and the observation at its close to an action."""


COUNTS = ("turnover", "exposed", "trades", "wins", "fees")


class Fold(NamedTuple):
    """Range of test bars from `first` to before `last`. The agent trains on earlier bars, less an embargo."""

    first: int
    last: int


@dataclass
class EquityCurve:
    """Result of one strategy."""

    changes: np.ndarray
    """[T] changes of log equity per bar."""
    positions: np.ndarray
    """[T] position as a fraction of equity at the close of each bar."""
    counts: np.ndarray
    """[5] values named by COUNTS."""

    def measures(self, bars_per_year: float) -> Measures:
        return measure(self.changes, bars_per_year, *self.counts.tolist())


@dataclass
class BacktestReport:
    """Walk-forward backtest of one symbol."""

    bars: PriceSeries
    folds: list[Fold]
    time: np.ndarray
    """[T] timestamp of each change of equity."""
    curves: dict[str, EquityCurve]
    """Curves of the agent and of the baselines, by name."""


def folds_of(bars: int, count: int, train_fraction: float) -> list[Fold]:
    """Split the bars after `train_fraction` of them into folds. The last bars are reserved to fill the last order."""
    edges = np.linspace(round(train_fraction * bars), bars - 3, count + 1).round().astype(int).tolist()
    return [Fold(first, last) for first, last in pairwise(edges)]


def walk_forward(recipe: Recipe, directory: Path, count: int, train_fraction: float) -> BacktestReport:
    """Train and test on each fold. The run directories are kept in `directory`."""
    task: TradingConfig = recipe.task
    if len(task.data) != 1:
        raise ConfigError(f"a backtest needs one symbol, but task.data has {len(task.data)}.", "Use --data FILE.")
    bars = read_bars(task.data[0], task.columns)
    folds = folds_of(len(bars.time), count, train_fraction)
    parts = []
    for number, fold in enumerate(folds, 1):
        start = fold.first / len(bars.time)
        parts_of_file = {"task.data_range": (0.0, (1 - VALIDATION_FRACTION) * start), "task.test_start": start}
        overrides = {"run.runs_dir": str(directory), "run.name": f"fold-{number}", "run.record_video": False}
        fold_recipe = apply_overrides(recipe, parts_of_file | overrides)
        policy = load(train(fold_recipe).path)
        parts.append(play(task, bars, fold, _policy_strategy(policy), _build(fold_recipe.task).shared_state()))
    all_folds, flat, long = Fold(folds[0].first, folds[-1].last), task.position_levels, 2 * task.position_levels
    rising = sma(bars.prices[:, CLOSE])
    baselines: dict[str, Strategy] = {
        "buy and hold": lambda *_: long,
        f"SMA {FAST}/{SLOW}": lambda bar, _: long if rising[bar] else flat,
        "flat": lambda *_: flat,
    }
    scale = _build(task).shared_state()  # the baselines ignore observations
    curves = {"agent": stitch(parts)}
    curves |= {name: play(task, bars, all_folds, strategy, scale) for name, strategy in baselines.items()}
    return BacktestReport(bars, folds, bars.time[all_folds.first + 2 : all_folds.last + 2], curves)


def stitch(parts: list[EquityCurve]) -> EquityCurve:
    """Concatenate consecutive curves."""
    return EquityCurve(
        changes=np.concatenate([part.changes for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        counts=np.sum([part.counts for part in parts], axis=0),
    )


def _policy_strategy(policy: LoadedPolicy) -> Strategy:
    return lambda _, obs: int(policy.act(obs)[0])


def play(task: TradingConfig, bars: PriceSeries, fold: Fold, strategy: Strategy, scale: StateDict) -> EquityCurve:
    """Trade a fold. The last order closes the position, so that folds can be concatenated."""
    length, levels = fold.last - fold.first, task.position_levels
    span = (fold.first / len(bars.time), min(1.0, (fold.last + 3) / len(bars.time)))
    part = {"data_range": span, "test_start": 0.0, "embargo": 0, "simulated_fraction": 0.0}
    env = _build(task, **part, episode_length=length, start_at_first_bar=True)
    env.load_shared_state(scale)
    obs: Tree = env.observations()
    changes, positions = np.zeros(length), np.zeros(length)
    for index in range(length):
        action = strategy(fold.first + index, obs) if index < length - 1 else levels
        step = env.step(torch.tensor([action]))
        changes[index], positions[index], obs = float(step.reward[0]), action / levels - 1.0, step.obs
        if step.terminated[0]:
            break  # equity is lost: later changes stay 0
    counts = {name: float(values[0]) for name, values in step.episode_info.items()}
    counts["exposed"] = counts["exposure"] * (index + 1)
    return EquityCurve(changes, positions, np.array([counts[name] for name in COUNTS]))


def _build(config: TradingConfig, **changes: Any) -> Trading:
    return Trading(replace(config, num_envs=1, **changes), Lanes(1, range(1), 0), torch.device("cpu"))


def sma(closes: np.ndarray) -> np.ndarray:
    """Return where the fast mean of closes is above the slow one, [bars]. False before SLOW bars are available."""
    sums = np.concatenate([[0.0], np.cumsum(closes)])
    above = np.zeros(len(closes), bool)
    ends = np.arange(SLOW, len(closes) + 1)
    fast, slow = ((sums[ends] - sums[ends - span]) / span for span in (FAST, SLOW))
    above[SLOW - 1 :] = fast > slow
    return above
