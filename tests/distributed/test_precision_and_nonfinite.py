"""Half precision and non-finite values: all processes react alike to a value on one process."""

import math

import pytest
import torch
from problems import (
    LANES,
    N,
    build,
    digest,
    distance,
    everything,
    gradients,
    hosted_here,
    optimizer_for,
    plain_gradient,
    run_config,
    squared_error,
)

from helpers.multiprocess import outcomes, together
from lockstep.distributed import Runtime
from lockstep.lanes import partition_lanes
from lockstep.metrics import Metrics

pytestmark = pytest.mark.distributed

NAN_LANE = 5


def nonfinite_batch(runtime, value):
    """Return the batch of this process, with one non-finite value on one lane of the run."""
    whole = everything("mlp")
    whole["y"][NAN_LANE, 0, 0] = value
    return hosted_here(whole, runtime)


def steps_with_nonfinite_batch(reduction, precision, value):
    """Take a finite step, one with a non-finite value on one lane, and a finite one; return the state after each."""
    with Runtime.start(run_config(reduction, precision=precision, on_nonfinite="skip")) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime, 0.01, torch.optim.Adam)
        optimizer._loss_scale.value.fill_(256.0 if precision == "fp16" else 1.0)  # large enough to matter here
        good, bad = hosted_here(everything("mlp"), runtime), nonfinite_batch(runtime, value)
        steps = []
        for batch in (good, bad, good):
            metrics = optimizer.step(squared_error(net), batch)
            steps.append(
                {
                    "parameters": digest(dict(net.named_parameters())),
                    "moments": digest({k: v for k, v in optimizer.shared_state().items() if "exp_avg" in k}),
                    "scale": optimizer._loss_scale.value.item(),
                    "loss": repr(metrics.latest("loss")),
                    "skipped": metrics.latest("skipped"),
                }
            )
        return steps


def stop_at_nonfinite_batch(reduction):
    with Runtime.start(run_config(reduction)) as runtime:
        net = build("mlp")
        optimizer_for(net, runtime).step(squared_error(net), nonfinite_batch(runtime, math.nan))


def train_in_half(reduction, precision):
    with Runtime.start(run_config(reduction, precision=precision)) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime, 0.01, torch.optim.Adam)
        optimizer._loss_scale.value.fill_(256.0 if precision == "fp16" else 1.0)
        batch = hosted_here(everything("mlp"), runtime)
        losses = [optimizer.step(squared_error(net), batch).latest("loss") for _ in range(10)]
        return {"losses": losses, "digest": digest(dict(net.named_parameters()) | optimizer.shared_state())}


def distance_in_half(precision):
    with Runtime.start(run_config(precision=precision)) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime)
        optimizer._loss_scale.value.fill_(256.0 if precision == "fp16" else 1.0)
        optimizer.step(squared_error(net), hosted_here(everything("mlp"), runtime))
        return distance(gradients(net), plain_gradient("mlp"))


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_fp16_overflow_skips_the_step_and_halves_the_scale_on_all_ranks(reduction, processes):
    by_process = together(steps_with_nonfinite_batch, processes, reduction, "fp16", math.inf)
    assert all(each == by_process[0] for each in by_process)
    before, skipped, after = by_process[0]
    assert (before["parameters"], before["moments"]) == (skipped["parameters"], skipped["moments"])
    assert skipped["parameters"] != after["parameters"]
    assert [before["scale"], skipped["scale"], after["scale"]] == [256.0, 128.0, 128.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_nonfinite_value_with_skip_skips_the_step_on_all_ranks(reduction, value):
    by_process = together(steps_with_nonfinite_batch, 2, reduction, "fp32", value)
    assert all(each == by_process[0] for each in by_process)
    before, skipped, after = by_process[0]
    assert (before["parameters"], before["moments"]) == (skipped["parameters"], skipped["moments"])
    assert skipped["parameters"] != after["parameters"]
    assert [step["skipped"] for step in by_process[0]] == [0.0, 1.0, 0.0]
    assert skipped["loss"] == "0.0"  # a skipped step is not counted in the metrics


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_nonfinite_value_stops_all_ranks_and_names_the_lane(processes, reduction):
    (host,) = [process for process, share in enumerate(partition_lanes(LANES, processes)) if NAN_LANE in share]
    for ended in outcomes(stop_at_nonfinite_batch, processes, reduction):
        assert ended.error.startswith(
            f"NonFiniteError: the gradient of update 1 is not finite:\n  process {host}, lane {NAN_LANE}: loss, error"
        )
        assert ended.error.count("lane") == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_exact_training_is_bitwise_equal_on_1_to_3_ranks(precision):
    found = [each for processes in (1, 2, 3) for each in together(train_in_half, processes, "exact", precision)]
    assert {each["digest"] for each in found} == {found[0]["digest"]}
    assert found[0]["losses"][-1] < 0.9 * found[0]["losses"][0]


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.003)])
def test_half_precision_gradient_is_close_to_fp32(precision, tolerance):
    found = together(distance_in_half, 2, precision)
    assert 1e-5 < max(found) < tolerance  # not zero: it did run in half precision


def test_metrics_add_global_accepts_host_count_with_device_sum():
    metrics = Metrics()
    metrics.add_global("grad_norm", torch.zeros((), device="meta"), torch.ones(()))  # meta instead of a GPU
    assert metrics.global_sums["grad_norm"].device.type == "meta"


def skipped_at_the_start(samples):
    """Return how many of the first fp16 updates are skipped, on a large batch with losses of about one."""
    with Runtime.start(run_config("fast", precision="fp16")) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime, 0.001, torch.optim.Adam)
        whole = {name: part.repeat(1, samples // N, 1) for name, part in everything("mlp").items()}
        batch = hosted_here(whole, runtime)
        return sum(optimizer.step(squared_error(net), batch).latest("skipped") for _ in range(8))


def test_fp16_large_batch_skips_at_most_one_initial_update():
    assert max(together(skipped_at_the_start, 2, 6000)) <= 1
