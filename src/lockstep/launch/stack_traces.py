"""Stack traces of threads, without the frames of lockstep's own runtime and of torch."""

import os
from types import FrameType


def is_internal_frame(location: str) -> bool:
    """Return whether a line of code belongs to lockstep's runtime or torch, which reports omit."""
    return any(
        f"{os.sep}{part}{os.sep}" in location
        for part in (f"lockstep{os.sep}launch", f"lockstep{os.sep}distributed", "torch")
    )


def format_stack(frame: FrameType | None) -> list[str]:
    """Return the frames of a thread, outermost first, without the internal frames at the inner end."""
    lines: list[tuple[bool, str]] = []
    while frame is not None and len(lines) < 40:
        code = frame.f_code
        lines.append((is_internal_frame(code.co_filename), f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"))
        frame = frame.f_back
    while len(lines) > 1 and lines[0][0]:
        lines.pop(0)
    return [line for _, line in reversed(lines[:12])]
