"""Runtime: collectives, lane iteration, metric reduction, phases and precision on one process."""

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


def test_runtime_has_at_most_fifteen_public_methods():
    constructors = {"start", "single_process"}
    public = {name for name, _ in inspect.getmembers(Runtime) if not name.startswith("_")} - constructors
    assert set(COLLECTIVES) | {"iter_lanes", "map_lanes", "phase"} <= public  # sanity check of the counted class
    assert len(public) <= 15, sorted(public)


@each_collective
def test_collective_outside_iter_lanes_is_allowed(call):
    call(runtime())


@each_collective
@both_modes
def test_collective_inside_iter_lanes_raises(call, reduction):
    alone = runtime(reduction)
    for _ in alone.iter_lanes(torch.zeros(12)):
        with pytest.raises(RuntimeError, match="inside iter_lanes or a loss"):
            call(alone)
    call(alone)


@both_modes
def test_collective_inside_map_lanes_raises(reduction):
    alone = runtime(reduction)
    with pytest.raises(RuntimeError, match="Accumulate the values in the loop"):
        alone.map_lanes(lambda part: alone.all_reduce_sum(part), torch.zeros(12))
    alone.all_reduce_sum(torch.zeros(1))  # the error leaves no state behind


@both_modes
def test_collective_after_nested_map_lanes_still_raises(reduction):
    alone = runtime(reduction)
    for part in alone.iter_lanes(torch.zeros(12)):
        alone.map_lanes(lambda inner: inner + 1, part.new_zeros(8))
        with pytest.raises(RuntimeError, match="inside iter_lanes"):
            alone.all_reduce_sum(torch.zeros(1))


def test_collective_after_break_from_iter_lanes_is_allowed():
    alone = runtime("exact")
    for _ in alone.iter_lanes(torch.zeros(12)):
        break
    alone.all_reduce_sum(torch.zeros(1))


def test_iter_lanes_fast_yields_one_batch_without_copy():
    batch = {"obs": torch.arange(24).view(12, 2), "reward": torch.arange(12)}
    (part,) = runtime("fast").iter_lanes(batch)
    assert part["obs"] is batch["obs"]  # neither split nor copied
    assert part["reward"] is batch["reward"]


def test_iter_lanes_exact_yields_contiguous_lanes():
    across = torch.arange(24.0).view(2, 12).t()  # [L x N, D], non-contiguous lanes
    assert not across[:3].is_contiguous()
    parts = list(runtime("exact").iter_lanes({"obs": across}))
    assert len(parts) == 4
    for lane, part in enumerate(parts):
        assert part["obs"].is_contiguous()
        assert torch.equal(part["obs"], across[3 * lane : 3 * (lane + 1)])


def test_iter_lanes_with_indivisible_batch_is_rejected():
    with pytest.raises(ValueError, match=r"a batch of 10 samples cannot be split into 4 equal lanes.\nGive every lane"):
        list(runtime("exact").iter_lanes(torch.zeros(10)))
    with pytest.raises(ValueError, match="a batch of 10 samples"):
        runtime("exact").map_lanes(lambda part: part, {"obs": torch.zeros(10, 2)})


def test_iter_lanes_exact_yields_only_local_lanes():
    batch = torch.arange(6)
    parts = list(runtime("exact", lanes=8, hosting=range(3, 5)).iter_lanes(batch))
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]


@given(st.sampled_from(MODES), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
def test_map_lanes_with_identity_returns_batch(reduction, lanes, samples, features):
    shape = (lanes * samples, *([3] * features))
    batch = {"a": torch.randn(shape), "b": {"c": torch.arange(lanes * samples)}}
    back = runtime(reduction, lanes).map_lanes(lambda part: part, batch)
    assert torch.equal(back["a"], batch["a"])
    assert torch.equal(back["b"]["c"], batch["b"]["c"])


@both_modes
def test_map_lanes_applies_function_to_every_sample(reduction):
    batch = torch.arange(12.0)
    doubled = runtime(reduction).map_lanes(
        lambda part: {"twice": part * 2, "pair": torch.stack([part, part], -1)}, batch
    )
    assert torch.equal(doubled["twice"], batch * 2)
    assert doubled["pair"].shape == (12, 2)


def test_exact_sum_of_local_lanes_is_float64():
    table = torch.tensor([[1.0, 2.0], [3.0, 2.0**24]])
    pooled = runtime(lanes=8, hosting=range(3, 5)).exact_sum(table)
    assert pooled.dtype == torch.float64
    assert pooled.tolist() == [4.0, 2.0**24 + 2]


def test_collectives_on_one_process_return_input():
    alone = runtime()
    assert alone.all_reduce_any(stop=True, save=False) == {"stop": True, "save": False}
    assert alone.all_gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]  # JSON values, as on other processes
    assert alone.run_on_main(lambda: 7) == 7
    assert alone.is_main
    ones = torch.ones(2)
    assert alone.all_reduce_sum(ones) is ones
    assert alone.all_reduce_max(ones) is ones


def test_reduce_metrics_returns_sums_and_counts():
    metrics = metrics_by_lane(4)
    metrics.add_global("kl", torch.tensor(1.0), torch.tensor(4))
    assert runtime().reduce_metrics(metrics) == {"kl": (1.0, 4.0), "return": (0.0, 4.0)}
    assert runtime().reduce_metrics(Metrics()) == {}


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_reduce_metrics_of_updates_excludes_skipped_ones(make):
    metrics = Metrics()
    for row in ([4.0, 10.0, 2.0, 0.5], [4.0, math.nan, 1.0, math.inf], [2.0, 3.0, 1.0, 0.25]):  # the second was skipped
        metrics.add_update(("loss", "error"), make(row))
    means = {"loss": (13.0, 6.0), "error": (3.0, 6.0), "grad_norm": (0.75, 2.0), "skipped": (1.0, 3.0)}
    assert runtime().reduce_metrics(metrics) == means
    under = {f"actor/{name}": pair for name, pair in means.items()}
    assert runtime().reduce_metrics(metrics.with_prefix("actor")) == under
    assert metrics.latest("loss") == metrics.with_prefix("actor").latest("actor/loss") == 1.5


def test_nested_phase_time_is_excluded_from_outer_phase(monkeypatch):
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


def test_phase_ends_when_body_raises():
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
def test_autocast_uses_configured_precision(precision, dtype):
    alone = Runtime.single_process(RunConfig(precision=precision))
    assert alone.autocast_dtype == dtype
    with alone.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)


@pytest.mark.parametrize(("given_lanes", "lanes"), [(None, 8), (3, 3)])
def test_default_number_of_lanes_is_eight(given_lanes, lanes):
    assert Runtime.single_process(RunConfig(lanes=given_lanes)).lanes.num_lanes == lanes
