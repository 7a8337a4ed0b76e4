"""DistributedOptimizer on one process: gradients, micro-batches, non-finite values and loss scale."""

import math

import pytest
import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.distributed import DistributedOptimizer, NonFiniteError, Runtime
from lockstep.distributed.nonfinite import MAX_CONSECUTIVE_SKIPS, LossScale
from lockstep.protocols import Loss

both_modes = pytest.mark.parametrize("reduction", ["fast", "exact"])
A_BUCKET_FOR_EACH = 1 / 2**20
# torch 2.10 has a fused Adagrad, but it does not scale gradients.
NO_ADAGRAD = not hasattr(torch.optim.Adagrad([torch.zeros(1)], fused=True), "_step_supports_amp_scaling")
FUSED = [
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD),
    pytest.param(torch.optim.Adagrad, marks=pytest.mark.skipif(NO_ADAGRAD, reason="needs a newer torch")),
]


class OddNet(nn.Module):
    """A channels-last convolution between parameters without elements."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(0))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.last = nn.Parameter(torch.zeros(0, 4))

    def loss(self, batch):
        return Loss(self.conv(batch["x"]).square().sum(), len(batch["x"]))


class Line(nn.Module):
    """One weight that is fitted to a target."""

    def __init__(self, weight=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def loss(self, batch):
        return Loss((0.5 * (self.weight - batch["y"]).square()).sum(), len(batch["y"]))


def line(run=None, kind=torch.optim.SGD, rate=1.0, weight=0.0, **options):
    """Return a line and its optimizer on one process with 8 lanes."""
    net, runtime = Line(weight), Runtime.single_process(run or RunConfig())
    return net, DistributedOptimizer(runtime, kind(net.named_parameters(), lr=rate, fused=True), **options)


def targets(*numbers):
    """Return one sample per lane for 8 lanes."""
    return {"y": torch.tensor(numbers or [1.0] * 8)}


BAD = targets(*[1.0] * 5, math.nan, 1.0, 1.0)


@both_modes
@pytest.mark.parametrize("bucket_mb", [A_BUCKET_FOR_EACH, 1.0])
def test_gradient_buffer_is_flat_for_any_strides_and_sizes(reduction, bucket_mb):
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


@pytest.mark.parametrize("kind", FUSED)
def test_optimizer_that_is_not_fused_is_rejected(kind):
    net, runtime = Line(), Runtime.single_process(RunConfig())
    for options in ({}, {"fused": False}, {"foreach": True}):
        with pytest.raises(
            ValueError, match=rf"{kind.__name__} was not created with fused=True.\nUse lockstep.distributed.FusedAdam"
        ):
            DistributedOptimizer(runtime, kind(net.named_parameters(), lr=0.1, **options))
    DistributedOptimizer(runtime, kind(net.named_parameters(), lr=0.1, fused=True))


def test_optimizer_without_fused_support_is_rejected():
    with pytest.raises(ValueError, match=r"RMSprop was not created with fused=True.\n.*Adam, AdamW, SGD or Adagrad\."):
        DistributedOptimizer(
            Runtime.single_process(RunConfig()), torch.optim.RMSprop(Line().named_parameters(), lr=0.1)
        )


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_step_matches_torch_with_mean_gradient_and_clipping(kind, limit):
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
def test_grad_norm_metric_is_that_before_clipping(reduction):
    net, optimizer = line(RunConfig(reduction=reduction), max_grad_norm=0.5)
    metrics = optimizer.step(net.loss, targets(*[3.0] * 8))
    assert metrics.latest("grad_norm") == pytest.approx(3.0)
    assert net.weight.item() == pytest.approx(0.5, rel=1e-5)
    assert metrics.latest("loss") == pytest.approx(4.5)


@both_modes
@pytest.mark.parametrize("accumulate", [2, 3])
def test_micro_batches_give_same_step_as_full_batch(reduction, accumulate):
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


def test_micro_batches_contain_samples_of_every_lane():
    net, optimizer = line(accumulate=2)
    seen = []

    def loss(batch):
        seen.append(batch["y"].tolist())
        return net.loss(batch)

    optimizer.step(loss, {"y": torch.arange(32.0)})  # lane 0 has 0 to 3, lane 1 has 4 to 7, ...
    assert seen == [[4 * lane + n for lane in range(8) for n in half] for half in ((0, 1), (2, 3))]


@both_modes
def test_indivisible_batch_is_rejected_only_in_exact_mode(reduction):
    net, optimizer = line(RunConfig(reduction=reduction))
    batch = {"y": torch.ones(7)}
    if reduction == "exact":
        with pytest.raises(ValueError, match=r"a batch of 7 samples cannot be split into 8 equal lanes"):
            optimizer.step(net.loss, batch)
    else:
        optimizer.step(net.loss, batch)
        assert net.weight.item() == pytest.approx(1.0)


def test_metrics_of_two_optimizers_add_up():
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


# ---------------------------------------------------------------------------------------------------- non-finite values


def everything(net, optimizer):
    """Return a copy of all state that an update changes."""
    state = optimizer.shared_state() | {"weight": net.weight.detach()}
    return {name: tensor.clone() for name, tensor in state.items() if name != "updates"}


@both_modes
def test_nonfinite_gradient_stops_run_without_changes(reduction):
    net, optimizer = line(RunConfig(reduction=reduction), torch.optim.Adam)
    optimizer.step(net.loss, targets())
    before = everything(net, optimizer)
    with pytest.raises(NonFiniteError, match="the gradient of update 2 is not finite:\n  process 0, lane 5: loss"):
        optimizer.step(net.loss, BAD)
    for name, tensor in everything(net, optimizer).items():
        assert torch.equal(tensor, before[name]), name


@both_modes
def test_nonfinite_gradient_with_skip_changes_nothing(reduction):
    net, optimizer = line(RunConfig(reduction=reduction, on_nonfinite="skip"), torch.optim.Adam)
    optimizer.step(net.loss, targets())
    before = everything(net, optimizer)
    metrics = optimizer.step(net.loss, BAD)
    before["skipped_in_a_row"] += 1
    assert metrics.latest("skipped") == 1.0
    assert metrics.global_sums["loss"].tolist() == metrics.global_sums["grad_norm"].tolist() == [0.0, 0.0]
    for name, tensor in everything(net, optimizer).items():
        assert torch.equal(tensor, before[name]), name
    assert optimizer.step(net.loss, targets()).latest("skipped") == 0.0
    assert net.weight > before["weight"]


def test_skip_messages_are_logged_at_powers_of_two():
    net, optimizer = line(RunConfig(on_nonfinite="skip"))
    for _ in range(40):
        optimizer.step(net.loss, BAD, where="here")
    notes = optimizer.runtime.pending_messages
    assert notes[0] == "Skipped: the gradient of update 1 (here) is not finite:\n  process 0, lane 5: loss of its loss"
    assert [note.partition(":")[0] for note in notes[1:]] == [
        f"Skipped ({count} times since the start)" for count in (2, 4, 8, 16, 32)
    ]


@pytest.mark.parametrize("run", [RunConfig(on_nonfinite="skip"), RunConfig(precision="fp16")], ids=["skip", "fp16"])
def test_too_many_consecutive_skips_stop_run(run):
    net, optimizer = line(run)
    for _ in range(MAX_CONSECUTIVE_SKIPS - 1):
        optimizer.step(net.loss, BAD)
    optimizer.step(net.loss, targets())
    for _ in range(MAX_CONSECUTIVE_SKIPS - 1):
        optimizer.step(net.loss, BAD)
    other, resumed = line(run)
    resumed.load_shared_state(optimizer.shared_state())
    for model, each in ((net, optimizer), (other, resumed)):
        with pytest.raises(NonFiniteError, match="process 0, lane 5: loss"):
            each.step(model.loss, BAD)


def test_overflow_of_gradient_sum_is_reported_as_overflow():
    net, optimizer = line()
    with pytest.raises(NonFiniteError, match="every lane is finite by itself, but their sum overflows"):
        optimizer.step(lambda batch: Loss((net.weight * batch["y"]).sum(), 8), targets(*[1e38] * 8))


# ----------------------------------------------------------------------------------------------------------- loss scale


def test_loss_scale_halves_on_overflow_and_doubles_after_good_steps():
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
    scale.update(bad)  # the count of good steps restarts
    assert (scale.value, scale.good_steps) == (2.0**15, 0)


def test_loss_scale_is_at_least_one():
    scale = LossScale(True, torch.device("cpu"))
    for _ in range(40):
        scale.update(torch.ones(()))
    assert scale.value == 1.0


def test_loss_scale_factor_is_per_sample_and_none_when_disabled():
    assert LossScale(True, torch.device("cpu")).factor(64) == 2.0**10
    idle = LossScale(False, torch.device("cpu"))
    assert idle.factor(64) is None
    idle.update(torch.ones(()))
    assert idle.value == 2.0**16


def test_loss_scale_is_in_state_and_does_not_change_step():
    run = RunConfig(precision="fp16")
    net, optimizer = line(run)
    optimizer.step(net.loss, targets())
    assert net.weight.item() == pytest.approx(1.0)
    assert optimizer.shared_state()["good_steps"] == 1
    _, fresh = line(run)
    fresh.load_shared_state(optimizer.shared_state())
    assert fresh.shared_state()["good_steps"] == 1
    assert "loss_scale" in fresh.shared_state()
    assert "loss_scale" not in line()[1].shared_state()


def test_zero_learning_rate_leaves_weights_unchanged():
    net, optimizer = line(rate=0.0, weight=3.0)
    optimizer.step(net.loss, targets(), learning_rate=0.0)
    assert net.weight.item() == 3.0
