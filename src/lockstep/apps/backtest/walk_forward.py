"""Walk-forward backtest: train new agents for each fold on the bars before it, join the folds into one curve.

Shapes: T traded bars.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lockstep.apps.backtest.baselines import RANDOM_STRATEGIES, baseline_targets, random_targets
from lockstep.apps.backtest.folds import Fold, Window, split_into_folds
from lockstep.apps.backtest.replay import AccountCurve, combine, join, replay
from lockstep.apps.backtest.results import BacktestReport, SeedResult
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import find_best, lineage
from lockstep.config import ConfigError, Recipe, apply_overrides, as_dict, flat_settings
from lockstep.inference import LoadedPolicy, load, load_recipe
from lockstep.io.jsonl import CHECKPOINTS, CONFIG, read_status
from lockstep.io.safe_read import read_json
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict
from lockstep.pytree import Tree
from lockstep.rng import RandomStream
from lockstep.tasks.trading.config import find_part, symbol_costs
from lockstep.tasks.trading.env import Trading, TradingConfig
from lockstep.tasks.trading.price_data import PriceSeries, read_bars

SETTINGS = "settings.json"
"""File with the settings of a backtest, which a repeated command compares with its own."""

Train = Callable[[Recipe, bool], bool]
"""Trains a recipe, or resumes its run. Returns whether the run has finished; False after a stop request."""


@dataclass(frozen=True)
class WalkForward:
    """Settings of a walk-forward backtest."""

    folds: int = 4
    train_fraction: float = 0.5
    window: Window = "expanding"
    seeds: int = 1
    weights: tuple[float, ...] = ()
    """Fraction of the capital for each symbol. Empty: equal fractions."""
    trials: int | None = None
    """Number of strategies tried, this one included. None: the number of seeds."""


def walk_forward(recipe: Recipe, directory: Path, settings: WalkForward, train: Train) -> BacktestReport | None:
    """Train and test on each fold with each seed. The run directories are kept in `directory`.

    A repeated call with the same settings resumes a backtest: finished runs are used again, and others are resumed.

    Returns:
        The report; None if a stop request ended a run early.
    """
    task: TradingConfig = recipe.task
    symbols = read_symbols(task)
    weights = normalized_weights(settings.weights, symbols)
    folds = split_into_folds(symbols, settings.folds, settings.train_fraction, settings.window)
    _claim(directory, recipe, settings)
    seeds = []
    for seed in range(recipe.run.seed, recipe.run.seed + settings.seeds):
        accounts = []
        for number, fold in enumerate(folds, 1):
            run = directory / f"seed-{seed}" / f"fold-{number}"
            location = {"run.runs_dir": str(run.parent), "run.name": run.name, "run.seed": seed}
            changes = location | {"run.record_video": False, "task.split_dates": fold.split_dates()}
            if not _train_run(apply_overrides(recipe, changes), run, train):
                return None
            accounts.append(_trade_symbols(run, task, symbols, fold))
        seeds.append(_seed_result(seed, accounts, weights))
    trained = f"{settings.window} window, trained before each fold with an embargo of {task.embargo_bars} bars"
    return _report(task, symbols, weights, folds, seeds, settings.trials or len(seeds), trained)


def backtest_run(run: Path, data: Sequence[str], weights: Sequence[float], trials: int) -> BacktestReport:
    """Trade the test part of a run's files, or of other files, with its best policy. Nothing is trained."""
    recipe = load_recipe(run)
    task: TradingConfig = recipe.task if not data else replace(recipe.task, data=tuple(data))
    symbols = read_symbols(task)
    parts = [find_part(task, bars, "test") for bars in symbols]
    for bars, part in zip(symbols, parts, strict=True):
        if len(part) < 6:
            raise ConfigError(
                f"the test part of {bars.name} has {len(part)} bars.", "Train with a smaller --task.test-start."
            )
    train_start = min(bars.time[find_part(task, bars, "train").start] for bars in symbols)
    start = max(bars.time[part.start] for bars, part in zip(symbols, parts, strict=True))
    stop = min(bars.time[part.stop - 1] for bars, part in zip(symbols, parts, strict=True))
    fold = Fold(float(train_start), float(start), float(stop))
    accounts = [_trade_symbols(run, task, symbols, fold)]
    shares = normalized_weights(weights, symbols)
    seeds = [_seed_result(recipe.run.seed, accounts, shares)]
    return _report(task, symbols, shares, [fold], seeds, trials, f"test part of {run}, nothing trained")


