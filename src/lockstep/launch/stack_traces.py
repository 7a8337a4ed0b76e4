"""Stack traces of threads, without the frames of lockstep's own runtime and of torch."""

import os
from itertools import islice
from traceback import walk_stack
from types import FrameType


def is_internal_frame(location: str) -> bool:
    """Return whether a line of code belongs to lockstep's runtime or torch, which reports omit."""
    return any(
        f"{os.sep}{part}{os.sep}" in location
        for part in (f"lockstep{os.sep}launch", f"lockstep{os.sep}distributed", "torch")
    )


def format_stack(frame: FrameType | None) -> list[str]:
    """Return the frames of a thread, outermost first, without the internal frames at the inner end."""
    frames = [] if frame is None else list(islice(walk_stack(frame), 40))
    while len(frames) > 1 and is_internal_frame(frames[0][0].f_code.co_filename):
        frames.pop(0)
    return [f"{f.f_code.co_filename}:{line} in {f.f_code.co_name}" for f, line in reversed(frames[:12])]
