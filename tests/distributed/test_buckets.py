"""Gradient buckets are reduced in one order on every process, whatever the order of backward, and no process hangs."""

import pytest
import torch
from problems import (
    TwoHeads,
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
from torch import nn

from helpers.multiprocess import together
from lockstep.distributed import Runtime
from lockstep.protocols import Loss

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-6
ONE_BUCKET, SEVERAL, A_BUCKET_FOR_EACH = 4.0, 300 / 2**20, 1 / 2**20
BF16 = 2.0**-8
"""Relative rounding error of bf16."""


def distance_with_buckets(kind, bucket_mb, accumulate):
    with Runtime.start(run_config(grad_bucket_mb=bucket_mb)) as runtime:
        net = build(kind)
        optimizer = optimizer_for(net, runtime, accumulate=accumulate)
        optimizer.step(squared_error(net), hosted_here(everything(kind), runtime))
        return {
            "buckets": len(optimizer.gradient._bounds),
            "distance": distance(gradients(net), plain_gradient(kind)),
        }


def distance_with_heads_in_another_order(accumulate):
    """All processes use both heads; the main process uses the left one first, the others the right one."""
    with Runtime.start(run_config(grad_bucket_mb=A_BUCKET_FOR_EACH)) as runtime:
        net = build("heads")
        heads = ("left", "right") if runtime.is_main else ("right", "left")
        optimizer = optimizer_for(net, runtime, accumulate=accumulate)
        for _ in range(3):
            net.load_state_dict(TwoHeads.state_dict(build("heads")))
            optimizer.step(squared_error(net, heads=heads), hosted_here(everything("heads"), runtime))
        return distance(gradients(net), plain_gradient("heads"))


def distance_when_one_process_has_nothing_to_learn_from(reduction, accumulate):
    """Process 1 returns a loss that depends on no parameter; its samples are still counted."""
    with Runtime.start(run_config(reduction, grad_bucket_mb=A_BUCKET_FOR_EACH)) as runtime:
        net, whole = build("mlp"), everything("mlp")
        learn = squared_error(net)

        def loss(batch):
            return (
                Loss(loss_sum=batch["y"].sum(), num_samples=len(batch["y"]))
                if runtime.rank == 1
                else learn(batch)._replace(metric_sums={})
            )

        optimizer = optimizer_for(net, runtime, accumulate=accumulate)
        optimizer.step(loss, hosted_here(whole, runtime))
        others = [lane for lane in range(8) if lane not in runtime.all_gather_json(list(runtime.lanes.local))[1]]
        part = {name: x[others] for name, x in whole.items()}
        expected = {name: x * len(others) / 8 for name, x in plain_gradient("mlp", part).items()}
        return distance(gradients(net), expected)


class WithEmptyParameters(nn.Module):
    """A layer with parameters without elements before, between and after its own; all are used in the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(5, 3) / 4)
        self.middle, self.bias = nn.Parameter(torch.zeros(0, 2)), nn.Parameter(torch.zeros(3))
        self.last = nn.Parameter(torch.zeros(3, 0))

    def forward(self, x):
        return x @ self.weight + self.bias + self.first.sum() + self.middle.sum() + self.last.sum()


def distance_with_parameters_without_elements(bucket_mb):
    with Runtime.start(run_config(grad_bucket_mb=bucket_mb)) as runtime:
        net, plain, whole = WithEmptyParameters(), WithEmptyParameters(), everything("mlp")
        optimizer_for(net, runtime).step(squared_error(net), hosted_here(whole, runtime))
        flat = {name: part.flatten(0, 1) for name, part in whole.items()}
        (squared_error(plain)(flat).loss_sum / len(flat["x"])).backward()
        return max((a.grad - b.grad).norm().item() for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def gradients_on_a_wire(kind, wire, bucket_mb, accumulate, reduction="fast"):
    """Return the reduced gradient of two steps with learning rate 0, and its distance from plain torch's."""
    with Runtime.start(run_config(reduction, grad_comm_dtype=wire, grad_bucket_mb=bucket_mb)) as runtime:
        net = build(kind)
        optimizer = optimizer_for(net, runtime, accumulate=accumulate)
        for _ in range(2):
            optimizer.step(squared_error(net), hosted_here(everything(kind), runtime), learning_rate=0.0)
        theirs = plain_gradient(kind)
        entries = torch.cat([(gradients(net)[name] - theirs[name]).abs().flatten() for name in theirs])
        return {
            "buckets": len(optimizer.gradient._bounds),
            "digest": digest(gradients(net)),
            "distance": distance(gradients(net), theirs),
            "worst": (entries.max() / max(x.abs().max() for x in theirs.values())).item(),
        }


def trained_on_a_wire(wire, steps=20):
    """Return a digest of parameters and optimizer state, and the losses."""
    with Runtime.start(run_config(grad_comm_dtype=wire, grad_bucket_mb=SEVERAL)) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime, 0.01, torch.optim.Adam, max_grad_norm=0.5)
        batch = hosted_here(everything("mlp"), runtime)
        losses = [optimizer.step(squared_error(net), batch).latest("loss") for _ in range(steps)]
        return {"digest": digest(dict(net.named_parameters()) | optimizer.shared_state()), "losses": losses}


