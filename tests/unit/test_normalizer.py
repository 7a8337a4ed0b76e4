"""Running moments are those of everything seen, whoever saw it, and stand still while a rollout is collected."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from lockstep.nn.normalization import ObservationNormalizer, RunningMeanStd
from lockstep.pytree import load_into

CPU = torch.device("cpu")


def seen(seed, lanes=2, samples=5, features=3):
    """What some lanes saw in one iteration, [L, N, D]."""
    return torch.randn(lanes, samples, features, generator=torch.Generator().manual_seed(seed)) * 3 + 2


def pool(table):
    return table.sum(0)


@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 6))
def test_moments_are_those_of_everything_seen(seeds, lanes, samples):
    moments, everything = RunningMeanStd(3, CPU), []
    for seed in seeds:
        batch = seen(seed, lanes, samples)
        moments.update(pool(RunningMeanStd.batch_stats(batch)))
        everything.append(batch.reshape(-1, 3).double().numpy())
    everything = np.concatenate(everything)
    mean, std = moments.mean_and_std()
    np.testing.assert_allclose(mean, everything.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(std, np.sqrt(everything.var(0) + 1e-8), rtol=1e-4, atol=1e-4)
    assert moments.sums[-1] == len(everything)


def test_moments_of_nothing_leave_everything_as_it_is():
    mean, std = RunningMeanStd(2, CPU).mean_and_std()
    assert (mean.tolist(), std.tolist()) == ([0, 0], [1, 1])


def test_the_order_in_which_iterations_are_merged_does_not_matter():
    # Whole numbers, so that sums are exact and nothing but the order could make a difference.
    tables = [pool(RunningMeanStd.batch_stats(torch.full((2, 3, 1), float(value)))) for value in (1, 5, -2, 9)]
    ordered, reversed_ = RunningMeanStd(1, CPU), RunningMeanStd(1, CPU)
    for table in tables:
        ordered.update(table)
    for table in reversed(tables):
        reversed_.update(table)
    assert torch.equal(ordered.sums, reversed_.sums)


def test_lanes_give_the_same_sums_whoever_hosts_them():
    batch = seen(0, lanes=4)
    whole = RunningMeanStd.batch_stats(batch)
    assert torch.equal(torch.cat([RunningMeanStd.batch_stats(batch[:1]), RunningMeanStd.batch_stats(batch[1:])]), whole)
    first = Runtime.single_process(RunConfig(lanes=4), hosting=range(0, 1)).exact_sum(whole[:1])
    others = Runtime.single_process(RunConfig(lanes=4), hosting=range(1, 4)).exact_sum(whole[1:])
    assert torch.allclose(first + others, Runtime.single_process(RunConfig(lanes=4)).exact_sum(whole))


def normalizer(example, enabled=True):
    return ObservationNormalizer(example, enabled)


def learn(normalizer, obs):
    """One iteration: everything that was seen, [L, N, ...], is merged."""
    normalizer.update(pool(normalizer.batch_stats(obs)))


def test_observations_are_shifted_and_scaled_to_mean_zero_and_deviation_one():
    batch = seen(0, samples=500)
    normal = normalizer(batch[0])
    learn(normal, batch)
    out = normal(batch.flatten(0, 1))
    torch.testing.assert_close(out.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.std(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_an_observation_is_normalised_by_what_was_seen_before_it_until_the_next_merge():
    normal, obs = normalizer(torch.zeros(4, 3)), seen(0)[0]
    assert torch.equal(normal(obs), obs)
    normal.batch_stats(seen(1))
    assert torch.equal(normal(obs), obs)
    learn(normal, seen(1))
    first = normal(obs)
    assert not torch.equal(first, obs)
    normal.batch_stats(seen(2))
    assert torch.equal(normal(obs), first)
    learn(normal, seen(2))
    assert not torch.equal(normal(obs), first)


def test_what_lies_far_outside_is_clipped_to_ten_deviations():
    normal = normalizer(torch.zeros(4, 1))
    learn(normal, torch.tensor([[[-1.0], [1.0]]]))
    out = normal(torch.tensor([[-1e6], [-10.5], [0.5], [1e6]]))
    torch.testing.assert_close(out, torch.tensor([[-10.0], [-10.0], [0.5], [10.0]]))


def test_a_feature_that_never_changes_becomes_nothing_instead_of_infinite():
    normal = normalizer(torch.zeros(4, 1))
    learn(normal, torch.full((1, 100, 1), 3.0))
    assert normal(torch.full((1, 1), 3.0)).item() == pytest.approx(0, abs=1e-3)


def test_pictures_pass_untouched_and_floats_beside_them_do_not():
    example = {"board": torch.ones(2, 3, 4, 4, dtype=torch.uint8), "inner": {"speed": torch.zeros(2, 3)}}
    normal = normalizer(example)
    assert list(normal.moments) == ["inner.speed"]
    learn(normal, {"board": torch.ones(2, 5, 3, 4, 4, dtype=torch.uint8), "inner": {"speed": seen(0)}})
    obs = {"board": example["board"], "inner": {"speed": seen(0)[0]}}
    out = normal(obs)
    assert out["board"] is example["board"]
    assert not torch.equal(out["inner"]["speed"], obs["inner"]["speed"])


def test_parts_of_an_observation_keep_their_own_moments_and_shapes():
    example = {"a": torch.zeros(2, 2, 3), "b": torch.zeros(2, 1)}
    normal = normalizer(example)
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 50, 2, 3, generator=draw) + 5, torch.randn(2, 50, 1, generator=draw) * 7
    learn(normal, {"a": a, "b": b})
    out = normal({"a": a[0], "b": b[0]})
    assert out["a"].shape == (50, 2, 3)
    everything = a.flatten(0, 1)
    torch.testing.assert_close(
        out["a"], (a[0] - everything.mean(0)) / everything.std(0, correction=0), rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(normal.moments["b"].mean_and_std()[1], b.flatten(0, 1).std(0, correction=0))


def test_an_observation_may_be_one_number():
    normal = normalizer(torch.zeros(4))
    learn(normal, torch.tensor([[1.0, 3.0], [1.0, 3.0]]))
    torch.testing.assert_close(normal(torch.tensor([1.0, 2.0, 4.0])), torch.tensor([-1.0, 0.0, 2.0]))


def test_a_normalizer_that_is_off_changes_and_keeps_nothing():
    normal, obs = normalizer(torch.zeros(4, 3), enabled=False), seen(0)[0]
    assert normal(obs) is obs
    assert normal.state() == {}


def test_a_restored_normalizer_goes_on_as_the_saved_one():
    example, obs = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)}, {"a": seen(5)[0], "b": seen(6)[0]}
    saved, fresh = normalizer(example), normalizer(example)
    learn(saved, {"a": seen(0), "b": seen(1)})
    assert sorted(saved.state()) == ["obs_moments.a", "obs_moments.b"]
    load_into(fresh.state(), saved.state(), "the normalizer")
    fresh.freeze()
    for normal in (saved, fresh):
        learn(normal, {"a": seen(2), "b": seen(3)})
    for name in obs:
        assert torch.equal(fresh(obs)[name], saved(obs)[name])
