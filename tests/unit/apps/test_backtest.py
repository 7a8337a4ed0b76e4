"""Backtest: folds without overlap, exact accounts, baselines, portfolios, resuming, and the written report."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.price_files import random_walk_bars, write_prices
from lockstep.apps.backtest.baselines import (
    AVERAGE,
    HOLD,
    MOMENTUM,
    baseline_targets,
    momentum,
    random_targets,
    sma,
)
from lockstep.apps.backtest.folds import split_into_folds
from lockstep.apps.backtest.replay import combine, join, replay
from lockstep.apps.backtest.walk_forward import normalized_weights
from lockstep.cli import main
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.rng import RandomStream
from lockstep.tasks.trading.account import Costs
from lockstep.tasks.trading.config import find_part
from lockstep.tasks.trading.env import TradingConfig
from lockstep.tasks.trading.price_data import OPEN, read_bars

FREE = Costs(0.0, 0.0, 0.0)
FILES = {"backtest.html", "backtest.png", "backtest.json", "equity.csv", "trades.csv", "settings.json"}


@pytest.fixture
def bars(tmp_path):
    return read_bars(write_prices(tmp_path / "walk.csv", random_walk_bars(3, 400)), {})


def days(count, start=0, name="symbol", seconds=86_400):
    from lockstep.tasks.trading.price_data import PriceSeries

    return PriceSeries(name, start + seconds * np.arange(count, dtype=float), np.ones((count, 4)))


# ---------------------------------------------------------------------------------------------------------------- folds


def test_folds_of_one_symbol_are_consecutive_to_the_end():
    bars = days(1000)
    tests = [fold.test_bars(bars) for fold in split_into_folds([bars], 3, 0.4)]
    assert tests[0].start == 400
    assert [test.stop for test in tests[:-1]] == [test.start for test in tests[1:]]
    assert tests[-1].stop == 997


@pytest.mark.parametrize(("window", "starts"), [("expanding", [0, 0, 0]), ("rolling", [0, 199, 398])])
def test_folds_train_on_window_before_test_with_embargo(window, starts):
    bars, folds = days(1000), split_into_folds([days(1000)], 3, 0.4, window)
    for fold, start in zip(folds, starts, strict=True):
        config = TradingConfig(split_dates=fold.split_dates())
        train, validation, test = (find_part(config, bars, split) for split in ("train", "validation", "test"))
        assert train.start == start
        assert test == fold.test_bars(bars)
        assert train.stop + 28 == validation.start
        assert validation.stop + 28 == test.start
        assert len(validation) + 28 == pytest.approx(0.2 * (test.start - start), abs=1)


def test_folds_of_several_symbols_are_of_their_common_period():
    daily, hourly = days(1000), days(9600, start=600 * 86_400, name="hourly", seconds=3600)  # 400 days
    folds = split_into_folds([daily, hourly], 2, 0.5)
    assert [fold.test_bars(daily).start for fold in folds] == [800, 900]
    assert [fold.test_bars(hourly).start for fold in folds] == [pytest.approx(24 * day, abs=24) for day in (200, 300)]
    assert folds[0].test_bars(daily).stop == folds[1].test_bars(daily).start
    for bars in (daily, hourly):  # each file has a training and a validation part of its own length
        config = TradingConfig(split_dates=folds[0].split_dates())
        train, validation, test = (find_part(config, bars, split) for split in ("train", "validation", "test"))
        assert len(validation) + 28 == pytest.approx(0.2 * test.start, abs=1)
        assert train == range(validation.start - 28)
    with pytest.raises(ConfigError, match="no period in common"):
        split_into_folds([days(10), days(10, start=1e9)], 2, 0.5)


def test_fold_with_too_few_bars_raises():
    with pytest.raises(ConfigError, match="fold 1 of 50 has"):
        split_into_folds([days(100)], 50, 0.5)


# ------------------------------------------------------------------------------------------------------------- accounts


def test_replay_equals_the_trading_environment(tmp_path, bars):
    path, costs = str(tmp_path / "walk.csv"), Costs(0.002, 0.001, 0.0005)
    task = TradingConfig(data=(path,), fee_rate=0.002, slippage=0.001, borrow_rate=0.0005, position_levels=2)
    actions = RandomStream(0, "actions").integers(0, 5, 97).tolist()
    part = {"data_range": (0.5, 1.0), "test_start": 0.0, "embargo": 0}
    config = replace(task, num_envs=1, episode_length=97, start_at_first_bar=True, **part)
    env = config.build(Lanes(1, range(1), 0), torch.device("cpu"))
    rewards = []
    for action in [*actions[:-1], 2]:  # the last order closes the position
        step = env.step(torch.tensor([action]))
        rewards.append(float(step.reward[0]))
    curve = replay(bars, range(200, 297), np.array(actions) / 2 - 1, costs)
    assert curve.changes == pytest.approx(rewards, abs=1e-6)
    info = {name: float(values[0]) for name, values in step.episode_info.items()}
    names = ("turnover", "trades", "wins", "fees")
    assert [getattr(curve.counts, name) for name in names] == pytest.approx([info[name] for name in names], rel=1e-5)
    assert len(curve.trades) == info["trades"]
    assert sum(trade.result > 0 for trade in curve.trades) == info["wins"]


def test_replay_records_trades_at_fill_prices(bars):
    targets = np.array([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    curve = replay(bars, range(100, 106), targets, FREE)
    opens, (long, short) = bars.prices[:, OPEN], curve.trades
    assert (long.side, long.entry_price, long.exit_price, long.bars) == ("long", opens[101], opens[103], 2)
    assert (long.entry_time, long.exit_time) == (86_400 * 101, 86_400 * 103)
    assert long.result == pytest.approx(opens[103] / opens[101] - 1)
    assert (short.side, short.bars) == ("short", 2)
    assert short.result == pytest.approx(1 - opens[105] / opens[103])
    assert np.exp(curve.changes.sum()) == pytest.approx((1 + long.result) * (1 + short.result))
    assert curve.time.tolist() == bars.time[102:108].tolist()


def test_replay_after_loss_of_all_equity_stays_at_zero(bars):
    prices = bars.prices.copy()
    prices[103:] *= 3.0
    curve = replay(bars._replace(prices=prices), range(100, 110), np.full(10, -1.0), FREE)
    assert curve.changes[1] == pytest.approx(np.log(1e-4))
    assert not curve.changes[2:].any()


def test_joined_folds_match_one_fold_except_closing_orders(bars):
    whole = replay(bars, range(200, 397), np.ones(197), FREE)
    opens = np.log(bars.prices[201:398, OPEN])
    assert whole.changes[:-1] == pytest.approx(np.diff(opens))  # filled at the open after the first decision
    assert whole.changes[-1] == 0.0
    parts = join([replay(bars, test, np.ones(len(test)), FREE) for test in (range(200, 300), range(300, 397))])
    assert np.flatnonzero(np.abs(parts.changes - whole.changes) > 1e-12).tolist() == [99]  # the first fold is closed
    assert (parts.counts.exposed, parts.counts.trades) == (195, 2)
    assert parts.time.tolist() == whole.time.tolist()


# ------------------------------------------------------------------------------------------------------------ baselines


@pytest.mark.parametrize("rule", [sma, momentum])
def test_baseline_uses_only_past_closes(rule):
    closes = np.concatenate([np.full(150, 100.0), np.full(50, 110.0)])
    above = rule(closes)
    assert not above[:150].any()
    assert above[150:].all()
    changed = closes.copy()
    changed[170:] = 1.0
    assert (rule(changed)[:170] == above[:170]).all()


def test_baseline_targets_are_long_or_flat(bars):
    targets = baseline_targets(bars, range(150, 390))
    assert set(targets) == {HOLD, AVERAGE, MOMENTUM}
    assert (targets[HOLD] == 1).all()
    assert {len(values) for values in targets.values()} == {240}
    assert {value for values in targets.values() for value in values} == {0.0, 1.0}


@pytest.mark.parametrize("levels", [1, 2])
def test_random_targets_have_given_turnover(levels):
    targets = random_targets(2000, levels, 120.0, RandomStream(0, "test"), 100)
    turnover = np.abs(np.diff(targets, axis=1, prepend=0.0)).sum(axis=1)
    assert turnover.mean() == pytest.approx(120, rel=0.05)
    assert set(np.unique(targets)) == set(np.arange(-levels, levels + 1) / levels)


# ------------------------------------------------------------------------------------------------------------ portfolio


def test_combine_of_equal_calendars_is_weighted_sum_of_equity(bars):
    one, two = (replay(bars, range(200, 300), np.full(100, side), FREE) for side in (1.0, -0.5))
    both = combine([one, two], [0.75, 0.25])
    wanted = 0.75 * np.exp(one.changes.cumsum()) + 0.25 * np.exp(two.changes.cumsum())
    assert np.exp(both.changes.cumsum()) == pytest.approx(wanted)
    assert both.positions[0] == pytest.approx(0.75 - 0.125)
    assert both.counts.turnover == pytest.approx(0.75 * one.counts.turnover + 0.25 * two.counts.turnover)


def test_combine_of_other_calendars_holds_last_value_between_marks(bars):
    hourly = bars._replace(time=bars.time[200] + 3600.0 * np.arange(400))
    one, two = replay(bars, range(200, 205), np.ones(5), FREE), replay(hourly, range(0, 90), np.ones(90), FREE)
    both = combine([one, two], [0.5, 0.5])
    assert (np.diff(both.time) > 0).all()
    end = 0.5 * np.exp(one.changes.sum()) + 0.5 * np.exp(two.changes.sum())
    assert np.exp(both.changes.sum()) == pytest.approx(end)


def test_normalized_weights_sum_to_one_and_reject_wrong_count():
    symbols = [days(10), days(10)]
    assert normalized_weights((), symbols) == [0.5, 0.5]
    assert normalized_weights((3, 1), symbols) == [0.75, 0.25]
    for wrong in ((1,), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="one weight of 0 or more"):
            normalized_weights(wrong, symbols)


# --------------------------------------------------------------------------------------------------------------- report


def words(tmp_path, out, *more, bars=400, files=("a.csv",)):
    for number, name in enumerate(files):
        if not (tmp_path / name).exists():
            write_prices(tmp_path / name, random_walk_bars(3 + number, bars), mood=np.sin(np.arange(bars)))
    data = [str(tmp_path / name) for name in files]
    small = [
        "task.episode_length=32",
        "task.embargo=5",
        "run.total_samples=512",
        "run.eval_every=none",
        "run.save_every=256",
    ]
    return ["backtest", "trading-lstm", "--smoke", "--data", *data, "--out", str(out), "--folds", "2", *small, *more]


def contents(out):
    return {name: (out / name).read_bytes() for name in FILES}


def test_backtest_writes_runs_tables_plot_page_and_csv(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    assert main(words(tmp_path, out, "--seeds", "2")) == 0
    told = " ".join(capsys.readouterr().out.split())
    for text in (HOLD, AVERAGE, MOMENTUM, "Sharpe", "Calmar", "beta to hold", "win rate", "365 bars a year"):
        assert text in told
    assert "a, 1970-07-22 to 1971-02-03: out of sample" in told
    assert "Deflated Sharpe ratio" in told
    assert "with 2 trials" in told
    assert {path.name for path in out.iterdir()} == FILES | {"seed-0", "seed-1"}
    assert {path.name for path in (out / "seed-1").iterdir()} == {"fold-1", "fold-2"}
    page = (out / "backtest.html").read_text()
    assert "data:image/png;base64," in page
    assert "out of sample" in page
    with open(out / "equity.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 197
    assert {row["fold"] for row in rows} == {"1", "2"}
    figures = json.loads((out / "backtest.json").read_text())
    assert float(rows[-1]["agent"]) - 1 == pytest.approx(figures["measures"]["agent"]["total"], abs=1e-9)
    mean = (float(rows[-1]["seed 0"]) + float(rows[-1]["seed 1"])) / 2
    assert float(rows[-1]["agent"]) == pytest.approx(mean)
    assert len(figures["folds"]) == 2
    totals = [fold["agent"]["total"] for fold in figures["folds"]]
    assert (1 + totals[0]) * (1 + totals[1]) - 1 == pytest.approx(figures["measures"]["agent"]["total"])
    with open(out / "trades.csv") as file:
        trades = list(csv.DictReader(file))
    assert len(trades) == figures["measures"]["agent"]["trades"]


def test_backtest_json_of_rolling_window_with_own_column_prints_figures_only(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    more = "--json", "--window", "rolling", "--task.features", "mood"
    assert main(words(tmp_path, tmp_path / "out", *more)) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [fold["train_start"][:10] for fold in figures["folds"]] == ["1970-01-01", "1970-04-09"]
    assert figures == json.loads((tmp_path / "out" / "backtest.json").read_text())
    assert figures["trials"] == 1


def test_backtest_of_two_symbols_is_a_portfolio(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    files = ("a.csv", "b.csv")
    assert main(words(tmp_path, out, "--weights", "0.7", "0.3", "--folds", "1", files=files)) == 0
    assert "70% a, 30% b" in " ".join(capsys.readouterr().out.split())
    figures = json.loads((out / "backtest.json").read_text())
    assert [symbol["weight"] for symbol in figures["symbols"]] == [0.7, 0.3]
    with open(out / "trades.csv") as file:
        assert {row["symbol"] for row in csv.DictReader(file)} <= {"a", "b"}


def test_backtest_repeated_resumes_with_other_settings_is_rejected(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    assert main(words(tmp_path, out)) == 0
    before = contents(out)
    assert main(words(tmp_path, out)) == 0  # nothing is trained again
    assert contents(out) == before
    capsys.readouterr()
    assert main(words(tmp_path, out, "--train-fraction", "0.6")) == 2
    assert "another train_fraction: 0.5" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert main(words(tmp_path, tmp_path / "other")) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.distributed
def test_backtest_killed_in_mid_fold_resumes_to_same_report(tmp_path):
    pytest.importorskip("matplotlib")
    more = ("--train-fraction", "0.6", "run.total_samples=2048", "run.save_every=256")
    assert main(words(tmp_path, tmp_path / "whole", *more)) == 0
    arguments = words(tmp_path, tmp_path / "killed", *more)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-m", "lockstep", *arguments], env=environment) as process:
        checkpoints = tmp_path / "killed" / "seed-0" / "fold-2" / "checkpoints"
        while process.poll() is None and not list(checkpoints.glob("*/manifest.json")):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "backtest.json").exists()
    assert main(arguments) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.distributed
def test_backtest_killed_before_first_checkpoint_starts_fold_again(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    assert main(words(tmp_path, out)) == 0
    before = contents(out)
    for path in (out / "seed-0" / "fold-2" / "checkpoints").iterdir():
        if path.is_dir():
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    status = out / "seed-0" / "fold-2" / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "running"}))
    assert main(words(tmp_path, out)) == 0
    assert contents(out) == before


@pytest.mark.slow
@pytest.mark.distributed
def test_backtest_on_two_processes_matches_one_with_exact_reduction(tmp_path):
    pytest.importorskip("matplotlib")
    exact = "run.reduction=exact"
    assert main(words(tmp_path, tmp_path / "one", exact, "--folds", "1")) == 0
    assert main(words(tmp_path, tmp_path / "two", exact, "--folds", "1", "--procs", "2")) == 0
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one == two


def test_backtest_of_existing_run_trades_its_test_part(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = write_prices(tmp_path / "a.csv", random_walk_bars(3, 500))
    settings = ["task.episode_length=32", "run.total_samples=512", "--run.runs-dir", str(tmp_path), "--run.name", "run"]
    assert main(["train", "trading-lstm", "--smoke", "--data", path, *settings]) == 0
    assert main(["backtest", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--trials", "7"]) == 0
    figures = json.loads((tmp_path / "out" / "backtest.json").read_text())
    assert figures["bars"] == 97
    assert figures["first"] == "1971-02-07"  # two bars after the first decision, at bar 400
    assert figures["trials"] == 7
    assert main(["backtest", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "task.lookback=3"]) == 2
    assert "cannot be set for a backtest of a run" in capsys.readouterr().err


def test_backtest_recipe_without_trading_task_is_rejected(capsys):
    assert main(["backtest", "gym-ppo"]) == 2
    assert "gym-ppo does not have the trading task" in capsys.readouterr().err


def test_backtest_without_files_is_rejected(tmp_path, capsys):
    assert main(["backtest", "trading-lstm", "--out", str(tmp_path / "out")]) == 2
    assert "--data FILE" in capsys.readouterr().err
