"""Running moments cover all data of all lanes and stay constant while a rollout is collected."""

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
    """Random observations of several lanes in one iteration, [L, N, D]."""
    return torch.randn(lanes, samples, features, generator=torch.Generator().manual_seed(seed)) * 3 + 2


def pool(table):
    return table.sum(0)


@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 6))
def test_running_moments_match_numpy_over_all_batches(seeds, lanes, samples):
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


def test_initial_moments_are_mean_zero_and_std_one():
    mean, std = RunningMeanStd(2, CPU).mean_and_std()
    assert (mean.tolist(), std.tolist()) == ([0, 0], [1, 1])


def test_update_is_independent_of_merge_order():
    # Integer values: sums are exact, so only the order could make a difference.
    tables = [pool(RunningMeanStd.batch_stats(torch.full((2, 3, 1), float(value)))) for value in (1, 5, -2, 9)]
    ordered, reversed_ = RunningMeanStd(1, CPU), RunningMeanStd(1, CPU)
    for table in tables:
        ordered.update(table)
    for table in reversed(tables):
        reversed_.update(table)
    assert torch.equal(ordered.sums, reversed_.sums)


def test_batch_stats_are_independent_of_host_process():
    batch = seen(0, lanes=4)
    whole = RunningMeanStd.batch_stats(batch)
    assert torch.equal(torch.cat([RunningMeanStd.batch_stats(batch[:1]), RunningMeanStd.batch_stats(batch[1:])]), whole)
    first = Runtime.single_process(RunConfig(lanes=4), hosting=range(0, 1)).exact_sum(whole[:1])
    others = Runtime.single_process(RunConfig(lanes=4), hosting=range(1, 4)).exact_sum(whole[1:])
    assert torch.allclose(first + others, Runtime.single_process(RunConfig(lanes=4)).exact_sum(whole))


def normalizer(example, enabled=True):
    return ObservationNormalizer(example, enabled)


def learn(normalizer, obs):
    """Merge the observations of one iteration, [L, N, ...]."""
    normalizer.update(pool(normalizer.batch_stats(obs)))


def test_normalized_observations_have_mean_zero_and_std_one():
    batch = seen(0, samples=500)
    normal = normalizer(batch[0])
    learn(normal, batch)
    out = normal(batch.flatten(0, 1))
    torch.testing.assert_close(out.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.std(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_normalizer_changes_only_at_update():
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


def test_outliers_are_clipped_to_ten_standard_deviations():
    normal = normalizer(torch.zeros(4, 1))
    learn(normal, torch.tensor([[[-1.0], [1.0]]]))
    out = normal(torch.tensor([[-1e6], [-10.5], [0.5], [1e6]]))
    torch.testing.assert_close(out, torch.tensor([[-10.0], [-10.0], [0.5], [10.0]]))


def test_constant_feature_normalizes_to_zero():
    normal = normalizer(torch.zeros(4, 1))
    learn(normal, torch.full((1, 100, 1), 3.0))
    assert normal(torch.full((1, 1), 3.0)).item() == pytest.approx(0, abs=1e-3)


def test_uint8_images_are_unchanged_and_floats_are_normalized():
    example = {"board": torch.ones(2, 3, 4, 4, dtype=torch.uint8), "inner": {"speed": torch.zeros(2, 3)}}
    normal = normalizer(example)
    assert list(normal.moments) == ["inner.speed"]
    learn(normal, {"board": torch.ones(2, 5, 3, 4, 4, dtype=torch.uint8), "inner": {"speed": seen(0)}})
    obs = {"board": example["board"], "inner": {"speed": seen(0)[0]}}
    out = normal(obs)
    assert out["board"] is example["board"]
    assert not torch.equal(out["inner"]["speed"], obs["inner"]["speed"])


def test_dict_observations_keep_separate_moments_and_shapes():
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


def test_scalar_observations_are_normalized():
    normal = normalizer(torch.zeros(4))
    learn(normal, torch.tensor([[1.0, 3.0], [1.0, 3.0]]))
    torch.testing.assert_close(normal(torch.tensor([1.0, 2.0, 4.0])), torch.tensor([-1.0, 0.0, 2.0]))


def test_disabled_normalizer_returns_input_and_has_no_state():
    normal, obs = normalizer(torch.zeros(4, 3), enabled=False), seen(0)[0]
    assert normal(obs) is obs
    assert normal.state() == {}


def test_restored_normalizer_continues_like_original():
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
