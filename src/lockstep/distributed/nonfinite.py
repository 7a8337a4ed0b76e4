"""Numbers that are not finite: what a run does about those that one of its processes met, the same on all of them."""

import torch

from lockstep.distributed.runtime import Runtime
from lockstep.protocols import StateDict
from lockstep.pytree import Tree, named_leaves

MAX_CONSECUTIVE_SKIPS = 100
"""So many updates or iterations left out one after another end a run: it no longer learns."""
_SHOWN = 6


class NonFiniteError(FloatingPointError):
    """Where numbers were not finite, in words, and the tensors of this process that they were met in."""

    def __init__(self, sentence: str, evidence: StateDict) -> None:
        super().__init__(sentence)
        self.tensors = evidence


class NonFinitePolicy:
    """What a run bears: `run.on_nonfinite` says whether bad numbers stop it or are left out.

    Whoever meets them has agreed with all other processes that somebody did, so they may talk about it here.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.consecutive_skips = torch.zeros((), dtype=torch.int64)
        """What was left out since the last update that was taken; saved, so that a resumed run bears no more."""
        self._left_out = 0

    def tolerate_overflow(self) -> bool:
        """Whether half precision may overflow once more, as it will now and then: its loss scale is lower after it."""
        forgiven = self.consecutive_skips < MAX_CONSECUTIVE_SKIPS - 1
        self.consecutive_skips += int(forgiven)
        return bool(forgiven)

    def handle(self, what: str, found: list[str], advice: str, evidence: Tree) -> None:
        """Leave something out, or stop; `found` says what was met on the lanes here, and `evidence` what it was in."""
        everybody = enumerate(self.runtime.all_gather_json(found))
        lines = [f"  process {process}, {words}" for process, theirs in everybody for words in theirs]
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        sentence = "\n".join(
            [what, *(lines or ["  no lane by itself: the numbers are too large to be added up"])[:_SHOWN], *more]
        )
        if self.runtime.nonfinite == "stop":
            raise NonFiniteError(f"{sentence}\n{advice}", named_leaves(evidence))
        self.consecutive_skips += 1
        if self.consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
            so_far = (
                f"It is number {int(self.consecutive_skips)} in a row that was left out: this run no longer learns."
            )
            raise NonFiniteError(f"{sentence}\n{so_far}\n{advice}", named_leaves(evidence))
        self._left_out += 1
        if self._left_out.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time, so that nobody is drowned in words
            times = "" if self._left_out == 1 else f" ({self._left_out} times since the start)"
            self.runtime.pending_messages.append(f"Left out{times}: {sentence}")
