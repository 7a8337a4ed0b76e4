"""Where a verb runs: in this process, in one that a launcher started, or in several that we start."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.checkpoint.fencing import SupersededError
from lockstep.cli import fail
from lockstep.distributed import NonFiniteError
from lockstep.io.printable import write_text
from lockstep.launch.failures import record_failure, to_user_error
from lockstep.launch.process_lifetime import ENV_LAUNCH_DIR, OUTCOME, launch_directory
from lockstep.launch.world import EXIT_PREEMPTED, STOP_SIGNALS, WorldInfo
from lockstep.launch.world import warn_user as warn
from lockstep.loggers.formatting import format_duration
from lockstep.run_dir import TrainResult

if TYPE_CHECKING:
    from lockstep.launch.rendezvous import LaunchConfig


def started_processes() -> int:
    """How many processes torchrun or our own launcher started, this one among them; 0 when nobody did."""
    place = WorldInfo.from_environment()
    return place.size if place.launched else 0


def say(sentence: str) -> None:
    """Print a sentence, once however many processes there are."""
    if WorldInfo.from_environment().rank == 0:
        with suppress(OSError):  # it may go to a file on a disk that is full; what it tells of is done
            write_text(sys.stdout, sentence + "\n")


def say_notes(notes: Sequence[str]) -> None:
    """Print what there is to say about a command line; where our own launcher started us, it has said it already."""
    for note in notes if ENV_LAUNCH_DIR not in os.environ else ():
        say(note)


def run_training_worker(work: Callable[[], TrainResult]) -> int:
    """Run as one process of a run; a failure is left where the launcher finds it, so that it can name the first."""
    from lockstep.config import ConfigError

    # Heard when there is a run to stop, and of no consequence before and after it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        result = work()
    except SupersededError as error:
        return _end_in_order("superseded", 1, str(error))
    except Exception as raised:
        said = to_user_error(raised, WorldInfo.from_environment())
        record_failure(said)
        if isinstance(said, ConfigError | NonFiniteError):
            return 2 if ENV_LAUNCH_DIR in os.environ else fail(str(said))
        if ENV_LAUNCH_DIR in os.environ:
            return 1
        raise
    for line in _final_message(result):
        say(line)
    return _end_in_order("preempted", EXIT_PREEMPTED) if result.preempted else 0


def _final_message(result: TrainResult) -> list[str]:
    """How the run ended, and the three commands that come next."""
    clock, path = result.clock, result.path
    best = "" if clock.best is None else f", best evaluation {clock.best:,.4g}"
    ended = f"{'Stopped' if result.preempted else 'Done'} at {clock.samples:,} steps"
    head = f"{ended} in {format_duration(result.seconds)}{best}: {path}"
    watch, look = f"  watch it   lockstep play {path}", f"  look back  lockstep report {path}"
    if result.preempted:
        return [head, f"  go on      lockstep resume {path}", watch, look]
    return [head, watch, look, f"  take it    lockstep export {path} --to safetensors"]


def run_worker(work: Callable[[], None]) -> int:
    """Run as one process of a group that has no run to save; a failure is left where the launcher finds it."""
    try:
        work()
    except Exception as error:
        record_failure(error)
        if ENV_LAUNCH_DIR in os.environ:
            return 1
        raise
    return 0


def _end_in_order(kind: str, code: int, sentence: str = "") -> int:
    """Leave word of how the run ended for our launcher. Whoever started this process would take any code but 0 for a
    failure and start it again, which is wrong for both kinds; a process that nobody started says it by its code."""
    place, shared = WorldInfo.from_environment(), launch_directory()
    if shared is not None and place.local_rank == 0:
        (shared / OUTCOME).write_text(f"{kind}\n{sentence}")
    elif sentence and shared is None:
        warn(sentence)
    return 0 if place.launched else code


def launch_and_report(arguments: Sequence[str], fleet: "LaunchConfig") -> int:
    """Start processes; when they fail, say which was first and why."""
    from lockstep.launch.launcher import launch

    if sys.stderr.isatty():  # each of them imports torch before it can say a word of its own
        warn(f"waking {fleet.processes} {'process' if fleet.processes == 1 else 'processes'} ...")
    outcome = launch(arguments, fleet)
    if outcome.cause:
        warn(outcome.cause)
    return outcome.code
