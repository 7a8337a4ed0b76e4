"""The plan: lines through measured shares, and what the model makes of them, worked by hand."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from tiny import ITERATION, SETTINGS, tiny

FREE = NetworkModel("free", 8, Link(0.0, math.inf), Link(0.0, math.inf), launch=0.0)
SLOW = NetworkModel("slow", 64, Link(1.0, 100.0), Link(1.0, 100.0), launch=0.0)
"""On two processes n bytes take 2 + n / 100 seconds, as a ring."""
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


# --------------------------------------------------------------------------------------------------------- the slowest


def test_the_slowest_of_some_is_as_worked_by_hand():
    jitter = [0.5, 1.5]  # of two, both are quick in a quarter of all cases
    assert slowest_of(1, jitter) == pytest.approx(1.0)
    assert slowest_of(2, jitter) == pytest.approx(0.25 * 0.5 + 0.75 * 1.5)
    assert slowest_of(1000, jitter) == pytest.approx(1.5)
    assert slowest_of(7, []) == 1.0


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=9), st.integers(1, 50))
def test_of_more_processes_the_slowest_is_no_faster(jitter, processes):
    assert slowest_of(processes, jitter) <= slowest_of(processes + 1, jitter) + 1e-9
    assert slowest_of(processes, jitter) <= max(jitter) + 1e-9


def test_all_wait_for_the_slowest_process():
    steady, shaky = predict_for(2), predict_for(2, replace(SHARES, jitter=[0.5, 1.5]))
    assert shaky.compute == steady.compute == pytest.approx(ALONE / 2)
    assert shaky.waiting - steady.waiting == pytest.approx(ALONE / 2 * 0.25)
    assert predict_for(1, replace(SHARES, jitter=[0.5, 1.5])).steps_per_second == predict_for(1).steps_per_second


def test_times_taken_while_all_were_busy_count_for_more_than_those_of_one():
    seen = predict_for(2, replace(SHARES, jitter=[0.5, 1.5]), replace(FREE, jitter=(0.8, 1.2)))
    assert seen == predict_for(2, replace(SHARES, jitter=[0.8, 1.2]))


def test_of_more_processes_than_cores_one_works_while_another_waits():
    shaky = replace(SHARES, jitter=[0.5, 1.5])
    for cores, at_once in ((2, 2), (None, 4)):
        steady, waited = (predict_for(4, shares, cores=cores) for shares in (SHARES, shaky))
        longer = waited.compute * (slowest_of(at_once, shaky.jitter) - 1.0)
        assert waited.waiting - steady.waiting == pytest.approx(longer)


def test_busy_cores_slow_each_other():
    network = replace(FREE, contention=1.5)
    assert predict_for(2, network=network, cores=2).compute == pytest.approx(1.5 * predict_for(2, cores=2).compute)
    assert predict_for(1, network=network, cores=2).compute == predict_for(1, cores=2).compute
    assert predict_for(2, network=network).compute == predict_for(2).compute  # on cores of their own


# ---------------------------------------------------------------------------------------------------------------- lines


@given(lines, st.lists(st.integers(1, 4096), min_size=2, max_size=6, unique=True))
def test_points_on_a_line_give_the_line_back(line, sizes):
    found = _fit([float(size) for size in sizes], [line.at(size) for size in sizes])
    for size in sizes:
        assert found.at(size) == pytest.approx(line.at(size), rel=1e-6)


def test_a_line_through_four_shares_has_the_fixed_time_and_slope_it_was_made_of():
    found = _fit([128.0, 64.0, 32.0, 16.0], [2.0 + 0.5 * size for size in (128, 64, 32, 16)])
    assert (found.fixed, found.per_sample) == pytest.approx((2.0, 0.5))


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-9, 1e3)), min_size=1, max_size=6))
def test_whatever_was_measured_no_part_of_the_line_is_negative(points):
    sizes, seconds = zip(*points, strict=True)
    found = _fit([float(size) for size in sizes], list(seconds))
    assert found.per_sample >= 0
    assert found.fixed >= -1e-12 * max(seconds)  # but for rounding
    assert 0 < found.at(max(sizes)) < math.inf


def test_a_time_that_falls_with_the_size_is_all_fixed_and_one_that_grows_too_fast_is_all_work():
    assert _fit([1.0, 2.0], [3.0, 1.0]).per_sample == 0.0
    steep = _fit([1.0, 2.0], [1.0, 100.0])
    assert steep.fixed == pytest.approx(0.0, abs=1e-12)


def test_a_single_share_is_taken_for_work_without_a_fixed_time():
    assert _fit([64.0], [32.0]) == LinearCost(0.0, 0.5)


def test_small_shares_weigh_as_much_as_large_ones():
    # A tenth more on the whole moves the small share's time by far less than that tenth.
    found = _fit([1000.0, 500.0, 1.0], [1001.0 * 1.1, 501.0 * 1.1, 2.0])
    assert found.at(1) == pytest.approx(2.0, rel=0.02)


# ---------------------------------------------------------------------------------------------------------- predictions


def test_one_process_does_what_was_measured_and_waits_for_nobody():
    found = predict_for(1, network=SLOW)
    assert found.steps_per_second == pytest.approx(128 / ALONE)
    assert found.compute == pytest.approx(ALONE)
    assert found.efficiency == pytest.approx(1.0)
    assert found.waiting == 0.0
    assert found.hours == pytest.approx(ALONE / 128)  # to 3600 samples
    assert found.batch == 64
    assert not found.impossible


@given(counts)
def test_without_fixed_times_and_on_a_free_network_processes_are_as_many_times_faster(count):
    found = predict_for(count)
    assert found.steps_per_second == pytest.approx(count * 128 / ALONE)
    assert found.efficiency == pytest.approx(1.0)
    assert found.waiting == 0.0


def test_two_processes_are_exactly_twice_as_fast_there():
    assert predict_for(2).steps_per_second == 2 * predict_for(1).steps_per_second


def test_a_fixed_time_is_paid_on_every_process():
    shares = replace(
        SHARES, update=LinearCost(3.0, 0.1), rollout_step=LinearCost(0.25, 0.5), rest=LinearCost(1.0, 0.01)
    )
    fixed = 2 * 3.0 + 8 * 0.25 + 1.0
    for count in (1, 2, 4):
        assert predict_for(count, shares).compute == pytest.approx(fixed + ALONE / count)


@given(st.integers(1, 5000), st.sampled_from(list(NETWORKS.values())))
def test_a_batch_that_grows_keeps_every_processs_share(count, network):
    shares = replace(SHARES, update=LinearCost(3.0, 0.1))
    found = predict_for(count, shares, network, grow=True)
    assert found.batch == 64 * count
    assert found.compute == pytest.approx(predict_for(1, shares).compute)
    assert found.memory == pytest.approx(predict_for(1, shares).memory)
    assert not found.impossible
    assert found.efficiency == pytest.approx(found.compute / (found.compute + found.waiting))


def test_what_is_not_the_gradient_is_waited_for_in_full():
    shares = replace(SHARES, sent=[("pool", 50, 1.0), ("totals", 50, 2.0), ("max", 100, 0.25)])
    assert predict_for(2, shares, SLOW).waiting == pytest.approx(2.5 + 2 * 2.5 + 0.25 * 3)


def test_the_last_bucket_of_a_gradient_is_waited_for():
    # 2 x 3 s for the only bucket, 2 x 2.5 s for the totals.
    found = predict_for(2, network=SLOW)
    assert found.waiting == pytest.approx(6.0 + 5.0)
    assert found.way == "ring"
    assert found.steps_per_second == pytest.approx(128 / (ALONE / 2 + 11.0))


def test_other_buckets_travel_while_backward_works():
    # 2 x (2.5 + 3) s of buckets, less half of the work of two updates on 32 samples: 2 x 3.2 / 2.
    shares = replace(SHARES, sent=[("gradient", 50, 2.0), ("gradient", 100, 2.0)])
    assert predict_for(2, shares, SLOW).waiting == pytest.approx(11.0 - 3.2)
    longer = replace(shares, update=LinearCost(0.0, 1.0))  # 2 x 32 / 2 s hide everything but the last bucket
    assert predict_for(2, longer, SLOW).waiting == pytest.approx(6.0)


@pytest.mark.parametrize(("count", "possible"), [(16, True), (17, False), (64, False)])
def test_more_processes_than_environments_cannot_be(count, possible):
    found = predict_for(count)
    assert (found.impossible == "") == possible
    if not possible:
        assert found.impossible == f"16 environments cannot be shared by {count}"
        assert found.steps_per_second == 0.0


def test_more_processes_than_samples_of_a_batch_cannot_be():
    found = predict_for(9, replace(SHARES, batch_size=8))
    assert found.impossible == "batches of 8 samples cannot be shared by 9"


@given(counts)
def test_memory_falls_with_processes_by_what_they_share_and_by_nothing_else(count):
    assert predict_for(count).memory == pytest.approx(1000 + (10 * 16 + 3 * 64) / count)


@pytest.mark.parametrize(("count", "cores", "crowd"), [(1, 2, 1.0), (2, 2, 1.0), (4, 2, 2.0), (3, 2, 1.5)])
def test_processes_that_share_cores_take_turns(count, cores, crowd):
    assert predict_for(count, cores=cores).compute == pytest.approx(crowd * ALONE / count)
    assert predict_for(count, cores=cores).steps_per_second == pytest.approx(count / crowd * 128 / ALONE)


@given(st.integers(1, 15), st.sampled_from(list(NETWORKS.values())), lines, lines, lines)
def test_no_processes_are_more_efficient_than_one(count, network, step, update, rest):
    shares = replace(SHARES, rollout_step=step, update=update, rest=rest)
    found = predict_for(count, shares, network)
    assert found.efficiency <= 1 + 1e-9
    assert found.compute >= predict_for(count + 1, shares, network).compute - 1e-9
    assert found.waiting >= 0


# ---------------------------------------------------------------------------------------------------------------- words


def row(processes, speed, waiting=0.0):
    return Prediction(processes, 64, steps_per_second=speed, waiting=waiting)


LOST = Prediction(64, 64, impossible="16 environments cannot be shared by 64")
FIXED = replace(SHARES, update=LinearCost(0.5, 0.1), rollout_step=LinearCost(0.125, 0.5), rest=LinearCost(0.25, 0.01))
"""2 x 0.5 + 8 x 0.125 + 0.25 s of an iteration are fixed."""


@pytest.mark.parametrize(
    ("rows", "cores", "words"),
    [
        ([row(1, 10)], None, "It pays up to 1 processes at least."),
        ([row(1, 10), row(2, 19), row(4, 36)], None, "It pays up to 4 processes at least."),
        (
            [row(1, 10), row(8, 60), LOST],
            None,
            "It pays up to 8 processes, and then there is nothing left to share: "
            "16 environments cannot be shared by 64.",
        ),
        (
            [row(1, 10), row(2, 19), row(8, 37, waiting=2.0)],  # four times as many, less than twice as fast
            None,
            "It stops paying between 2 and 8 processes at this batch: what is left is the fixed time of updates and "
            "steps (2.25e+03 ms an iteration), which no share shortens. A larger batch moves that point.",
        ),
        (
            [row(1, 10), row(4, 12, waiting=2.5)],
            None,
            "It stops paying between 1 and 4 processes at this batch: what is left is waiting for the network "
            "(2.5e+03 ms an iteration). A larger batch moves that point.",
        ),
        (
            [row(2, 20), row(4, 20)],
            2,
            "It stops paying between 2 and 4 processes at this batch: 4 processes share 2 cores.",
        ),
        (
            [row(1, 10), row(2, 11, waiting=9.0), row(4, 11)],  # not for want of cores: two have one each
            2,
            "It stops paying between 1 and 2 processes at this batch: what is left is waiting for the network "
            "(9e+03 ms an iteration). A larger batch moves that point.",
        ),
    ],
)
def test_where_more_processes_stop_paying_is_said_in_words(rows, cores, words):
    assert scaling_limit(FIXED, rows, cores) == words


def test_where_nothing_is_possible_that_is_said_too():
    assert LOST.impossible in scaling_limit(FIXED, [LOST])


def test_the_model_finds_the_point_where_it_stops_paying():
    shares = replace(
        SHARES, update=LinearCost(2.0, 0.1), rest=LinearCost(0.0, 0.0), rollout_step=LinearCost(0.0, 0.0), sent=[]
    )
    # 4 s fixed and 12.8 s of work: 16.8, 10.4, 7.2, 5.6, 4.8. Twice as many are 1.5 times as fast at first, then 1.29.
    rows = [predict_for(count, shares) for count in (1, 2, 4, 8, 16)]
    assert scaling_limit(shares, rows).startswith("It stops paying between 4 and 8 processes at this batch")


# ------------------------------------------------------------------------------------------------------------- measured


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
    return measure_shares(recipe, rounds=2, say=said.append)


def test_measured_lines_are_positive(measured):
    for line in (measured.rollout_step, measured.update, measured.rest):
        assert line.fixed >= 0
        assert line.per_sample >= 0
        assert line.at(1) > 0


def test_a_measurement_knows_the_numbers_of_the_run(measured):
    algo = SETTINGS["algo"]
    assert measured.num_envs == SETTINGS["task"]["num_envs"]
    assert (measured.batch_size, measured.horizon) == (algo["batch_size"], algo["rollout_steps"])
    assert measured.samples == ITERATION
    assert measured.updates == algo["epochs"] * ITERATION // algo["batch_size"]


def test_the_share_of_one_of_1_2_4_and_8_processes_is_measured(measured, said):
    shares = [f"preparing the share of one of {count} processes" for count in (1, 2, 4, 8)]
    assert said == [*shares, "measuring shares, round 1 of 2", "measuring shares, round 2 of 2"]


def test_what_would_be_sent_is_named_with_its_bytes(measured, meter):
    sent = {}
    for name, size, often in measured.sent:
        sent.setdefault(name, []).append((size, often))
    assert set(sent) == {"gradient", "totals", "pool", "max"}
    assert sent["gradient"] == [(4 * meter.parameters, 2)]  # single precision, once an update
    assert sent["totals"] == [(8 * 7, 2)]  # the count, the loss and five sums, in double precision
    assert sent["max"] == [(8 * 2, 1)]  # whether to stop, whether to save
    assert [often for _, often in sent["pool"]] == [1, 1]  # moments of advantages and returns; metrics


def test_on_a_narrow_wire_the_gradient_is_half_as_many_bytes(recipe, meter):
    narrow = apply_overrides(
        recipe, {"run": {"grad_comm_dtype": "bf16", "lanes": 1}, "task.num_envs": 1, "algo.batch_size": 8}
    )
    sent = measure_shares(narrow, rounds=1).sent
    assert [size for name, size, _ in sent if name == "gradient"] == [2 * meter.parameters]


def test_memory_is_what_the_buffers_and_the_agent_take(measured, meter):
    # A board of 3 x 4 x 4, an action, four outputs, a value; reward, two flags, apples, full; the value where cut off.
    one_step = 48 + 8 + 16 + 4 + 4 + 2 + 4 + 4 + 4
    assert measured.rollout_bytes == one_step * SETTINGS["algo"]["rollout_steps"]
    agent = sum(tensor.nbytes for tensor in meter.algorithm.shared_state().values())
    assert agent > 3 * 4 * meter.parameters  # with the two moments of Adam
    assert measured.state_bytes == agent + 4 * meter.parameters
    assert measured.activation_bytes > 3 * 4 * 4  # more than the board itself


def test_a_plan_is_plain_numbers(measured):
    rows = [predict_for(count, measured) for count in (1, 64)]
    found = as_json(measured, FREE, rows, rows)
    assert list(found) == ["shares", "network", "fixed_batch", "growing_batch"]
    assert found["shares"] == asdict(measured)
    assert [row["processes"] for row in found["fixed_batch"]] == [1, 64]


@pytest.mark.parametrize(
    ("hours", "words"), [(0.5 / 3600, "0.5 s"), (0.5, "30.0 min"), (30.0, "30.0 h"), (24_000.0, "1,000.0 days")]
)
def test_a_time_is_said_as_people_say_it(hours, words):
    assert _duration(hours) == words


@pytest.mark.parametrize(("memory", "words"), [(2_048, "2 KiB"), (3.5 * 2**20, "3.5 MiB"), (80 * 2**30, "80.0 GiB")])
def test_memory_is_said_in_the_unit_that_fits(memory, words):
    assert _size(memory) == words
