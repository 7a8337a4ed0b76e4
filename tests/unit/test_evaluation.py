"""Vectorized evaluation equals a plain Python loop bit for bit."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from helpers.toy_envs import ToyWorlds, ToyWorldsConfig
from lockstep.config import DEFAULT_EVAL_EPISODES, RunConfig
from lockstep.distributed import Runtime
from lockstep.evaluation import (
    Scoreboard,
    _whole_rounds,
    evaluate,
    evaluate_during_training,
    evaluation_interval,
)
from lockstep.lanes import Lanes
from lockstep.rng import stable_hash
from lockstep.tasks.snake.env import SnakeConfig

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class CountedConfig(ToyWorldsConfig):
    """Toy worlds with episode info: an integer, a value that is NaN in some episodes, and one that is always NaN."""

    def build(self, lanes, device):
        return Counted(self, lanes, device)


class Counted(ToyWorlds):
    def step(self, action):
        step = super().step(action)
        ended, last = step.terminated | step.truncated, step.final_obs[:, 0]
        sometimes = torch.where(ended & (last > 0), last, torch.nan)
        never = torch.full_like(last, torch.nan)
        return step._replace(episode_info={"number": self._taken[:, 0].clone(), "sometimes": sometimes, "never": never})


class Walker:
    """A recurrent policy: actions depend on the observation and on the number of steps since the episode began."""

    def __init__(self, discrete):
        self.discrete = discrete

    def initial_state(self, count):
        return {"age": torch.zeros(count)}

    def act(self, obs, memory):
        seen = obs.flatten(1).float()
        mixed = (seen * torch.arange(1.0, seen.shape[1] + 1)).sum(1) + memory["age"] // 3
        action = (mixed % 4).long() if self.discrete else mixed.sin().unsqueeze(1)
        return action, {"age": memory["age"] + 1}


def plain(policy, task, count, seed, episodes):
    """Run episodes in a Python loop over environments, on one process with `count` lanes."""
    lanes = Lanes(count, range(count), stable_hash(seed, "evaluation") & (2**63 - 1))
    envs = math.ceil(min(episodes, max(task.num_envs, count)) / count) * count
    env = replace(task, num_envs=envs).build(lanes, CPU)
    number, totals, lengths = list(range(envs)), [0.0] * envs, [0] * envs
    fresh, obs, found = policy.initial_state(envs)["age"], env.reset(), {}
    age = fresh
    while min(number) < episodes:
        action, after = policy.act(obs, {"age": age})
        step = env.step(action)
        obs, age = step.obs, after["age"].clone()
        for index in range(envs):
            totals[index] += float(step.reward[index])
            lengths[index] += 1
            if step.terminated[index] or step.truncated[index]:
                if number[index] < episodes:
                    extras = {name: float(values[index]) for name, values in step.episode_info.items()}
                    found[number[index]] = {"return": totals[index], "length": float(lengths[index]), **extras}
                    number[index] += envs
                totals[index], lengths[index], age[index] = 0.0, 0, fresh[index]
    ordered = [found[number] for number in sorted(found)]
    summary = {}
    for name in ordered[0]:
        values = [result[name] for result in ordered if not math.isnan(result[name])]
        if values:
            summary[f"{name}_mean"] = sum(values) / len(values)
    spread = sum((result["return"] - summary["return_mean"]) ** 2 for result in ordered) / len(ordered)
    return summary | {"return_std": math.sqrt(spread), "episodes": float(len(ordered))}


TASKS = {
    "snake": SnakeConfig(size=5, num_envs=8, max_steps_without_food=9),
    "snake of torch operations": SnakeConfig(size=5, num_envs=8, max_steps_without_food=9, backend="torch"),
    "toys that count": CountedConfig(num_envs=8, length=7),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(("lanes", "episodes"), [(1, 8), (2, 30), (4, 3), (8, 101)])
def test_evaluation_equals_plain_loop_bit_for_bit(name, lanes, episodes):
    task, policy = TASKS[name], Walker(discrete="snake" in name)
    runtime = Runtime.single_process(RunConfig(lanes=lanes, seed=5))
    ours, theirs = evaluate(policy, task, runtime, episodes), plain(policy, task, lanes, 5, episodes)
    assert ours == theirs
    assert "never_mean" not in ours
    assert ours["episodes"] == episodes


def test_interrupted_evaluation_returns_none():
    runtime = Runtime.single_process(RunConfig(lanes=2))

    class Stops(Walker):
        def act(self, obs, memory):
            runtime.status.stop_requested = True
            return super().act(obs, memory)

    assert evaluate(Stops(discrete=True), TASKS["snake"], runtime, 8) is None


def test_scoreboard_without_episodes_is_done_and_empty():
    board = Scoreboard(torch.arange(6, 8), envs=8, episodes=5, device=CPU)
    assert board.done()
    assert board.results() == []


LONG = ToyWorldsConfig(num_envs=32, length=50, ends=0.0)
"""Every episode has 50 steps."""


@pytest.mark.parametrize(
    ("eval_every", "total", "last", "episodes"),
    [
        (1_000, 10**6, False, 8),  # one episode per lane, however small the interval is
        (8 * 50 * 25, 10**6, False, 16),  # two episodes per lane fit into 8 % of the interval
        (10**9, 10**9, False, DEFAULT_EVAL_EPISODES),
        (1_000, 10_000, True, 8),
        (1_000, 8 * 50 * 50, True, 16),  # two episodes per lane fit into 4 % of the run
        (1_000, 10**6, True, DEFAULT_EVAL_EPISODES),
    ],
)
def test_default_evaluation_is_limited_to_a_share_of_the_samples(eval_every, total, last, episodes):
    run = RunConfig(lanes=8, eval_every=eval_every, total_samples=total)
    scores = evaluate_during_training(Walker(discrete=False), LONG, Runtime.single_process(run), run, 0.08, last)
    assert scores["episodes"] == episodes
    steps = 0.04 * total if last else 0.08 * eval_every
    assert episodes == 8 or episodes * scores["length_mean"] <= steps


@pytest.mark.parametrize(
    ("settings", "limit", "interval"),
    [
        ({"eval_every": 50_000}, 1_000, 100_000),  # 8 lanes x 1,000 steps are 8 % of 100,000
        ({"eval_every": 50_000}, 500, 50_000),
        ({"eval_every": 50_000}, None, 50_000),
        ({"eval_every": 50_000, "eval_episodes": 32}, 1_000, 50_000),  # as the user asks
        ({"eval_every": None}, 1_000, None),
    ],
)
def test_evaluation_interval_grows_with_the_length_of_episodes(settings, limit, interval):
    run = RunConfig(lanes=8, **settings)
    runtime = Runtime.single_process(run)
    assert evaluation_interval(SimpleNamespace(max_episode_steps=limit), run, runtime, 0.08) == interval
    assert bool(runtime.pending_messages) == (interval == 100_000)


def test_explicit_eval_episodes_are_all_played():
    run = RunConfig(lanes=8, eval_every=10, eval_episodes=19)
    assert evaluate_during_training(Walker(False), LONG, Runtime.single_process(run), run, 0.1, False)["episodes"] == 19


def test_limited_evaluation_plays_every_started_episode_to_its_end():
    task = ToyWorldsConfig(num_envs=8, length=30, ends=0.1)
    runtime = Runtime.single_process(RunConfig(lanes=2, seed=5))
    full, limited = (evaluate(Walker(False), task, runtime, 16, max_steps=steps) for steps in (10**6, 40))
    assert 2 <= limited["episodes"] < full["episodes"] == 16


def test_limited_episodes_do_not_depend_on_the_process_of_an_environment():
    ends = torch.rand(200, 8, generator=torch.Generator().manual_seed(0)) < 0.1

    def play(first, stop):
        board = Scoreboard(torch.arange(first, stop), envs=8, episodes=32, device=CPU, max_steps=40)
        for ended in ends:
            if not board.done():
                board.count(torch.ones(stop - first), ended[first:stop], {})
        return board.results()

    together = play(0, 8)
    assert 8 < len(together) < 32
    assert sorted(together, key=str) == sorted(play(0, 3) + play(3, 8), key=str)


@pytest.mark.parametrize(
    ("played", "episodes", "counted"),
    [
        ([0, 1, 2, 3, 4, 6, 8], 10, [0, 1, 2, 3]),  # environment 0 had short episodes and played more of them
        ([0, 1], 10, [0, 1]),
        ([0, 1, 2], 3, [0, 1, 2]),  # the last round is smaller than the number of environments
    ],
)
def test_limited_evaluation_counts_whole_rounds_of_two_environments(played, episodes, counted):
    results = [(number, {"return": 1.0}) for number in played]
    assert [number for number, _ in _whole_rounds(results, envs=2, episodes=episodes)] == counted
