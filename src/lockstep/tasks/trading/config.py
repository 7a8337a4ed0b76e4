"""Settings of trading, and the parts of a price file: training, validation and test."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lockstep.base import VecEnv
from lockstep.config import ConfigError
from lockstep.protocols import Split
from lockstep.tasks.trading.account import Costs
from lockstep.tasks.trading.price_data import PriceSeries, format_time, parse_time, read_bars
from lockstep.tasks.trading.simulated_market import LOOKBACK

AUTO, VALIDATION_FRACTION = "auto", 0.2
"""Validation date of `split_dates` that means this fraction of the bars before the test part."""
SLIPPAGE, BORROW_PER_YEAR = 0.0005, 0.02
"""Default costs on files: slippage per order and cost of a short position per year, as fractions of the value."""
SPLIT_LABELS: dict[Split, str] = {
    "train": "training part, IN SAMPLE",
    "validation": "validation part",
    "test": "test part, out of sample",
}
"""How a part of a file is named on screen, in images and in videos."""


@dataclass(frozen=True, kw_only=True)
class TradingConfig(VecEnv.Config):
    """Settings of trading. Every number is for the whole run, not for one process."""

    num_envs: int = 64
    """Number of accounts in the whole run, stepped in parallel."""
    data: tuple[str, ...] = ()
    """CSV or Parquet files of bars, one symbol each. Empty: all episodes use the simulated market."""
    columns: dict[str, str] = field(default_factory=dict)
    """File column names of time, open, high, low, close and adjusted, where they are not recognized."""
    features: tuple[str, ...] = ()
    """Further columns of the files to observe, such as Volume. They are normalized with the training part. The value of
    a bar must be known at its close."""
    market: Literal["gbm", "regime_switching", "mean_reverting"] = "regime_switching"
    """Simulated market: geometric Brownian motion without drift, switching bull and bear regimes, or mean reverting."""
    volatility: float = 0.01
    """Standard deviation of the simulated market's return per bar."""
    simulated_fraction: float = 0.0
    """Fraction of training episodes on the simulated market if there are files; the same on every lane."""
    data_range: tuple[float, float] = (0.0, 0.6)
    """Range of each file, from 0 to 1, that training episodes use. Indicators are normalized with this range only."""
    test_start: float = 0.8
    """Start of the test part of each file, from 0 to 1. Bars between data_range and test_start are the validation part,
    which evaluations during training use. Without a validation part, they use the training part."""
    split_dates: tuple[str, ...] = ()
    """Dates that split the files, instead of data_range and test_start: start of the training part, of the validation
    part, of the test part and, optionally, end of the test part. ISO 8601, such as 2015-01-01. The second may be auto:
    the last fifth of each file's bars between the training and the test date is its validation part."""
    embargo: int | None = None
    """Bars skipped at the end of the training and the validation part. None: the bars that an observation depends on,
    so that the observations of two parts share no bars."""
    episode_length: int = 256
    """Steps of an episode. Shorter in a validation or test part that has fewer bars."""
    start_at_first_bar: bool = False
    """Start each episode at the first bar of the part, as in a test, instead of at a random bar."""
    lookback: int = 8
    """Bars in an observation."""
    position_levels: int = 1
    """Position sizes per side. 1: short, flat and long. 2: also half positions."""
    fee_rate: float = 0.001
    """Fee per order, as a fraction of the traded value."""
    slippage: float | None = None
    """Fraction by which a fill's price is worse than the open. None: 0.0005 on files, 0 on the simulated market."""
    borrow_rate: float | None = None
    """Cost of a short position per bar, as a fraction of its value. None: 2 % a year on files, 0 on the simulated
    market."""
    reward: Literal["log_growth", "mean_variance", "differential_sharpe"] = "log_growth"
    """Reward of a bar after costs. log_growth: change of log equity. mean_variance: return, less risk_aversion / 2
    times its square. differential_sharpe: influence of the return on a moving Sharpe ratio (Moody and Saffell)."""
    risk_aversion: float = 2.0
    """Risk aversion of the reward mean_variance. log_growth is close to a risk aversion of 1."""
    sharpe_rate: float = 0.01
    """Rate at which the moving averages of the reward differential_sharpe forget, per bar."""
    leak_future: bool = False
    """Only for tests of the pipeline: add the next return to the observation."""

    def __post_init__(self) -> None:
        low, high = self.data_range
        fractions = self.simulated_fraction, self.test_start
        if not 0 <= low < high <= 1 or not all(0 <= fraction <= 1 for fraction in fractions):
            raise ConfigError(
                f"data_range is {self.data_range}, test_start {self.test_start} and simulated_fraction "
                f"{self.simulated_fraction}.",
                "Use fractions from 0 to 1, in increasing order.",
            )
        if min(self.episode_length, self.lookback, self.position_levels) < 1 or self.embargo_bars < 0:
            raise ConfigError(
                f"episode_length is {self.episode_length}, lookback {self.lookback}, position_levels "
                f"{self.position_levels} and embargo {self.embargo}.",
                "Use 1 or more, and an embargo of 0 or more.",
            )
        costs = self.fee_rate, self.slippage or 0.0, self.borrow_rate or 0.0, self.risk_aversion
        if min(costs) < 0 or self.volatility <= 0 or not 0 < self.sharpe_rate < 1:
            raise ConfigError(
                f"fee_rate is {self.fee_rate}, slippage {self.slippage}, borrow_rate {self.borrow_rate}, risk_aversion "
                f"{self.risk_aversion}, volatility {self.volatility} and sharpe_rate {self.sharpe_rate}.",
                "Use 0 or more, a volatility above 0, and a sharpe_rate between 0 and 1.",
            )
        if self.features and not self.data:
            named = " ".join(self.features)
            raise ConfigError(f"features is {named}, but there are no files.", "Give files: --data FILE")
        times = [parse_time(date) for date in self.split_dates if date != AUTO]
        autos = [index for index, date in enumerate(self.split_dates) if date == AUTO]
        if len(self.split_dates) not in (0, 3, 4) or times != sorted(times) or autos not in ([], [1]):
            raise ConfigError(
                f"split_dates is {' '.join(self.split_dates)}.",
                "Give 3 or 4 dates in increasing order: --task.split-dates 2010-01-01 2016-01-01 2017-01-01",
            )

    @property
    def split(self) -> Split:
        """Part of each file that episodes use. Not a setting: `with_split` selects it."""
        return "train"

    @property
    def episode_steps(self) -> int:
        return self.episode_length

    @property
    def observed_bars(self) -> int:
        """Bars that an observation depends on, up to its own."""
        return LOOKBACK + self.lookback

    @property
    def embargo_bars(self) -> int:
        return self.observed_bars if self.embargo is None else self.embargo

    @property
    def has_validation(self) -> bool:
        dates = self.split_dates
        return dates[1] != dates[2] if dates else self.data_range[1] < self.test_start

    def with_absolute_paths(self) -> "TradingConfig":
        """Resolve the files, so that `eval` and `play` find them from another directory."""
        return _changed(type(self), self, data=tuple(str(Path(path).absolute()) for path in self.data))

    def with_split(self, split: Split) -> "TradingConfig":
        """Return settings whose episodes use another part of the files. The simulated market has no parts."""
        if not self.data:
            return self
        if split == "validation" and not self.has_validation:
            split = "train"
        return _changed(CONFIG_CLASSES[split], self)

    def describe_data(self) -> list[dict[str, Any]]:
        described = []
        for path in self.data:
            bars = read_bars(path, self.columns)
            part = find_part(self, bars, self.split)
            first, last = (format_time(bars.time[bar]) for bar in (part[0], part[-1])) if part else ("", "")
            described.append(
                {"symbol": bars.name, "part": SPLIT_LABELS[self.split], "first": first, "last": last, "bars": len(part)}
            )
        return described


