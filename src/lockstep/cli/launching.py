"""Where a verb runs: in this process, in one that a launcher started, or in several that we start."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.cli import fail
from lockstep.runtime.launch import LAUNCHED, Place, launch, record_failure


def is_worker() -> bool:
    """Whether torchrun or our own launcher started this process."""
    return Place.from_environment().started


def say(sentence: str) -> None:
    """Print a sentence, once however many processes there are."""
    if Place.from_environment().rank == 0:
        sys.stdout.write(sentence + "\n")
        sys.stdout.flush()


def run_worker(work: Callable[[], Any]) -> int:
    """Run as one process of a run; a failure is left where the launcher finds it, so that it can name the first."""
    from lockstep.config import ConfigError

    try:
        result = work()
    except ConfigError as error:
        record_failure(error)
        return 2 if LAUNCHED in os.environ else fail(str(error))
    except Exception as error:
        record_failure(error)
        if LAUNCHED in os.environ:
            return 1
        raise
    path = getattr(result, "path", None)
    if path is not None:
        say(f"Done. Watch it: lockstep play {path}")
        say(f"Score it:       lockstep eval {path}\nGo on:          lockstep resume {path} --samples N")
    return 0


def launch_or_explain(arguments: Sequence[str], processes: int) -> int:
    """Start processes; when they fail, say which was first and why."""
    cause = launch(arguments, processes)
    if cause is None:
        return 0
    sys.stderr.write(f"lockstep: {cause}\n")
    return 1
