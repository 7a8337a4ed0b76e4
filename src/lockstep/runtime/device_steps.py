"""Optimizer steps on a device: decided there, and read back by the host later, many at a time.

Whether a step is applied depends on its gradient. Asking the device before each step would make the host wait for every
one of them, so the device decides for itself and leaves a flag.
"""

import torch
from torch import Tensor

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
