"""Trading: hold a fraction of equity in a symbol, bar by bar, on historical prices or simulated markets.

At the close of bar t the policy sees bars up to t and chooses a target. The order is filled at the open of t + 1. The
reward depends on the change of equity, after all costs, from that open to the next. The prices of an episode are a pure
function of the environment's key and the episode's number. With several symbols, every episode uses one of them.

Shapes: E environments per lane, B local environments, F indicators, K further columns, N bars of an episode.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from numba import njit
from torch import Tensor

from lockstep.base import VecEnv
from lockstep.protocols import StateDict, Step
from lockstep.pytree import load_into
from lockstep.tasks.kernels import Buffers
from lockstep.tasks.trading.account import ACCOUNT, BANKRUPTCY, Costs, open_account, rebalance
from lockstep.tasks.trading.account import FIELDS as ACCOUNT_FIELDS
from lockstep.tasks.trading.config import SPLIT_LABELS, symbol_costs
from lockstep.tasks.trading.config import TradingConfig as TradingConfig
from lockstep.tasks.trading.history import (
    History,
    bars_per_episode,
    build_history,
    choose_start,
    find_bars,
    find_symbol,
    fit_scale,
)
from lockstep.tasks.trading.price_data import CLOSE, OPEN, read_bars
from lockstep.tasks.trading.rendering import RecordedBar, WholeEpisode, as_frame, as_text
from lockstep.tasks.trading.simulated_market import INDICATORS, LOOKBACK, MARKETS, compute_indicators, simulate

LOG_GROWTH, MEAN_VARIANCE, DIFFERENTIAL_SHARPE = range(3)
REWARDS = {"log_growth": LOG_GROWTH, "mean_variance": MEAN_VARIANCE, "differential_sharpe": DIFFERENTIAL_SHARPE}
NUM_INDICATORS = len(INDICATORS)
PORTFOLIO = 4
"""Portfolio features of an observation: fraction held, last target, result of the open trade, log equity."""
RESULTS = ("growth", "trades", "wins", "open", "turnover", "fees", "exposure")
"""Metrics of an episode. The win rate is wins over trades, both summed over all episodes."""


class TradingRules(NamedTuple):
    """Settings that the kernel needs."""

    episode_length: int
    lookback: int
    position_levels: int
    market: int
    volatility: float
    simulated_fraction: float
    leak_future: bool
    costs: Costs
    reward: int
    risk_aversion: float
    sharpe_rate: float


class MarketTable(NamedTuple):
    """State of the environments. Prices and indicators are recomputed from key and episode."""

    key: np.ndarray
    episode: np.ndarray
    age: np.ndarray
    account: np.recarray
    prices: np.ndarray
    """[B, N, 4] float64."""
    indicators: np.ndarray
    """[B, N, F + K] float32: normalized indicators and features."""
    borrow: np.ndarray
    """[B] float64: cost of a short position per bar, which depends on the symbol."""
    moments: np.ndarray
    """[B, 2] float64: moving averages of the return and its square, for the reward differential_sharpe."""


@njit(cache=True, nogil=True)
def _start_episode(b: int, table: MarketTable, history: History, scale: Any, rules: TradingRules) -> None:
    """Compute the prices and indicators of an environment's current episode."""
    prices, indicators = table.prices[b], table.indicators[b]
    start = choose_start(table.key[b], table.episode[b], history, rules.simulated_fraction)
    if start < 0:
        simulate(prices, rules.market, table.key[b], table.episode[b], rules.volatility)
        table.borrow[b] = rules.costs.borrow
    else:
        prices[:] = history.prices[start : start + len(prices)]
        table.borrow[b] = history.borrow[find_symbol(history, start)]
    compute_indicators(prices, indicators)
    for k in range(history.features.shape[1]):
        for n in range(len(indicators)):  # the simulated market has mean values
            column = NUM_INDICATORS + k
            indicators[n, column] = scale[0, column] if start < 0 else history.features[start + n, k]
    for n in range(LOOKBACK, len(indicators)):
        for f in range(indicators.shape[1]):
            indicators[n, f] = min(max((indicators[n, f] - scale[0, f]) / scale[1, f], -5.0), 5.0)


@njit(cache=True, nogil=True)
def _write_obs(b: int, table: MarketTable, rules: TradingRules, obs: Any) -> None:
    """Write the observation at the close of the current bar."""
    bar = LOOKBACK + rules.lookback - 1 + table.age[b]
    index = 0
    for n in range(bar - rules.lookback + 1, bar + 1):
        for f in range(table.indicators.shape[2]):
            obs[index] = table.indicators[b, n, f]
            index += 1
    account, close = table.account[b], table.prices[b, bar, CLOSE]
    equity = max(account.cash + account.units * close, BANKRUPTCY)
    obs[index] = min(max(account.units * close / equity, -5.0), 5.0)
    obs[index + 1] = account.target
    obs[index + 2] = min(max(10.0 * (account.flow + account.units * close) / equity, -5.0), 5.0)
    obs[index + 3] = min(max(math.log(equity), -5.0), 5.0)
    if rules.leak_future:
        obs[index + 4] = 100.0 * math.log(table.prices[b, bar + 2, OPEN] / table.prices[b, bar + 1, OPEN])


