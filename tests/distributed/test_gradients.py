"""The reduced gradient equals that of torch's DDP and that of one process on the global batch."""

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

from helpers.multiprocess import together
from lockstep.distributed import Runtime

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-6


def distances_from_ddp(kind, reduction, accumulate):
    """Return the distance of our gradient from DDP's on the same batch, and that of a gradient without reduction."""
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
    """A separate function, so that DDP is deleted before the process group; the other order may hang."""
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
    """Return a digest of parameters and optimizer state after several clipped Adam steps, and the last loss."""
    with Runtime.start(run_config(reduction)) as runtime:
        net = build(kind)
        optimizer = optimizer_for(net, runtime, 0.01, torch.optim.Adam, max_grad_norm=0.5, accumulate=2)
        batch = hosted_here(everything(kind), runtime)
        for _ in range(steps):
            metrics = optimizer.step(squared_error(net), batch)
        state = dict(net.named_parameters()) | optimizer.shared_state()
        return {"digest": digest(state), "loss": metrics.latest("loss")}


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("kind", ["conv", "mlp", "heads"])
def test_gradient_matches_ddp(kind, reduction, accumulate, processes):
    found = together(distances_from_ddp, processes, kind, reduction, accumulate)
    assert max(each["ours"] for each in found) < TOLERANCE
    assert min(each["alone"] for each in found) > 1e-2  # without reduction the result would differ


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_gradient_on_several_processes_matches_one_on_the_global_batch(kind, reduction, processes):
    assert max(together(distance_from_plain_torch, processes, kind, reduction)) < TOLERANCE


@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_exact_training_is_bitwise_equal_on_any_number_of_processes(kind):
    found = [each for processes in (1, 2, 3, 4) for each in together(trained, processes, kind, "exact")]
    assert {each["digest"] for each in found} == {found[0]["digest"]}
    assert {each["loss"] for each in found} == {found[0]["loss"]}


@pytest.mark.parametrize("processes", [2, 3])
def test_fast_training_is_bitwise_equal_on_all_ranks(processes):
    found = together(trained, processes, "conv", "fast")
    assert {each["digest"] for each in found} == {found[0]["digest"]}
