"""Data loader: batches of a data set, partitioned among lanes and prefetched during training.

An epoch is one permutation of the training examples, cut into batches of which the last may be smaller. The examples
of a batch are a pure function of (seed, samples so far), so a run that resumes in the middle of an epoch needs no other
loader state.

Shapes: L local lanes, M examples per lane, N examples of the training split.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lockstep.base import Dataset
from lockstep.data.dataloader_worker import LoaderWorker
from lockstep.lanes import Lanes


def deal_batch(order: np.ndarray, start: int, size: int, lanes: Lanes) -> tuple[np.ndarray, np.ndarray, int]:
    """Partition the batch that begins at `start` of an epoch's order [N]; return local rows, weights, batch size.

    Rows and weights are [L x M], lane after lane. All lanes get the same number of rows, so that a lane does not depend
    on which process hosts it. If the batch does not divide evenly, padding rows have weight 0.
    """
    batch = order[start : start + size]
    share = -(-len(batch) // lanes.num_lanes)
    # Assign rows round-robin, so that padding of a small last batch is spread over the lanes.
    positions = np.arange(share)[None, :] * lanes.num_lanes + np.array(lanes.local)[:, None]  # [L, M]
    rows = batch[np.minimum(positions, len(batch) - 1)]
    return rows.reshape(-1), (positions < len(batch)).reshape(-1).astype(np.float32), len(batch)


class DataLoader:
    """Batches of the training split in the order of a run. The next batches are prefetched."""

    def __init__(self, data: Dataset, size: int, lanes: Lanes, readers: int = 0) -> None:
        """Prefetch with `readers` worker processes, one batch each; with 0, in a thread of this process."""
        self.data, self.size, self.lanes = data, size, lanes
        self.count = data.count("train")
        self._stream = lanes.shared_stream("data.order")
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)
        self._ahead: deque[_Prefetcher] = deque()
        self._readers: list[LoaderWorker] = []
        self._wanted = readers

    def batch(self, samples: int) -> tuple[dict[str, Any], int]:
        """Return the batch that follows after `samples` of the run, [L x M, ...], and its global number of examples."""
        if self._ahead and self._ahead[0].samples != samples:  # the run was restored to another position
            self._ahead.clear()
        if not self._ahead:
            self._ahead.append(self._begin(samples))
        batch, size = self._ahead.popleft().take()
        following = self._ahead[-1].following if self._ahead else samples + size
        while len(self._ahead) < max(1, self._wanted):
            self._ahead.append(self._begin(following))
            following = self._ahead[-1].following
        return batch, size

    def _begin(self, samples: int) -> "_Prefetcher":
        epoch, start = divmod(samples, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._stream.permutation(epoch, self.count).numpy()
        return _Prefetcher(self._reading(), samples, *deal_batch(self._order, start, self.size, self.lanes))

    def _reading(self) -> Callable[[np.ndarray], dict[str, Any]]:
        """Return the read function for the next batch. Workers take turns, and start with their first batch."""
        if not self._wanted:
            return lambda rows: self.data.read("train", rows)
        if len(self._readers) < self._wanted:
            name = f"data worker {len(self._readers) + 1} of {self._wanted}"
            self._readers.append(LoaderWorker(self.data.config, "train", name))
        else:
            self._readers.append(self._readers.pop(0))
        return self._readers[-1].read


class _Prefetcher:
    """One batch that a thread reads during training."""

    def __init__(
        self,
        read: Callable[[np.ndarray], dict[str, Any]],
        samples: int,
        rows: np.ndarray,
        weights: np.ndarray,
        size: int,
    ) -> None:
        self.samples, self.following = samples, samples + size
        self._read, self._rows, self._weights, self._size = read, rows, weights, size
        self._batch: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._batch = {**self._read(self._rows), "weight": torch.from_numpy(self._weights)}
        except BaseException as error:
            self._error = error

    def take(self) -> tuple[dict[str, Any], int]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._batch, self._size