def read_symbols(task: TradingConfig) -> list[PriceSeries]:
    """Read the price files of a task."""
    if not task.data:
        raise ConfigError("a backtest needs price files, but task.data is empty.", "Use --data FILE.")
    return [read_bars(path, task.columns, task.features) for path in task.data]


def normalized_weights(weights: Sequence[float], symbols: Sequence[PriceSeries]) -> list[float]:
    """Return the fraction of the capital for each symbol."""
    values = list(weights) or [1.0] * len(symbols)
    if len(values) != len(symbols) or min(values) < 0 or sum(values) <= 0:
        raise ConfigError(
            f"--weights has {' '.join(map(str, values))}, but there are {len(symbols)} symbols.",
            "Give one weight of 0 or more for each file.",
        )
    return [value / sum(values) for value in values]


# -- training and resuming -------------------------------------------------------------------------------------------


def _claim(directory: Path, recipe: Recipe, settings: WalkForward) -> None:
    """Write the settings of a new backtest, or compare them with those of the one to resume.

    The number of seeds and trials may change: more seeds continue a backtest.
    """
    digests = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in recipe.task.data}
    ignored = ("run.lanes", "run.runs_dir", "run.name", "run.device")
    chosen = {key: value for key, value in flat_settings(as_dict(recipe)).items() if key not in ignored}
    folds = {"folds": settings.folds, "train_fraction": settings.train_fraction, "window": settings.window}
    wanted = json.loads(json.dumps({"recipe": recipe.name, "files": digests, **folds, **chosen}))
    file = directory / SETTINGS
    if not file.exists():
        if directory.exists() and any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty and contains no backtest.", "Choose another --out.")
        directory.mkdir(parents=True, exist_ok=True)
        form.replace_text(file, json.dumps(wanted, indent=1) + "\n")
        return
    existing = read_json(file)
    existing = existing if isinstance(existing, dict) else {}
    changed = [key for key in sorted(wanted.keys() | existing.keys()) if wanted.get(key) != existing.get(key)]
    if changed:
        raise ConfigError(
            f"{directory} contains a backtest with another {changed[0]}: {str(existing.get(changed[0]))[:200]}.",
            "Repeat its command to resume it, or choose another --out.",
        )


def _train_run(recipe: Recipe, run: Path, train: Train) -> bool:
    """Train the run of a fold, resume it, or do nothing if it has finished. Return whether it has."""
    if read_status(run).get("state") == "finished":
        return True
    if (run / CONFIG).exists() and lineage(run / CHECKPOINTS):
        return train(load_recipe(run), True)
    if run.exists():  # it was killed before its first checkpoint
        shutil.rmtree(run)
    return train(recipe, False)


# -- trading ---------------------------------------------------------------------------------------------------------


def _trade_symbols(run: Path, task: TradingConfig, symbols: Sequence[PriceSeries], fold: Fold) -> list[AccountCurve]:
    """Trade a fold with the best policy of a run, one account per symbol."""
    policy, scale = load(run), _saved_scale(run)
    accounts = []
    for path, bars in zip(task.data, symbols, strict=True):
        policy.reset()
        test_bars = fold.test_bars(bars)
        targets = policy_targets(replace(task, data=(path,)), bars, test_bars, policy, scale)
        accounts.append(replay(bars, test_bars, targets, symbol_costs(task, bars)))
    return accounts


