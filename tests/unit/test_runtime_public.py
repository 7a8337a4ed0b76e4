"""The runtime: small, and strict about collectives with one process as with many."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from lockstep.metrics import Metrics

MODES = ["fast", "exact"]
both_modes = pytest.mark.parametrize("reduction", MODES)


def runtime(reduction="fast", lanes=4, hosting=None):
    return Runtime.single_process(RunConfig(lanes=lanes, reduction=reduction), hosting=hosting)


def metrics_by_lane(lanes):
    metrics = Metrics()
    metrics.add_local("return", torch.zeros(lanes), torch.ones(lanes))
    return metrics


COLLECTIVES = {
    "all_reduce_sum": lambda runtime: runtime.all_reduce_sum(torch.ones(2)),
    "all_reduce_max": lambda runtime: runtime.all_reduce_max(torch.ones(2)),
    "exact_sum": lambda runtime: runtime.exact_sum(torch.ones(4, 2)),
    "all_reduce_any": lambda runtime: runtime.all_reduce_any(stop=True),
    "all_gather_json": lambda runtime: runtime.all_gather_json(1),
    "run_on_main": lambda runtime: runtime.run_on_main(lambda: 1),
    "reduce_metrics": lambda runtime: runtime.reduce_metrics(metrics_by_lane(4)),
    "check_replicas": lambda runtime: runtime.check_replicas({"a": torch.ones(2)}, "here"),
}
each_collective = pytest.mark.parametrize("call", COLLECTIVES.values(), ids=COLLECTIVES)


def test_a_runtime_has_at_most_fifteen_public_methods_besides_its_constructors():
    constructors = {"start", "single_process"}
    public = {name for name, _ in inspect.getmembers(Runtime) if not name.startswith("_")} - constructors
    assert set(COLLECTIVES) | {"iter_lanes", "map_lanes", "phase"} <= public  # it is the right class that is counted
    assert len(public) <= 15, sorted(public)


@each_collective
def test_a_collective_is_welcome_outside_by_lane(call):
    call(runtime())


@each_collective
@both_modes
def test_a_collective_inside_by_lane_raises_even_with_one_process(call, reduction):
    alone = runtime(reduction)
    for _ in alone.iter_lanes(torch.zeros(12)):
        with pytest.raises(RuntimeError, match="inside iter_lanes or a loss"):
            call(alone)
    call(alone)


@both_modes
def test_a_collective_inside_map_lanes_raises(reduction):
    alone = runtime(reduction)
    with pytest.raises(RuntimeError, match="Collect what is to be shared"):
        alone.map_lanes(lambda part: alone.all_reduce_sum(part), torch.zeros(12))
    alone.all_reduce_sum(torch.zeros(1))  # and the one that raised has left no trace


@both_modes
def test_a_loop_within_a_loop_does_not_open_the_outer_one_to_collectives(reduction):
    alone = runtime(reduction)
    for part in alone.iter_lanes(torch.zeros(12)):
        alone.map_lanes(lambda inner: inner + 1, part.new_zeros(8))
        with pytest.raises(RuntimeError, match="inside iter_lanes"):
            alone.all_reduce_sum(torch.zeros(1))


def test_a_loop_that_was_left_early_is_left():
    alone = runtime("exact")
    for _ in alone.iter_lanes(torch.zeros(12)):
        break
    alone.all_reduce_sum(torch.zeros(1))


def test_fast_mode_yields_all_local_lanes_as_one_batch():
    batch = {"obs": torch.arange(24).view(12, 2), "reward": torch.arange(12)}
    (part,) = runtime("fast").iter_lanes(batch)
    assert part["obs"] is batch["obs"]  # as it is: neither cut nor copied
    assert part["reward"] is batch["reward"]


def test_exact_mode_yields_one_contiguous_lane_after_another():
    across = torch.arange(24.0).view(2, 12).t()  # [L x N, D], a lane is strided
    assert not across[:3].is_contiguous()
    parts = list(runtime("exact").iter_lanes({"obs": across}))
    assert len(parts) == 4
    for lane, part in enumerate(parts):
        assert part["obs"].is_contiguous()
        assert torch.equal(part["obs"], across[3 * lane : 3 * (lane + 1)])


def test_a_batch_that_lanes_cannot_share_evenly_is_refused_in_words():
    with pytest.raises(ValueError, match=r"a batch of 10 samples cannot be 4 lanes.*\nGive every lane as many samples"):
        list(runtime("exact").iter_lanes(torch.zeros(10)))
    with pytest.raises(ValueError, match="a batch of 10 samples"):
        runtime("exact").map_lanes(lambda part: part, {"obs": torch.zeros(10, 2)})


def test_exact_mode_yields_only_the_lanes_that_live_here():
    batch = torch.arange(6)
    parts = list(runtime("exact", lanes=8, hosting=range(3, 5)).iter_lanes(batch))
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]


@given(st.sampled_from(MODES), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
def test_mapping_lanes_puts_everything_back_where_it_was(reduction, lanes, samples, features):
    shape = (lanes * samples, *([3] * features))
    batch = {"a": torch.randn(shape), "b": {"c": torch.arange(lanes * samples)}}
    back = runtime(reduction, lanes).map_lanes(lambda part: part, batch)
    assert torch.equal(back["a"], batch["a"])
    assert torch.equal(back["b"]["c"], batch["b"]["c"])


@both_modes
def test_mapping_lanes_applies_the_function_to_every_sample(reduction):
    batch = torch.arange(12.0)
    doubled = runtime(reduction).map_lanes(
        lambda part: {"twice": part * 2, "pair": torch.stack([part, part], -1)}, batch
    )
    assert torch.equal(doubled["twice"], batch * 2)
    assert doubled["pair"].shape == (12, 2)


def test_pooling_adds_lanes_up_in_double_precision_and_leaves_other_lanes_at_nothing():
    table = torch.tensor([[1.0, 2.0], [3.0, 2.0**24]])
    pooled = runtime(lanes=8, hosting=range(3, 5)).exact_sum(table)
    assert pooled.dtype == torch.float64
    assert pooled.tolist() == [4.0, 2.0**24 + 2]


def test_alone_every_agreement_is_ones_own():
    alone = runtime()
    assert alone.all_reduce_any(stop=True, save=False) == {"stop": True, "save": False}
    assert alone.all_gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]  # plain values, as others would get them
    assert alone.run_on_main(lambda: 7) == 7
    assert alone.is_main
    ones = torch.ones(2)
    assert alone.all_reduce_sum(ones) is ones
    assert alone.all_reduce_max(ones) is ones


def test_metrics_are_reduced_to_sums_and_counts():
    metrics = metrics_by_lane(4)
    metrics.add_global("kl", torch.tensor(1.0), torch.tensor(4))
    assert runtime().reduce_metrics(metrics) == {"kl": (1.0, 4.0), "return": (0.0, 4.0)}
    assert runtime().reduce_metrics(Metrics()) == {}


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_updates_are_reduced_to_sums_over_samples_and_counts_of_what_was_taken(make):
    metrics = Metrics()
    for row in ([4.0, 10.0, 2.0, 0.5], [4.0, math.nan, 1.0, math.inf], [2.0, 3.0, 1.0, 0.25]):  # the second was skipped
        metrics.add_update(("loss", "error"), make(row))
    means = {"loss": (13.0, 6.0), "error": (3.0, 6.0), "grad_norm": (0.75, 2.0), "skipped": (1.0, 3.0)}
    assert runtime().reduce_metrics(metrics) == means
    under = {f"actor/{name}": pair for name, pair in means.items()}
    assert runtime().reduce_metrics(metrics.with_prefix("actor")) == under
    assert metrics.latest("loss") == metrics.with_prefix("actor").latest("actor/loss") == 1.5


def test_a_phase_inside_another_counts_for_itself_alone(monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("lockstep.ops.phase_timer.time.perf_counter", lambda: float(next(now)))
    alone = runtime()
    with alone.phase("learn"):  # 0
        with alone.phase("reduce"):  # 10
            pass  # 20
        with alone.phase("reduce"):  # 30
            pass  # 40
    # 50
    assert alone.timer.take() == {"learn": 30.0, "reduce": 20.0}
    assert alone.timer.take() == {}
    assert alone.status.phase_counts == {"learn": 1, "reduce": 2}


def test_a_phase_that_fails_is_over():
    alone = runtime()
    with pytest.raises(ZeroDivisionError), alone.phase("learn"):
        raise ZeroDivisionError
    with alone.phase("collect"):
        pass
    assert alone.status.phase_counts == {"learn": 1, "collect": 1}
    assert alone.status.phases == []


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("amp", torch.bfloat16)]
)
def test_networks_run_in_the_precision_that_was_asked_for(precision, dtype):
    alone = Runtime.single_process(RunConfig(precision=precision))
    assert alone.autocast_dtype == dtype
    with alone.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)


@pytest.mark.parametrize(("given_lanes", "lanes"), [(None, 8), (3, 3)])
def test_a_run_has_eight_lanes_unless_it_says_otherwise(given_lanes, lanes):
    assert Runtime.single_process(RunConfig(lanes=given_lanes)).lanes.num_lanes == lanes
