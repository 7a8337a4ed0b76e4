"""Optimizer steps on a device: decided there, and read back by the host later, many at a time.

Whether a step is applied depends on its gradient. Asking the device before each step would make the host wait for every
one of them, so the device decides for itself and leaves a flag.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.distributed.gradient_buffer import GradientBuffer
from lockstep.distributed.runtime import Runtime
from lockstep.pytree import Tree

MAX_UNCONFIRMED = 64
"""Steps that may be taken before the host must ask which of them were applied."""


class DeviceSteps:
    """Flags of the latest steps, and the arithmetic that decides about each."""

    def __init__(self, device: torch.device, halted: Tensor | None, recorded: bool = False) -> None:
        """`halted` is set by a step that is skipped, and has all that follow it skipped, of other optimizers, too.

        Steps that are `recorded` as a graph count on the device which of them they are.
        """
        self._applied = torch.ones(MAX_UNCONFIRMED, dtype=torch.bool, device=device)
        self._slots = self._applied.unbind()
        self._bad = torch.zeros((), device=device)
        self._halted = halted
        self._next = 0
        self._position = torch.zeros(1, dtype=torch.int64, device=device) if recorded else None

    def settle(
        self, gradient: Tensor, totals: Tensor, scale: Tensor | None, max_norm: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What to divide the summed gradient by, 1.0 if the step is to be skipped, and a row for the log.

        Few operations, because each is a launch. `totals` begins with the global number of samples.
        """
        base = totals[0].clamp(min=1)
        if scale is not None:
            base = base * scale
        norm = torch.linalg.vector_norm(gradient)
        # NaN is not less than infinity, either.
        if self._position is None:
            finite = torch.lt(norm, torch.inf, out=self._slots[self._next])
            self._next += 1
        else:
            finite = norm < torch.inf
            self._applied.index_copy_(0, self._position, finite.unsqueeze(0))
            self._position += 1
        skip = torch.logical_not(finite, out=self._bad)
        if self._halted is not None:
            skip = torch.maximum(self._halted, skip, out=self._halted)
        # Clipping divides by norm / max_norm where that is more than 1, and norm is the sum's, not the mean's.
        divisor = base if max_norm is None else torch.maximum(base, norm / max_norm)
        return divisor.float(), skip, torch.cat([totals, (norm / base).unsqueeze(0)])

    def applied(self, count: int) -> list[bool]:
        """Whether each of the latest steps was applied. Waits for the device; the next step is the first one again."""
        flags: list[bool] = self._applied.tolist()[:count]
        self._next = 0
        if self._position is not None:
            self._position.zero_()
        if self._halted is not None and not all(flags):
            self._halted.zero_()
        return flags


class RecordedStep:
    """The step of one optimizer on one loss function as CUDA graphs.

    One graph on one process, and two around the reduction on several. Collectives stay outside of graphs: the watchdog
    could not name a collective in a graph in a hang report, NCCL's own error handling would not see it, and a process
    whose recording failed would issue its collectives in another way than the others do. This costs the overlap of
    reduction and backward.
    """

    def __init__(
        self,
        runtime: Runtime,
        gradient: GradientBuffer,
        backward: Callable[[Tree], tuple[tuple[str, ...], Tensor]],
        apply: Callable[[Tensor], Tensor],
        name: str,
    ) -> None:
        """`backward` fills the local gradient and returns names and local sums; `apply` takes the reduced sums."""
        self._runtime, self._gradient = runtime, gradient
        self._backward_of, self._apply_of = backward, apply
        self._names: tuple[str, ...] = ()
        self._sent: Counter[tuple[str, int]] = Counter()
        """What a step would send to other processes, by name and bytes."""
        compilation = runtime.compilation
        self._whole = compilation(self._take, f"the update by {name}")
        self._backward = compilation(self._fill, f"the gradient of {name}")
        self._apply = compilation(self._settle, f"the step by {name}")

    def __call__(self, batch: Tree) -> tuple[tuple[str, ...], Tensor]:
        """Take the step; the names of its sums, and a row for the log."""
        if self._runtime.size == 1:
            row = self._take_whole(batch)
        else:
            totals = self._backward(batch)
            handle = self._runtime._start_sum("totals", totals)
            with self._runtime.phase("reduce"):
                self._gradient.reduce()
                handle.wait()
            row = self._apply(totals)
        return self._names, row.clone()  # the next step overwrites it

    def _take_whole(self, batch: Tree) -> Tensor:
        sent = self._runtime.bytes_reduced
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
        self._runtime._start_sum("totals", totals)  # one process: only counted
        self._gradient.reduce()
        return self._settle(totals)

    def _fill(self, batch: Tree) -> Tensor:
        """Fill the local gradient; the local sums."""
        self._names, totals = self._backward_of(batch)
        return totals

    def _settle(self, totals: Tensor) -> Tensor:
        return self._apply_of(totals)
