"""Half precision, and numbers that are not finite: what one process meets, all of them answer in the same way."""

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

from lockstep.distributed import Runtime
from lockstep.lanes import partition_lanes
from lockstep.metrics import Metrics
from processes import outcomes, together

pytestmark = pytest.mark.distributed

BAD_LANE = 5


def spoiled_batch(runtime, value):
    """The batch of this process, with one bad number on one lane of the run."""
    whole = everything("mlp")
    whole["y"][BAD_LANE, 0, 0] = value
    return hosted_here(whole, runtime)


def step_through_trouble(reduction, precision, value):
    """A good step, one that meets a bad number on one lane, another good one; what each left behind."""
    with Runtime.start(run_config(reduction, precision=precision, on_nonfinite="skip")) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime, 0.01, torch.optim.Adam)
        optimizer._loss_scale.value.fill_(256.0 if precision == "fp16" else 1.0)  # large enough to matter here
        good, bad = hosted_here(everything("mlp"), runtime), spoiled_batch(runtime, value)
        steps = []
        for batch in (good, bad, good):
            metrics = optimizer.step(squared_error(net), batch)
            steps.append(
                {
                    "parameters": digest(dict(net.named_parameters())),
                    "moments": digest({k: v for k, v in optimizer.state().items() if "exp_avg" in k}),
                    "scale": optimizer._loss_scale.value.item(),
                    "loss": repr(metrics.latest("loss")),
                    "skipped": metrics.latest("skipped"),
                }
            )
        return steps


def stop_at_trouble(reduction):
    with Runtime.start(run_config(reduction)) as runtime:
        net = build("mlp")
        optimizer_for(net, runtime).step(squared_error(net), spoiled_batch(runtime, math.nan))


def train_in_half(reduction, precision):
    with Runtime.start(run_config(reduction, precision=precision)) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime, 0.01, torch.optim.Adam)
        optimizer._loss_scale.value.fill_(256.0 if precision == "fp16" else 1.0)
        batch = hosted_here(everything("mlp"), runtime)
        losses = [optimizer.step(squared_error(net), batch).latest("loss") for _ in range(10)]
        return {"losses": losses, "digest": digest(dict(net.named_parameters()) | optimizer.state())}


def distance_in_half(precision):
    with Runtime.start(run_config(precision=precision)) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime)
        optimizer._loss_scale.value.fill_(256.0 if precision == "fp16" else 1.0)
        optimizer.step(squared_error(net), hosted_here(everything("mlp"), runtime))
        return distance(gradients(net), plain_gradient("mlp"))


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_an_overflow_on_one_process_skips_the_step_and_halves_the_scale_on_all(reduction, processes):
    everybody = together(step_through_trouble, processes, reduction, "fp16", math.inf)
    assert all(each == everybody[0] for each in everybody)
    before, skipped, after = everybody[0]
    assert (before["parameters"], before["moments"]) == (skipped["parameters"], skipped["moments"])
    assert skipped["parameters"] != after["parameters"]
    assert [before["scale"], skipped["scale"], after["scale"]] == [256.0, 128.0, 128.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_bad_number_on_one_process_skips_the_step_on_all_where_the_run_says_skip(reduction, value):
    everybody = together(step_through_trouble, 2, reduction, "fp32", value)
    assert all(each == everybody[0] for each in everybody)
    before, skipped, after = everybody[0]
    assert (before["parameters"], before["moments"]) == (skipped["parameters"], skipped["moments"])
    assert skipped["parameters"] != after["parameters"]
    assert [step["skipped"] for step in everybody[0]] == [0.0, 1.0, 0.0]
    assert skipped["loss"] == "0.0"  # a step that was not taken counts for nothing in the log


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_bad_number_on_one_process_stops_all_of_them_and_names_the_lane(processes, reduction):
    (host,) = [process for process, share in enumerate(partition_lanes(LANES, processes)) if BAD_LANE in share]
    for ended in outcomes(stop_at_trouble, processes, reduction):
        assert ended.error.startswith(
            f"NonFiniteError: the gradient of update 1 is not finite:\n  process {host}, lane {BAD_LANE}: loss, error"
        )
        assert ended.error.count("lane") == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_and_exact_mode_gives_the_same_bits_on_any_number_of_processes(precision):
    found = [each for processes in (1, 2, 3) for each in together(train_in_half, processes, "exact", precision)]
    assert {each["digest"] for each in found} == {found[0]["digest"]}
    assert found[0]["losses"][-1] < 0.9 * found[0]["losses"][0]


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.003)])
def test_a_gradient_in_half_precision_is_the_full_one_within_its_digits(precision, tolerance):
    found = together(distance_in_half, 2, precision)
    assert 1e-5 < max(found) < tolerance  # not zero: it did run in half precision


def test_a_count_on_the_host_goes_with_a_sum_on_a_device():
    metrics = Metrics()
    metrics.add_global("grad_norm", torch.zeros((), device="meta"), torch.ones(()))  # meta, for want of a GPU
    assert metrics.global_sums["grad_norm"].device.type == "meta"


def skipped_at_the_start(samples):
    """How many of the first updates fp16 loses, on a batch of many samples with losses of about one."""
    with Runtime.start(run_config("fast", precision="fp16")) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime, 0.001, torch.optim.Adam)
        whole = {name: part.repeat(1, samples // N, 1) for name, part in everything("mlp").items()}
        batch = hosted_here(whole, runtime)
        return sum(optimizer.step(squared_error(net), batch).latest("skipped") for _ in range(8))


def test_fp16_starts_to_learn_at_once_however_large_the_batch():
    assert max(together(skipped_at_the_start, 2, 6000)) <= 1
