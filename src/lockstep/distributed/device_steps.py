"""Optimizer steps on a device. The device decides whether to apply each step; the host reads the decisions later.

A step is skipped if its gradient is non-finite. Reading that back before each step would synchronize the host with the
device every time, so the device decides and stores a flag. The host reads many flags at once.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.distributed.gradient_buffer import GradientBuffer
from lockstep.distributed.runtime import Runtime
from lockstep.pytree import Tree

MAX_UNCONFIRMED = 64
"""Steps that may be launched before the host must read which of them were applied."""


class DeviceSteps:
    """Flags of the latest steps, and the computation that decides whether to apply each."""

    def __init__(self, device: torch.device, halted: Tensor | None, recorded: bool = False) -> None:
        """Create the flags.

        A skipped step sets `halted`, after which all later steps are skipped, including those of other optimizers. With
        `recorded`, steps are CUDA graphs and keep the index of the next flag on the device.
        """
        self._applied = torch.ones(MAX_UNCONFIRMED, dtype=torch.bool, device=device)
        self._slots = self._applied.unbind()
        self._nonfinite = torch.zeros((), device=device)
        self._halted = halted
        self._next = 0
        self._position = torch.zeros(1, dtype=torch.int64, device=device) if recorded else None

    def prepare_step(
        self, gradient: Tensor, totals: Tensor, scale: Tensor | None, max_norm: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the divisor of the summed gradient, 1.0 if the step must be skipped (else 0.0), and a row for the log.

        Uses few operations, because each is a kernel launch. `totals` begins with the global number of samples.
        """
        base = totals[0].clamp(min=1)
        if scale is not None:
            base = base * scale
        norm = torch.linalg.vector_norm(gradient)
        # False for NaN, too.
        if self._position is None:
            finite = torch.lt(norm, torch.inf, out=self._slots[self._next])
            self._next += 1
        else:
            finite = norm < torch.inf
            self._applied.index_copy_(0, self._position, finite.unsqueeze(0))
            self._position += 1
        skip = torch.logical_not(finite, out=self._nonfinite)
        if self._halted is not None:
            skip = torch.maximum(self._halted, skip, out=self._halted)
        # Gradient clipping divides the mean gradient by its norm / max_norm if that is above 1. Here `norm` is the norm
        # of the summed gradient, so base * (norm / base / max_norm) is norm / max_norm.
        divisor = base if max_norm is None else torch.maximum(base, norm / max_norm)
        return divisor.float(), skip, torch.cat([totals, (norm / base).unsqueeze(0)])

    def applied(self, count: int) -> list[bool]:
        """Return whether each of the latest steps was applied, and reset the flags. Waits for the device."""
        flags: list[bool] = self._applied.tolist()[:count]
        self._next = 0
        if self._position is not None:
            self._position.zero_()
        if self._halted is not None and not all(flags):
            self._halted.zero_()
        return flags


class RecordedStep:
    """The step of one optimizer on one loss function as CUDA graphs.

    One process uses one graph; several processes use two, before and after the reduction. Collectives stay outside of
    graphs for three reasons: a hang report could not name a collective in a graph, NCCL's error handling would not see
    it, and a process whose capture failed would launch its collectives differently from the others. The cost is that
    reduction and backward do not overlap.
    """

    def __init__(
        self,
        runtime: Runtime,
        gradient: GradientBuffer,
        backward: Callable[[Tree], tuple[tuple[str, ...], Tensor]],
        apply: Callable[[Tensor], Tensor],
        name: str,
    ) -> None:
        """`backward` fills the local gradient and returns names and local sums. `apply` receives the reduced sums."""
        self._runtime, self._gradient = runtime, gradient
        self._names: tuple[str, ...] = ()
        self._sent: Counter[tuple[str, int]] = Counter()
        """Reductions of one step, by name and bytes."""

        def compute_gradient(batch: Tree) -> Tensor:
            self._names, totals = backward(batch)
            return totals

        def whole_step(batch: Tree) -> Tensor:
            totals = compute_gradient(batch)
            runtime._start_sum("totals", totals)  # on one process this only counts bytes
            gradient.reduce()
            return apply(totals)

        compilation = runtime.compilation
        self._whole = compilation(whole_step, f"the update by {name}")
        self._backward = compilation(compute_gradient, f"the gradient of {name}")
        self._apply = compilation(apply, f"the step by {name}")

    def __call__(self, batch: Tree) -> tuple[tuple[str, ...], Tensor]:
        """Take the step. Return the names of its sums, and a row for the log."""
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
        bytes_reduced = self._runtime.bytes_reduced
        before = bytes_reduced.copy()
        row: Tensor = self._whole(batch)
        reductions = bytes_reduced - before
        if reductions:
            self._sent = reductions
        else:  # a graph replay runs no Python code, so it did not count its reductions
            bytes_reduced.update(self._sent)
        return row
