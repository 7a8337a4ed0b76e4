"""The gradient of a run is the gradient of its whole batch: torch's DDP finds the same, and so does one process."""

import pytest
import torch
from problems import (
    build,
    by_lane,
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
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed import Runtime
from processes import together

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-6


def distances_from_ddp(kind, reduction, accumulate):
    """How far our gradient is from DDP's on the same batch, and how far that of this process alone would be."""
    with Runtime.start(run_config(reduction)) as runtime:
        whole = everything(kind)
        batch = hosted_here(whole, runtime)
        # DDP averages over processes, which may host unequal numbers of lanes: this makes it the mean over samples.
        weight = runtime.size / whole["x"].flatten(0, 1).shape[0]
        options = {"heads": ("left",)} if kind == "heads" and runtime.rank == 1 else {}  # the right head is unused here
        ours = build(kind)
        optimizer_for(ours, runtime, accumulate=accumulate).step(squared_error(ours, **options), batch)
        alone = build(kind)
        _backward(alone, batch, weight, {})
        theirs = gradients_of_ddp(kind, by_lane(batch, runtime), accumulate, weight, options)
        return {"ours": distance(gradients(ours), theirs), "alone": distance(gradients(alone), theirs)}


def gradients_of_ddp(kind, batch, accumulate, weight, options):
    """In a function of its own, so that DDP is gone before the process group: it may hang when it goes after it."""
    ddp = DistributedDataParallel(build(kind), find_unused_parameters=kind == "heads")
    pieces = [{name: part[:, rows].flatten(0, 1) for name, part in batch.items()} for rows in _split(batch, accumulate)]
    for piece in pieces[:-1]:
        with ddp.no_sync():
            _backward(ddp, piece, weight, options)
    _backward(ddp, pieces[-1], weight, options)
    return gradients(ddp.module)


def _split(batch, pieces):
    return torch.arange(batch["x"].shape[1]).chunk(pieces)


def _backward(net, batch, weight, options):
    (squared_error(net, **options)(batch).loss_sum * weight).backward()


def distance_from_plain_torch(kind, reduction):
    with Runtime.start(run_config(reduction)) as runtime:
        net = build(kind)
        optimizer_for(net, runtime).step(squared_error(net), hosted_here(everything(kind), runtime))
        return distance(gradients(net), plain_gradient(kind))


def trained(kind, reduction, steps=5):
    """A digest of parameters and optimizer state after several clipped steps of Adam, and the last loss."""
    with Runtime.start(run_config(reduction)) as runtime:
        net = build(kind)
        optimizer = optimizer_for(net, runtime, 0.01, torch.optim.Adam, max_grad_norm=0.5, accumulate=2)
        batch = hosted_here(everything(kind), runtime)
        for _ in range(steps):
            metrics = optimizer.step(squared_error(net), batch)
        state = dict(net.named_parameters()) | optimizer.state()
        return {"digest": digest(state), "loss": metrics.latest("loss")}


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("kind", ["conv", "mlp", "heads"])
def test_the_gradient_is_the_one_ddp_finds(kind, reduction, accumulate, processes):
    found = together(distances_from_ddp, processes, kind, reduction, accumulate)
    assert max(each["ours"] for each in found) < TOLERANCE
    assert min(each["alone"] for each in found) > 1e-2  # the batch is one that tells them apart


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_many_processes_with_a_share_each_find_what_one_finds_with_the_whole_batch(kind, reduction, processes):
    assert max(together(distance_from_plain_torch, processes, kind, reduction)) < TOLERANCE


@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_exact_training_ends_with_the_same_bits_on_any_number_of_processes(kind):
    found = [each for processes in (1, 2, 3, 4) for each in together(trained, processes, kind, "exact")]
    assert {each["digest"] for each in found} == {found[0]["digest"]}
    assert {each["loss"] for each in found} == {found[0]["loss"]}


@pytest.mark.parametrize("processes", [2, 3])
def test_fast_training_ends_with_the_same_bits_on_all_processes(processes):
    found = together(trained, processes, "conv", "fast")
    assert {each["digest"] for each in found} == {found[0]["digest"]}
