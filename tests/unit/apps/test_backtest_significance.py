"""Significance of backtests: bootstrap intervals, and the deflated Sharpe ratio."""

import math

import numpy as np
import pytest
from scipy import stats

from helpers.price_files import normal_returns, random_walk_bars
from lockstep.apps.backtest import significance
from lockstep.apps.backtest.baselines import random_targets
from lockstep.apps.backtest.significance import (
    bootstrap_interval,
    deflated_sharpe,
    expected_max_sharpe,
    growth_interval,
    probabilistic_sharpe,
    sharpe_interval,
    stationary_indices,
)
from lockstep.rng import RandomStream

# ------------------------------------------------------------------------------------------------------------ bootstrap


def test_stationary_indices_form_blocks_of_given_mean_length():
    indices = stationary_indices(1000, 200, 10.0, RandomStream(0, "test").generator(0))
    assert indices.shape == (200, 1000)
    assert (indices >= 0).all()
    assert (indices < 1000).all()
    starts = (np.diff(indices, axis=1) % 1000 != 1).sum() + 200
    assert indices.size / starts == pytest.approx(10.0, rel=0.05)
    assert np.bincount(indices.ravel(), minlength=1000).std() < 0.2 * 200  # every bar is drawn about equally often


def test_stationary_indices_of_block_length_one_are_independent_draws():
    indices = stationary_indices(50, 2000, 1.0, RandomStream(0, "test").generator(0))
    follows = (np.diff(indices, axis=1) % 50 == 1).mean()
    assert follows == pytest.approx(1 / 50, rel=0.1)


def test_bootstrap_interval_of_mean_matches_normal_theory():
    returns = normal_returns(0, 2000)
    low, high = bootstrap_interval(returns, lambda sampled: sampled.mean(axis=1), samples=4000, mean_block=1.0)
    error = 1.96 * returns.std() / math.sqrt(2000)
    assert (low, high) == pytest.approx((returns.mean() - error, returns.mean() + error), abs=0.1 * error)


def test_bootstrap_interval_is_wider_for_correlated_returns_in_blocks():
    noise = normal_returns(0, 3000)
    correlated = np.convolve(noise, np.ones(20) / 20, mode="valid")
    widths = []
    for block in (1.0, 60.0):
        low, high = bootstrap_interval(correlated, lambda sampled: sampled.mean(axis=1), mean_block=block)
        widths.append(high - low)
    # The standard error of the mean is about sqrt(20) times that of independent draws.
    assert 2.5 < widths[1] / widths[0] < 5.5


def test_sharpe_and_growth_intervals_contain_estimate_and_repeat():
    returns = normal_returns(0, 1000, mean=0.0005)
    interval = sharpe_interval(returns, 252)
    assert interval.low < returns.mean() / returns.std() * math.sqrt(252) < interval.high
    assert interval == sharpe_interval(returns, 252)
    changes = np.log1p(returns)
    low, high = growth_interval(changes, 252)
    assert low < math.expm1(252 * changes.mean()) < high
    assert sharpe_interval(np.zeros(100), 252) == (0.0, 0.0)


def test_bootstrap_interval_does_not_depend_on_chunks(monkeypatch):
    returns = normal_returns(0, 500)
    monkeypatch.setattr(significance, "MAX_DRAWS", 10_000)
    low, high = sharpe_interval(returns, 252)
    monkeypatch.setattr(significance, "MAX_DRAWS", 4_000_000)
    assert (low, high) == pytest.approx(sharpe_interval(returns, 252), abs=0.35)


# ------------------------------------------------------------------------------------------------------ deflated Sharpe


def test_probabilistic_sharpe_matches_formula_with_scipy_moments():
    returns = normal_returns(0, 400, mean=0.0006) ** 3 * 1e4 + 0.0004
    sharpe = returns.mean() / returns.std()
    skew, kurtosis = stats.skew(returns), stats.kurtosis(returns, fisher=False)
    z = sharpe * math.sqrt(399) / math.sqrt(1 - skew * sharpe + (kurtosis - 1) / 4 * sharpe**2)
    assert probabilistic_sharpe(returns) == pytest.approx(stats.norm.cdf(z))
    assert probabilistic_sharpe(returns, benchmark=sharpe) == pytest.approx(0.5)
    assert probabilistic_sharpe(np.zeros(10)) == 0.0


def test_expected_max_sharpe_matches_simulated_maximum():
    draws = RandomStream(0, "maximum").normal(0, 20_000, 50).numpy()
    assert expected_max_sharpe(1.0, 50) == pytest.approx(draws.max(axis=1).mean(), rel=0.02)
    assert expected_max_sharpe(0.04, 50) == pytest.approx(0.2 * expected_max_sharpe(1.0, 50))
    assert expected_max_sharpe(1.0, 1) == 0.0


def test_deflated_sharpe_flags_best_of_fifty_random_strategies():
    # Fifty random strategies on a random walk, three years of days: the best looks significant until it is deflated.
    flagged, looked_good = 0, 0
    for seed in range(20):
        moves = np.diff(np.log(random_walk_bars(seed, 757)[:, 3]))
        targets = random_targets(756, 1, 200.0, RandomStream(seed, "targets"), 50)
        returns = targets * np.expm1(moves)
        sharpes = returns.mean(axis=1) / returns.std(axis=1)
        best = returns[sharpes.argmax()]
        looked_good += probabilistic_sharpe(best) > 0.95
        flagged += deflated_sharpe(best, 50, sharpes) < 0.95
    assert looked_good >= 15
    assert flagged >= 19


def test_deflated_sharpe_keeps_strategy_with_skill():
    returns = normal_returns(0, 756, mean=0.003)  # a Sharpe ratio of about 4.8
    assert deflated_sharpe(returns, 50) > 0.99


def test_deflated_sharpe_uses_variance_of_skill_free_trials_at_least():
    returns = normal_returns(0, 756, mean=0.001)
    equal = np.full(5, returns.mean() / returns.std())
    assert deflated_sharpe(returns, 5, equal) == deflated_sharpe(returns, 5)
    assert deflated_sharpe(returns, 5, np.array([0.2, -0.2, 0.1])) < deflated_sharpe(returns, 5)
    assert deflated_sharpe(returns, 1) == probabilistic_sharpe(returns)
