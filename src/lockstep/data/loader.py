"""A loader: batches of a data set, dealt to lanes and read ahead while the learner works.

An epoch is one permutation of the training examples, cut into batches of which the last may be smaller. Which examples
a batch holds is a pure function of (seed, samples so far): a run that resumes in the middle of an epoch needs no other
memory of where it was.

Shapes: L local lanes, M examples a lane, N examples of the training split.
"""

import threading
from typing import Any

import numpy as np
import torch

from lockstep.lanes import Lanes
from lockstep.protocols import Dataset


def deal_batch(order: np.ndarray, start: int, size: int, lanes: Lanes) -> tuple[np.ndarray, np.ndarray, int]:
    """The batch that begins at `start` of an epoch's order [N]: its rows on the local lanes, their weights, its size.

    Rows and weights are [L x M], lane after lane. All lanes get as many rows, so that a lane looks the same whoever
    hosts it; where the batch does not divide, the rows that fill up weigh nothing.
    """
    batch = order[start : start + size]
    share = -(-len(batch) // lanes.count)
    # Dealt in turn, so that no lane of a small last batch is left with nothing but filling.
    places = np.arange(share)[None, :] * lanes.count + np.array(lanes.local)[:, None]  # [L, M]
    rows = batch[np.minimum(places, len(batch) - 1)]
    return rows.reshape(-1), (places < len(batch)).reshape(-1).astype(np.float32), len(batch)


class Loader:
    """Batches of the training split in the order of a run, the next one always under way."""

    def __init__(self, data: Dataset, size: int, lanes: Lanes) -> None:
        self.data, self.size, self.lanes = data, size, lanes
        self.count = data.count("train")
        self._stream = lanes.shared_stream("data.order")
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)
        self._ahead: _Ahead | None = None

    def batch(self, samples: int) -> tuple[dict[str, Any], int]:
        """What comes after so many samples of the run: a batch [L x M, ...], and its global number of examples."""
        ahead = self._ahead if self._ahead is not None and self._ahead.samples == samples else self._begin(samples)
        batch, size = ahead.take()
        self._ahead = self._begin(samples + size)
        return batch, size

    def _begin(self, samples: int) -> "_Ahead":
        epoch, start = divmod(samples, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._stream.permutation(epoch, self.count).numpy()
        return _Ahead(self.data, samples, *deal_batch(self._order, start, self.size, self.lanes))


class _Ahead:
    """A batch that is being read in a thread of its own."""

    def __init__(self, data: Dataset, samples: int, rows: np.ndarray, weights: np.ndarray, size: int) -> None:
        self.samples = samples
        self._data, self._rows, self._weights, self._size = data, rows, weights, size
        self._batch: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._batch = {**self._data.read("train", self._rows), "weight": torch.from_numpy(self._weights)}
        except BaseException as error:
            self._error = error

    def take(self) -> tuple[dict[str, Any], int]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._batch, self._size
