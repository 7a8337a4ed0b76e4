"""An optimizer's step as CUDA graphs: one for all of it on one process, and two around the reduction on several.

Collectives stay outside of graphs. A collective in a graph is known to nobody but the device: the watchdog could not
name it in a hang report, NCCL's own error handling would not see it, and a process whose recording failed would issue
its collectives in another way than the others do. What this costs is the overlap of reduction and backward.
"""

from collections import Counter
from typing import TYPE_CHECKING

from torch import Tensor

from lockstep.protocols import LossFunction
from lockstep.trees import Tree

if TYPE_CHECKING:
    from lockstep.runtime.optimizer import Optimizer


class RecordedStep:
    """The step of one optimizer on one loss function."""

    def __init__(self, optimizer: "Optimizer", loss: LossFunction, name: str) -> None:
        self._optimizer, self._loss = optimizer, loss
        self._names: tuple[str, ...] = ()
        self._sent: Counter[tuple[str, int]] = Counter()
        """What a step would send to other processes, by name and bytes."""
        compilation = optimizer.runtime.compilation
        self._whole = compilation(self._take, f"the update by {name}")
        self._backward = compilation(self._fill, f"the gradient of {name}")
        self._apply = compilation(self._settle, f"the step by {name}")

    def __call__(self, batch: Tree) -> tuple[tuple[str, ...], Tensor]:
        """Take the step; the names of its sums, and a row for the log."""
        optimizer = self._optimizer
        if optimizer.runtime.size == 1:
            row = self._take_whole(batch)
        else:
            totals = self._backward(batch)
            handle = optimizer.runtime._start_sum("totals", totals)
            with optimizer.runtime.phase("reduce"):
                optimizer.gradient.reduce()
                handle.wait()
            row = self._apply(totals)
        return self._names, row.clone()  # the next step overwrites it

    def _take_whole(self, batch: Tree) -> Tensor:
        sent = self._optimizer.runtime.sent
        before = sent.copy()
        row: Tensor = self._whole(batch)
        counted = sent - before
        if counted:
            self._sent = counted
        else:  # a replay runs no Python, so nobody has counted
            sent.update(self._sent)
        return row

    def _take(self, batch: Tree) -> Tensor:
        totals = self._fill(batch)
        self._optimizer.runtime._start_sum("totals", totals)  # one process: only counted
        self._optimizer.gradient.reduce()
        return self._settle(totals)

    def _fill(self, batch: Tree) -> Tensor:
        """Fill the local gradient; the local sums."""
        self._names, totals = self._optimizer._backward(self._loss, batch, overlap=False)
        return totals

    def _settle(self, totals: Tensor) -> Tensor:
        row: Tensor = self._optimizer._apply(totals)[1]
        return row