def _saved_scale(run: Path) -> StateDict:
    """Return the scale of the indicators that the policy of a run was trained with."""
    directory = run / CHECKPOINTS
    name, _ = find_best(directory, form.verify_weights)
    with form.user_facing_errors(directory / str(name)):
        return form.strip_prefix(form.read_shared(directory / str(name)), "task")


def policy_targets(
    task: TradingConfig, bars: PriceSeries, test_bars: range, policy: LoadedPolicy, scale: StateDict
) -> np.ndarray:
    """Return the target positions [T] of a policy at the close of each test bar of one symbol."""
    length, levels, count = len(test_bars), task.position_levels, len(bars.time)
    # One episode over the test bars. The bars after the last decision only fill its order.
    part = {"data_range": (test_bars.start / count, min(1.0, (test_bars.stop + 3) / count)), "split_dates": ()}
    config = replace(task, **part, num_envs=1, test_start=0.0, embargo=0, episode_length=length)  # type: ignore[arg-type]
    config = replace(config, simulated_fraction=0.0, start_at_first_bar=True)
    env = Trading(config, Lanes(1, range(1), 0), torch.device("cpu"))
    env.load_shared_state(scale)
    obs: Tree = env.observations()
    targets = np.zeros(length)
    for index in range(length - 1):  # the last order closes the position
        action = int(policy.act(obs)[0])
        targets[index] = action / levels - 1.0
        step = env.step(torch.tensor([action]))
        obs = step.obs
        if step.terminated[0]:
            break
    return targets


def _seed_result(seed: int, accounts: list[list[AccountCurve]], weights: Sequence[float]) -> SeedResult:
    """Sum the accounts [folds][symbols] of one seed."""
    return SeedResult(seed, accounts, combine(_join_folds(accounts), weights))


def _join_folds(accounts: list[list[AccountCurve]]) -> list[AccountCurve]:
    """Join the accounts [folds][symbols] over the folds."""
    return [join(folds) for folds in zip(*accounts, strict=True)]


def _report(
    task: TradingConfig,
    symbols: Sequence[PriceSeries],
    weights: Sequence[float],
    folds: Sequence[Fold],
    seeds: Sequence[SeedResult],
    trials: int,
    description: str,
) -> BacktestReport:
    """Sum the seeds and add the baselines, which trade all folds without closing positions between them."""
    agent_accounts = [account for seed in seeds for account in _join_folds(seed.accounts)]
    agent = combine(agent_accounts, [weight / len(seeds) for _ in seeds for weight in weights])
    costs = [symbol_costs(task, bars) for bars in symbols]
    baselines: dict[str, list[AccountCurve]] = {}
    random: list[list[AccountCurve]] = [[] for _ in range(RANDOM_STRATEGIES)]
    for number, (bars, cost) in enumerate(zip(symbols, costs, strict=True)):
        test_bars = range(folds[0].test_bars(bars).start, folds[-1].test_bars(bars).stop)
        for name, targets in baseline_targets(bars, test_bars).items():
            baselines.setdefault(name, []).append(replay(bars, test_bars, targets, cost))
        # Random strategies have the mean turnover of the seeds on this symbol.
        turnover = sum(account.counts.turnover for account in agent_accounts[number :: len(symbols)]) / len(seeds)
        stream = RandomStream(0, "backtest.random", number)
        drawn = random_targets(len(test_bars), task.position_levels, turnover, stream, RANDOM_STRATEGIES)
        for accounts, targets in zip(random, drawn, strict=True):
            accounts.append(replay(bars, test_bars, targets, cost, record_trades=False))
    return BacktestReport(
        symbols=symbols,
        weights=weights,
        costs=costs,
        folds=folds,
        seeds=seeds,
        agent=agent,
        baselines={name: combine(accounts, weights) for name, accounts in baselines.items()},
        random=np.stack([combine(accounts, weights).changes for accounts in random]),
        trials=trials,
        description=description,
        notes=[note for bars in symbols for note in bars.notes],
    )
