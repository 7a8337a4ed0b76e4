"""Trading: exact costs, no look-ahead, and accounts restored from saved state."""

import math
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.price_files import random_walk_bars, write_prices
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.rng import RandomStream
from lockstep.tasks.rendering.line_chart import GREEN, RED
from lockstep.tasks.trading.env import TradingConfig
from lockstep.tasks.trading.price_data import CLOSE, OPEN
from lockstep.tasks.trading.rendering import WholeEpisode, _equity_range
from lockstep.tasks.trading.simulated_market import LOOKBACK

SHORT, FLAT, LONG = 0, 1, 2
BARS = 200


def build(path, prices=None, lanes=1, files=(), **settings):
    data = files if prices is None else (write_prices(path / "prices.csv", prices),)
    common = {
        "num_envs": lanes,
        "start_at_first_bar": True,
        "data_range": (0.0, 1.0),
        "embargo": 0,
        "slippage": 0.0,
        "borrow_rate": 0.0,
        "episode_length": 100,
        "lookback": 4,
    }
    config = TradingConfig(data=data, **{**common, **settings})
    return config.build(Lanes(lanes, range(lanes), 0), torch.device("cpu"))


def trade(env, actions):
    """Observations (including the first), rewards and last step of one account."""
    seen, rewards = [env.observations()[0].clone()], []
    for action in actions:
        step = env.step(torch.tensor([action]))
        rewards.append(float(step.reward[0]))
        seen.append((step.final_obs if step.truncated[0] or step.terminated[0] else step.obs)[0].clone())
    return torch.stack(seen), rewards, step


# ---------------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize("side", [SHORT, LONG])
def test_round_trip_at_constant_price_costs_exactly_the_fees(tmp_path, side):
    env = build(tmp_path, np.full((BARS, 4), 50.0), fee_rate=0.002, slippage=0.001, episode_length=4)
    _, rewards, last = trade(env, [side, side, FLAT, FLAT])
    # One unit of equity is traded and traded back: two fills of value 1 at 0.3 % each.
    assert math.exp(sum(rewards)) == pytest.approx(1 - 2 * 0.003, abs=1e-6)
    assert rewards[1] == rewards[3] == 0.0
    assert last.truncated.all()
    results = {name: float(values[0]) for name, values in last.episode_info.items()}
    assert results == pytest.approx(
        {
            "growth": -0.006,
            "trades": 1,
            "wins": 0,
            "open": 0,
            "turnover": 1 + 1 / 0.997,
            "fees": 0.006,
            "exposure": 0.5,
        },
        abs=1e-6,
    )


def test_order_fills_at_next_open_and_earns_until_following_open(tmp_path):
    prices = random_walk_bars()
    env = build(tmp_path, prices, fee_rate=0.0)
    _, rewards, _ = trade(env, [LONG, LONG, SHORT, FLAT, LONG])
    first = LOOKBACK + 4 - 1  # the first decision is made at the close of this bar
    opens = prices[first + 1 : first + 7, OPEN]
    change = np.diff(opens) / opens[:-1]
    assert rewards == pytest.approx(
        [*np.log1p(change[:2]), math.log1p(-change[2]), 0.0, math.log1p(change[4])], abs=1e-6
    )


def test_short_position_pays_borrow_rate(tmp_path):
    env = build(tmp_path, np.full((BARS, 4), 50.0), fee_rate=0.0, borrow_rate=0.01)
    _, rewards, _ = trade(env, [SHORT, SHORT, LONG])
    assert rewards[:2] == pytest.approx([math.log(0.99), math.log(0.98 / 0.99)], abs=1e-6)
    assert rewards[2] == 0.0


def test_unchanged_target_position_places_no_order(tmp_path):
    env = build(tmp_path, random_walk_bars(), fee_rate=0.01, position_levels=2)
    _, _, last = trade(env, [3] * 100)  # long with half of the equity
    assert float(last.episode_info["turnover"]) == pytest.approx(0.5)
    assert float(last.episode_info["open"]) == 1.0
    assert float(last.episode_info["trades"]) == 0.0


def test_episode_info_counts_trades_on_close_or_flip(tmp_path):
    prices = np.full((BARS, 4), 100.0)
    first = LOOKBACK + 4
    prices[first + 1 :] = 110.0  # after the first fill
    prices[first + 4 :] = 120.0
    env = build(tmp_path, prices, fee_rate=0.0, episode_length=8)
    # Long 100 -> 110 is a win. Flipping to short 110 -> 120 is a loss. Then flat, and long 120 -> 120, still open.
    _, _, last = trade(env, [LONG, LONG, SHORT, SHORT, SHORT, FLAT, LONG, LONG])
    assert [float(last.episode_info[name]) for name in ("trades", "wins", "open")] == [2, 1, 1]


def test_account_with_no_equity_left_terminates(tmp_path):
    prices = np.full((BARS, 4), 100.0)
    prices[LOOKBACK + 4 + 2 :] = 250.0
    env = build(tmp_path, prices, fee_rate=0.0)
    seen, rewards, last = trade(env, [SHORT, SHORT])
    assert last.terminated.all()
    assert not last.truncated.any()
    assert rewards[1] == pytest.approx(math.log(1e-4))
    assert float(last.episode_info["growth"]) == -1.0
    assert seen.isfinite().all()


