"""Rollout buffer contents and lane layout; episode statistics count each episode once."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.episode_statistics import EpisodeStatistics
from lockstep.data.rollout import Rollout, flatten_rollout, minibatches
from lockstep.pytree import load_into

sizes = st.integers(1, 4)


def filled(lanes=2, horizon=3, envs=4, trailing=(5,)):
    """Return a rollout whose values encode their position, and those values [T, B, ...]."""
    rollout = Rollout(horizon)
    shape = (horizon, lanes * envs, *trailing)
    wanted = torch.arange(torch.Size(shape).numel()).view(shape)
    for step in range(horizon):
        rollout.write(step, {"obs": wanted[step]})
    return rollout, wanted


# -------------------------------------------------------------------------------------------------------------- buffers


@given(sizes, sizes, sizes, st.lists(sizes, max_size=2))
def test_rollout_returns_written_values(lanes, horizon, envs, trailing):
    rollout, wanted = filled(lanes, horizon, envs, tuple(trailing))
    assert torch.equal(rollout["obs"], wanted)
    assert rollout["obs"].dtype == wanted.dtype


def test_rollout_write_of_tree_stores_each_leaf():
    rollout = Rollout(3)
    for step in range(3):
        obs = {"a": torch.full((8,), step), "b": {"c": torch.full((8, 2), 10.0 * step)}}
        rollout.write(step, {"obs": obs, "done": torch.full((8,), step == 1)})
    assert rollout["obs"]["a"][2].eq(2).all()
    assert rollout["obs"]["b"]["c"][1].eq(10).all()
    assert rollout["obs"]["b"]["c"].shape == (3, 8, 2)
    assert rollout["done"].all(1).tolist() == [False, True, False]
    assert rollout["done"].dtype == torch.bool


def test_rollout_write_copies_values():
    rollout, live = Rollout(1), torch.zeros(8)
    rollout.write(0, {"reward": live})
    live += 1  # a task reuses its buffers in the next step
    assert not rollout["reward"].any()


def test_rollout_buffers_are_allocated_once():
    rollout, _ = filled()
    before = rollout["obs"].data_ptr()
    rollout.write(0, {"obs": torch.zeros(8, 5, dtype=torch.int64)})
    assert rollout["obs"].data_ptr() == before
    assert not rollout["obs"][0].any()
    assert rollout["obs"][1].all()


def test_rollout_write_with_missing_key_is_rejected():
    rollout = Rollout(2)
    rollout.write(0, {"reward": torch.zeros(4), "value": torch.zeros(4)})
    with pytest.raises(RuntimeError):
        rollout.write(1, {"reward": torch.zeros(4)})


@given(sizes, sizes, sizes, st.lists(sizes, max_size=2))
def test_flatten_rollout_makes_lanes_contiguous_blocks(lanes, horizon, envs, trailing):
    rollout, wanted = filled(lanes, horizon, envs, tuple(trailing))
    flat = flatten_rollout(rollout["obs"], lanes)
    assert flat.shape == (lanes * horizon * envs, *trailing)
    for lane, block in enumerate(flat.chunk(lanes)):
        assert block.is_contiguous()
        assert torch.equal(block, wanted[:, lane * envs : (lane + 1) * envs].flatten(0, 1))


def test_flatten_rollout_of_tree_flattens_each_leaf():
    rollout, wanted = filled()
    flat = flatten_rollout({"obs": rollout["obs"], "inner": {"first": rollout["obs"][..., 0]}}, 2)
    assert flat["obs"].shape == (24, 5)
    assert torch.equal(flat["inner"]["first"], flatten_rollout(wanted, 2)[:, 0])


def test_flatten_rollout_is_independent_of_host_process():
    rollout, _ = filled(lanes=3)
    alone = Rollout(3)
    for step in range(3):
        alone.write(step, {"obs": rollout["obs"][step, 4:8]})
    assert torch.equal(flatten_rollout(alone["obs"], 1), flatten_rollout(rollout["obs"], 3)[12:24])


@given(sizes, st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32))
def test_minibatches_match_per_lane_indexing(lanes, count, size, seed):
    draw = torch.Generator().manual_seed(seed)
    batch = {"a": torch.randn(lanes, count, 2, generator=draw), "b": torch.randn(lanes, count, generator=draw)}
    flat = {name: part.flatten(0, 1) for name, part in batch.items()}
    order = torch.stack([torch.randperm(count, generator=draw) for _ in range(lanes)])
    for minibatch, rows in zip(minibatches(flat, order, size), order.split(size, dim=1), strict=True):
        for name, part in minibatch.items():
            assert part.is_contiguous()
            assert torch.equal(part, torch.cat([batch[name][lane][rows[lane]] for lane in range(lanes)]))


def test_minibatches_of_permutation_cover_every_sample_once():
    rollout, _ = filled()
    flat = flatten_rollout(rollout["obs"], 2)
    order = torch.stack([torch.randperm(12) for _ in range(2)])
    parts = list(minibatches(flat, order, 4))
    assert [part.shape for part in parts] == [(8, 5)] * 3
    for lane in range(2):
        seen = torch.cat([part.chunk(2)[lane] for part in parts])
        assert sorted(seen[:, 0].tolist()) == sorted(flat.chunk(2)[lane][:, 0].tolist())


# ------------------------------------------------------------------------------------------------------------- episodes


def reference_statistics(rollouts, lanes=2):
    """Return [sum of returns, sum of lengths, count] of ended episodes by rollout and lane, with a plain loop."""
    envs = rollouts[0][0].shape[1] // lanes
    running = {(lane, env): [0.0, 0] for lane in range(lanes) for env in range(envs)}
    result = []
    for rewards, ended in rollouts:
        table = [[0.0, 0, 0] for _ in range(lanes)]
        for (lane, env), state in running.items():
            column = lane * envs + env
            for reward, end in zip(rewards[:, column].tolist(), ended[:, column].tolist(), strict=True):
                state[0] += reward
                state[1] += 1
                if end:
                    table[lane][0] += state[0]
                    table[lane][1] += state[1]
                    table[lane][2] += 1
                    state[:] = [0.0, 0]
        result.append(table)
    return result


def play(seed, count, lanes=2, horizon=6, envs=3):
    draw = torch.Generator().manual_seed(seed)
    shape = (horizon, lanes * envs)
    return [(torch.randn(shape, generator=draw), torch.rand(shape, generator=draw) < 0.3) for _ in range(count)]


def count(episodes, rewards, ended, **extras):
    return episodes.count(rewards, ended, extras).per_lane


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_episodes_spanning_rollouts_are_counted_once(seed, number):
    rollouts, episodes = play(seed, number), EpisodeStatistics(range(4, 6), 3)
    for (rewards, ended), wanted in zip(rollouts, reference_statistics(rollouts), strict=True):
        found = count(episodes, rewards, ended)
        for lane, (total, length, ends) in enumerate(wanted):
            assert found["ep_return_mean"][lane].tolist() == pytest.approx([total, ends], abs=1e-5)
            assert found["ep_length_mean"][lane].tolist() == [length, ends]


def test_two_episodes_in_one_rollout_match_manual_values():
    rewards = torch.tensor([1.0, 2, 4, 8]).view(4, 1)
    ended = torch.tensor([False, True, True, False]).view(4, 1)
    episodes = EpisodeStatistics(range(1), 1)
    found = count(episodes, rewards, ended)
    assert found["ep_return_mean"].tolist() == [[3 + 4, 2]]
    assert found["ep_length_mean"].tolist() == [[2 + 1, 2]]
    assert (episodes.returns.item(), episodes.lengths.item()) == (8, 1)  # the running episode


def test_nonfinite_return_is_excluded_from_mean():
    rewards = torch.tensor([math.nan, 2, 4, math.inf, 8]).view(5, 1)
    ended = torch.tensor([False, True, True, True, True]).view(5, 1)
    found = count(EpisodeStatistics(range(1), 1), rewards, ended, apples=torch.ones(5, 1))
    assert found["ep_return_mean"].tolist() == [[4 + 8, 2]]
    assert found["ep_length_mean"].tolist() == [[2 + 1 + 1 + 1, 4]]
    assert found["ep_apples_mean"].tolist() == [[4, 4]]


def test_task_extras_are_read_only_at_episode_end():
    ended = torch.tensor([False, True, True, False]).view(4, 1)
    apples = torch.tensor([99.0, 2, 3, 99]).view(4, 1)
    found = count(EpisodeStatistics(range(1), 1), torch.zeros(4, 1), ended, apples=apples)
    assert found["ep_apples_mean"].tolist() == [[5, 2]]


def test_count_does_not_modify_rollout():
    ((rewards, ended),) = play(0, 1)
    before = rewards.clone(), ended.clone()
    count(EpisodeStatistics(range(2), 3), rewards, ended)
    assert torch.equal(rewards, before[0])
    assert torch.equal(ended, before[1])


def test_running_episodes_continue_after_restore_on_other_lanes():
    (first, second), whole = play(7, 2), EpisodeStatistics(range(2), 3)
    count(whole, *first)
    moved = EpisodeStatistics(range(1, 2), 3)
    load_into(moved.lane_state(1), {name: tensor.clone() for name, tensor in whole.lane_state(1).items()}, "lane 1")
    wanted = count(whole, *second)
    found = count(moved, second[0][:, 3:], second[1][:, 3:])
    for name, table in found.items():
        assert torch.equal(table, wanted[name][1:])


def test_lane_state_is_a_view():
    episodes = EpisodeStatistics(range(3, 5), 2)
    episodes.lane_state(4)["episode_returns"].fill_(7)
    assert episodes.returns.tolist() == [[0, 0], [7, 7]]
