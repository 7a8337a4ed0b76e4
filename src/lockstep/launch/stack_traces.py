"""Stack traces of threads, without the frames of lockstep's own runtime and of torch."""

import faulthandler
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import IO, NamedTuple


class CodeLocation(NamedTuple):
    """Line of code that a frame of a stack executes."""

    file: str
    line: int
    function: str


def is_internal_frame(location: str) -> bool:
    """Return whether a line of code belongs to lockstep's runtime or torch, which reports omit."""
    return any(
        f"{os.sep}{part}{os.sep}" in location
        for part in (f"lockstep{os.sep}launch", f"lockstep{os.sep}distributed", "torch")
    )


def format_stack(stack: Sequence[CodeLocation]) -> list[str]:
    """Return the lines of a stack, outermost first, without the internal frames at the inner end."""
    start = next((i for i, location in enumerate(stack) if not is_internal_frame(location.file)), len(stack) - 1)
    return [f"{file}:{line} in {function}" for file, line, function in reversed(stack[max(start, 0) :][:12])]


def own_stack(frame: FrameType) -> list[CodeLocation]:
    """Return the stack of a frame of this thread, innermost first. Never use it for frames of another thread."""
    return [CodeLocation(f.f_code.co_filename, line, f.f_code.co_name) for f, line in islice(walk_stack(frame), 40)]


def thread_stacks() -> dict[int, list[CodeLocation]]:
    """Return the stacks of all threads by thread identifier, innermost frame first. Empty if they cannot be written.

    The fault handler writes them in one call, during which no other thread executes Python code. The frames of
    `sys._current_frames()` continue to execute while they are read, which is not safe in every version of CPython.
    """
    with suppress(OSError), _memory_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return _parse(file.read().decode(errors="replace"))
    return {}


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):  # Linux; works if the disk is full or blocked
        return os.fdopen(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()


def _parse(report: str) -> dict[int, list[CodeLocation]]:
    """Parse a report of the fault handler: for each thread a line with its identifier, then a line for each frame."""
    stacks: dict[int, list[CodeLocation]] = {}
    stack: list[CodeLocation] = []
    for line in report.splitlines():
        if thread := re.match(r"(?:Current t|T)hread 0x([0-9a-f]+)", line):
            stack = stacks.setdefault(int(thread[1], 16), [])
        elif frame := re.match(r'  File "(.*)", line (\d+) in (.*)', line):
            stack.append(CodeLocation(frame[1], int(frame[2]), frame[3]))
    return stacks