def critic_after_an_actor_step(reduction):
    """Update an actor through a critic, then update the critic with its own loss."""
    with Runtime.start(run_config(reduction)) as runtime:
        actor, critic = build("mlp"), nn.Linear(3, 1)
        with torch.no_grad():
            critic.weight.fill_(0.5)
            critic.bias.fill_(0.1)
        of_actor, of_critic = optimizer_for(actor, runtime), optimizer_for(critic, runtime)
        batch = hosted_here(everything("mlp"), runtime)
        before = [parameter.clone() for parameter in critic.parameters()]
        of_actor.step(lambda part: Loss(-critic(actor(part["x"])).sum(), len(part["x"])), batch)
        untouched = all(torch.equal(a, b) for a, b in zip(before, critic.parameters(), strict=True))
        left_behind = of_critic.gradient.flat.abs().max().item()
        actor_moved = of_actor.gradient.flat.abs().max().item()
        of_critic.step(lambda part: Loss(critic(part["y"]).square().sum(), len(part["y"])), batch)
        whole = everything("mlp")["y"].flatten(0, 1)
        fresh = nn.Linear(3, 1)
        fresh.load_state_dict({"weight": before[0], "bias": before[1]})
        fresh(whole).square().mean().backward()
        return {
            "untouched": untouched,
            "left_behind": left_behind,
            "actor_moved": actor_moved,
            "distance": distance(gradients(critic), gradients(fresh)),
        }


def clipped_step(reduction, limit):
    with Runtime.start(run_config(reduction)) as runtime:
        net, before = build("mlp"), build("mlp")
        optimizer = optimizer_for(net, runtime, 1.0, max_grad_norm=limit)
        metrics = optimizer.step(squared_error(net), hosted_here(everything("mlp"), runtime))
        moved = torch.cat([(a - b).flatten() for a, b in zip(net.parameters(), before.parameters(), strict=True)])
        whole = torch.cat([g.flatten() for g in plain_gradient("mlp").values()])
        return {
            "reported": metrics.latest("grad_norm"),
            "true": whole.norm().item(),
            "moved": moved.norm().item(),
            "aligned": torch.cosine_similarity(-moved, whole, dim=0).item(),
        }


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_gradient_does_not_depend_on_the_number_of_buckets(kind, accumulate, processes):
    for bucket_mb, several in ((ONE_BUCKET, False), (SEVERAL, True), (A_BUCKET_FOR_EACH, True)):
        for found in together(distance_with_buckets, processes, kind, bucket_mb, accumulate):
            assert (found["buckets"] > 1) == several
            assert found["distance"] < TOLERANCE


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("processes", [2, 3])
def test_buckets_filled_in_different_order_are_reduced_in_one_order(processes, accumulate):
    assert max(together(distance_with_heads_in_another_order, processes, accumulate)) < TOLERANCE


