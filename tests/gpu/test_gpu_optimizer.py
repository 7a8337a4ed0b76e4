"""The optimizer on an emulated GPU: no synchronization in a step, and the same steps, skips and stops as on the CPU."""

import math

import pytest
import torch
from torch import nn

import emulated_cuda
from helpers.multiprocess import together
from lockstep.config import RunConfig
from lockstep.distributed import DistributedOptimizer, FusedAdam, NonFiniteError, Runtime
from lockstep.distributed.device_steps import MAX_UNCONFIRMED
from lockstep.distributed.nonfinite import MAX_CONSECUTIVE_SKIPS
from lockstep.protocols import Loss

GOOD, BAD = [1.0] * 8, [1.0] * 5 + [math.nan] + [1.0] * 2


def on_gpus(function, *arguments, processes=1):
    environment = {"EMULATED_GPUS": str(processes)}
    values = together(function, processes, *arguments, environment=environment)
    return values[0] if processes == 1 else values


class Line(nn.Module):
    """A weight that is fit to a target, and a parameter that no loss uses."""

    def __init__(self):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(3))

    def loss(self, batch):
        return Loss((0.5 * (self.weight - batch["y"]).square()).sum(), len(batch["y"]))


def line(device, **settings):
    net = Line().to(device)
    optimizer = DistributedOptimizer(
        Runtime.single_process(RunConfig(**settings), device), FusedAdam(net.named_parameters(), lr=0.1)
    )
    return net, optimizer


def follow(device, script, **settings):
    """Take steps on finite (1) and non-finite (0) batches, then check; return updates or error, and the weight."""
    net, optimizer = line(device, **settings)
    batches = {number: {"y": torch.tensor(values).to(device)} for number, values in ((0, BAD), (1, GOOD))}
    try:
        for number in script:
            optimizer.step(net.loss, batches[number])
        optimizer.check_last_step()
    except NonFiniteError as error:
        return f"{error}".splitlines()[:2], net.weight.item()
    optimizer.shared_state()
    return int(optimizer.updates), net.weight.item()


def same_on_both(script, settings):
    return follow("cuda:0", script, **settings), follow("cpu", script, **settings)


@pytest.mark.parametrize("script", [[1], [1, 1, 1], [1, 0, 1, 1], [0, 1, 0], [1] * 70 + [0] + [1] * 3])
@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_nonfinite_skip_on_device_matches_cpu(script, compile):
    there, here = on_gpus(same_on_both, script, {"on_nonfinite": "skip", "compile": compile})
    assert there == pytest.approx(here, rel=1e-6)


@pytest.mark.parametrize("script", [[0], [1, 0], [1, 1, 0, 1, 1, 1], [1] * 70 + [0, 1]])
@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_nonfinite_stop_restores_the_weights_before_the_step(script, compile):
    there, here = on_gpus(same_on_both, script, {"on_nonfinite": "stop", "compile": compile})
    assert here[0][0] == f"the gradient of update {script.index(0) + 1} is not finite:"
    assert there[0] == here[0]
    assert there[1] == pytest.approx(here[1], rel=1e-6)


def sent_by(compile):
    """Return the bytes that steps would have sent to other processes, by name and size."""
    net, optimizer = line("cuda:0", compile=compile)
    for _ in range(6):  # eager, captured and replayed
        optimizer.step(net.loss, {"y": torch.tensor(GOOD).to("cuda")})
    return sorted([*key, count] for key, count in optimizer.runtime.bytes_reduced.items())


def test_captured_steps_count_the_same_bytes_as_eager_steps():
    assert on_gpus(sent_by, "graphs") == on_gpus(sent_by, "off")


def test_too_many_consecutive_skips_stop_the_run():
    there, _ = on_gpus(same_on_both, [0] * MAX_CONSECUTIVE_SKIPS, {"on_nonfinite": "skip"})
    assert "is not finite" in there[0][0]


def counted(steps, reduction, precision):
    net, optimizer = line("cuda:0", reduction=reduction, precision=precision)
    batch = {"y": torch.tensor(GOOD).to("cuda")}
    optimizer.step(net.loss, batch)
    optimizer.check_last_step()
    with emulated_cuda.counting() as taking:
        metrics = [optimizer.step(net.loss, batch) for _ in range(steps)]
    with emulated_cuda.counting() as confirming:
        optimizer.check_last_step()
    total = metrics[0]
    for each in metrics[1:]:
        total += each
    with emulated_cuda.counting() as reading:
        reduced = optimizer.runtime.reduce_metrics(total.with_prefix("train"))
    return dict(taking.by_line), confirming.syncs, reading.syncs, reduced["train/skipped"]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_optimizer_steps_do_not_synchronize(precision):
    waits, confirming, reading, skipped = on_gpus(counted, 10, "fast", precision)
    assert waits == {}
    assert (confirming, reading) == (1, 1)
    assert skipped == [0.0, 10.0]


def kept():
    """Return the bytes that steps without and with `rebuild` keep on the device until they are checked."""
    found = []
    for rebuilt in (False, True):
        net, optimizer = line("cuda:0")
        optimizer.step(net.loss, {"y": torch.ones(8, device="cuda")})
        optimizer.check_last_step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(10):
            batch = {"y": torch.ones(8 * 1024, device="cuda")}
            again = (lambda: {"y": torch.ones(8 * 1024, device="cuda")}) if rebuilt else None
            optimizer.step(net.loss, batch, rebuild=again)
        del batch
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated() - before)
    return found


def test_batches_that_can_be_rebuilt_are_not_kept():
    without, rebuilt = on_gpus(kept)
    assert without >= 10 * 8 * 1024 * 4
    assert rebuilt < 2 * 8 * 1024 * 4


def gradients_of(processes_settings):
    """The reduced gradient with and without micro-batches, in several buckets."""
    wire, accumulations = processes_settings
    with Runtime.start(RunConfig(device="cuda", grad_bucket_mb=1e-4, grad_comm_dtype=wire)) as runtime:
        found = []
        for accumulate in accumulations:
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)).to("cuda")
            optimizer = DistributedOptimizer(runtime, FusedAdam(net.named_parameters(), lr=0.1), accumulate=accumulate)
            x = torch.linspace(-1, 1, 64 * 4).view(8, 8, 4)[list(runtime.lanes.local)].flatten(0, 1).to("cuda")
            optimizer.step(lambda batch, net=net: Loss(net(batch["x"]).square().sum(), len(batch["x"])), {"x": x})
            found.append((optimizer.gradient.flat.tolist(), len(optimizer.gradient._bounds)))
        return found


@pytest.mark.parametrize("processes", [1, 2])
def test_gradient_is_the_same_in_buckets_micro_batches_and_on_several_gpus(processes):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    net(
        torch.linspace(-1, 1, 64 * 4).view(64, 4)
    ).square().mean().backward()  # the fused step divides by the sample count
    expected = torch.cat([p.grad.flatten() for p in reversed(list(net.parameters()))]).tolist()
    values = on_gpus(gradients_of, ("fp32", [1, 2, 4]), processes=processes)
    for found in values if processes > 1 else [values]:
        for gradient, buckets in found:
            assert buckets > 1
            assert gradient == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_max_unconfirmed_is_below_max_consecutive_skips():
    assert MAX_UNCONFIRMED < MAX_CONSECUTIVE_SKIPS
