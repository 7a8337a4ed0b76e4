"""Thousands of processes, of which one is real: what it says to the others does not grow with their number.

torch's `fake` process group makes collectives do nothing at any world size. So one process can play its part among
4,096 here, and everything it would send is counted, beside what a plan made on one process says it would.
"""

import os
from collections import Counter

import psutil
import pytest
import torch
import torch.distributed as dist

from lockstep.config import RunConfig, apply_overrides
from lockstep.distributed import Runtime
from lockstep.launch.world import WorldInfo
from lockstep.registry import find_recipe
from lockstep.tools.bench.measure import IterationTimer
from processes import together

pytestmark = pytest.mark.distributed

ITERATIONS = 2


def recipe_for(lanes, envs):
    """A tiny run with buckets so small that there are several; `envs` environments on every lane."""
    return apply_overrides(
        find_recipe("snake-ppo")(),
        {
            "task": {"size": 4, "num_envs": lanes * envs},
            "algo": {"rollout_steps": 8, "batch_size": lanes * envs * 4, "epochs": 1},
            "algo.encoder": {"hidden_sizes": 4, "num_layers": 1, "out_features": 8},
            "run": {"lanes": lanes, "device": "cpu", "grad_bucket_mb": 0.0005, "replica_check_every": 1},
        },
    )


def one_of(processes, lanes, envs, really=True):
    """What the last process of so many sends in some iterations, by its bytes; and the memory its state takes."""
    recipe = recipe_for(lanes, envs)
    sent = Counter()
    if really:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        dist.init_process_group("fake", store=FakeStore(), rank=processes - 1, world_size=processes)
        for name in ("all_reduce", "all_gather", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor"):
            _count(name, sent)
        runtime = Runtime(recipe.run, WorldInfo(rank=processes - 1, size=processes), torch.device("cpu"))
    else:
        runtime = Runtime.single_process(recipe.run)
    meter = IterationTimer(recipe, runtime)
    runtime.bytes_reduced.clear()
    sent.clear()
    for _ in range(ITERATIONS):
        meter.iterate()
    said = Counter()
    for (_, size), times in runtime.bytes_reduced.items():
        said[size] += times
    if really:
        dist.destroy_process_group()
    return {
        "sent": sorted(sent.items()) if really else None,
        "said": sorted(said.items()),
        "memory": psutil.Process().memory_info().rss,
    }


def _count(name, sent):
    """Count every call of a collective, by the bytes it is given."""
    original = getattr(dist, name)

    def counting(*arguments, **options):
        tensor = next(x for x in arguments if isinstance(x, torch.Tensor))
        sent[tensor.nbytes] += 1
        return original(*arguments, **options)

    setattr(dist, name, counting)


def on_fake(processes, lanes, envs):
    return together(one_of, 1, processes, lanes, envs)[0]


def test_what_is_sent_is_what_a_plan_on_one_process_says_and_does_not_grow_with_the_processes():
    planned = together(one_of, 1, 1, 8, 2, False)[0]["said"]
    assert sum(times for _, times in planned) >= 10 * ITERATIONS  # buckets, totals, tables, agreements, checks
    for processes in (8, 512, 4096):
        found = on_fake(processes, lanes=processes, envs=2)
        assert found["sent"] == found["said"] == planned, f"{processes} processes"


def test_what_is_sent_does_not_depend_on_how_lanes_are_dealt():
    found = [on_fake(processes, lanes=4096, envs=1)["sent"] for processes in (512, 4096)]
    assert found[0] == found[1]


def test_a_process_takes_no_more_memory_among_thousands():
    few, many = (on_fake(processes, lanes=processes, envs=2)["memory"] for processes in (8, 4096))
    assert many < 1.1 * few


def test_the_count_sees_what_grows():
    """The one thing here that grows by its nature, so that a count that sees nothing would be noticed."""
    (found,) = together(gathered, 1, 64)
    assert found > 0


def gathered(processes):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    sent = Counter()
    _count("all_reduce", sent)
    Runtime(RunConfig(lanes=processes), WorldInfo(size=processes), torch.device("cpu")).all_reduce_sum(
        torch.zeros(processes)
    )
    dist.destroy_process_group()
    return sum(sent)
