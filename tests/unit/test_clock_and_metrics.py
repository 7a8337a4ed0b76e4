"""TrainState intervals and pending metrics; Metrics stores sums and counts, not means of means."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from lockstep.metrics import Metrics


def pooled_means(metrics, lanes=2):
    """Return the means that a run would log."""
    clock = TrainState(total_samples=1)
    clock.accumulate(Runtime.single_process(RunConfig(lanes=lanes)).reduce_metrics(metrics))
    return clock.flush_metrics()


# ---------------------------------------------------------------------------------------------------------------- clock


def test_advance_counts_samples_and_iterations():
    clock = TrainState(total_samples=100)
    clock.advance(30)
    clock.advance(40)
    assert (clock.samples, clock.iteration, clock.last_iteration_samples) == (70, 2, 40)


def test_progress_increases_to_one_and_is_clamped():
    clock = TrainState(total_samples=100)
    seen = [clock.progress]
    for _ in range(4):
        clock.advance(30)
        seen.append(clock.progress)
    assert seen == pytest.approx([0.0, 0.3, 0.6, 0.9, 1.0])


def test_done_is_true_at_or_beyond_total_samples():
    done = [TrainState(total_samples=100, samples=samples).done for samples in (0, 99, 100, 101)]
    assert done == [False, False, True, True]


def test_crossed_is_true_when_multiple_is_passed_or_reached():
    clock, crossed = TrainState(total_samples=100), []
    for _ in range(10):
        clock.advance(7)
        if clock.crossed(20):
            crossed.append(clock.samples)
    assert crossed == [21, 42, 63]  # crossed 20, 40 and 60
    clock.advance(10)  # ends exactly on a multiple
    assert (clock.samples, clock.crossed(20)) == (80, True)


def test_crossed_is_false_for_none_and_zero():
    clock = TrainState(total_samples=100)
    clock.advance(50)
    assert [clock.crossed(None), clock.crossed(0)] == [False, False]


def test_crossed_is_false_before_first_iteration():
    assert not TrainState(total_samples=100).crossed(1)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_crossed_detects_every_multiple_exactly_once(steps, interval):
    clock, noticed = TrainState(total_samples=1), 0
    for step in steps:
        before = clock.samples
        clock.advance(step)
        wanted = any(sample % interval == 0 for sample in range(before + 1, clock.samples + 1))
        assert clock.crossed(interval) == wanted
        noticed += clock.crossed(interval)
    assert noticed <= sum(steps) // interval
    if all(step <= interval for step in steps):
        assert noticed == sum(steps) // interval


def test_flush_metrics_returns_weighted_mean_over_interval():
    clock = TrainState(total_samples=1)
    clock.accumulate({"a": (1.0, 1.0), "b": (4.0, 2.0)})
    clock.accumulate({"a": (9.0, 3.0), "nothing": (0.0, 0.0)})
    assert clock.flush_metrics() == {"a": 2.5, "b": 2.0}  # 10 over 4, not the mean of 1 and 3
    assert clock.metrics == {"a": 2.5, "b": 2.0}
    assert clock.flush_metrics() == {}


def test_train_state_survives_json_round_trip():
    clock = TrainState(total_samples=9, samples=3, evaluation={"return_mean": 1.5}, best=1.5)
    clock.accumulate({"a": (1.0, 2.0)})
    assert TrainState(**json.loads(json.dumps(dataclasses.asdict(clock)))) == clock


# -------------------------------------------------------------------------------------------------------------- metrics


def test_local_metric_mean_is_weighted_by_lane_counts():
    metrics = Metrics()
    metrics.add_local("return", tensor([10.0, 1.0]), tensor([10, 1]))
    metrics.add_local("return", tensor([0.0, 5.0]), tensor([0, 1]))
    assert metrics.per_lane["return"].tolist() == [[10, 10], [6, 2]]
    assert pooled_means(metrics) == {"return": 16 / 12}


def test_metric_with_zero_count_is_skipped():
    metrics = Metrics()
    metrics.add_local("return", tensor([0.0, 0.0]), tensor([0, 0]))
    metrics.add_global("loss", tensor(0.0), tensor(0.0))
    metrics.add_global("kl", tensor(0.0), tensor(2.0))
    assert pooled_means(metrics) == {"kl": 0.0}


def test_global_metrics_are_summed_and_not_reduced_again():
    metrics = Metrics()
    metrics.add_global("kl", tensor(1.0), tensor(4))
    metrics.add_global("kl", tensor(3.0), tensor(4))
    assert pooled_means(metrics) == {"kl": 0.5}


def test_latest_returns_mean_of_newest_entry():
    metrics = Metrics()
    metrics.add_global("kl", tensor(1.0), tensor(4))
    metrics.add_global("kl", tensor(3.0), tensor(4))
    assert metrics.latest("kl") == 0.75
    newer = Metrics()
    newer.add_global("kl", tensor(8.0), tensor(4))
    metrics += newer
    assert metrics.latest("kl") == 2.0
    newer = Metrics()
    newer.add_global("loss", tensor(1.0), tensor(1))
    metrics += newer
    assert metrics.latest("kl") == 2.0


def test_latest_with_zero_count_is_zero():
    metrics = Metrics()
    metrics.add_global("kl", tensor(0.0), tensor(0))
    assert metrics.latest("kl") == 0.0


def test_with_prefix_changes_names_and_keeps_values():
    metrics = Metrics()
    metrics.add_local("return", tensor([1.0, 2.0]), tensor([1, 1]))
    metrics.add_global("kl", tensor(1.0), tensor(4))
    grouped = metrics.with_prefix("train")
    assert pooled_means(grouped) == {"train/kl": 0.25, "train/return": 1.5}
    assert grouped.latest("train/kl") == 0.25
    assert pooled_means(metrics) == {"kl": 0.25, "return": 1.5}


entries = st.lists(
    st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(-5, 5), st.integers(0, 5), st.integers(0, 5)),
    max_size=6,
)


def fill(rows):
    metrics = Metrics()
    for agreed, name, total, count, other in rows:
        if agreed:
            metrics.add_global(f"agreed {name}", tensor(float(total)), tensor(count))
        else:
            metrics.add_local(name, tensor([float(total), 1.0]), tensor([count, other]))
    return metrics


@given(entries, entries)
def test_metrics_iadd_equals_metrics_of_all_entries(first, second):
    one, other = fill(first), fill(second)
    untouched = {name: pair.clone() for name, pair in other.per_lane.items()}
    one += other
    whole = fill(first + second)
    for mine, wanted in ((one.per_lane, whole.per_lane), (one.global_sums, whole.global_sums)):
        assert mine.keys() == wanted.keys()
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert all(one.latest(name) == whole.latest(name) for name in whole.global_sums)
    assert all(torch.equal(other.per_lane[name], pair) for name, pair in untouched.items())


def test_metric_sums_use_float64():
    metrics = Metrics()
    for _ in range(2):
        metrics.add_local("steps", tensor([16_777_216.0, 1.0], dtype=torch.float32), tensor([1, 1]))
    metrics.add_local("steps", tensor([1.0, 0.0]), tensor([0, 0]))
    assert metrics.per_lane["steps"][0, 0] == 33_554_433


def test_record_evaluation_keeps_best_score_and_ignores_nan():
    clock = TrainState(total_samples=1)
    scores = [math.nan, 1.0, math.nan, 0.5, 1.0, 2.0]
    assert [clock.record_evaluation({"return_mean": score}) for score in scores] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert clock.best == 2.0
    assert clock.evaluation == {"return_mean": 2.0}
