"""Data loader: batches of a data set, partitioned among lanes and prefetched during training.

An epoch is one permutation of the training examples, cut into batches of which the last may be smaller. The examples
of a batch are a pure function of (seed, samples so far), so a run that resumes in the middle of an epoch needs no other
loader state.

Shapes: L local lanes, M examples per lane, N examples of the training split.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep.base import Dataset
from lockstep.data.dataloader_worker import LoaderWorker
from lockstep.lanes import Lanes


def partition_batch(order: np.ndarray, start: int, size: int, lanes: Lanes) -> tuple[np.ndarray, np.ndarray, int]:
    """Partition the batch that begins at `start` of an epoch's order [N]; return local rows, weights, batch size.

    Rows and weights are [L x M], lane after lane. All lanes get the same number of rows, so that a lane does not depend
    on which process hosts it. If the batch does not divide evenly, padding rows have weight 0.
    """
    batch = order[start : start + size]
    per_lane = -(-len(batch) // lanes.num_lanes)
    # Assign rows round-robin, so that padding of a small last batch is spread over the lanes.
    positions = np.arange(per_lane)[None, :] * lanes.num_lanes + np.array(lanes.local)[:, None]  # [L, M]
    rows = batch[np.minimum(positions, len(batch) - 1)]
    return rows.reshape(-1), (positions < len(batch)).reshape(-1).astype(np.float32), len(batch)


class _Prefetch(NamedTuple):
    """One batch that a thread reads during training."""

    samples: int
    """Samples of the run before the batch."""
    next_samples: int
    """Samples of the run after it."""
    batch: Future[dict[str, Any]]


class DataLoader:
    """Batches of the training split in the order of a run. The next batches are prefetched."""

    def __init__(self, data: Dataset, size: int, lanes: Lanes, num_workers: int = 0) -> None:
        """Prefetch with `num_workers` worker processes, one batch each; with 0, in a thread of this process."""
        self.data, self.size, self.lanes = data, size, lanes
        self.count = data.count("train")
        self._stream = lanes.shared_stream("data.order")
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)
        self._prefetched: deque[_Prefetch] = deque()
        self._workers: list[LoaderWorker] = []
        self._num_workers = num_workers

    def batch(self, samples: int) -> tuple[dict[str, Any], int]:
        """Return the batch that follows after `samples` of the run, [L x M, ...], and its global number of examples."""
        if self._prefetched and self._prefetched[0].samples != samples:  # the run was restored to another position
            self._prefetched.clear()
        if not self._prefetched:
            self._prefetched.append(self._prefetch(samples))
        current = self._prefetched.popleft()
        batch = current.batch.result()  # before the next read: a data set is read by one thread at a time
        while len(self._prefetched) < max(1, self._num_workers):
            newest = self._prefetched[-1] if self._prefetched else current
            self._prefetched.append(self._prefetch(newest.next_samples))
        return batch, current.next_samples - samples

    def _prefetch(self, samples: int) -> _Prefetch:
        epoch, start = divmod(samples, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._stream.permutation(epoch, self.count).numpy()
        rows, weights, size = partition_batch(self._order, start, self.size, self.lanes)
        read, batch = self._next_reader(), Future[dict[str, Any]]()

        def work() -> None:
            try:
                batch.set_result({**read(rows), "weight": torch.from_numpy(weights)})
            except BaseException as error:
                batch.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return _Prefetch(samples, samples + size, batch)

    def _read(self, rows: np.ndarray) -> dict[str, Any]:
        with self.data.lock:
            return self.data.read("train", rows)

    def _next_reader(self) -> Callable[[np.ndarray], dict[str, Any]]:
        """Return the read function for the next batch. Workers take turns, and start with their first batch."""
        if not self._num_workers:
            return self._read
        if len(self._workers) < self._num_workers:
            name = f"data worker {len(self._workers) + 1} of {self._num_workers}"
            self._workers.append(LoaderWorker(self.data.config, "train", name))
        else:
            self._workers.append(self._workers.pop(0))
        return self._workers[-1].read
