"""One process of an audit: `python -m lockstep.tools.audit.worker DIRECTORY STEPS [-m] SCRIPT [ARGUMENTS]`."""

import faulthandler
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from lockstep.launch.process_lifetime import CRASH_FILE, die_with_parent
from lockstep.launch.stack_traces import is_internal_frame
from lockstep.launch.world import WorldInfo
from lockstep.tools.audit.recorder import StepRecorder


def main(args: Sequence[str]) -> int:
    """Run the script as Python would run it, with a recorder of its optimizer steps installed."""
    die_with_parent()
    directory, steps, *script_args = args
    rank = WorldInfo.from_environment().rank
    faulthandler.enable((Path(directory) / CRASH_FILE.format(rank)).open("w"))
    recorder = StepRecorder(Path(directory), rank, int(steps))
    recorder.install()
    try:
        _run(script_args)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            recorder.end("failed", error=f"{type(error).__name__}: {error}", stack=_lines(error))
            raise
    recorder.end("ended")
    return 0


def _run(args: Sequence[str]) -> None:
    if args[0] == "-m":
        sys.argv = list(args[1:])
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(args)
        sys.path[0] = os.path.dirname(os.path.abspath(args[0]))
        runpy.run_path(args[0], run_name="__main__")


def _lines(error: BaseException) -> list[str]:
    """Return the stack of an error, outermost frame first, without library frames at its end."""
    frames = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    while len(frames) > 1 and is_internal_frame(frames[-1]):
        frames.pop()
    return frames[-12:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
