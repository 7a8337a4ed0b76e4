"""Walk forward: a fresh agent for each fold, trained on the bars before it; the folds are stitched into one curve.

Shapes: T bars that were traded.
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
from lockstep.train import train

SLOW, FAST = 100, 20
"""Bars of the two means that the SMA baseline compares."""

Choose = Callable[[int, Any], int]
"""From the number of a bar, and what an account sees at its close, to an action."""


COUNTS = ("turnover", "exposed", "trades", "wins", "fees")


class Fold(NamedTuple):
    """Train on all bars before `first` (but for an embargo), test from there to before `last`."""

    first: int
    last: int


@dataclass
class EquityCurve:
    """What one way to trade came to."""

    changes: np.ndarray
    """[T] of log equity, bar after bar."""
    held: np.ndarray
    """[T] part of equity in the position, at each bar's close."""
    counts: np.ndarray
    """[5] what COUNTS names."""

    def measures(self, a_year: float) -> Measures:
        turnover, exposed, trades, wins, fees = self.counts.tolist()
        return measure(self.changes, a_year, turnover, exposed, trades, wins, fees)


@dataclass
class BacktestReport:
    """A walk forward over one symbol."""

    bars: PriceSeries
    folds: list[Fold]
    time: np.ndarray
    """[T] when each change of equity was complete."""
    curves: dict[str, EquityCurve]
    """The agent, and whom it is compared with."""


def folds_of(bars: int, count: int, before: float) -> list[Fold]:
    """Cut what follows the part `before` into folds; at the end, bars are left to fill and mark the last order."""
    edges = np.linspace(round(before * bars), bars - 3, count + 1).round().astype(int).tolist()
    return [Fold(first, last) for first, last in pairwise(edges)]


def walk_forward(recipe: Recipe, directory: Path, count: int, before: float) -> BacktestReport:
    """Train and test fold after fold; runs are left in the directory."""
    task: TradingConfig = recipe.task
    if len(task.data) != 1:
        raise ConfigError(f"a walk forward is over one symbol, and data names {len(task.data)}.", "Give --data FILE.")
    bars = read_bars(task.data[0], task.columns)
    folds = folds_of(len(bars.time), count, before)
    parts = []
    for number, fold in enumerate(folds, 1):
        part = (0.0, fold.first / len(bars.time))
        place = {"run.runs_dir": str(directory), "run.name": f"fold-{number}", "run.record_video": False}
        learned = apply_overrides(recipe, {"task.data_range": part} | place)
        policy = load(train(learned).path)
        parts.append(play(task, bars, fold, _follow(policy), _build(learned.task).shared_state()))
    whole, flat, long = Fold(folds[0].first, folds[-1].last), task.position_levels, 2 * task.position_levels
    rising = sma(bars.prices[:, CLOSE])
    others: dict[str, Choose] = {
        "buy and hold": lambda *_: long,
        f"SMA {FAST}/{SLOW}": lambda bar, _: long if rising[bar] else flat,
        "flat": lambda *_: flat,
    }
    scale = _build(task).shared_state()  # none of them looks
    curves = {"agent": stitch(parts)} | {name: play(task, bars, whole, way, scale) for name, way in others.items()}
    return BacktestReport(bars, folds, bars.time[whole.first + 2 : whole.last + 2], curves)


def stitch(parts: list[EquityCurve]) -> EquityCurve:
    """One curve of several that follow each other."""
    changes, held = (np.concatenate([getattr(part, name) for part in parts]) for name in ("changes", "held"))
    return EquityCurve(changes, held, np.sum([part.counts for part in parts], axis=0))


def _follow(policy: LoadedPolicy) -> Choose:
    return lambda _, obs: int(policy.act(obs)[0])


def play(task: TradingConfig, bars: PriceSeries, fold: Fold, choose: Choose, scale: StateDict) -> EquityCurve:
    """Trade a fold from its first bar to its last; the last order is to be flat, so that one can follow another."""
    length, sizes = fold.last - fold.first, task.position_levels
    part = (fold.first / len(bars.time), min(1.0, (fold.last + 3) / len(bars.time)))
    env = _build(
        replace(
            task, data_range=part, embargo=0, episode_length=length, start_at_first_bar=True, simulated_fraction=0.0
        )
    )
    env.load_shared_state(scale)
    obs: Tree = env.observations()
    changes, held = np.zeros(length), np.zeros(length)
    for place in range(length):
        action = choose(fold.first + place, obs) if place < length - 1 else sizes
        step = env.step(torch.tensor([action]))
        changes[place], held[place], obs = float(step.reward[0]), action / sizes - 1.0, step.obs
        if step.terminated[0]:
            break  # all is lost, and stays so
    counts = {name: float(values[0]) for name, values in step.episode_info.items()}
    counts["exposed"] = counts["exposure"] * (place + 1)
    return EquityCurve(changes, held, np.array([counts[name] for name in COUNTS]))


def _build(config: TradingConfig) -> Trading:
    return replace(config, num_envs=1).build(Lanes(1, range(1), 0), torch.device("cpu"))


def sma(closes: np.ndarray) -> np.ndarray:
    """Whether the mean of the last few closes is above that of more of them, [bars]; false where the past is short."""
    sums = np.concatenate([[0.0], np.cumsum(closes)])
    above = np.zeros(len(closes), bool)
    places = np.arange(SLOW, len(closes) + 1)
    fast, slow = ((sums[places] - sums[places - span]) / span for span in (FAST, SLOW))
    above[SLOW - 1 :] = fast > slow
    return above