class ValidationConfig(TradingConfig):
    """Settings whose episodes use the validation part."""

    @property
    def split(self) -> Split:
        return "validation"


class TestConfig(TradingConfig):
    """Settings whose episodes use the test part."""

    __test__ = False  # not a class of tests

    @property
    def split(self) -> Split:
        return "test"


CONFIG_CLASSES: dict[Split, type[TradingConfig]] = {
    "train": TradingConfig,
    "validation": ValidationConfig,
    "test": TestConfig,
}


def _changed(config_class: type[TradingConfig], config: TradingConfig, **changes: Any) -> TradingConfig:
    return config_class(**{setting.name: getattr(config, setting.name) for setting in fields(config)} | changes)


def find_part(config: TradingConfig, bars: PriceSeries, split: Split) -> range:
    """Return the bars of a part of a file, without the embargo at the end of the training and the validation part."""
    count = len(bars.time)
    if config.split_dates:
        start, validation, *others = config.split_dates
        low, test, *end = (int(np.searchsorted(bars.time, parse_time(date))) for date in (start, *others))
        high = test - round(VALIDATION_FRACTION * (test - low))
        if validation != AUTO:
            high = int(np.searchsorted(bars.time, parse_time(validation)))
        stop = end[0] if end else count
    else:
        low, high, test = (round(fraction * count) for fraction in (*config.data_range, config.test_start))
        test, stop = max(high, test), count
    if split == "test":
        return range(test, stop)
    first, last = (high, test) if split == "validation" else (low, high)
    return range(first, max(first, last - config.embargo_bars))


def symbol_costs(config: TradingConfig, bars: PriceSeries | None) -> Costs:
    """Return the trading costs of a symbol; of the simulated market if it is None."""
    slippage, borrow = (0.0, 0.0) if bars is None else (SLIPPAGE, BORROW_PER_YEAR / bars.bars_per_year)
    return Costs(
        config.fee_rate,
        slippage if config.slippage is None else config.slippage,
        borrow if config.borrow_rate is None else config.borrow_rate,
    )
