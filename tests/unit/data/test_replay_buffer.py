"""Replay buffer: contents, sampling by lane and counter, n-step targets, state and slices within episodes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import ConfigError
from lockstep.data.replay_buffer import Replay, outcome
from lockstep.lanes import Lanes
from lockstep.protocols import AppendOnlyTensor, Step

LANES, ENVS = 4, 2


def step_values(time, lanes=range(LANES), envs=ENVS, agents=(), terminated=(), truncated=()):
    """Return a step whose values encode their position: 1,000 x time + 10 x lane + environment."""
    where = torch.tensor([1000.0 * time + 10 * lane + env for lane in lanes for env in range(envs)])
    ends = {"terminated": terminated, "truncated": truncated}
    return {
        "obs": {"a": where.unsqueeze(-1).repeat(1, 3), "b": (where % 256).byte()},
        "action": where.long(),
        "reward": where.view(-1, *[1] * len(agents)).expand(-1, *agents).clone(),
        **{name: torch.tensor([env in chosen for _ in lanes for env in range(envs)]) for name, chosen in ends.items()},
        "next_obs": {"a": (where + 0.5).unsqueeze(-1).repeat(1, 3), "b": (where % 256).byte()},
    }


def filled(rows, steps, local=range(LANES), seed=0, **more):
    replay = Replay(rows * LANES * ENVS, Lanes(LANES, local, seed), step_values(0, local, **more))
    for time in range(steps):
        replay.write(step_values(time, local, **more))
    return replay


def plain(replay, lane):
    """Return the state of a lane with plain tensors, as it is loaded."""
    return {name: x.all() if isinstance(x, AppendOnlyTensor) else x for name, x in replay.lane_state(lane).items()}


# ------------------------------------------------------------------------------------------------- writing and sampling


@given(st.integers(1, 6), st.integers(1, 15))
def test_sample_returns_written_transitions_still_in_buffer(rows, steps):
    replay = filled(rows, steps)
    batch = replay.sample(0, 40)
    times, places = batch["action"] // 1000, batch["action"] % 1000
    assert times.min() >= max(0, steps - rows)
    assert times.max() < steps
    assert torch.equal(places // 10, torch.arange(LANES).repeat_interleave(40))  # ordered by lane
    assert torch.equal(batch["obs"]["a"][:, 1], batch["action"].float())
    assert torch.equal(batch["obs"]["b"], (batch["action"] % 256).byte())
    assert torch.equal(batch["next_obs"]["a"][:, 0], batch["action"] + 0.5)
    assert torch.equal(batch["reward"], batch["action"].float())
    assert batch["discount"].eq(1.0).all()


def test_sample_is_uniform_over_stored_transitions():
    counts = torch.zeros(LANES, 5, ENVS)
    replay = filled(rows=5, steps=8)
    for counter in range(100):
        action = replay.sample(counter, 50)["action"]
        counts.index_put_((action % 1000 // 10, action // 1000 - 3, action % 10), torch.ones(()), accumulate=True)
    expected = counts.sum() / counts.numel()
    assert ((counts - expected) ** 2 / expected).sum() < 80  # 39 degrees of freedom: 99.99 %
    assert counts.sum() == 100 * 50 * LANES


def test_sample_depends_only_on_seed_lane_and_counter():
    whole = filled(5, 8).sample(3, 20)["action"].view(LANES, 20)
    for local in (range(1), range(1, 4), range(2, 4)):
        part = filled(5, 8, local).sample(3, 20)["action"].view(len(local), 20)
        assert torch.equal(part, whole[local.start : local.stop])
    assert torch.equal(filled(5, 8).sample(3, 20)["action"].view(LANES, 20), whole)
    assert not torch.equal(filled(5, 8).sample(4, 20)["action"].view(LANES, 20), whole)
    assert not torch.equal(filled(5, 8, seed=1).sample(3, 20)["action"].view(LANES, 20), whole)
    ages = whole // 1000 * 10 + whole % 10
    assert len({tuple(row.tolist()) for row in ages}) == LANES  # each lane has its own random stream


@pytest.mark.parametrize("local", [range(LANES), range(1)])
def test_count_is_global_over_all_lanes(local):
    replay, counts = filled(3, 0, local), []
    for time in range(5):
        counts.append(replay.count)
        replay.write(step_values(time, local))
    assert counts == [0, 8, 16, 24, 24]


def test_write_copies_values_and_allocates_once():
    replay = filled(3, 1)
    before, values = replay.buffers["obs"]["a"].data_ptr(), step_values(1)
    replay.write(values)
    values["obs"]["a"] += 1e6
    for time in range(2, 9):
        replay.write(step_values(time))
    assert replay.buffers["obs"]["a"].data_ptr() == before
    assert replay.buffers["obs"]["a"].max() < 1e5


def test_outcome_uses_final_observation_at_episode_end():
    following, final = torch.full((3, 2), 1.0), torch.full((3, 2), 9.0)
    terminated, truncated = torch.tensor([True, False, False]), torch.tensor([False, True, False])
    step = Step(following, torch.ones(3), terminated, truncated, final, {})
    assert outcome(step)["next_obs"][:, 0].tolist() == [9, 9, 1]
    assert outcome(step)["reward"].shape == (3,)
    assert outcome(step._replace(agent_reward=torch.ones(3, 4)))["reward"].shape == (3, 4)


def test_sample_from_empty_buffer_is_rejected():
    with pytest.raises(ValueError, match="nothing to sample from"):
        filled(3, 0).sample(0, 1)


def test_buffer_size_below_one_step_is_rejected_and_others_rounded_down():
    example = step_values(0)
    with pytest.raises(ConfigError, match="Use 8 or more"):
        Replay(7, Lanes(LANES, range(LANES), 0), example)
    assert Replay(23, Lanes(LANES, range(LANES), 0), example).rows == 2


# ------------------------------------------------------------------------------------------------------- n-step targets


def scripted(events, rows=10, agents=()):
    """Return a buffer with one environment per lane and episode ends `events` by time. Rewards are 1, 2, 4, 8, ..."""
    replay = Replay(rows * LANES, Lanes(LANES, range(LANES), 0), step_values(0, envs=1, agents=agents))
    for time, event in enumerate(events):
        values = step_values(time, envs=1, agents=agents)
        values["reward"].fill_(2.0**time)
        values["terminated"].fill_(event == "terminated")
        values["truncated"].fill_(event == "truncated")
        replay.write(values)
    return replay


def targets(replay, steps, discount=0.5):
    """Return [reward, time of the next observation, discount] by time; check that all lanes agree."""
    batch = replay.sample(0, 200, steps, discount)
    told = zip(
        (batch["action"] // 1000).tolist(),
        batch["reward"].tolist(),
        (batch["next_obs"]["a"][:, 0] // 1000).long().tolist(),
        batch["discount"].tolist(),
        strict=True,
    )
    found = {}
    for time, *target in told:
        assert found.setdefault(time, target) == target
    return [found[time] for time in sorted(found)]


def test_n_step_reward_is_discounted_sum_with_bootstrap():
    assert targets(scripted([""] * 5), steps=2)[:4] == [[2.0, 1, 0.25], [4.0, 2, 0.25], [8.0, 3, 0.25], [16.0, 4, 0.25]]
    assert targets(scripted([""] * 5), steps=3)[:2] == [[3.0, 2, 0.125], [6.0, 3, 0.125]]
    assert targets(scripted([""] * 5), steps=1)[:2] == [[1.0, 0, 0.5], [2.0, 1, 0.5]]


def test_n_step_termination_ends_sum_without_bootstrap():
    ended = targets(scripted(["", "", "terminated", "", ""]), steps=3)
    assert ended[0] == [3.0, 2, 0.0]
    assert ended[1] == [4.0, 2, 0.0]
    assert ended[2] == [4.0, 2, 0.0]
    assert ended[3] == [16.0, 4, 0.25]


def test_n_step_truncation_bootstraps_from_final_observation():
    cut = targets(scripted(["", "", "truncated", "", ""]), steps=3)
    assert cut[0] == [3.0, 2, 0.125]
    assert cut[1] == [4.0, 2, 0.25]
    assert cut[2] == [4.0, 2, 0.5]


def test_n_step_sum_stops_at_newest_step_of_ring():
    # Seven steps in a ring of five: the slot after the newest step holds the oldest one.
    rolled = targets(scripted([""] * 7, rows=5), steps=3)
    assert [following for _, following, _ in rolled] == [4, 5, 6, 6, 6]
    assert [weight for *_, weight in rolled] == [0.125, 0.125, 0.125, 0.25, 0.5]
    assert rolled[-1] == [64.0, 6, 0.5]
    assert rolled[-2] == [32.0 + 32.0, 6, 0.25]


@given(
    st.lists(st.sampled_from(["", "", "", "terminated", "truncated"]), min_size=1, max_size=14),
    st.integers(1, 8),
    st.integers(1, 6),
    st.floats(0.1, 1.0),
)
def test_n_step_targets_match_definition(events, rows, steps, discount):
    found = targets(scripted(events, rows), steps, discount)
    for time, (reward, following, weight) in zip(range(max(0, len(events) - rows), len(events)), found, strict=True):
        total, factor, now = 0.0, 1.0, time
        while True:
            total, factor = total + factor * 2.0**now, factor * discount
            if events[now] or now - time + 1 == steps or now == len(events) - 1:
                break
            now += 1
        assert reward == pytest.approx(total, rel=1e-6)
        assert following == now
        assert weight == pytest.approx(0.0 if events[now] == "terminated" else factor, rel=1e-6)


def test_n_step_rewards_are_summed_per_agent():
    replay = Replay(40, Lanes(LANES, range(LANES), 0), step_values(0, envs=1, agents=(3,)))
    for time in range(4):
        values = step_values(time, envs=1, agents=(3,))
        values["reward"] = torch.tensor([1.0, 10.0, 100.0]).repeat(LANES, 1)
        replay.write(values)
    batch = replay.sample(0, 50, steps=2, discount=0.5)
    assert batch["reward"].shape == (50 * LANES, 3)
    full = batch["discount"] == 0.25
    assert batch["reward"][full].unique(dim=0).tolist() == [[1.5, 15.0, 150.0]]


# ---------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("steps", [0, 3, 5, 12])
def test_loaded_lanes_continue_on_another_process(steps):
    whole = filled(5, steps)
    saved = {lane: plain(whole, lane) for lane in range(LANES)}
    for local in (range(1), range(1, 4)):
        part = filled(5, 7, local)  # other content, which is overwritten
        for lane in local:
            part.load_lane_state(lane, saved[lane])
            for name, tensor in plain(part, lane).items():
                assert torch.equal(tensor, saved[lane][name]), name
        for time in range(steps, steps + 4):
            part.write(step_values(time, local))
        expected = filled(5, steps + 4).sample(9, 30)
        mine = slice(30 * local.start, 30 * local.stop)
        assert torch.equal(part.sample(9, 30)["action"], expected["action"][mine])


def test_append_only_rows_are_numbered_from_start_of_run():
    rows = filled(5, 12).lane_state(1)["action"]
    assert (rows.first, rows.stop) == (7, 12)
    for start in range(7, 13):
        for stop in range(start, 13):
            assert (rows.read(start, stop)[:, 0] // 1000).tolist() == list(range(start, stop))
    first = rows.read(7, 12)
    first.zero_()
    assert rows.all().any()  # the result of read is a copy


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("action"),
        lambda state: state.update(more=torch.zeros(1)),
        lambda state: state.update(action=state["action"][:-1]),
        lambda state: state.update(action=state["action"].int()),
        lambda state: state.update(action=state["action"][:, :1]),
        lambda state: state.update(written=torch.tensor(4)),
        lambda state: state.update(written=torch.tensor(-1)),
        lambda state: state.update(written=torch.tensor(2**63 - 1)),
        lambda state: state.update(written=torch.tensor([9, 9])),
    ],
)
def test_load_of_mismatched_state_is_rejected_without_changes(change):
    replay = filled(5, 9)
    before = plain(replay, 1)
    state = plain(filled(5, 12), 1)
    change(state)
    with pytest.raises(ValueError, match="replay, lane 1"):
        replay.load_lane_state(1, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in plain(replay, 1).items())


def test_lanes_with_different_step_counts_are_rejected():
    replay = filled(5, 3)
    replay.load_lane_state(2, plain(filled(5, 2), 2))
    with pytest.raises(ValueError, match=r"written \[3, 3, 2, 3\] steps"):
        replay.sample(0, 1)


# ------------------------------------------------------------------------------------------------------------- slices


def with_ends(rows, steps, every, local=range(LANES)):
    """Return a buffer with episodes of `every` steps in environment 0 and one more in environment 1.

    Episodes terminate and truncate alternately.
    """
    replay = Replay(rows * LANES * ENVS, Lanes(LANES, local, 0), step_values(0, local))
    for time in range(steps):
        over = [env for env in range(ENVS) if time % (every + env) == every + env - 1]
        replay.write(step_values(time, local, **{("terminated", "truncated")[time % 2]: over}))
    return replay


@settings(max_examples=30)
@given(st.integers(9, 15), st.integers(9, 30), st.integers(3, 5))
def test_slices_are_consecutive_steps_of_one_episode(rows, steps, every):
    batch = with_ends(rows, steps, every).slices(1, 25, 3)
    where = batch["action"]  # [N, 3]
    assert batch["whole"].all()
    assert where.shape == (LANES * 25, 3)
    times, env = where // 1000, where[:, 0] % 10
    assert torch.equal(where[:, 1:], where[:, :1] + torch.tensor([1000, 2000]))  # consecutive steps of one environment
    assert times.min() >= max(0, steps - rows)
    assert times.max() < steps
    assert torch.equal(times[:, 0] // (every + env), times[:, -1] // (every + env))  # in one episode
    assert torch.equal(batch["obs"]["a"][:, :-1, 0], where.float())
    assert torch.equal(batch["obs"]["a"][:, -1, 0], where[:, -1] + 0.5)  # the final, not the reset observation
    assert "next_obs" not in batch


def test_slices_are_sampled_uniformly():
    replay, counts = with_ends(12, 12, 4), torch.zeros(12)
    for counter in range(200):
        starts = replay.slices(counter, 10, 3)["action"][:, 0]
        counts += torch.bincount(starts[starts % 10 == 0] // 1000, minlength=12)
    drawn = counts[counts > 0]
    assert counts.nonzero().flatten().tolist() == [0, 1, 4, 5, 8, 9]  # environment 0 has episodes of four steps
    assert drawn.max() / drawn.min() < 1.2


def test_slices_are_found_when_long_episodes_are_rare():
    replay = Replay(400 * LANES * ENVS, Lanes(LANES, range(LANES), 0), step_values(0))
    for time in range(400):
        replay.write(step_values(time, terminated=() if 200 <= time < 203 else range(ENVS)))
    starts = replay.slices(0, 6, 3)["action"][:, 0] // 1000
    assert set(starts.tolist()) <= {200, 201}


def test_slices_are_independent_of_host_process():
    whole, part = with_ends(9, 20, 4), with_ends(9, 20, 4, range(2, 3))
    assert torch.equal(whole.slices(7, 5, 3)["action"][10:15], part.slices(7, 5, 3)["action"])


def test_slices_without_long_enough_episode_are_not_whole():
    assert with_ends(9, 20, 5).slices(0, 2, 5)["whole"].all()
    batch = with_ends(9, 20, 3).slices(0, 2, 5)
    assert not batch["whole"].any()
    assert batch["action"].shape == (2 * LANES, 5)
    with pytest.raises(ValueError, match="there are no 3 steps to sample"):
        filled(5, 2).slices(0, 1, 3)
