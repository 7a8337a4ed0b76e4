"""Data loader: each example once per epoch for any partition of lanes and any start; data workers."""

import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.toy_datasets import Toy, ToyConfig
from lockstep.config import ConfigError
from lockstep.data.dataloader import DataLoader, partition_batch
from lockstep.data.dataloader_worker import LoaderWorker, ReaderError
from lockstep.lanes import Lanes, partition_lanes
from lockstep.pytree import named_leaves


def epoch_of(examples, size, lanes, processes, epoch=0):
    """Return the rows with non-zero weight per process for every batch of an epoch."""
    data = [Toy(ToyConfig(examples=examples)) for _ in range(processes)]
    loaders = [
        DataLoader(d, size, Lanes(lanes, host, 7))
        for d, host in zip(data, partition_lanes(lanes, processes), strict=True)
    ]
    samples, batches = epoch * examples, []
    while samples < (epoch + 1) * examples:
        parts, sizes = zip(*(loader.batch(samples) for loader in loaders), strict=True)
        assert len(set(sizes)) == 1
        batches.append([part["inputs"]["row"][part["weight"] > 0].tolist() for part in parts])
        assert sum(map(len, batches[-1])) == sizes[0]
        samples += sizes[0]
    assert samples == (epoch + 1) * examples  # an epoch ends with a batch
    return batches


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_shards_of_epoch_cover_data_without_overlap(processes):
    batches = epoch_of(examples=103, size=20, lanes=8, processes=processes)  # 103 is prime
    rows = [row for batch in batches for shard in batch for row in shard]
    assert sorted(rows) == list(range(103))
    assert [sum(map(len, batch)) for batch in batches] == [20, 20, 20, 20, 20, 3]


@given(st.integers(1, 60), st.integers(1, 25), st.integers(1, 9), st.data())
def test_epoch_contains_every_example_once(examples, size, lanes, data):
    processes = data.draw(st.integers(1, lanes))
    rows = [row for batch in epoch_of(examples, size, lanes, processes) for shard in batch for row in shard]
    assert sorted(rows) == list(range(examples))


def test_batches_are_independent_of_process_count():
    alone = [sorted(row for shard in batch for row in shard) for batch in epoch_of(103, 20, 8, 1)]
    assert [sorted(row for shard in batch for row in shard) for batch in epoch_of(103, 20, 8, 3)] == alone


def test_order_changes_with_epoch_and_seed():
    orders = [[row for [shard] in epoch_of(103, 20, 8, 1, epoch) for row in shard] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    other = DataLoader(Toy(ToyConfig()), 103, Lanes(1, range(1), 8)).batch(0)[0]["inputs"]["row"]
    assert (
        other.tolist() != DataLoader(Toy(ToyConfig()), 103, Lanes(1, range(1), 7)).batch(0)[0]["inputs"]["row"].tolist()
    )


def test_partition_batch_rows_are_independent_of_host_process():
    order = np.arange(100, 203)
    rows, weights, _ = partition_batch(order, 20, 30, Lanes(8, range(8), 0))
    for lane in range(8):
        mine, weight, _ = partition_batch(order, 20, 30, Lanes(8, range(lane, lane + 1), 0))
        assert mine.tolist() == rows.reshape(8, -1)[lane].tolist()
        assert weight.tolist() == weights.reshape(8, -1)[lane].tolist()
    assert weights.sum() == 30  # 8 x 4 rows, two of which are padding


def test_loader_starting_mid_epoch_continues_the_sequence():
    lanes = Lanes(8, range(8), 0)
    whole, later, samples, after = (
        DataLoader(Toy(ToyConfig()), 20, lanes),
        DataLoader(Toy(ToyConfig()), 20, lanes),
        0,
        [],
    )
    for _ in range(9):  # into the second epoch
        batch, size = whole.batch(samples)
        after.append((samples, batch))
        samples += size
    for start, batch in after[4:]:
        assert torch.equal(later.batch(start)[0]["inputs"]["row"], batch["inputs"]["row"])


def test_loader_prefetches_next_batch():
    data = Toy(ToyConfig())
    loader = DataLoader(data, 20, Lanes(8, range(8), 0))
    loader.batch(0)
    loader._prefetched[0].batch.exception(30)
    assert len(data.reads) == 2  # the requested batch and the prefetched one
    loader.batch(20)
    assert len(data.reads) <= 3  # the prefetched batch is not read again


def test_read_error_is_raised_when_batch_is_taken():
    data = Toy(ToyConfig())
    data.read = lambda split, rows: 1 / 0
    with pytest.raises(ZeroDivisionError):
        DataLoader(data, 20, Lanes(8, range(8), 0)).batch(0)


@pytest.mark.parametrize("readers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.distributed
def test_workers_give_same_batches_as_thread_from_any_start(readers):
    lanes = Lanes(8, range(2, 5), 0)
    plain, read = DataLoader(Toy(ToyConfig()), 20, lanes), DataLoader(Toy(ToyConfig()), 20, lanes, readers)
    samples, order = 0, []
    for _ in range(8):
        order.append(samples)
        samples += plain.batch(samples)[1]
    for start in [*order, *order[3:]]:  # back to an earlier position, as after a resume
        (one, size), (other, same) = plain.batch(start), read.batch(start)
        assert size == same
        one, other = named_leaves(one), named_leaves(other)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(read._workers) == readers


@pytest.mark.distributed
def test_worker_exits_with_its_loader():
    reader = LoaderWorker(ToyConfig(), "train", "reader 1 of 1")
    assert len(reader.read(np.arange(3))["target"]) == 3
    process = reader.process
    reader._terminate()
    assert process.returncode == 0


@pytest.mark.distributed
def test_dead_worker_is_named_when_batch_is_taken():
    loader = DataLoader(Toy(ToyConfig()), 20, Lanes(8, range(8), 0), 1)
    loader.batch(0)
    os.kill(loader._workers[0].process.pid, signal.SIGKILL)
    loader._workers[0].process.wait(30)
    loader._prefetched[0].batch.exception(30)  # the prefetch may finish before or after the kill
    loader._prefetched.clear()
    with pytest.raises(ReaderError, match=r"data worker 1 of 1 was ended by SIGKILL"):
        loader.batch(20)


def test_dataset_that_worker_cannot_import_is_rejected():
    kind = type("Mine", (ToyConfig,), {"__module__": "recipe_in_mine"})
    with pytest.raises(ConfigError, match="num-workers 0"):
        LoaderWorker(kind(), "train", "reader 1 of 1")
