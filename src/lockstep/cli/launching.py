"""Where a verb runs: in this process, in one that a launcher started, or in several that we start."""

import os
import sys
from collections.abc import Callable, Sequence

from lockstep.cli import fail
from lockstep.run.rundir import Result
from lockstep.runtime.launch import LAUNCHED, Place, launch, record_failure


def started_processes() -> int:
    """How many processes torchrun or our own launcher started, this one among them; 0 when nobody did."""
    place = Place.from_environment()
    return place.size if place.started else 0


def say(sentence: str) -> None:
    """Print a sentence, once however many processes there are."""
    if Place.from_environment().rank == 0:
        sys.stdout.write(sentence + "\n")
        sys.stdout.flush()


def say_notes(notes: Sequence[str]) -> None:
    """Print what there is to say about a command line; where our own launcher started us, it has said it already."""
    for note in notes if LAUNCHED not in os.environ else ():
        say(note)


def run_worker(work: Callable[[], Result]) -> int:
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
    done = result.clock.done
    say(f"{'Done' if done else 'Stopped'} at {result.clock.samples:,} steps: {result.path}")
    say(f"  watch it   lockstep play {result.path}")
    say(f"  score it   lockstep eval {result.path}")
    say(f"  go on      lockstep resume {result.path}" + (" --samples N" if done else ""))
    return 0


def launch_or_explain(arguments: Sequence[str], processes: int) -> int:
    """Start processes; when they fail, say which was first and why."""
    cause = launch(arguments, processes)
    if cause is None:
        return 0
    sys.stderr.write(f"lockstep: {cause}\n")
    return 1
