"""The rollout buffer gives back what was written, lane by lane; the tally counts each episode once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.rollout import Episodes, Rollout, samples, take
from lockstep.trees import copy_into

sizes = st.integers(1, 4)


def filled(lanes=2, horizon=3, envs=4, trailing=(5,)):
    """A rollout in which every number says where it belongs, and those numbers [L, T, E, ...]."""
    rollout = Rollout(lanes, horizon, envs)
    wanted = torch.arange(lanes * horizon * envs * (torch.Size(trailing).numel())).view(lanes, horizon, envs, *trailing)
    for step in range(horizon):
        rollout.write(step, obs=wanted[:, step])
    return rollout, wanted


# -------------------------------------------------------------------------------------------------------------- buffers


@given(sizes, sizes, sizes, st.lists(sizes, max_size=2))
def test_what_is_written_is_read_whatever_the_sizes(lanes, horizon, envs, trailing):
    rollout, wanted = filled(lanes, horizon, envs, tuple(trailing))
    assert torch.equal(rollout["obs"], wanted)
    assert rollout.tensor("obs").dtype == wanted.dtype


def test_a_tree_is_written_leaf_by_leaf():
    rollout = Rollout(2, 3, 4)
    for step in range(3):
        rollout.write(step, obs={"a": torch.full((2, 4), step), "b": {"c": torch.full((2, 4, 2), 10.0 * step)}})
    assert rollout["obs"]["a"][:, 2].eq(2).all()
    assert rollout["obs"]["b"]["c"][:, 1].eq(10).all()
    assert rollout["obs"]["b"]["c"].shape == (2, 3, 4, 2)


def test_what_is_written_is_a_copy():
    rollout, live = Rollout(2, 1, 4), torch.zeros(2, 4)
    rollout.write(0, reward=live)
    live += 1  # a task reuses its buffers at the next step
    assert not rollout.tensor("reward").any()


def test_buffers_are_made_once_and_written_again():
    rollout, _ = filled()
    before = rollout.tensor("obs").data_ptr()
    rollout.write(0, obs=torch.zeros(2, 4, 5, dtype=torch.int64))
    assert rollout.tensor("obs").data_ptr() == before
    assert not rollout.tensor("obs")[:, 0].any()
    assert rollout.tensor("obs")[:, 1].all()


def test_a_lane_is_one_contiguous_block():
    rollout, wanted = filled()
    flat = samples(rollout["obs"])
    for lane in range(2):
        assert rollout.tensor("obs")[lane].is_contiguous()
        assert flat[lane].is_contiguous()
        assert torch.equal(flat[lane], wanted[lane].flatten(0, 1))


def test_samples_are_a_view_not_a_copy():
    rollout, _ = filled()
    flat = samples({"obs": rollout["obs"]})["obs"]
    assert flat.shape == (2, 12, 5)
    assert flat.data_ptr() == rollout.tensor("obs").data_ptr()


@given(sizes, st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32))
def test_taking_rows_is_indexing_lane_by_lane(lanes, count, wanted, seed):
    draw = torch.Generator().manual_seed(seed)
    batch = {"a": torch.randn(lanes, count, 2, generator=draw), "b": torch.randn(lanes, count, generator=draw)}
    rows = torch.randint(count, (lanes, wanted), generator=draw)
    taken = take(batch, rows)
    for name, part in taken.items():
        assert part.is_contiguous()
        assert torch.equal(part, torch.stack([batch[name][lane][rows[lane]] for lane in range(lanes)]))


def test_a_permutation_cut_in_minibatches_takes_every_sample_once():
    rollout, _ = filled()
    flat = samples(rollout["obs"])
    order = torch.stack([torch.randperm(12) for _ in range(2)])
    parts = [take(flat, rows) for rows in order.split(4, dim=1)]
    assert [part.shape for part in parts] == [(2, 4, 5)] * 3
    for lane in range(2):
        seen = torch.cat([part[lane] for part in parts])
        assert sorted(seen[:, 0].tolist()) == sorted(flat[lane, :, 0].tolist())


# ------------------------------------------------------------------------------------------------------------- episodes


def tally_slowly(rollouts):
    """Returns and lengths of the episodes that ended, by rollout and lane: one environment after another."""
    lanes, _, envs = rollouts[0][0].shape
    running = {(lane, env): [0.0, 0] for lane in range(lanes) for env in range(envs)}
    result = []
    for rewards, ended in rollouts:
        table = [[0.0, 0, 0] for _ in range(lanes)]
        for (lane, env), state in running.items():
            for reward, end in zip(rewards[lane, :, env].tolist(), ended[lane, :, env].tolist(), strict=True):
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
    shape = (lanes, horizon, envs)
    return [(torch.randn(shape, generator=draw), torch.rand(shape, generator=draw) < 0.3) for _ in range(count)]


def count(episodes, rewards, ended, **extras):
    return episodes.count(rewards, ended, extras).by_lane


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_episodes_are_counted_once_also_when_they_reach_over_several_rollouts(seed, number):
    rollouts, episodes = play(seed, number), Episodes(range(4, 6), 3)
    for (rewards, ended), wanted in zip(rollouts, tally_slowly(rollouts), strict=True):
        found = count(episodes, rewards, ended)
        for lane, (total, length, ends) in enumerate(wanted):
            assert found["ep_return_mean"][lane].tolist() == pytest.approx([total, ends], abs=1e-5)
            assert found["ep_length_mean"][lane].tolist() == [length, ends]


def test_two_episodes_of_one_environment_are_those_worked_by_hand():
    rewards = torch.tensor([1.0, 2, 4, 8]).view(1, 4, 1)
    ended = torch.tensor([False, True, True, False]).view(1, 4, 1)
    episodes = Episodes(range(1), 1)
    found = count(episodes, rewards, ended)
    assert found["ep_return_mean"].tolist() == [[3 + 4, 2]]
    assert found["ep_length_mean"].tolist() == [[2 + 1, 2]]
    assert (episodes.returns.item(), episodes.lengths.item()) == (8, 1)  # the one under way


def test_what_a_task_counts_is_read_only_where_an_episode_ended():
    ended = torch.tensor([False, True, True, False]).view(1, 4, 1)
    apples = torch.tensor([99.0, 2, 3, 99]).view(1, 4, 1)
    found = count(Episodes(range(1), 1), torch.zeros(1, 4, 1), ended, apples=apples)
    assert found["ep_apples_mean"].tolist() == [[5, 2]]


def test_the_tally_leaves_the_rollout_alone():
    ((rewards, ended),) = play(0, 1)
    before = rewards.clone(), ended.clone()
    count(Episodes(range(2), 3), rewards, ended)
    assert torch.equal(rewards, before[0])
    assert torch.equal(ended, before[1])


def test_episodes_under_way_go_on_after_a_restore_on_other_lanes():
    (first, second), whole = play(7, 2), Episodes(range(2), 3)
    count(whole, *first)
    moved = Episodes(range(1, 2), 3)
    copy_into(moved.state(1), {name: tensor.clone() for name, tensor in whole.state(1).items()}, "lane 1")
    wanted = count(whole, *second)
    found = count(moved, second[0][1:], second[1][1:])
    for name, table in found.items():
        assert torch.equal(table, wanted[name][1:])


def test_the_state_of_a_lane_is_live():
    episodes = Episodes(range(3, 5), 2)
    episodes.state(4)["episode_returns"].fill_(7)
    assert episodes.returns.tolist() == [[0, 0], [7, 7]]
