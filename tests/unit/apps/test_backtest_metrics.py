"""Backtest statistics: hand-calculated metrics."""

import math

import numpy as np
import pytest
from scipy import stats

from helpers.price_files import normal_returns
from lockstep.apps.backtest.metrics import Counts, annual_growth, beta, drawdowns, measure, possible_leak, volatility


def of(returns, a_year=4.0, hold=None, **counts):
    changes = np.log1p(np.array(returns))
    return measure(changes, changes if hold is None else np.log1p(np.array(hold)), a_year, Counts(**counts))


# -------------------------------------------------------------------------------------------------------------- metrics


def test_measure_sharpe_and_sortino_match_hand_calculation():
    found = of([0.1, -0.1, 0.2, 0.0])
    # The mean is 0.05 and the variance 0.05 / 4 = 0.0125. A year has four bars.
    assert found.sharpe == pytest.approx(0.05 / math.sqrt(0.0125) * 2)
    # The only loss is 0.1, so the mean squared loss is 0.01 / 4.
    assert found.sortino == pytest.approx(0.05 / 0.05 * 2)
    assert found.total == pytest.approx(1.1 * 0.9 * 1.2 - 1)
    assert found.years == 1.0


def test_measure_growth_volatility_and_calmar_match_hand_calculation():
    found = of([0.1, -0.1, 0.2, 0.0, 0.1, 0.1, -0.2, 0.3])  # two years
    end = 1.1 * 0.9 * 1.2 * 1.1 * 1.1 * 0.8 * 1.3
    assert found.cagr == pytest.approx(math.sqrt(end) - 1)
    assert found.volatility == pytest.approx(2 * np.std([0.1, -0.1, 0.2, 0.0, 0.1, 0.1, -0.2, 0.3]))
    assert found.calmar == pytest.approx(found.cagr / 0.2)
    assert math.isnan(of([0.1, 0.1]).calmar)  # no drawdown
    assert annual_growth(np.full(10, 100.0), 10) > 1e300  # no overflow


def test_beta_is_slope_of_regression_on_hold():
    hold, noise = normal_returns(0, 500), normal_returns(1, 500)
    mixed = 0.4 * hold + noise
    assert beta(mixed, hold) == pytest.approx(stats.linregress(hold, mixed).slope)
    assert beta(-2 * hold, hold) == pytest.approx(-2)
    assert math.isnan(beta(mixed, np.zeros(500)))


def test_alpha_is_annualized_intercept_of_regression_on_hold():
    hold, noise = normal_returns(0, 500), normal_returns(1, 500, mean=0.001)
    mixed = 0.4 * hold + noise
    found = of(mixed, a_year=252, hold=hold)
    assert found.alpha == pytest.approx(252 * stats.linregress(hold, mixed).intercept)
    assert of(hold, hold=hold).alpha == pytest.approx(0.0, abs=1e-12)


def test_volatility_matches_numpy():
    returns = normal_returns(0, 300)
    assert volatility(returns, 252) == pytest.approx(np.std(returns) * math.sqrt(252))


def test_drawdown_is_measured_from_previous_high():
    # 1 -> 1.5 -> 0.75 -> 1.5 -> 3 -> 2: drawdowns of one half, then one third.
    changes = np.log([1.5, 0.5, 2.0, 2.0, 2 / 3])
    assert drawdowns(changes) == pytest.approx([0, 0.5, 0, 0, 1 / 3])
    assert of(np.expm1(changes)).drawdown == pytest.approx(0.5)
    assert of([-0.2, 0.1]).drawdown == pytest.approx(0.2)  # the start counts as a high


def test_measure_converts_counts_to_rates():
    found = of([0.0] * 8, turnover=6.0, exposed=2.0, trades=3.0, wins=2.0, fees=0.01)
    assert (found.turnover, found.exposure, found.win_rate) == (3.0, 0.25, 2 / 3)
    assert (found.trades, found.fees, found.years) == (3, 0.01, 2.0)
    assert math.isnan(of([0.0]).win_rate)
    assert found.sharpe == found.sortino == 0.0


def test_possible_leak_flags_high_sharpe_over_a_year():
    good = of([0.0] * 4)._replace(sharpe=3.1)
    assert possible_leak(good)
    assert not possible_leak(good._replace(sharpe=2.9))
    assert not possible_leak(good._replace(years=0.9))