@njit(cache=True, nogil=True)
def _reward(change: float, moments: Any, rules: TradingRules) -> float:
    """Return the reward of a change of log equity, and update the moving averages of an account."""
    if rules.reward == LOG_GROWTH:
        return change
    gain = math.exp(change) - 1.0
    if rules.reward == MEAN_VARIANCE:
        return gain - 0.5 * rules.risk_aversion * gain * gain
    # Differential Sharpe ratio: derivative of the moving Sharpe ratio with respect to the rate of its averages.
    mean, square = moments[0], moments[1]
    mean_change, square_change = gain - mean, gain * gain - square
    moments[0] += rules.sharpe_rate * mean_change
    moments[1] += rules.sharpe_rate * square_change
    variance = square - mean * mean
    if variance < 1e-12:  # before the first trade
        return 0.0
    return min(max((square * mean_change - 0.5 * mean * square_change) / variance**1.5, -10.0), 10.0)


@njit(cache=True, nogil=True)
def _step_all(
    actions: Any, table: MarketTable, history: History, scale: Any, rules: TradingRules, out: Any, results: Any
) -> int:
    """Step every account and start new episodes where one ended. Return the truncated count, or -1 for a bad action."""
    obs, reward, terminated, truncated, final_obs = out
    for b in range(len(actions)):
        if not 0 <= actions[b] <= 2 * rules.position_levels:
            return -1
    num_truncated = 0
    for b in range(len(actions)):
        account, bar = table.account[b], LOOKBACK + rules.lookback - 1 + table.age[b]
        price, next_price = table.prices[b, bar + 1, OPEN], table.prices[b, bar + 2, OPEN]
        costs = Costs(rules.costs.fee, rules.costs.slippage, table.borrow[b])
        change = rebalance(account, actions[b] / rules.position_levels - 1.0, price, next_price, costs)
        terminated[b] = change == -math.inf
        reward[b] = math.log(BANKRUPTCY) if terminated[b] else _reward(change, table.moments[b], rules)
        table.age[b] += 1
        truncated[b] = not terminated[b] and table.age[b] == rules.episode_length
        if terminated[b] or truncated[b]:
            _write_obs(b, table, rules, final_obs[b])
            results[0, b] = max(account.cash + account.units * next_price, 0.0) - 1.0
            results[1, b], results[2, b] = account.trades, account.wins
            results[3, b] = account.units != 0.0
            results[4, b], results[5, b] = account.turnover, account.fees
            results[6, b] = account.exposed / table.age[b]
            table.age[b] = 0
            table.episode[b] += 1
            open_account(account)
            table.moments[b] = 0.0
            _start_episode(b, table, history, scale, rules)
            num_truncated += truncated[b]
        _write_obs(b, table, rules, obs[b])
    return num_truncated


