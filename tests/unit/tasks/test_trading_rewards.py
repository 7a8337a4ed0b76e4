"""Trading: default costs on files, columns of the user as features, and reward options."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.price_files import random_walk_bars, write_prices
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.tasks.trading.config import symbol_costs
from lockstep.tasks.trading.env import TradingConfig
from lockstep.tasks.trading.price_data import OPEN, read_bars
from lockstep.tasks.trading.simulated_market import INDICATORS, LOOKBACK

SHORT, FLAT, LONG = 0, 1, 2
BARS = 200
EXACT = {"data_range": (0.0, 1.0), "embargo": 0, "start_at_first_bar": True, "lookback": 4, "episode_length": 100}


def build(config, lanes=1):
    return replace(config, num_envs=lanes).build(Lanes(lanes, range(lanes), 0), torch.device("cpu"))


def rewards_of(env, actions):
    return [float(env.step(torch.tensor([action])).reward[0]) for action in actions]


# ---------------------------------------------------------------------------------------------------------------- costs


def test_costs_on_files_are_not_zero_by_default(tmp_path):
    path = write_prices(tmp_path / "a.csv", np.full((BARS, 4), 50.0))
    config = TradingConfig(data=(path,), fee_rate=0.0, **EXACT)
    long, still, short, held, closed = rewards_of(build(config), [LONG, LONG, SHORT, SHORT, FLAT])
    per_bar = 0.02 / 365.25  # one bar a day
    assert long == pytest.approx(math.log(1 - 0.0005), abs=1e-7)
    assert still == 0.0
    # A flip closes one position and opens another. The short one costs 2 % a year from its first bar on.
    assert short == pytest.approx(-2 * 0.0005 - per_bar, abs=2e-6)
    assert held == pytest.approx(-per_bar, abs=1e-6)
    assert closed == pytest.approx(-0.0005, abs=2e-6)


def test_costs_on_simulated_market_are_the_fee_only_by_default():
    costs = symbol_costs(TradingConfig(), None)
    assert costs == (0.001, 0.0, 0.0)


def test_costs_that_are_set_replace_the_defaults(tmp_path):
    bars = read_bars(write_prices(tmp_path / "a.csv", random_walk_bars()), {})
    assert symbol_costs(TradingConfig(slippage=0.0, borrow_rate=0.0), bars) == (0.001, 0.0, 0.0)
    assert symbol_costs(TradingConfig(), bars) == (0.001, 0.0005, pytest.approx(0.02 / 365.25))


def test_borrow_cost_depends_on_bars_per_year_of_the_symbol(tmp_path):
    flat = np.full((BARS, 4), 50.0)
    paths = (write_prices(tmp_path / "day.csv", flat), write_prices(tmp_path / "hour.csv", 2 * flat, seconds=3600))
    config = TradingConfig(data=paths, fee_rate=0.0, slippage=0.0, **EXACT)
    env = build(config, lanes=8)
    rewards = env.step(torch.full((8,), SHORT)).reward
    hourly = torch.from_numpy(env._table.prices[:, 0, OPEN] == 100.0)
    assert 0 < hourly.sum() < 8
    assert rewards[~hourly].tolist() == pytest.approx([-0.02 / 365.25] * int((~hourly).sum()), rel=1e-2)
    assert rewards[hourly].tolist() == pytest.approx([-0.02 / 365.25 / 24] * int(hourly.sum()), rel=1e-2)


# ------------------------------------------------------------------------------------------------------------- features


def test_features_are_observed_at_the_close_of_their_bar_normalized(tmp_path):
    mood = np.sin(np.arange(BARS))
    path = write_prices(tmp_path / "a.csv", random_walk_bars(), mood=mood, volume=1e9 + 1e6 * mood)
    plain = TradingConfig(data=(path,), **EXACT)
    env = build(replace(plain, features=("mood", "volume")))
    assert env.observation_space.shape[0] == build(plain).observation_space.shape[0] + 2 * 4
    obs = env.observations()[0, : 4 * (len(INDICATORS) + 2)].view(4, -1)
    wanted = (mood[LOOKBACK : LOOKBACK + 4] - mood.mean()) / mood.std()
    assert obs[:, -2].tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
    assert obs[:, -1].tolist() == pytest.approx(wanted.tolist(), abs=1e-3)
    assert torch.equal(obs[:, :-2].flatten(), build(plain).observations()[0, : 4 * len(INDICATORS)])


def test_features_are_scaled_by_training_part_and_clipped(tmp_path):
    mood = np.sin(np.arange(400))
    mood[300:] = 1e6
    path = write_prices(tmp_path / "a.csv", random_walk_bars(bars=400), mood=mood)
    config = TradingConfig(data=(path,), features=("mood",), episode_length=20, embargo=0)
    env = build(config.with_split("test"))
    assert env.shared_state()["scale"][0, -1] == pytest.approx(mood[:240].mean())
    assert env.observations().max() == 5.0


def test_features_are_neutral_on_simulated_market(tmp_path):
    path = write_prices(tmp_path / "a.csv", random_walk_bars(bars=400), mood=np.arange(400.0))
    config = TradingConfig(data=(path,), features=("mood",), episode_length=20, embargo=0, simulated_fraction=1.0)
    obs = build(config, lanes=8).observations()[:, : 8 * (len(INDICATORS) + 1)].view(8, 8, -1)
    assert not obs[..., -1].any()


@pytest.mark.parametrize(
    ("features", "values", "message"),
    [
        (("mood",), {}, "has no column mood; it has unix, open"),
        (
            ("mood",),
            {"mood": [math.nan] * BARS},
            "column mood has 200 values that are not finite",
        ),
    ],
)
def test_features_missing_or_not_finite_raise(tmp_path, features, values, message):
    path = write_prices(tmp_path / "a.csv", random_walk_bars(), **values)
    with pytest.raises(ConfigError, match=message):
        build(TradingConfig(data=(path,), features=features, **EXACT))


def test_features_without_files_raise():
    with pytest.raises(ConfigError, match="there are no files"):
        TradingConfig(features=("mood",))


def test_features_follow_the_order_of_time(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("unix,open,high,low,close,mood\n172800,3,3,3,3,30\n86400,2,2,2,2,20\n0,1,1,1,1,10\n0,9,9,9,9,90\n")
    bars = read_bars(str(path), {}, ("mood",))
    assert bars.prices[:, OPEN].tolist() == [1, 2, 3]
    assert bars.features.tolist() == [[10], [20], [30]]


# -------------------------------------------------------------------------------------------------------------- rewards


def returns_of_long(path):
    opens = read_bars(path, {}).prices[LOOKBACK + 4 : LOOKBACK + 4 + 41, OPEN]
    return np.diff(opens) / opens[:-1]


def costless(path, **settings):
    return TradingConfig(data=(path,), fee_rate=0.0, slippage=0.0, **EXACT, **settings)


def test_reward_mean_variance_subtracts_squared_return(tmp_path):
    path = write_prices(tmp_path / "a.csv", random_walk_bars())
    gains = returns_of_long(path)
    found = rewards_of(build(costless(path, reward="mean_variance", risk_aversion=3.0)), [LONG] * 40)
    assert found == pytest.approx((gains - 1.5 * gains**2).tolist(), abs=1e-6)


def test_reward_differential_sharpe_matches_formula(tmp_path):
    path = write_prices(tmp_path / "a.csv", random_walk_bars())
    found = rewards_of(build(costless(path, reward="differential_sharpe", sharpe_rate=0.05)), [LONG] * 40)
    mean, square, wanted = 0.0, 0.0, []
    for gain in returns_of_long(path):
        variance = square - mean**2
        value = (square * (gain - mean) - 0.5 * mean * (gain**2 - square)) / variance**1.5 if variance > 1e-12 else 0.0
        wanted.append(min(max(value, -10.0), 10.0))
        mean, square = mean + 0.05 * (gain - mean), square + 0.05 * (gain**2 - square)
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert found[0] == 0.0


def test_reward_differential_sharpe_is_derivative_of_moving_sharpe(tmp_path):
    # After one more bar, the moving Sharpe ratio changes by rate x reward, to first order in the rate.
    path, rate = write_prices(tmp_path / "a.csv", random_walk_bars()), 1e-4
    env = build(costless(path, reward="differential_sharpe", sharpe_rate=rate))
    env._table.moments[:] = 0.0005, 0.0002
    ratios = [0.0005 / math.sqrt(0.0002 - 0.0005**2)]
    (reward,) = rewards_of(env, [LONG])
    mean, square = env._table.moments[0]
    ratios.append(mean / math.sqrt(square - mean**2))
    assert (ratios[1] - ratios[0]) / rate == pytest.approx(reward, rel=0.02)


@pytest.mark.parametrize("reward", ["log_growth", "mean_variance", "differential_sharpe"])
def test_reward_state_survives_a_restore_and_ends_with_the_episode(tmp_path, reward):
    path = write_prices(tmp_path / "a.csv", random_walk_bars())
    env, other = (build(costless(path, reward=reward)) for _ in range(2))
    assert ("moments" in env.lane_state(0)) == (reward == "differential_sharpe")
    rewards_of(env, [LONG] * 20)
    other.load_lane_state(0, env.lane_state(0))
    assert rewards_of(env, [LONG] * 30) == rewards_of(other, [LONG] * 30)
    rewards_of(env, [LONG] * 50)  # the end of the episode
    assert not env._table.moments.any()


def test_growth_of_episode_does_not_depend_on_reward(tmp_path):
    path = write_prices(tmp_path / "a.csv", random_walk_bars())
    growth = []
    for reward in ("log_growth", "mean_variance", "differential_sharpe"):
        env = build(costless(path, reward=reward))
        for _ in range(100):
            step = env.step(torch.tensor([LONG]))
        growth.append(float(step.episode_info["growth"][0]))
    assert len(set(growth)) == 1


@pytest.mark.parametrize("setting", [{"risk_aversion": -1.0}, {"sharpe_rate": 0.0}, {"slippage": -0.1}])
def test_config_invalid_costs_or_rewards_raise(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        TradingConfig(**setting)
