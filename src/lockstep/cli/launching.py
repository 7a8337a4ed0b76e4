"""Where a verb runs: in this process, in one that a launcher started, or in several that we start."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.cli import fail
from lockstep.parent import LAUNCHED, OUTCOME, launch_directory
from lockstep.printable import write_text
from lockstep.run.fence import Outdated
from lockstep.run.phrases import duration
from lockstep.run.rundir import Result
from lockstep.runtime import BadNumbers
from lockstep.runtime.failures import in_words, record_failure
from lockstep.runtime.place import PREEMPTED, REQUESTS, Place
from lockstep.runtime.place import say as warn

if TYPE_CHECKING:
    from lockstep.runtime.hosts import Fleet


def started_processes() -> int:
    """How many processes torchrun or our own launcher started, this one among them; 0 when nobody did."""
    place = Place.from_environment()
    return place.size if place.started else 0


def say(sentence: str) -> None:
    """Print a sentence, once however many processes there are."""
    if Place.from_environment().rank == 0:
        with suppress(OSError):  # it may go to a file on a disk that is full; what it tells of is done
            write_text(sys.stdout, sentence + "\n")


def say_notes(notes: Sequence[str]) -> None:
    """Print what there is to say about a command line; where our own launcher started us, it has said it already."""
    for note in notes if LAUNCHED not in os.environ else ():
        say(note)


def run_worker(work: Callable[[], Result]) -> int:
    """Run as one process of a run; a failure is left where the launcher finds it, so that it can name the first."""
    from lockstep.config import ConfigError

    # Heard when there is a run to stop, and of no consequence before and after it.
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        result = work()
    except Outdated as error:
        return _end_in_order("outdated", 1, str(error))
    except Exception as raised:
        said = in_words(raised, Place.from_environment())
        record_failure(said)
        if isinstance(said, ConfigError | BadNumbers):
            return 2 if LAUNCHED in os.environ else fail(str(said))
        if LAUNCHED in os.environ:
            return 1
        raise
    for line in _farewell(result):
        say(line)
    return _end_in_order("preempted", PREEMPTED) if result.preempted else 0


def _farewell(result: Result) -> list[str]:
    """How the run ended, and the three commands that come next."""
    clock, path = result.clock, result.path
    best = "" if clock.best is None else f", best evaluation {clock.best:,.4g}"
    ended = f"{'Stopped' if result.preempted else 'Done'} at {clock.samples:,} steps"
    head = f"{ended} in {duration(result.seconds)}{best}: {path}"
    watch, look = f"  watch it   lockstep play {path}", f"  look back  lockstep report {path}"
    if result.preempted:
        return [head, f"  go on      lockstep resume {path}", watch, look]
    return [head, watch, look, f"  take it    lockstep export {path} --to safetensors"]


def as_worker(work: Callable[[], None]) -> int:
    """Run as one process of a group that has no run to save; a failure is left where the launcher finds it."""
    try:
        work()
    except Exception as error:
        record_failure(error)
        if LAUNCHED in os.environ:
            return 1
        raise
    return 0


def _end_in_order(kind: str, code: int, sentence: str = "") -> int:
    """Leave word of how the run ended for our launcher. Whoever started this process would take any code but 0 for a
    failure and start it again, which is wrong for both kinds; a process that nobody started says it by its code."""
    place, shared = Place.from_environment(), launch_directory()
    if shared is not None and place.local_rank == 0:
        (shared / OUTCOME).write_text(f"{kind}\n{sentence}")
    elif sentence and shared is None:
        warn(sentence)
    return 0 if place.started else code


def launch_or_explain(arguments: Sequence[str], fleet: "Fleet") -> int:
    """Start processes; when they fail, say which was first and why."""
    from lockstep.runtime.launch import launch

    if sys.stderr.isatty():  # each of them imports torch before it can say a word of its own
        warn(f"waking {fleet.processes} {'process' if fleet.processes == 1 else 'processes'} ...")
    outcome = launch(arguments, fleet)
    if outcome.cause:
        warn(outcome.cause)
    return outcome.code