class Trading(VecEnv):
    """The accounts of the local lanes. Action k of 2 x levels + 1 is the target k / levels - 1."""

    Config = TradingConfig

    def setup(self) -> None:
        config, count = self.config, self.num_envs
        self._symbols = symbols = [read_bars(path, config.columns, config.features) for path in config.data]
        num_indicators = len(INDICATORS) + (len(config.features) if symbols else 0)
        features = config.lookback * num_indicators + PORTFOLIO + config.leak_future
        self.observation_space = Box(-np.inf, np.inf, (features,), np.float32)
        self.action_space = Discrete(2 * config.position_levels + 1)
        self._history, episode_length = build_history(config, symbols)
        # Validation and test parts are those of the files only.
        simulated_fraction = 1.0 if not config.data else config.simulated_fraction if config.split == "train" else 0.0
        self._rules = TradingRules(
            episode_length,
            config.lookback,
            config.position_levels,
            MARKETS[config.market],
            config.volatility,
            simulated_fraction,
            config.leak_future,
            symbol_costs(config, symbols[0] if symbols else None),
            REWARDS[config.reward],
            config.risk_aversion,
            config.sharpe_rate,
        )
        self._scale = torch.from_numpy(fit_scale(config, symbols, self.lanes.shared_stream("trading.scale")))  # [2, F]
        num_bars = bars_per_episode(config, episode_length)
        vector, matrix = (count,), (count, features)
        self._buffers = Buffers(
            self.device,
            obs=(torch.float32, matrix),
            reward=(torch.float32, vector),
            terminated=(torch.bool, vector),
            truncated=(torch.bool, vector),
            final_obs=(torch.float32, matrix),
            results=(torch.float32, (len(RESULTS), count)),
        )
        self._table = MarketTable(
            key=np.array([stream.draw_seed(0) for stream in self.env_streams("trading")], np.int64),
            episode=np.zeros(count, np.int64),
            age=np.zeros(count, np.int64),
            account=np.zeros(count, ACCOUNT).view(np.recarray),
            prices=np.zeros((count, num_bars, 4)),
            indicators=np.zeros((count, num_bars, num_indicators), np.float32),
            borrow=np.zeros(count),
            moments=np.zeros((count, 2)),
        )
        self.register_state("episode", self._table.episode)
        self.register_state("age", self._table.age)
        for name in ACCOUNT_FIELDS:
            self.register_state(name, self._table.account[name])
        if config.reward == "differential_sharpe":
            self.register_state("moments", self._table.moments)
        self._recorded: dict[int, list[RecordedBar]] = {}

    def reset(self) -> Tensor:
        self._table.episode[:] = self._table.age[:] = 0
        self._table.moments[:] = 0.0
        for account in self._table.account:
            open_account(account)
        return self._start_episodes(range(self.num_envs))

    def observations(self) -> Tensor:
        return self._buffers.tensors["obs"]

    def step(self, action: Tensor) -> Step:
        actions = action.to("cpu", torch.int64).contiguous().numpy()
        num_truncated = self.step_numpy(actions) if actions.shape == (self.num_envs,) else -1
        if num_truncated < 0:
            raise ValueError(
                f"the actions have shape {actions.shape} and run from {actions.min()} to {actions.max()}.\n"
                f"Give each of the {self.num_envs} accounts one from 0 to {2 * self._rules.position_levels}."
            )
        out = {**self._buffers.copy_to_device()}
        episode_info = dict(zip(RESULTS, out.pop("results"), strict=True))
        for env in self._recorded:
            self._record(env)
        return Step(**out, episode_info=episode_info, any_truncated=num_truncated > 0)

    def step_numpy(self, actions: np.ndarray) -> int:
        """Step the market and the accounts alone, without tensors."""
        *out, results = self._buffers.arrays.values()
        return int(
            _step_all(actions, self._table, self._history, self._scale.numpy(), self._rules, tuple(out), results)
        )

    # Saved state: the scale of the indicators, and the part of each account that does not follow from its key.

    def shared_state(self) -> StateDict:
        return {"scale": self._scale}

    def load_shared_state(self, state: StateDict) -> None:
        load_into(self.shared_state(), state, "trading")
        self._start_episodes(range(self.num_envs))

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        super().load_lane_state(lane, state)
        self._start_episodes(range(self.num_envs)[self.lanes.lane_slice(lane, self.envs_per_lane)])

    def is_valid_state(self, state: StateDict) -> bool:
        return bool(((state["age"] >= 0) & (state["age"] < self._rules.episode_length)).all())

    def _start_episodes(self, rows: range) -> Tensor:
        for row in rows:
            _start_episode(row, self._table, self._history, self._scale.numpy(), self._rules)
            _write_obs(row, self._table, self._rules, self._buffers.arrays["obs"][row])
        return self._buffers.copy_to_device()["obs"]

    # Rendering

    def render_text(self, env: int) -> str:
        return as_text(self._recorded_bars(env), self._whole_episode(env))

    def render(self, env: int) -> np.ndarray:
        return as_frame(self._recorded_bars(env), self._whole_episode(env))

    def render_title(self, env: int) -> str:
        title = self._whole_episode(env).title()
        return f"{title}: {self._split_label}" if title else f"simulated market: {self.config.market}"

    def render_score(self, env: int) -> str:
        return self._whole_episode(env).date(int(self._table.age[env]))

    def render_result(self, info: Mapping[str, float]) -> str:
        return f"equity {info['growth']:+.1%}"

    @property
    def _split_label(self) -> str:
        return SPLIT_LABELS[self.config.split]

    def _whole_episode(self, env: int) -> WholeEpisode:
        """Return the bars of the current episode, those to come included."""
        table, rules, first = self._table, self._rules, LOOKBACK + self._rules.lookback - 1
        start = int(choose_start(table.key[env], table.episode[env], self._history, rules.simulated_fraction))
        symbol, time = find_bars(self._symbols, start)
        bars, costs = slice(first, first + rules.episode_length + 1), 1.0 + rules.costs.fee + rules.costs.slippage
        close = table.prices[env, bars, CLOSE]
        buy_and_hold = np.append(1.0, close[1:] / (table.prices[env, first + 1, OPEN] * costs))
        return WholeEpisode(symbol, time[bars], close, buy_and_hold, self._split_label if symbol else "")

    def _recorded_bars(self, env: int) -> list[RecordedBar]:
        """Return the bars of an episode. They are recorded from the first call on, and only for rendered accounts."""
        bars = self._recorded.setdefault(env, [])
        if not bars or bars[-1].age != self._table.age[env]:  # at first, and after a restore
            self._record(env)
        return bars

    def _record(self, env: int) -> None:
        """Add the current bar of an account. The first bar of an episode clears the earlier ones."""
        account, age, bars = self._table.account[env], int(self._table.age[env]), self._recorded[env]
        close = self._table.prices[env, LOOKBACK + self._rules.lookback - 1 + age, CLOSE]
        equity = max(account.cash + account.units * close, BANKRUPTCY)
        if bars and age <= bars[-1].age:
            bars.clear()
        bars.append(RecordedBar(age, equity, account.units * close / equity, int(account.trades), account.fees))
