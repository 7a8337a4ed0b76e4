"""Policy for non-finite values: if one process finds any, all processes skip the update or stop the run together."""

import torch
from torch import Tensor

from lockstep.distributed.runtime import Runtime
from lockstep.protocols import StateDict
from lockstep.pytree import Tree, named_leaves

MAX_CONSECUTIVE_SKIPS = 100
"""Consecutive skipped updates or iterations after which a run is aborted, because it no longer learns."""
_MAX_SHOWN = 6


class NonFiniteError(FloatingPointError):
    """Non-finite values. The message says where; `tensors` are the inputs of this process that produced them."""

    def __init__(self, message: str, tensors: StateDict) -> None:
        super().__init__(message)
        self.tensors = tensors


class NonFinitePolicy:
    """Skip updates with non-finite values or stop the run, as `run.on_nonfinite` says.

    `handle` uses collectives. Callers must first synchronize that any process found non-finite values.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.consecutive_skips = torch.zeros((), dtype=torch.int64)
        """Skips since the last applied update. Saved in checkpoints, so that a resume does not reset the count."""
        self._skipped = 0

    def tolerate_overflow(self) -> bool:
        """Count an fp16 overflow; return whether it is tolerated. Some are normal and lower the loss scale."""
        tolerated = self.consecutive_skips < MAX_CONSECUTIVE_SKIPS - 1
        self.consecutive_skips += int(tolerated)
        return bool(tolerated)

    def handle(self, what: str, found: list[str], advice: str, tensors: Tree) -> None:
        """Log a skipped update, or raise NonFiniteError.

        `found` describes the non-finite values on local lanes; `tensors` produced them.
        """
        by_process = enumerate(self.runtime.all_gather_json(found))
        lines = [f"  process {rank}, {text}" for rank, texts in by_process for text in texts]
        more = [f"  and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else []
        message = "\n".join(
            [what, *(lines or ["  every lane is finite by itself, but their sum overflows"])[:_MAX_SHOWN], *more]
        )
        if self.runtime.nonfinite == "stop":
            raise NonFiniteError(f"{message}\n{advice}", named_leaves(tensors))
        self.consecutive_skips += 1
        if self.consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
            count = f"This is skip number {int(self.consecutive_skips)} in a row: this run no longer learns."
            raise NonFiniteError(f"{message}\n{count}\n{advice}", named_leaves(tensors))
        self._skipped += 1
        if self._skipped.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th ... skip only, to keep the log short
            times = "" if self._skipped == 1 else f" ({self._skipped} times since the start)"
            self.runtime.pending_messages.append(f"Skipped{times}: {message}")


class LossScale:
    """Dynamic loss scale against fp16 underflow: halved after an overflow, doubled after 2,000 steps without one."""

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self.value = torch.full((), 2.0**16, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def factor(self, samples: int) -> Tensor | None:
        """Return the scale of a loss summed over N samples. Divided by N, because fp16 could not hold the sum."""
        return self.value / samples if self.enabled else None

    def update(self, found_inf: Tensor) -> None:
        if self.enabled:
            torch._amp_update_scale_(self.value, self.good_steps, found_inf, 2.0, 0.5, 2000)
            self.value.clamp_(min=1.0)
