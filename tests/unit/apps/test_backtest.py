"""Backtest: hand-calculated measures, consecutive folds, and the written report."""

import math

import numpy as np
import pytest
import torch

from lockstep.apps.backtest.metrics import Measures, drawdowns, measure, possible_leak
from lockstep.apps.backtest.walk_forward import EquityCurve, Fold, folds_of, play, sma, stitch
from lockstep.cli import main
from lockstep.lanes import Lanes
from lockstep.rng import RandomStream
from lockstep.tasks.trading.env import TradingConfig
from lockstep.tasks.trading.price_data import OPEN, read_bars

FLAT, LONG = 1, 2


def of(returns, a_year=4.0, **counts):
    counts = {"turnover": 0.0, "exposed": 0.0, "trades": 0.0, "wins": 0.0, "fees": 0.0} | counts
    return measure(np.log1p(np.array(returns)), a_year, **counts)


# ------------------------------------------------------------------------------------------------------------- measures


def test_measure_sharpe_and_sortino_match_hand_calculation():
    found = of([0.1, -0.1, 0.2, 0.0])
    # The mean is 0.05 and the variance 0.05 / 4 = 0.0125. A year has four bars.
    assert found.sharpe == pytest.approx(0.05 / math.sqrt(0.0125) * 2)
    # The only loss is 0.1, so the mean squared loss is 0.01 / 4.
    assert found.sortino == pytest.approx(0.05 / 0.05 * 2)
    assert found.total == pytest.approx(1.1 * 0.9 * 1.2 - 1)
    assert found.years == 1.0


def test_drawdown_is_measured_from_previous_high():
    # 1 -> 1.5 -> 0.75 -> 1.5 -> 3 -> 2: drawdowns of one half, then one third.
    changes = np.log([1.5, 0.5, 2.0, 2.0, 2 / 3])
    assert drawdowns(changes) == pytest.approx([0, 0.5, 0, 0, 1 / 3])
    assert of(np.expm1(changes)).drawdown == pytest.approx(0.5)
    assert of([-0.2, 0.1]).drawdown == pytest.approx(0.2)  # the start counts as a high


def test_measure_converts_counts_to_rates():
    found = of([0.0] * 8, turnover=6.0, exposed=2.0, trades=3.0, wins=2.0, fees=0.01)
    assert found[4:] == (3.0, 0.25, 2 / 3, 3, 0.01, 2.0)
    assert math.isnan(of([0.0]).win_rate)
    assert found.sharpe == found.sortino == 0.0


def test_possible_leak_flags_high_sharpe_over_a_year():
    good = Measures(1.0, 3.1, 5.0, 0.1, 1.0, 1.0, 0.5, 2, 0.1, 1.0)
    assert possible_leak(good)
    assert not possible_leak(good._replace(sharpe=2.9))
    assert not possible_leak(good._replace(years=0.9))


# ---------------------------------------------------------------------------------------------------------------- folds


def write(path, bars=400):
    moves = RandomStream(3, "prices").normal(0, bars, 2).numpy().astype(float) * 0.01
    close = 100 * np.exp(np.cumsum(moves[:, 0]))
    rows = [f"{86400 * day},{c * 1.001},{c * 1.01},{c * 0.99},{c}" for day, c in enumerate(close)]
    path.write_text("unix,open,high,low,close\n" + "\n".join(rows))
    return str(path)


def test_folds_of_are_consecutive_to_the_end():
    folds = folds_of(1000, 3, 0.4)
    assert folds[0].first == 400
    assert [fold.last for fold in folds[:-1]] == [fold.first for fold in folds[1:]]
    assert folds[-1].last == 997


def test_stitched_folds_match_one_fold_except_closing_orders(tmp_path):
    task = TradingConfig(data=(write(tmp_path / "a.csv"),), fee_rate=0.0)
    bars, scale = read_bars(task.data[0], {}), built(task).shared_state()
    whole = play(task, bars, Fold(200, 397), lambda *_: LONG, scale)
    opens = np.log(bars.prices[201:398, OPEN])
    assert whole.changes[:-1] == pytest.approx(np.diff(opens), abs=1e-6)  # filled at the open after the first decision
    assert whole.changes[-1] == 0.0
    parts = stitch([play(task, bars, fold, lambda *_: LONG, scale) for fold in (Fold(200, 300), Fold(300, 397))])
    assert np.flatnonzero(parts.changes != whole.changes).tolist() == [99]  # the closing order of the first fold
    assert parts.counts[1:3] == pytest.approx([195, 2])  # bars exposed, trades
    assert len(parts.changes) == len(parts.positions) == 197


def built(task):
    config = TradingConfig(data=task.data, num_envs=1)
    return config.build(Lanes(1, range(1), 0), torch.device("cpu"))


def test_sma_baseline_uses_only_past_closes():
    closes = np.concatenate([np.full(150, 100.0), np.full(50, 110.0)])
    above = sma(closes)
    assert not above[:150].any()
    assert above[150:].all()
    changed = closes.copy()
    changed[170:] = 1.0
    assert (sma(changed)[:170] == above[:170]).all()


def test_equity_curve_measures_use_its_counts():
    curve = EquityCurve(np.zeros(2), np.zeros(2), np.array([2.0, 1.0, 4.0, 3.0, 0.5]))
    assert curve.measures(2.0)[4:] == (2.0, 0.5, 0.75, 4, 0.5, 1.0)


# --------------------------------------------------------------------------------------------------------------- report


def test_backtest_writes_run_per_fold_plot_and_page(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    words = ["trading-lstm", "--smoke", "--data", write(tmp_path / "a.csv"), "--out", str(out), "--folds", "2"]
    assert main(["backtest", *words, "run.total_samples=512", "run.eval_every=none", "task.embargo=5"]) == 0
    told = capsys.readouterr().out
    for word in ("agent", "buy and hold", "SMA 20/100", "flat", "Sharpe", "win rate", "365 bars a year"):
        assert word in told
    assert {path.name for path in out.iterdir()} == {"fold-1", "fold-2", "backtest.png", "backtest.html"}
    assert (out / "backtest.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "backtest.html").read_text()
    assert "data:image/png;base64," in page
    assert "max drawdown" in page


def test_backtest_recipe_without_trading_task_is_rejected(capsys):
    assert main(["backtest", "gym-ppo"]) == 2
    assert "gym-ppo does not have the trading task" in capsys.readouterr().err
