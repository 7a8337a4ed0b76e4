"""Controls for trading: a leaked return is learned, a random market is not traded, and real prices show no leak."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.price_files import random_walk_bars, write_prices
from lockstep.apps.backtest.metrics import possible_leak
from lockstep.apps.backtest.results import BacktestReport
from lockstep.apps.backtest.walk_forward import WalkForward, walk_forward
from lockstep.config import Recipe, apply_overrides
from lockstep.inference import LoadedPolicy, load
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict
from lockstep.registry import find_recipe
from lockstep.rng import RandomStream
from lockstep.tasks.trading.env import TradingConfig
from lockstep.training_loop import train

SHORT, FLAT, LONG = 0, 1, 2


def trained(directory: Path, samples: int, **task: object) -> tuple[LoadedPolicy, LoadedPolicy, TradingConfig]:
    """Return an agent before and after training, and its task."""
    common = {"run.runs_dir": str(directory), "run.eval_every": None, "run.device": "cpu"}
    recipe = apply_overrides(find_recipe("trading-lstm")(), {"task": task, **common})
    before = train(
        apply_overrides(recipe, {"run.total_samples": 1, "run.name": "before", "algo.learning_rate": 1e-12})
    ).path
    after = train(apply_overrides(recipe, {"run.total_samples": samples, "run.name": "after"})).path
    return load(before), load(after), recipe.task


def traded(task: TradingConfig, choose: object) -> dict[str, torch.Tensor]:
    """Run one episode on each of 64 new markets; return the summed rewards and the account statistics."""
    env = replace(task, num_envs=64).build(Lanes(1, range(1), 99), torch.device("cpu"))
    obs, total = env.observations(), torch.zeros(64, dtype=torch.float64)
    for _ in range(task.episode_length):
        step = env.step(choose(obs))
        total += step.reward
        obs = step.obs
    assert step.truncated.all()
    counts: StateDict = {name: values.clone() for name, values in step.episode_info.items()}
    return {"total": total, **counts}


def sampling(policy: LoadedPolicy):
    """Return the policy with sampled actions. Greedy actions of an untrained policy would all be equal."""
    net, count, memory = policy.policy.net, iter(range(10**6)), None

    def choose(obs):
        nonlocal memory
        memory = policy.policy.initial_state(len(obs)) if memory is None else memory
        with torch.no_grad():
            outputs, _, memory = net.step(policy.policy.normalizer(obs), memory)
        return (outputs + RandomStream(0, "draws").gumbel(next(count), *outputs.shape)).argmax(-1)

    return choose


def greedy(policy: LoadedPolicy):
    return lambda obs: torch.from_numpy(policy.act(obs))


@pytest.mark.slow
def test_trading_with_leaked_return_earns_most_of_it(tmp_path: Path) -> None:
    _, agent, task = trained(tmp_path, 200_000, market="gbm", leak_future=True, fee_rate=0.0)
    earned = traded(task, greedy(agent))["total"].sum()
    possible = traded(task, lambda obs: torch.where(obs[:, -1] > 0, LONG, SHORT))["total"].sum()
    print(f"positive control: {earned / possible:.1%} of what the sign earns")
    assert possible > 0
    assert earned >= 0.8 * possible


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trading_on_random_walk_with_fees_learns_not_to_trade(tmp_path: Path) -> None:
    untrained, agent, task = trained(tmp_path, 1_000_000, market="gbm", fee_rate=0.001)
    before, after = traded(task, sampling(untrained)), traded(task, greedy(agent))
    gross = after["growth"] + after["fees"]
    error = float(gross.std()) / math.sqrt(len(gross))
    share = float(after["turnover"].sum() / before["turnover"].sum())
    print(f"negative control: turnover {share:.2%} of the untrained; gross {gross.mean():+.4f} +- {error:.4f}")
    assert share < 0.05
    assert abs(float(gross.mean())) <= 3 * error + 1e-9


PRICES = next((place for parent in Path(__file__).parents if (place := parent / "shared/data/prices").is_dir()), None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(PRICES is None, reason="needs the real prices, which are not part of the repository")
@pytest.mark.parametrize("name", ["GOOGL-daily", "BTCUSD-hourly"])
def test_trading_on_real_prices_shows_no_leak(tmp_path: Path, name: str) -> None:
    data = {"task.data": (str(PRICES / f"{name}.csv"),), "run.total_samples": 65_536, "run.eval_every": None}
    recipe = apply_overrides(find_recipe("trading-lstm")(), data)
    report = walk_forward(recipe, tmp_path / "out", WalkForward(folds=3), train_in_process)
    assert report is not None
    print(f"{name}: {report.measures}")
    assert not possible_leak(report.measures["agent"])
    assert report.measures["buy and hold"].total > 0.5  # the price files are the expected ones


def train_in_process(recipe: Recipe, resume: bool) -> bool:
    return not train(recipe, resume=resume).preempted


def backtest_of_walk(directory: Path, seed: int, samples: int, leak: bool) -> BacktestReport:
    """Backtest an agent on a random walk without fees, on which nothing can be earned without a leak."""
    path = write_prices(directory / f"walk-{seed}.csv", random_walk_bars(seed, 1500))
    settings = {"task.leak_future": leak, "task.fee_rate": 0.0, "task.slippage": 0.0, "task.borrow_rate": 0.0}
    settings |= {"task.data": (path,), "task.episode_length": 128, "run.total_samples": samples}
    recipe = apply_overrides(find_recipe("trading-lstm")(), settings | {"run.eval_every": None, "run.device": "cpu"})
    report = walk_forward(recipe, directory / f"out-{seed}-{leak}", WalkForward(folds=1), train_in_process)
    assert report is not None
    return report


@pytest.mark.slow
def test_backtest_with_leaked_return_is_flagged(tmp_path: Path) -> None:
    report = backtest_of_walk(tmp_path, 0, 100_000, leak=True)
    print(f"leak: Sharpe {report.measures['agent'].sharpe:.2f}, deflated {report.deflated_sharpe:.3f}")
    assert possible_leak(report.measures["agent"])
    assert any("possible leak" in warning for warning in report.warnings())
    assert report.random_rank == 1.0


@pytest.mark.slow
def test_backtests_of_random_walks_earn_nothing_on_average(tmp_path: Path) -> None:
    # One walk in twenty looks significant by chance, so that the control is the mean over walks.
    reports = [backtest_of_walk(tmp_path, seed, 50_000, leak=False) for seed in range(8)]
    scores = [report.measures["agent"].sharpe * math.sqrt(report.measures["agent"].years) for report in reports]
    pooled = sum(scores) / math.sqrt(len(scores))  # standard normal if there is no leak
    deflated = [report.deflated_sharpe for report in reports]
    print(f"walks: {[round(score, 2) for score in scores]}, pooled {pooled:+.2f}, deflated Sharpe {deflated}")
    assert abs(pooled) < 3
    assert not any(possible_leak(report.measures["agent"]) for report in reports)
    assert sum(value > 0.95 for value in deflated) <= 2
