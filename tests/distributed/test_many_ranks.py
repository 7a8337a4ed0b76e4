"""Thousands of ranks, of which one is real: its communication does not grow with the world size.

torch's `fake` process group makes collectives do nothing at any world size. So one process can act as one of 4,096
ranks. Its communication is counted and compared with a plan made on one process.
"""

import os
from collections import Counter

import psutil
import pytest
import torch
import torch.distributed as dist

from helpers.multiprocess import together
from lockstep.config import RunConfig, apply_overrides
from lockstep.distributed import Runtime
from lockstep.launch.world import WorldInfo
from lockstep.registry import find_recipe
from lockstep.tools.bench.measure import IterationTimer

pytestmark = pytest.mark.distributed

ITERATIONS = 2


def recipe_for(lanes, envs):
    """Return a tiny recipe with several small buckets and `envs` environments per lane."""
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
    """Return what the last of `processes` ranks sends in some iterations, by bytes, and its resident memory."""
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
    """Count every call of a collective by the bytes of its tensor."""
    original = getattr(dist, name)

    def counting(*arguments, **options):
        tensor = next(x for x in arguments if isinstance(x, torch.Tensor))
        sent[tensor.nbytes] += 1
        return original(*arguments, **options)

    setattr(dist, name, counting)


def on_fake(processes, lanes, envs):
    return together(one_of, 1, processes, lanes, envs)[0]


def test_bytes_sent_match_the_plan_and_do_not_grow_with_world_size():
    planned = together(one_of, 1, 1, 8, 2, False)[0]["said"]
    assert sum(times for _, times in planned) >= 10 * ITERATIONS  # buckets, totals, tables, agreements, checks
    for processes in (8, 512, 4096):
        found = on_fake(processes, lanes=processes, envs=2)
        assert found["sent"] == found["said"] == planned, f"{processes} processes"


def test_bytes_sent_do_not_depend_on_the_lane_partition():
    found = [on_fake(processes, lanes=4096, envs=1)["sent"] for processes in (512, 4096)]
    assert found[0] == found[1]


def test_memory_of_a_rank_does_not_grow_with_world_size():
    few, many = (on_fake(processes, lanes=processes, envs=2)["memory"] for processes in (8, 4096))
    assert many < 1.1 * few


def test_byte_counter_counts_an_all_reduce():
    """A tensor that grows with the world size must be counted, so that a broken counter is detected."""
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
