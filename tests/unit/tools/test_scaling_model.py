"""Scaling model: linear fits of measured shares and hand-calculated predictions."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tiny_recipes import ITERATION, SETTINGS, tiny
from lockstep.cli.plan import _duration, _size
from lockstep.config import apply_overrides
from lockstep.distributed import Runtime
from lockstep.tools.bench.measure import IterationTimer
from lockstep.tools.bench.network_model import NETWORKS, Link, NetworkModel
from lockstep.tools.bench.scaling_model import (
    CostProfile,
    LinearCost,
    Prediction,
    _fit,
    as_json,
    measure_shares,
    predict,
    scaling_limit,
    slowest_of,
)

FREE = NetworkModel("free", 8, Link(0.0, math.inf), Link(0.0, math.inf), launch=0.0)
SLOW = NetworkModel("slow", 64, Link(1.0, 100.0), Link(1.0, 100.0), launch=0.0)
"""On two processes, n bytes take 2 + n / 100 seconds in a ring."""
SHARES = CostProfile(
    rollout_step=LinearCost(0.0, 0.5),
    update=LinearCost(0.0, 0.1),
    rest=LinearCost(0.0, 0.01),
    num_envs=16,
    batch_size=64,
    horizon=8,
    updates=2,
    samples=128,
    sent=[("gradient", 100, 2.0), ("totals", 50, 2.0)],
    state_bytes=1000,
    rollout_bytes=10.0,
    activation_bytes=3.0,
)
ALONE = 8 * 0.5 * 16 + 2 * 0.1 * 64 + 0.01 * 128
"""Seconds of an iteration on one process."""
counts = st.integers(1, 16)
lines = st.builds(LinearCost, fixed=st.floats(0, 10), per_sample=st.floats(1e-6, 1))


def predict_for(processes, shares=SHARES, network=FREE, budget=3600, **settings):
    return predict(shares, processes, network, budget, **settings)


# ----------------------------------------------------------------------------------------------------------- stragglers


def test_slowest_of_matches_hand_calculation():
    jitter = [0.5, 1.5]  # of two processes, both are fast with probability 1/4
    assert slowest_of(1, jitter) == pytest.approx(1.0)
    assert slowest_of(2, jitter) == pytest.approx(0.25 * 0.5 + 0.75 * 1.5)
    assert slowest_of(1000, jitter) == pytest.approx(1.5)
    assert slowest_of(7, []) == 1.0


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=9), st.integers(1, 50))
def test_slowest_of_does_not_decrease_with_processes(jitter, processes):
    assert slowest_of(processes, jitter) <= slowest_of(processes + 1, jitter) + 1e-9
    assert slowest_of(processes, jitter) <= max(jitter) + 1e-9


def test_predict_jitter_adds_waiting_for_the_slowest_process():
    steady, shaky = predict_for(2), predict_for(2, replace(SHARES, jitter=[0.5, 1.5]))
    assert shaky.compute == steady.compute == pytest.approx(ALONE / 2)
    assert shaky.waiting - steady.waiting == pytest.approx(ALONE / 2 * 0.25)
    assert predict_for(1, replace(SHARES, jitter=[0.5, 1.5])).steps_per_second == predict_for(1).steps_per_second


def test_predict_network_jitter_overrides_single_process_jitter():
    seen = predict_for(2, replace(SHARES, jitter=[0.5, 1.5]), replace(FREE, jitter=(0.8, 1.2)))
    assert seen == predict_for(2, replace(SHARES, jitter=[0.8, 1.2]))


def test_predict_jitter_is_limited_by_cores():
    shaky = replace(SHARES, jitter=[0.5, 1.5])
    for cores, at_once in ((2, 2), (None, 4)):
        steady, waited = (predict_for(4, shares, cores=cores) for shares in (SHARES, shaky))
        longer = waited.compute * (slowest_of(at_once, shaky.jitter) - 1.0)
        assert waited.waiting - steady.waiting == pytest.approx(longer)


def test_predict_contention_slows_processes_on_shared_machine():
    network = replace(FREE, contention=1.5)
    assert predict_for(2, network=network, cores=2).compute == pytest.approx(1.5 * predict_for(2, cores=2).compute)
    assert predict_for(1, network=network, cores=2).compute == predict_for(1, cores=2).compute
    assert predict_for(2, network=network).compute == predict_for(2).compute  # each process has its own core


# ---------------------------------------------------------------------------------------------------------- linear fits


@given(lines, st.lists(st.integers(1, 4096), min_size=2, max_size=6, unique=True))
def test_fit_recovers_points_on_a_line(line, sizes):
    found = _fit([float(size) for size in sizes], [line.at(size) for size in sizes])
    for size in sizes:
        assert found.at(size) == pytest.approx(line.at(size), rel=1e-6)


def test_fit_recovers_fixed_time_and_slope():
    found = _fit([128.0, 64.0, 32.0, 16.0], [2.0 + 0.5 * size for size in (128, 64, 32, 16)])
    assert (found.fixed, found.per_sample) == pytest.approx((2.0, 0.5))


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-9, 1e3)), min_size=1, max_size=6))
def test_fit_coefficients_are_never_negative(points):
    sizes, seconds = zip(*points, strict=True)
    found = _fit([float(size) for size in sizes], list(seconds))
    assert found.per_sample >= 0
    assert found.fixed >= -1e-12 * max(seconds)  # up to rounding
    assert 0 < found.at(max(sizes)) < math.inf


def test_fit_clamps_falling_times_to_fixed_and_steep_times_to_slope():
    assert _fit([1.0, 2.0], [3.0, 1.0]).per_sample == 0.0
    steep = _fit([1.0, 2.0], [1.0, 100.0])
    assert steep.fixed == pytest.approx(0.0, abs=1e-12)


def test_fit_single_point_has_no_fixed_time():
    assert _fit([64.0], [32.0]) == LinearCost(0.0, 0.5)


def test_fit_weighs_small_and_large_shares_equally():
    # 10 % more on large shares changes the fit of the small share far less.
    found = _fit([1000.0, 500.0, 1.0], [1001.0 * 1.1, 501.0 * 1.1, 2.0])
    assert found.at(1) == pytest.approx(2.0, rel=0.02)


# ---------------------------------------------------------------------------------------------------------- predictions


def test_predict_one_process_matches_measurement_without_waiting():
    found = predict_for(1, network=SLOW)
    assert found.steps_per_second == pytest.approx(128 / ALONE)
    assert found.compute == pytest.approx(ALONE)
    assert found.efficiency == pytest.approx(1.0)
    assert found.waiting == 0.0
    assert found.hours == pytest.approx(ALONE / 128)  # for 3600 samples
    assert found.batch == 64
    assert not found.impossible


@given(counts)
def test_predict_without_fixed_time_on_free_network_is_linear(count):
    found = predict_for(count)
    assert found.steps_per_second == pytest.approx(count * 128 / ALONE)
    assert found.efficiency == pytest.approx(1.0)
    assert found.waiting == 0.0


def test_predict_two_processes_on_free_network_double_the_speed():
    assert predict_for(2).steps_per_second == 2 * predict_for(1).steps_per_second


def test_predict_fixed_time_is_paid_by_every_process():
    shares = replace(
        SHARES, update=LinearCost(3.0, 0.1), rollout_step=LinearCost(0.25, 0.5), rest=LinearCost(1.0, 0.01)
    )
    fixed = 2 * 3.0 + 8 * 0.25 + 1.0
    for count in (1, 2, 4):
        assert predict_for(count, shares).compute == pytest.approx(fixed + ALONE / count)


@given(st.integers(1, 5000), st.sampled_from(list(NETWORKS.values())))
def test_predict_growing_batch_keeps_share_per_process(count, network):
    shares = replace(SHARES, update=LinearCost(3.0, 0.1))
    found = predict_for(count, shares, network, grow=True)
    assert found.batch == 64 * count
    assert found.compute == pytest.approx(predict_for(1, shares).compute)
    assert found.memory == pytest.approx(predict_for(1, shares).memory)
    assert not found.impossible
    assert found.efficiency == pytest.approx(found.compute / (found.compute + found.waiting))


def test_predict_non_gradient_reductions_are_not_overlapped():
    shares = replace(SHARES, sent=[("pool", 50, 1.0), ("totals", 50, 2.0), ("max", 100, 0.25)])
    assert predict_for(2, shares, SLOW).waiting == pytest.approx(2.5 + 2 * 2.5 + 0.25 * 3)


def test_predict_last_gradient_bucket_is_not_overlapped():
    # 2 x 3 s for the only bucket, 2 x 2.5 s for totals.
    found = predict_for(2, network=SLOW)
    assert found.waiting == pytest.approx(6.0 + 5.0)
    assert found.way == "ring"
    assert found.steps_per_second == pytest.approx(128 / (ALONE / 2 + 11.0))


def test_predict_other_gradient_buckets_overlap_with_backward():
    # 2 x (2.5 + 3) s of buckets, minus half of the work of two updates on 32 samples: 2 x 3.2 / 2.
    shares = replace(SHARES, sent=[("gradient", 50, 2.0), ("gradient", 100, 2.0)])
    assert predict_for(2, shares, SLOW).waiting == pytest.approx(11.0 - 3.2)
    longer = replace(shares, update=LinearCost(0.0, 1.0))  # 2 x 32 / 2 s hide everything but the last bucket
    assert predict_for(2, longer, SLOW).waiting == pytest.approx(6.0)


@pytest.mark.parametrize(("count", "possible"), [(16, True), (17, False), (64, False)])
def test_predict_more_processes_than_envs_is_impossible(count, possible):
    found = predict_for(count)
    assert (found.impossible == "") == possible
    if not possible:
        assert found.impossible == f"16 environments cannot be split over {count} processes"
        assert found.steps_per_second == 0.0


def test_predict_more_processes_than_batch_samples_is_impossible():
    found = predict_for(9, replace(SHARES, batch_size=8))
    assert found.impossible == "batches of 8 samples cannot be split over 9 processes"


@given(counts)
def test_predict_memory_shrinks_only_by_shared_buffers(count):
    assert predict_for(count).memory == pytest.approx(1000 + (10 * 16 + 3 * 64) / count)


@pytest.mark.parametrize(("count", "cores", "crowd"), [(1, 2, 1.0), (2, 2, 1.0), (4, 2, 2.0), (3, 2, 1.5)])
def test_predict_processes_sharing_cores_take_turns(count, cores, crowd):
    assert predict_for(count, cores=cores).compute == pytest.approx(crowd * ALONE / count)
    assert predict_for(count, cores=cores).steps_per_second == pytest.approx(count / crowd * 128 / ALONE)


@given(st.integers(1, 15), st.sampled_from(list(NETWORKS.values())), lines, lines, lines)
def test_predict_efficiency_is_at_most_one(count, network, step, update, rest):
    shares = replace(SHARES, rollout_step=step, update=update, rest=rest)
    found = predict_for(count, shares, network)
    assert found.efficiency <= 1 + 1e-9
    assert found.compute >= predict_for(count + 1, shares, network).compute - 1e-9
    assert found.waiting >= 0


# -------------------------------------------------------------------------------------------------------- scaling limit


def row(processes, speed, waiting=0.0):
    return Prediction(processes, 64, steps_per_second=speed, waiting=waiting)


LOST = Prediction(64, 64, impossible="16 environments cannot be split over 64 processes")
FIXED = replace(SHARES, update=LinearCost(0.5, 0.1), rollout_step=LinearCost(0.125, 0.5), rest=LinearCost(0.25, 0.01))
"""2 x 0.5 + 8 x 0.125 + 0.25 s of an iteration are fixed."""


@pytest.mark.parametrize(
    ("rows", "cores", "words"),
    [
        ([row(1, 10)], None, "The run scales up to 1 processes or more."),
        ([row(1, 10), row(2, 19), row(4, 36)], None, "The run scales up to 4 processes or more."),
        (
            [row(1, 10), row(8, 60), LOST],
            None,
            "The run scales up to 8 processes and cannot be split further: "
            "16 environments cannot be split over 64 processes.",
        ),
        (
            [row(1, 10), row(2, 19), row(8, 37, waiting=2.0)],  # 4 times the processes, less than twice the speed
            None,
            "Scaling at this batch size ends between 2 and 8 processes. The limit is the fixed time of updates and "
            "steps (2.25e+03 ms per iteration). A larger batch moves it.",
        ),
        (
            [row(1, 10), row(4, 12, waiting=2.5)],
            None,
            "Scaling at this batch size ends between 1 and 4 processes. The limit is waiting for the network "
            "(2.5e+03 ms per iteration). A larger batch moves it.",
        ),
        (
            [row(2, 20), row(4, 20)],
            2,
            "Scaling at this batch size ends between 2 and 4 processes: 4 processes share 2 cores.",
        ),
        (
            [row(1, 10), row(2, 11, waiting=9.0), row(4, 11)],  # two processes have one core each
            2,
            "Scaling at this batch size ends between 1 and 2 processes. The limit is waiting for the network "
            "(9e+03 ms per iteration). A larger batch moves it.",
        ),
    ],
)
def test_scaling_limit_explains_where_scaling_ends(rows, cores, words):
    assert scaling_limit(FIXED, rows, cores) == words


def test_scaling_limit_without_possible_rows_says_why():
    assert LOST.impossible in scaling_limit(FIXED, [LOST])


def test_scaling_limit_is_found_from_predictions():
    shares = replace(
        SHARES, update=LinearCost(2.0, 0.1), rest=LinearCost(0.0, 0.0), rollout_step=LinearCost(0.0, 0.0), sent=[]
    )
    # 4 s fixed and 12.8 s of work: 16.8, 10.4, 7.2, 5.6, 4.8. Doubling first gives 1.5 times the speed, then 1.29.
    rows = [predict_for(count, shares) for count in (1, 2, 4, 8, 16)]
    assert scaling_limit(shares, rows).startswith("Scaling at this batch size ends between 4 and 8 processes")


# ------------------------------------------------------------------------------------------------------ measured shares


@pytest.fixture(scope="module")
def recipe():
    return tiny(Path("nowhere"))


@pytest.fixture(scope="module")
def meter(recipe):
    return IterationTimer(recipe, Runtime.single_process(recipe.run))


@pytest.fixture(scope="module")
def said():
    return []


@pytest.fixture(scope="module")
def measured(recipe, said):
    return measure_shares(recipe, rounds=2, report=said.append)


def test_measure_shares_fits_are_positive(measured):
    for line in (measured.rollout_step, measured.update, measured.rest):
        assert line.fixed >= 0
        assert line.per_sample >= 0
        assert line.at(1) > 0


def test_measure_shares_has_run_settings(measured):
    algo = SETTINGS["algo"]
    assert measured.num_envs == SETTINGS["task"]["num_envs"]
    assert (measured.batch_size, measured.horizon) == (algo["batch_size"], algo["rollout_steps"])
    assert measured.samples == ITERATION
    assert measured.updates == algo["epochs"] * ITERATION // algo["batch_size"]


def test_measure_shares_measures_1_2_4_and_8_processes(measured, said):
    shares = [f"preparing the share of one of {count} processes" for count in (1, 2, 4, 8)]
    assert said == [*shares, "measuring shares, round 1 of 2", "measuring shares, round 2 of 2"]


def test_measure_shares_lists_reductions_with_bytes(measured, meter):
    sent = {}
    for name, size, often in measured.sent:
        sent.setdefault(name, []).append((size, often))
    assert set(sent) == {"gradient", "totals", "pool", "max"}
    assert sent["gradient"] == [(4 * meter.parameters, 2)]  # fp32, once per update
    assert sent["totals"] == [(8 * 7, 2)]  # count, loss and five sums, in fp64
    assert sent["max"] == [(8 * 2, 1)]  # stop and save flags
    assert [often for _, often in sent["pool"]] == [1, 1]  # advantage and return moments; metrics


def test_measure_shares_bf16_gradients_halve_the_bytes(recipe, meter):
    narrow = apply_overrides(
        recipe, {"run": {"grad_comm_dtype": "bf16", "lanes": 1}, "task.num_envs": 1, "algo.batch_size": 8}
    )
    sent = measure_shares(narrow, rounds=1).sent
    assert [size for name, size, _ in sent if name == "gradient"] == [2 * meter.parameters]


def test_measure_shares_memory_matches_buffers_and_agent(measured, meter):
    # Board of 3 x 4 x 4, action, four outputs, value; reward, two flags, apples, full; bootstrap value.
    one_step = 48 + 8 + 16 + 4 + 4 + 2 + 4 + 4 + 4
    assert measured.rollout_bytes == one_step * SETTINGS["algo"]["rollout_steps"]
    agent = sum(tensor.nbytes for tensor in meter.algorithm.shared_state().values())
    assert agent > 3 * 4 * meter.parameters  # including the two moments of Adam
    assert measured.state_bytes == agent + 4 * meter.parameters
    assert measured.activation_bytes > 3 * 4 * 4  # more than the board itself


def test_as_json_contains_plain_numbers(measured):
    rows = [predict_for(count, measured) for count in (1, 64)]
    found = as_json(measured, FREE, rows, rows)
    assert list(found) == ["shares", "network", "fixed_batch", "growing_batch"]
    assert found["shares"] == asdict(measured)
    assert [row["processes"] for row in found["fixed_batch"]] == [1, 64]


@pytest.mark.parametrize(
    ("hours", "words"), [(0.5 / 3600, "0.5 s"), (0.5, "30.0 min"), (30.0, "30.0 h"), (24_000.0, "1,000.0 days")]
)
def test_duration_uses_readable_unit(hours, words):
    assert _duration(hours) == words


@pytest.mark.parametrize(("memory", "words"), [(2_048, "2 KiB"), (3.5 * 2**20, "3.5 MiB"), (80 * 2**30, "80.0 GiB")])
def test_size_uses_readable_unit(memory, words):
    assert _size(memory) == words