# ------------------------------------------------------------------------------------------------------------ causality


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 60), st.lists(st.integers(0, 2), min_size=61, max_size=61), st.integers(1, 1000))
def test_observations_and_rewards_do_not_depend_on_future_prices(tmp_path_factory, age, actions, seed):
    prices, other = random_walk_bars(), random_walk_bars(seed)
    now = LOOKBACK + 4 - 1 + age
    changed = np.concatenate([prices[: now + 1], other[now + 1 :]])
    # Use the scalers of the unchanged history; scaler fitting is tested separately.
    one, two = (build(tmp_path_factory.mktemp("prices"), table) for table in (prices, changed))
    two.load_shared_state(one.shared_state())
    (seen, rewards, _), (seen_too, rewards_too, _) = trade(one, actions), trade(two, actions)
    assert torch.equal(seen[: age + 1], seen_too[: age + 1])
    # The reward of a step covers the next open to the open after it.
    assert rewards[: max(0, age - 1)] == rewards_too[: max(0, age - 1)]
    if age < 58:
        assert not torch.equal(seen, seen_too)


def test_scalers_are_fitted_on_data_range_only(tmp_path):
    prices = random_walk_bars()
    changed = np.concatenate([prices[:150], random_walk_bars(7)[150:] * 3])
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    scale = [
        build(tmp_path / name, table, data_range=(0.0, 0.8), embargo=10, episode_length=20).shared_state()["scale"]
        for name, table in (("one", prices), ("two", changed))
    ]
    assert torch.equal(*scale)
    whole = build(tmp_path / "two", changed, data_range=(0.0, 1.0), episode_length=20).shared_state()["scale"]
    assert not torch.equal(scale[0], whole)


def test_episodes_use_bars_of_data_range_only(tmp_path):
    prices = random_walk_bars()
    prices[: 160 - 10] *= 1.0
    prices[150:] *= 1e6  # any use of these prices would show in the rewards
    env = build(
        tmp_path, prices, lanes=8, data_range=(0.0, 0.8), embargo=10, episode_length=5, start_at_first_bar=False
    )
    growth, starts = [], set()
    for count in range(200):
        step = env.step(RandomStream(0, "actions").integers(count, 3, 8))
        growth.append(step.reward.abs().max())
        starts |= set(env._table.prices[:, 0, OPEN].tolist())
    assert max(growth) < 0.5
    assert len(starts) > 60  # of 119 possible start bars


def test_leak_future_adds_next_return_to_observation(tmp_path):
    prices = random_walk_bars()
    plain, leaking = build(tmp_path, prices), build(tmp_path, prices, leak_future=True, fee_rate=0.0)
    assert leaking.observation_space.shape[0] == plain.observation_space.shape[0] + 1
    seen, rewards, _ = trade(leaking, [LONG] * 10)
    assert seen[:-1, -1].tolist() == pytest.approx([100 * reward for reward in rewards], abs=1e-4)


# -------------------------------------------------------------------------------------------------------------- markets


@pytest.mark.parametrize("market", ["gbm", "regime_switching", "mean_reverting"])
def test_simulated_markets_have_valid_prices_differing_by_env_and_episode(tmp_path, market):
    env = build(tmp_path, lanes=8, market=market, episode_length=30)
    first = env._table.prices.copy()
    assert len(np.unique(first[:, 5, OPEN])) == 8
    assert (first > 0).all()
    assert (first[..., 1] >= first.max(axis=2) - 1e-12).all()  # high is the maximum of the bar
    assert (first[..., 2] <= first.min(axis=2) + 1e-12).all()
    for _ in range(30):
        env.step(torch.ones(8, dtype=torch.int64))
    assert not (env._table.prices == first).any()


def test_gbm_market_has_zero_mean_return(tmp_path):
    env = build(tmp_path, lanes=8, market="gbm", episode_length=200, num_envs=2000)
    ends = env._table.prices[:, -1, OPEN] / env._table.prices[:, 0, OPEN]
    assert abs(ends.mean() - 1) < 3.5 * ends.std() / math.sqrt(2000)


def test_simulated_fraction_sets_share_of_simulated_episodes(tmp_path):
    env = build(tmp_path, random_walk_bars() * 1000, lanes=8, simulated_fraction=0.25, num_envs=4000, episode_length=20)
    simulated = (env._table.prices[:, 0, OPEN] < 1000).mean()
    assert abs(simulated - 0.25) < 0.03


def test_multiple_symbols_are_all_traded(tmp_path):
    paths = tuple(write_prices(tmp_path / f"{scale}.csv", random_walk_bars() * scale) for scale in (1, 1000))
    config = TradingConfig(num_envs=64, data=paths, episode_length=20, embargo=0)
    env = config.build(Lanes(8, range(8), 0), torch.device("cpu"))
    share = (env._table.prices[:, 0, OPEN] > 5000).mean()
    assert 0.25 < share < 0.75


# --------------------------------------------------------------------------------------------------------------- errors


