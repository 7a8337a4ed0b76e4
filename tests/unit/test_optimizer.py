"""The optimizer on one process: what it makes of its parameters before anything is reduced."""

import math

import pytest
import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.distributed import DistributedOptimizer, NonFiniteError, Runtime
from lockstep.distributed.nonfinite import MAX_CONSECUTIVE_SKIPS
from lockstep.distributed.optimizer import LossScale
from lockstep.protocols import Loss

both_modes = pytest.mark.parametrize("reduction", ["fast", "exact"])
A_BUCKET_FOR_EACH = 1 / 2**20


class OddNet(nn.Module):
    """A channels-last convolution, and parameters without elements at both ends."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(0))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.last = nn.Parameter(torch.zeros(0, 4))

    def loss(self, batch):
        return Loss(self.conv(batch["x"]).square().sum(), len(batch["x"]))


class Line(nn.Module):
    """One weight that is to be what it is told."""

    def __init__(self, weight=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def loss(self, batch):
        return Loss((0.5 * (self.weight - batch["y"]).square()).sum(), len(batch["y"]))


def line(run=None, kind=torch.optim.SGD, rate=1.0, weight=0.0, **options):
    """A line with its optimizer, on one process and 8 lanes."""
    net, runtime = Line(weight), Runtime.single_process(run or RunConfig())
    return net, DistributedOptimizer(runtime, kind(net.named_parameters(), lr=rate, fused=True), **options)


def targets(*numbers):
    """One sample for each of the 8 lanes."""
    return {"y": torch.tensor(numbers or [1.0] * 8)}


BAD = targets(*[1.0] * 5, math.nan, 1.0, 1.0)


@both_modes
@pytest.mark.parametrize("bucket_mb", [A_BUCKET_FOR_EACH, 1.0])
def test_gradients_lie_in_one_buffer_whatever_the_strides_and_sizes_of_parameters(reduction, bucket_mb):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, batch = OddNet(), {"x": torch.randn(40, 2, 4, 4)}
    expected = torch.autograd.grad(net.loss(batch).loss_sum / 40, net.conv.weight)[0]
    runtime = Runtime.single_process(RunConfig(reduction=reduction, grad_bucket_mb=bucket_mb))
    inner = torch.optim.SGD(net.named_parameters(), lr=0.1, fused=True)
    optimizer = DistributedOptimizer(runtime, inner)
    before = net.conv.weight.detach().clone()
    optimizer.step(net.loss, batch)
    assert len(optimizer.gradient.flat) == sum(p.numel() for p in net.parameters())
    torch.testing.assert_close(before - 0.1 * expected, net.conv.weight.detach())


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_that_is_not_fused_is_refused_in_words(kind):
    net, runtime = Line(), Runtime.single_process(RunConfig())
    for options in ({}, {"fused": False}, {"foreach": True}):
        with pytest.raises(
            ValueError, match=rf"{kind.__name__} was not made with fused=True.\nUse lockstep.distributed.FusedAdam"
        ):
            DistributedOptimizer(runtime, kind(net.named_parameters(), lr=0.1, **options))
    DistributedOptimizer(runtime, kind(net.named_parameters(), lr=0.1, fused=True))  # while this one is welcome


def test_an_optimizer_that_cannot_be_fused_is_refused_in_words():
    with pytest.raises(ValueError, match=r"RMSprop was not made with fused=True.\n.*Adam, AdamW, SGD or Adagrad\."):
        DistributedOptimizer(
            Runtime.single_process(RunConfig()), torch.optim.RMSprop(Line().named_parameters(), lr=0.1)
        )


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_step_is_the_one_plain_torch_takes_on_the_mean_and_clips(kind, limit):
    net, plain = Line(3.0), Line(3.0)
    optimizer = DistributedOptimizer(
        Runtime.single_process(RunConfig()), kind(net.named_parameters(), lr=0.1, fused=True), max_grad_norm=limit
    )
    theirs, batch = kind(plain.parameters(), lr=0.1), targets(*range(-4, 4))
    for _ in range(4):
        optimizer.step(net.loss, batch)
        plain.zero_grad()
        (plain.loss(batch).loss_sum / 8).backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), limit)
        theirs.step()
        torch.testing.assert_close(net.weight, plain.weight)


@both_modes
def test_the_norm_that_is_told_is_that_of_the_mean_before_it_is_clipped(reduction):
    net, optimizer = line(RunConfig(reduction=reduction), max_grad_norm=0.5)
    metrics = optimizer.step(net.loss, targets(*[3.0] * 8))
    assert metrics.latest("grad_norm") == pytest.approx(3.0)
    assert net.weight.item() == pytest.approx(0.5, rel=1e-5)
    assert metrics.latest("loss") == pytest.approx(4.5)


@both_modes
@pytest.mark.parametrize("accumulate", [2, 3])
def test_micro_batches_add_up_to_the_batch(reduction, accumulate):
    numbers = torch.arange(40.0)
    whole, at_once = line(RunConfig(reduction=reduction))
    parts, in_pieces = line(RunConfig(reduction=reduction), accumulate=accumulate)
    seen = []

    def loss(batch):
        seen.append(len(batch["y"]))
        return parts.loss(batch)

    at_once.step(whole.loss, {"y": numbers})
    in_pieces.step(loss, {"y": numbers})
    torch.testing.assert_close(parts.weight, whole.weight)
    assert max(seen) < 40 / accumulate * 1.5
    assert sum(seen) == 40


def test_micro_batches_hold_a_part_of_every_lane():
    net, optimizer = line(accumulate=2)
    seen = []

    def loss(batch):
        seen.append(batch["y"].tolist())
        return net.loss(batch)

    optimizer.step(loss, {"y": torch.arange(32.0)})  # lane 0 has 0 to 3, lane 1 has 4 to 7, ...
    assert seen == [[4 * lane + n for lane in range(8) for n in half] for half in ((0, 1), (2, 3))]


@both_modes
def test_a_batch_that_lanes_cannot_share_is_refused_in_exact_mode_and_taken_as_it_is_in_fast(reduction):
    net, optimizer = line(RunConfig(reduction=reduction))
    batch = {"y": torch.ones(7)}
    if reduction == "exact":
        with pytest.raises(ValueError, match=r"a batch of 7 samples cannot be 8 lanes"):
            optimizer.step(net.loss, batch)
    else:
        optimizer.step(net.loss, batch)
        assert net.weight.item() == pytest.approx(1.0)


def test_updates_of_two_optimizers_add_up_whatever_else_their_losses_tell():
    actor, of_actor = line()
    critic, of_critic = line()

    def telling(batch):
        return critic.loss(batch)._replace(metric_sums={"error": batch["y"].sum()})

    metrics = of_actor.step(actor.loss, targets(*[2.0] * 8))
    metrics += of_critic.step(telling, targets(*[4.0] * 8))
    assert {name: pair.tolist() for name, pair in metrics.global_sums.items()} == {
        "loss": [8 * 2.0 + 8 * 8.0, 16],
        "error": [8 * 4.0, 8],
        "grad_norm": [2.0 + 4.0, 2],
        "skipped": [0, 2],
    }


# ------------------------------------------------------------------------------------------------- numbers that are bad


def everything(net, optimizer):
    """What an update changes, copied."""
    state = optimizer.state() | {"weight": net.weight.detach()}
    return {name: tensor.clone() for name, tensor in state.items() if name != "optimizer.updates"}


@both_modes
def test_a_bad_number_stops_the_run_at_once_and_changes_nothing(reduction):
    net, optimizer = line(RunConfig(reduction=reduction), torch.optim.Adam)
    optimizer.step(net.loss, targets())
    before = everything(net, optimizer)
    with pytest.raises(NonFiniteError, match="the gradient of update 2 is not finite:\n  process 0, lane 5: loss"):
        optimizer.step(net.loss, BAD)
    for name, tensor in everything(net, optimizer).items():
        assert torch.equal(tensor, before[name]), name


@both_modes
def test_a_bad_number_that_may_be_skipped_changes_nothing(reduction):
    net, optimizer = line(RunConfig(reduction=reduction, on_nonfinite="skip"), torch.optim.Adam)
    optimizer.step(net.loss, targets())
    before = everything(net, optimizer)
    metrics = optimizer.step(net.loss, BAD)
    before["optimizer.skipped_in_a_row"] += 1
    assert metrics.latest("skipped") == 1.0
    assert metrics.global_sums["loss"].tolist() == metrics.global_sums["grad_norm"].tolist() == [0.0, 0.0]
    for name, tensor in everything(net, optimizer).items():
        assert torch.equal(tensor, before[name]), name
    assert optimizer.step(net.loss, targets()).latest("skipped") == 0.0
    assert net.weight > before["weight"]


def test_what_is_skipped_is_said_at_first_and_then_ever_more_rarely():
    net, optimizer = line(RunConfig(on_nonfinite="skip"))
    for _ in range(40):
        optimizer.step(net.loss, BAD, where="here")
    notes = optimizer.runtime.pending_messages
    assert notes[0] == "Left out: the gradient of update 1 (here) is not finite:\n  process 0, lane 5: loss of its loss"
    assert [note.partition(":")[0] for note in notes[1:]] == [
        f"Left out ({count} times since the start)" for count in (2, 4, 8, 16, 32)
    ]


@pytest.mark.parametrize("run", [RunConfig(on_nonfinite="skip"), RunConfig(precision="fp16")], ids=["skip", "fp16"])
def test_too_many_skips_in_a_row_stop_the_run_and_one_update_that_is_taken_begins_anew(run):
    net, optimizer = line(run)
    for _ in range(MAX_CONSECUTIVE_SKIPS - 1):
        optimizer.step(net.loss, BAD)
    optimizer.step(net.loss, targets())
    for _ in range(MAX_CONSECUTIVE_SKIPS - 1):
        optimizer.step(net.loss, BAD)
    other, resumed = line(run)
    resumed.load_state(optimizer.state())
    for model, each in ((net, optimizer), (other, resumed)):
        with pytest.raises(NonFiniteError, match="process 0, lane 5: loss"):
            each.step(model.loss, BAD)


def test_numbers_that_only_their_sum_makes_infinite_are_said_to_be_too_large():
    net, optimizer = line()
    with pytest.raises(NonFiniteError, match="no lane by itself: the numbers are too large to be added up"):
        optimizer.step(lambda batch: Loss((net.weight * batch["y"]).sum(), 8), targets(*[1e38] * 8))


# ----------------------------------------------------------------------------------------------------------- loss scale


def test_a_loss_scale_is_halved_by_an_overflow_and_doubled_after_a_long_calm():
    scale = LossScale(True, torch.device("cpu"))
    good, bad = torch.zeros(()), torch.ones(())
    assert (scale.value.item(), scale.value.dtype) == (2.0**16, torch.float32)
    assert (scale.good_steps.item(), scale.good_steps.dtype) == (0, torch.int32)
    scale.update(bad)
    assert scale.value == 2.0**15
    for _ in range(1999):
        scale.update(good)
    assert (scale.value, scale.good_steps) == (2.0**15, 1999)
    scale.update(good)
    assert (scale.value, scale.good_steps) == (2.0**16, 0)
    scale.update(good)
    scale.update(bad)  # and the calm begins anew
    assert (scale.value, scale.good_steps) == (2.0**15, 0)


def test_a_loss_scale_never_falls_below_one():
    scale = LossScale(True, torch.device("cpu"))
    for _ in range(40):
        scale.update(torch.ones(()))
    assert scale.value == 1.0


def test_a_loss_scale_is_for_a_mean_and_for_half_precision_alone():
    assert LossScale(True, torch.device("cpu")).factor(64) == 2.0**10
    idle = LossScale(False, torch.device("cpu"))
    assert idle.factor(64) is None
    idle.update(torch.ones(()))
    assert idle.value == 2.0**16


def test_a_loss_scale_is_in_the_state_and_leaves_no_trace_in_the_step():
    run = RunConfig(precision="fp16")
    net, optimizer = line(run)
    optimizer.step(net.loss, targets())
    assert net.weight.item() == pytest.approx(1.0)
    assert optimizer.state()["optimizer.good_steps"] == 1
    _, fresh = line(run)
    fresh.load_state(optimizer.state())
    assert fresh.state()["optimizer.good_steps"] == 1
    assert "optimizer.loss_scale" in fresh.state()
    assert "optimizer.loss_scale" not in line()[1].state()


def test_a_learning_rate_of_zero_leaves_everything_as_it_is():
    net, optimizer = line(rate=0.0, weight=3.0)
    optimizer.step(net.loss, targets(), learning_rate=0.0)
    assert net.weight.item() == 3.0
