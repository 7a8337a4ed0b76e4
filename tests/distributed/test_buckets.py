"""Buckets travel in one order on every process, whatever backward does there, and nobody is left waiting."""

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

from lockstep.distributed import Runtime
from lockstep.protocols import Loss
from processes import together

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-6
ONE_BUCKET, SEVERAL, A_BUCKET_FOR_EACH = 4.0, 300 / 2**20, 1 / 2**20
BF16 = 2.0**-8
"""How far a number may be rounded when it becomes a bf16, relative to itself."""


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
    """Everybody uses both heads; the main process the left one first, the others the right one."""
    with Runtime.start(run_config(grad_bucket_mb=A_BUCKET_FOR_EACH)) as runtime:
        net = build("heads")
        heads = ("left", "right") if runtime.is_main else ("right", "left")
        optimizer = optimizer_for(net, runtime, accumulate=accumulate)
        for _ in range(3):
            net.load_state_dict(TwoHeads.state_dict(build("heads")))
            optimizer.step(squared_error(net, heads=heads), hosted_here(everything("heads"), runtime))
        return distance(gradients(net), plain_gradient("heads"))


def distance_when_one_process_has_nothing_to_learn_from(reduction, accumulate):
    """Process 1 returns a loss that no parameter has part in; its samples count all the same."""
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


class WithNothing(nn.Module):
    """A layer, and before, between and behind its parameters some without elements that have part in the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(5, 3) / 4)
        self.middle, self.bias = nn.Parameter(torch.zeros(0, 2)), nn.Parameter(torch.zeros(3))
        self.last = nn.Parameter(torch.zeros(3, 0))

    def forward(self, x):
        return x @ self.weight + self.bias + self.first.sum() + self.middle.sum() + self.last.sum()


def distance_with_parameters_without_elements(bucket_mb):
    with Runtime.start(run_config(grad_bucket_mb=bucket_mb)) as runtime:
        net, plain, whole = WithNothing(), WithNothing(), everything("mlp")
        optimizer_for(net, runtime).step(squared_error(net), hosted_here(whole, runtime))
        flat = {name: part.flatten(0, 1) for name, part in whole.items()}
        (squared_error(plain)(flat).loss_sum / len(flat["x"])).backward()
        return max((a.grad - b.grad).norm().item() for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def gradients_on_a_wire(kind, wire, bucket_mb, accumulate, reduction="fast"):
    """The gradient of two steps that change nothing, after travelling, and how far it is from plain torch's."""
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
    """A digest of parameters and optimizer state, and the loss at both ends."""
    with Runtime.start(run_config(grad_comm_dtype=wire, grad_bucket_mb=SEVERAL)) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime, 0.01, torch.optim.Adam, max_grad_norm=0.5)
        batch = hosted_here(everything("mlp"), runtime)
        losses = [optimizer.step(squared_error(net), batch).latest("loss") for _ in range(steps)]
        return {"digest": digest(dict(net.named_parameters()) | optimizer.state()), "losses": losses}


def critic_after_an_actor_step(reduction):
    """An actor learns by what a critic says of its actions; then the critic learns on its own."""
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


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_many_buckets_and_one_give_the_same_gradient(kind, accumulate, processes):
    for bucket_mb, several in ((ONE_BUCKET, False), (SEVERAL, True), (A_BUCKET_FOR_EACH, True)):
        for found in together(distance_with_buckets, processes, kind, bucket_mb, accumulate):
            assert (found["buckets"] > 1) == several
            assert found["distance"] < TOLERANCE


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("processes", [2, 3])
def test_buckets_that_fill_in_another_order_elsewhere_are_not_summed_crosswise(processes, accumulate):
    assert max(together(distance_with_heads_in_another_order, processes, accumulate)) < TOLERANCE


@pytest.mark.parametrize("bucket_mb", [ONE_BUCKET, A_BUCKET_FOR_EACH])
def test_parameters_without_elements_keep_nobody_waiting(bucket_mb):
    assert max(together(distance_with_parameters_without_elements, 2, bucket_mb)) < TOLERANCE


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bucket_mb", [ONE_BUCKET, SEVERAL, A_BUCKET_FOR_EACH], ids=["one", "several", "each"])
def test_a_gradient_that_travels_in_bf16_is_the_full_one_within_its_digits(bucket_mb, accumulate, processes):
    everybody = together(gradients_on_a_wire, processes, "mlp", "bf16", bucket_mb, accumulate)
    assert {each["digest"] for each in everybody} == {everybody[0]["digest"]}  # rounded alike on all processes
    assert (everybody[0]["buckets"] > 1) == (bucket_mb != ONE_BUCKET)
    # Each process rounds what it sends, and each sum on the way is rounded: of parts that partly cancel, so some more.
    assert 1e-5 < everybody[0]["distance"] < 4 * processes * BF16  # not zero: it did travel in bf16
    assert everybody[0]["worst"] < 4 * processes * BF16


@pytest.mark.parametrize("kind", ["conv", "heads"])
def test_every_kind_of_network_sends_its_gradient_in_bf16(kind):
    everybody = together(gradients_on_a_wire, 2, kind, "bf16", A_BUCKET_FOR_EACH, 1)
    assert {each["digest"] for each in everybody} == {everybody[0]["digest"]}
    assert 1e-5 < everybody[0]["distance"] < 8 * BF16


@pytest.mark.parametrize(("wire", "reduction"), [("fp32", "fast"), ("fp32", "exact"), ("bf16", "exact")])
def test_a_gradient_is_not_rounded_where_nobody_asked_for_it_or_bits_must_not_be_lost(wire, reduction):
    for processes in (1, 2):
        everybody = together(gradients_on_a_wire, processes, "mlp", wire, SEVERAL, 1, reduction)
        assert max(each["distance"] for each in everybody) < TOLERANCE


def test_a_process_that_is_alone_rounds_as_well_since_how_many_there_are_decides_nothing():
    (alone,) = together(gradients_on_a_wire, 1, "mlp", "bf16", SEVERAL, 1)
    assert 1e-5 < alone["distance"] < BF16


def test_training_on_a_bf16_wire_keeps_one_agent_and_learns_as_it_does_in_full():
    half, full = together(trained_on_a_wire, 3, "bf16"), together(trained_on_a_wire, 3, "fp32")
    for everybody in (half, full):
        assert all(each == everybody[0] for each in everybody)
    assert half[0]["digest"] != full[0]["digest"]
    assert half[0]["losses"][-1] < 0.9 * half[0]["losses"][0]
    assert half[0]["losses"] == pytest.approx(full[0]["losses"], rel=0.02)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_process_whose_loss_touches_no_parameter_still_joins(reduction, accumulate):
    for processes in (2, 3):
        found = together(distance_when_one_process_has_nothing_to_learn_from, processes, reduction, accumulate)
        assert max(found) < TOLERANCE


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_an_actor_loss_leaves_nothing_in_the_critic(reduction):
    for found in together(critic_after_an_actor_step, 2, reduction):
        assert found["untouched"]
        assert found["left_behind"] == 0.0
        assert found["actor_moved"] > 0.0
        assert found["distance"] < TOLERANCE


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_clipping_looks_at_the_gradient_of_the_whole_run(processes, reduction):
    for found in together(clipped_step, processes, reduction, 0.25):
        assert found["true"] > 0.25
        assert found["reported"] == pytest.approx(found["true"], rel=1e-5)
        assert found["moved"] == pytest.approx(0.25, rel=1e-4)
        assert found["aligned"] == pytest.approx(1.0, abs=1e-5)