def test_data_range_shorter_than_episode_raises_with_valid_length(tmp_path):
    with pytest.raises(ConfigError, match=r"reads 226.*\n.*--task\.episode-length 174"):
        build(tmp_path, random_walk_bars(), episode_length=200)
    build(tmp_path, random_walk_bars(), episode_length=174)


def test_step_invalid_action_raises(tmp_path):
    env = build(tmp_path)
    with pytest.raises(ValueError, match="from 0 to 2"):
        env.step(torch.tensor([3]))


def test_load_lane_state_with_invalid_age_raises(tmp_path):
    env = build(tmp_path)
    state = env.lane_state(0)
    state["age"][0] = 100
    with pytest.raises(ValueError, match="not in a valid state"):
        env.load_lane_state(0, state)


# ------------------------------------------------------------------------------------------------------------ rendering


def test_rendered_account_records_equity_and_buy_and_hold(tmp_path):
    prices = random_walk_bars()
    env = build(tmp_path, prices, fee_rate=0.01, episode_length=50)
    env.render_text(0)  # starts recording this account
    _, rewards, _ = trade(env, [LONG] * 20 + [FLAT] * 10)
    bars = env._recorded[0]
    assert [bar.age for bar in bars] == list(range(31))
    hold = env._whole_episode(0).buy_and_hold
    assert bars[0].equity == hold[0] == 1.0
    # Paying the fee on top of the amount or out of it differs by the square of the fee.
    assert bars[20].equity == pytest.approx(hold[20], rel=1e-3)
    assert bars[30].equity == pytest.approx(math.exp(sum(rewards)), rel=1e-6)
    opened, close = prices[LOOKBACK + 4, OPEN], prices[LOOKBACK + 4 + 29, CLOSE]
    assert hold[30] == pytest.approx(close / opened / 1.01)
    assert (bars[0].position, bars[-1].position, bars[-1].trades) == (0.0, 0.0, 1)
    assert f"equity {bars[30].equity - 1:+.2%}" in env.render_text(0)
    assert "trades 1" in env.render_text(0)


def test_render_restarts_record_each_episode_for_rendered_accounts_only(tmp_path):
    env = build(tmp_path, random_walk_bars(), lanes=2, episode_length=5)
    env.render(1)
    for _ in range(7):
        env.step(torch.tensor([LONG, SHORT]))
    assert list(env._recorded) == [1]
    assert [bar.age for bar in env._recorded[1]] == [0, 1, 2]
    assert env.render(1).shape == (400, 640, 3)


def test_render_colors_position_by_side(tmp_path):
    frames = {}
    for side in (SHORT, FLAT, LONG):
        env = build(tmp_path, random_walk_bars(), episode_length=20)
        env.render(0)
        trade(env, [side] * 10)
        frames[side] = env.render(0)
    painted = {side: [(frame == color).all(axis=-1).any() for color in (RED, GREEN)] for side, frame in frames.items()}
    assert painted == {SHORT: [True, False], FLAT: [False, False], LONG: [False, True]}


def test_render_price_axis_stays_the_same_from_frame_to_frame(tmp_path):
    env = build(tmp_path, random_walk_bars(), episode_length=50)
    labels = []
    for _ in range(40):
        labels.append(env.render(0)[36:180, :60].tobytes())
        env.step(torch.tensor([FLAT]))
    assert len(set(labels)) == 1


def test_equity_range_doubles_only_where_equity_leaves_it():
    episode = WholeEpisode("", np.zeros(0), np.ones(5), np.array([1.0, 1.1, 0.9, 1.05, 1.0]))
    ranges = [_equity_range(np.array([1.0, equity]), episode) for equity in (1.0, 1.1, 0.9, 1.2, 1.5)]
    assert [round((high - low) / 2, 4) for low, high in ranges] == [0.105, 0.105, 0.105, 0.21, 0.84]


@pytest.mark.parametrize("envs", [1, 8])
def test_title_and_score_name_symbol_and_dates_of_the_prices(tmp_path, envs):
    # Each symbol has its own level of prices, which rise by 1 a day: a price tells the symbol and the day.
    levels, days = {"LOW": 100, "HIGH": 1000}, np.arange(BARS)[:, None] * np.ones(4)
    files = tuple(write_prices(tmp_path / f"{name}.csv", level + days) for name, level in levels.items())
    env = build(tmp_path, lanes=envs, files=files, start_at_first_bar=False, episode_length=20)
    env.step(torch.full((envs,), FLAT))
    for row in range(envs):
        first = env._table.prices[row, LOOKBACK + 3, CLOSE]
        name = "LOW" if first < 1000 else "HIGH"
        start, now, end = (
            f"{datetime.fromtimestamp(86_400 * (first - levels[name] + step), UTC):%Y-%m-%d}" for step in (0, 1, 20)
        )
        assert env.render_title(row) == f"{name}, {start} to {end}: training part, IN SAMPLE"
        assert env.render_score(row) == now


def test_title_names_simulated_market(tmp_path):
    env = build(tmp_path, market="gbm")
    assert (env.render_title(0), env.render_score(0)) == ("simulated market: gbm", "")
