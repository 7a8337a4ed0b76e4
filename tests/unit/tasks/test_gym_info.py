"""Keys of the last `info` of Gymnasium episodes: read once per episode, averaged over all of them, and logged."""

import contextlib
import json
import math
import os
import sys

import pytest
import torch

import lockstep
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.tasks.gym.env import GymConfig
from lockstep.tasks.gym.sync_envs import make, to_number

GOAL = "helpers.gym_toys:LockstepGoal-v0"
KEYS = ("is_success", "distance", "name", "infinite", "pair", "missing")
SMALL = {"rollout_steps": 8, "batch_size": 64, "epochs": 1}
RUN = {"total_samples": 192, "log_every": 128, "eval_every": 192, "eval_episodes": 8, "record_video": False}
RUN |= {"save_every": 64, "device": "cpu", "reduction": "exact"}


def last_infos(envs, steps):
    """Step and return the episode info of ended episodes: step, row and values by key."""
    found = []
    for t in range(steps):
        step = envs.step(torch.zeros(envs.num_envs, dtype=torch.int64))
        ended = (step.terminated | step.truncated).nonzero().flatten().tolist()
        found += [(t, row, {key: values[row].item() for key, values in step.episode_info.items()}) for row in ended]
    return found


def play_plainly(seed):
    """Play one episode in plain Gymnasium and return its length and its last info."""
    env = make(GOAL, {})
    env.reset(seed=seed)
    for length in range(1, 9):
        *_, terminated, truncated, info = env.step(0)
        if terminated or truncated:
            return length, info
    raise AssertionError("the episode did not end")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.skipif(os.name != "posix", reason="POSIX"))])
def test_episode_info_is_last_info_of_each_episode(workers):
    config = GymConfig(id=GOAL, num_envs=4, info_keys=KEYS, num_workers=workers)
    with contextlib.closing(config.build(Lanes(4, range(4), 5), torch.device("cpu"))) as envs:
        seeds = [envs._seed(row) for row in range(4)]
        found = {row: (t + 1, values) for t, row, values in reversed(last_infos(envs, 3))}  # the first episode of each
    assert found.keys() == set(range(4))
    for row, seed in enumerate(seeds):
        length, info = play_plainly(seed)
        steps, values = found[row]
        assert (steps, values["is_success"]) == (length, float(info["is_success"]))
        assert values["distance"] == pytest.approx(float(info.get("distance", [math.nan])[0]), nan_ok=True)
        assert all(math.isnan(values[key]) for key in ("name", "infinite", "pair", "missing"))


@pytest.mark.parametrize(
    ("value", "number"), [(True, 1.0), (3, 3.0), ("3", math.nan), (None, math.nan), ([1], math.nan)]
)
def test_only_numbers_and_booleans_are_read(value, number):
    assert to_number(value) == pytest.approx(number, nan_ok=True)


@pytest.mark.parametrize("key", ["reward", "terminated", "length"])
def test_reserved_info_key_is_rejected(key):
    with pytest.raises(ConfigError, match=rf"task.info_keys contains {key}"):
        GymConfig(info_keys=("is_success", key))


def train(directory, name, id=GOAL, **options):
    return lockstep.train(
        "gym-ppo",
        task={"id": id, "num_envs": 8, **options.pop("task", {})},
        algo=SMALL,
        run=RUN | {"runs_dir": str(directory), "name": name},
        **options,
    )


def test_info_of_unreported_key_changes_neither_log_nor_checkpoint(tmp_path):
    runs = [train(tmp_path, name, "CartPole-v1", task={"info_keys": keys}) for name, keys in (("a", ()), ("b", KEYS))]
    # The first checkpoint is saved before the first log entry, which clears the sums.
    clocks = [json.loads((run.checkpoints[0] / "train_state.json").read_text())["clock"] for run in runs]
    assert clocks[0] == clocks[1]
    assert clocks[0]["metric_sums"]
    assert not any("success" in name for entry in runs[1].metrics for name in entry)


@pytest.mark.distributed
def test_info_means_are_equal_on_any_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # workers import the environment from `helpers`
    one, two = (train(tmp_path, f"run{procs}", procs=procs, task={"info_keys": KEYS}) for procs in (1, 2))

    def means(run):
        return [{k: v for k, v in entry.items() if "success" in k or "distance" in k} for entry in run.metrics]

    assert means(one) == means(two)
    logged = {name: value for entry in means(one) for name, value in entry.items()}
    assert logged.keys() == {
        *("rollout/ep_is_success_mean", "rollout/ep_distance_mean", "eval/is_success_mean", "eval/distance_mean")
    }
    assert all(0 < value < 1 for value in logged.values())
