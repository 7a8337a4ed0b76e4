"""Parts of price files: training, validation and test share no bars, and every picture says which one it shows."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.price_files import random_walk_bars, write_prices
from lockstep.cli import main
from lockstep.config import ConfigError, RunConfig
from lockstep.distributed import Runtime
from lockstep.evaluation import evaluate
from lockstep.lanes import Lanes
from lockstep.loggers.video import command
from lockstep.tasks.rendering.line_chart import ORANGE
from lockstep.tasks.trading.config import find_part
from lockstep.tasks.trading.env import TradingConfig
from lockstep.tasks.trading.price_data import OPEN, read_bars

SPLITS = "train", "validation", "test"


@pytest.fixture
def config(tmp_path):
    path = write_prices(tmp_path / "prices.csv", random_walk_bars(bars=500))
    return TradingConfig(num_envs=8, data=(path,), episode_length=40, lookback=4, embargo=10)


def build(config):
    return config.build(Lanes(8, range(8), 0), torch.device("cpu"))


def part_of(config, split):
    return find_part(config, read_bars(config.data[0], {}), split)


# --------------------------------------------------------------------------------------------------------------- ranges


def test_find_part_splits_file_with_embargo_before_held_out_parts(config):
    assert [part_of(config, split) for split in SPLITS] == [range(290), range(300, 390), range(400, 500)]


def test_find_part_default_embargo_covers_an_observation(config):
    config = replace(config, embargo=None)
    assert config.embargo_bars == 24  # indicators look 20 bars back, an observation has 4
    assert part_of(config, "train") == range(276)


def test_find_part_by_dates_uses_bars_from_start_date(config):
    dates = ("1970-01-11", "1970-04-11", "1970-07-20", "1970-10-28")
    config = replace(config, split_dates=dates)
    assert [part_of(config, split) for split in SPLITS] == [range(10, 90), range(100, 190), range(200, 300)]
    assert part_of(replace(config, split_dates=dates[:3]), "test") == range(200, 500)


def test_find_part_with_auto_date_validates_last_fifth_of_each_file(config):
    config = replace(config, split_dates=("1970-01-11", "auto", "1970-07-20"))
    assert [part_of(config, split) for split in SPLITS] == [range(10, 152), range(162, 190), range(200, 500)]
    assert config.has_validation


@pytest.mark.parametrize(
    "dates", [("1970-01-01",), ("1971-01-01", "1970-01-01", "1972-01-01"), ("a", "b", "c"), ("auto", "a", "b")]
)
def test_config_invalid_split_dates_raise(dates):
    with pytest.raises(ConfigError):
        TradingConfig(split_dates=dates)


def test_with_split_without_validation_part_uses_training_part(config):
    without = replace(config, data_range=(0.0, 0.8))
    assert without.with_split("validation").split == "train"
    assert without.with_split("test").split == "test"
    assert part_of(without, "train") == range(390)


def test_with_split_of_simulated_market_changes_nothing():
    config = TradingConfig()
    assert config.with_split("test") is config


@pytest.mark.parametrize("split", SPLITS)
def test_episodes_stay_within_the_part(config, split):
    env = build(config.with_split(split))
    opens, part = read_bars(config.data[0], {}).prices[:, OPEN], part_of(config, split)
    for _ in range(200):
        env.step(torch.ones(8, dtype=torch.int64))
        for row in range(8):
            first = int(np.flatnonzero(opens == env._table.prices[row, 0, OPEN])[0])
            decision, last = first + config.observed_bars - 1, first + env._table.prices.shape[1] - 1
            assert decision in part or decision < config.observed_bars
            assert last in part


def test_held_out_parts_use_scale_of_training_part(config):
    config = replace(config, simulated_fraction=0.3)
    scales = [build(config.with_split(split)).shared_state()["scale"] for split in SPLITS]
    assert torch.equal(scales[0], scales[1])
    assert torch.equal(scales[0], scales[2])


def test_held_out_part_has_no_simulated_episodes(config):
    env = build(replace(config, simulated_fraction=1.0).with_split("test"))
    assert all("test part" in env.render_title(row) for row in range(8))


def test_held_out_part_shorter_than_episode_shortens_episodes(config):
    config = replace(config, episode_length=150)
    assert build(config)._rules.episode_length == 150
    assert build(config.with_split("validation"))._rules.episode_length == 87
    assert build(config.with_split("test"))._rules.episode_length == 97


def test_validation_part_too_short_raises_before_training(config):
    with pytest.raises(ConfigError, match=r"validation part of prices has 15 of its 500 bars[\s\S]*--task\.test-start"):
        build(replace(config, data_range=(0.0, 0.75)))


def test_missing_test_part_raises_with_other_split(config):
    with pytest.raises(ConfigError, match=r"test part of prices has 0 of its 500 bars[\s\S]*--split validation"):
        build(replace(config, test_start=1.0).with_split("test"))


# ---------------------------------------------------------------------------------------------------- model selection


def test_evaluation_during_training_does_not_depend_on_test_part(tmp_path, config):
    class Long:
        def initial_state(self, count):
            return {}

        def act(self, obs, memory):
            return torch.full((len(obs),), 2), memory

    prices = random_walk_bars(bars=500)
    prices[400:] *= np.exp(0.1 * np.arange(100))[:, None]
    other = replace(config, data=(write_prices(tmp_path / "other.csv", prices),))
    runtime = Runtime.single_process(RunConfig(lanes=8, device="cpu"))
    scores = {split: [evaluate(Long(), task, runtime, 16, split) for task in (config, other)] for split in SPLITS}
    assert scores["train"][0] == scores["train"][1]
    assert scores["validation"][0] == scores["validation"][1] != scores["train"][0]
    assert scores["test"][0] != scores["test"][1]
    assert evaluate(Long(), config, runtime, 16) == scores["validation"][0]  # the default, used during training


def test_video_recorded_during_training_shows_validation_part(tmp_path):
    words = command(tmp_path, 8, tmp_path / "best.gif")
    assert words[words.index("--split") + 1] == "validation"


# ------------------------------------------------------------------------------------------------------------- pictures


def test_pictures_and_text_mark_the_part_in_sample_in_orange(config):
    for split in SPLITS:
        env = build(config.with_split(split))
        label = {"train": "training part, IN SAMPLE", "validation": "validation part", "test": "out of sample"}[split]
        assert label in env.render_title(0)
        assert label in env.render_text(0)
        marked = (env.render(0)[190:215, 400:] == ORANGE).all(axis=-1).any()
        assert marked == (split == "train")


def test_eval_and_play_print_part_symbol_and_dates_of_held_out_part(tmp_path, config, capsys):
    words = ["trading-lstm", "--smoke", "--data", config.data[0], "run.total_samples=512", "run.save_every=none"]
    assert main(["train", *words, "--run.runs-dir", str(tmp_path), "--run.name", "run"]) == 0
    capsys.readouterr()
    run = str(tmp_path / "run")
    assert main(["eval", run, "--episodes", "8"]) == 0
    assert "prices: test part, out of sample, 1971-02-05 to 1971-05-15, 100 bars" in capsys.readouterr().out
    assert main(["eval", run, "--episodes", "8", "--split", "train"]) == 0
    assert "prices: training part, IN SAMPLE, 1970-01-01 to" in capsys.readouterr().out
    assert main(["eval", run, "--episodes", "8", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["data"] == [
        {
            "symbol": "prices",
            "part": "test part, out of sample",
            "first": "1971-02-05",
            "last": "1971-05-15",
            "bars": 100,
        }
    ]
    assert main(["play", run, "--gif", str(tmp_path / "a.gif"), "--max-steps", "3"]) == 0
    assert "prices: test part, out of sample, 1971-02-05 to" in capsys.readouterr().err
