"""Buckets travel in one order on every process, whatever backward does there, and nobody is left waiting."""

import pytest
import torch
from problems import (
    TwoHeads,
    build,
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

from lockstep.protocols import Loss
from lockstep.runtime import Optimizer, Runtime
from processes import together

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-6
ONE_BUCKET, A_BUCKET_FOR_EACH = 2**22, 4


def distance_with_buckets(kind, bucket_bytes, accumulate):
    with Runtime.start(run_config()) as runtime:
        net = build(kind)
        optimizer = optimizer_for(net, runtime, bucket_bytes=bucket_bytes, accumulate=accumulate)
        optimizer.step(squared_error(net), hosted_here(everything(kind), runtime))
        return {
            "buckets": len(optimizer.gradient._bounds),
            "distance": distance(gradients(net), plain_gradient(kind)),
        }


def distance_with_heads_in_another_order(accumulate):
    """Everybody uses both heads; the main process the left one first, the others the right one."""
    with Runtime.start(run_config()) as runtime:
        net = build("heads")
        heads = ("left", "right") if runtime.main else ("right", "left")
        optimizer = optimizer_for(net, runtime, bucket_bytes=A_BUCKET_FOR_EACH, accumulate=accumulate)
        for _ in range(3):
            net.load_state_dict(TwoHeads.state_dict(build("heads")))
            optimizer.step(squared_error(net, heads=heads), hosted_here(everything("heads"), runtime))
        return distance(gradients(net), plain_gradient("heads"))


def distance_when_one_process_has_nothing_to_learn_from(reduction, accumulate):
    """Process 1 returns a loss that no parameter has part in; its samples count all the same."""
    with Runtime.start(run_config(reduction)) as runtime:
        net, whole = build("mlp"), everything("mlp")
        learn = squared_error(net)

        def loss(batch):
            return (
                Loss(total=batch["y"].sum(), samples=len(batch["y"]))
                if runtime.rank == 1
                else learn(batch)._replace(sums={})
            )

        optimizer = optimizer_for(net, runtime, bucket_bytes=A_BUCKET_FOR_EACH, accumulate=accumulate)
        optimizer.step(loss, hosted_here(whole, runtime))
        others = [lane for lane in range(8) if lane not in runtime.gather(list(runtime.lanes.local))[1]]
        part = {name: x[others] for name, x in whole.items()}
        expected = {name: x * len(others) / 8 for name, x in plain_gradient("mlp", part).items()}
        return distance(gradients(net), expected)


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
        optimizer = Optimizer(runtime, torch.optim.SGD(net.named_parameters(), lr=1.0), max_grad_norm=limit)
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
    for bucket_bytes, several in ((ONE_BUCKET, False), (300, True), (A_BUCKET_FOR_EACH, True)):
        for found in together(distance_with_buckets, processes, kind, bucket_bytes, accumulate):
            assert (found["buckets"] > 1) == several
            assert found["distance"] < TOLERANCE


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("processes", [2, 3])
def test_buckets_that_fill_in_another_order_elsewhere_are_not_summed_crosswise(processes, accumulate):
    assert max(together(distance_with_heads_in_another_order, processes, accumulate)) < TOLERANCE


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