@pytest.mark.parametrize("bucket_mb", [ONE_BUCKET, A_BUCKET_FOR_EACH])
def test_parameters_without_elements_do_not_block_the_reduction(bucket_mb):
    assert max(together(distance_with_parameters_without_elements, 2, bucket_mb)) < TOLERANCE


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bucket_mb", [ONE_BUCKET, SEVERAL, A_BUCKET_FOR_EACH], ids=["one", "several", "each"])
def test_bf16_comm_gradient_is_close_to_fp32(bucket_mb, accumulate, processes):
    by_process = together(gradients_on_a_wire, processes, "mlp", "bf16", bucket_mb, accumulate)
    assert {each["digest"] for each in by_process} == {by_process[0]["digest"]}  # rounded equally on all processes
    assert (by_process[0]["buckets"] > 1) == (bucket_mb != ONE_BUCKET)
    # Each process rounds what it sends, and partial sums are rounded. Cancellation increases the relative error.
    assert 1e-5 < by_process[0]["distance"] < 4 * processes * BF16  # not zero: it was sent in bf16
    assert by_process[0]["worst"] < 4 * processes * BF16


@pytest.mark.parametrize("kind", ["conv", "heads"])
def test_bf16_comm_applies_to_every_kind_of_network(kind):
    by_process = together(gradients_on_a_wire, 2, kind, "bf16", A_BUCKET_FOR_EACH, 1)
    assert {each["digest"] for each in by_process} == {by_process[0]["digest"]}
    assert 1e-5 < by_process[0]["distance"] < 8 * BF16


@pytest.mark.parametrize(("wire", "reduction"), [("fp32", "fast"), ("fp32", "exact"), ("bf16", "exact")])
def test_gradient_is_not_rounded_with_fp32_comm_or_exact_reduction(wire, reduction):
    for processes in (1, 2):
        by_process = together(gradients_on_a_wire, processes, "mlp", wire, SEVERAL, 1, reduction)
        assert max(each["distance"] for each in by_process) < TOLERANCE


def test_bf16_comm_rounds_on_a_single_process_too():
    (alone,) = together(gradients_on_a_wire, 1, "mlp", "bf16", SEVERAL, 1)
    assert 1e-5 < alone["distance"] < BF16


def test_bf16_comm_training_keeps_one_agent_and_matches_fp32_losses():
    half, full = together(trained_on_a_wire, 3, "bf16"), together(trained_on_a_wire, 3, "fp32")
    for by_process in (half, full):
        assert all(each == by_process[0] for each in by_process)
    assert half[0]["digest"] != full[0]["digest"]
    assert half[0]["losses"][-1] < 0.9 * half[0]["losses"][0]
    assert half[0]["losses"] == pytest.approx(full[0]["losses"], rel=0.02)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_loss_without_parameters_on_one_process_joins_the_reduction(reduction, accumulate):
    for processes in (2, 3):
        found = together(distance_when_one_process_has_nothing_to_learn_from, processes, reduction, accumulate)
        assert max(found) < TOLERANCE


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_actor_loss_leaves_no_gradient_in_the_critic(reduction):
    for found in together(critic_after_an_actor_step, 2, reduction):
        assert found["untouched"]
        assert found["left_behind"] == 0.0
        assert found["actor_moved"] > 0.0
        assert found["distance"] < TOLERANCE


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_max_grad_norm_clips_the_global_gradient(processes, reduction):
    for found in together(clipped_step, processes, reduction, 0.25):
        assert found["true"] > 0.25
        assert found["reported"] == pytest.approx(found["true"], rel=1e-5)
        assert found["moved"] == pytest.approx(0.25, rel=1e-4)
        assert found["aligned"] == pytest.approx(1.0, abs=1e-5)
