"""Run a command in this process, as a worker of a launcher, or in several processes that it starts."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.checkpoint.fencing import SupersededError
from lockstep.cli import fail
from lockstep.distributed import NonFiniteError
from lockstep.io.printable import print_line
from lockstep.io.status_line import STARTUP
from lockstep.launch.failures import record_failure, to_user_error
from lockstep.launch.process_lifetime import ENV_LAUNCH_DIR, OUTCOME, launch_directory, started_by_a_launcher
from lockstep.launch.world import EXIT_PREEMPTED, STOP_SIGNALS, WorldInfo
from lockstep.launch.world import warn_user as warn
from lockstep.loggers.formatting import format_duration
from lockstep.run_dir import TrainResult

if TYPE_CHECKING:
    from lockstep.launch.rendezvous import LaunchConfig


def started_processes() -> int:
    """Return the number of processes that torchrun or our launcher started; 0 if this process was not launched."""
    world = WorldInfo.from_environment()
    return world.size if world.launched else 0


def print_on_main(message: str) -> None:
    """Print a message on rank 0."""
    if WorldInfo.from_environment().rank == 0:
        with suppress(OSError):  # stdout may be a file on a full disk
            print_line(message)


def print_notes(notes: Sequence[str]) -> None:
    """Print notes about a command line to stderr, unless our launcher has already printed them."""
    if ENV_LAUNCH_DIR not in os.environ and WorldInfo.from_environment().rank == 0:
        for note in notes:
            warn(note)


def run_training_worker(work: Callable[[], TrainResult], stop_at: int | None = None) -> int:
    """Train as one process of a run. Record a failure for the launcher, which reports the first one.

    A run that stops because it has reached `stop_at` has succeeded: a scheduler must not start it again.
    """
    from lockstep.config import ConfigError

    # Block stop signals. The watchdog handles them while a run is active; before and after it they are ignored.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if not started_by_a_launcher():
        STARTUP.start("starting")  # the console of the run stops it
    try:
        result = work()
    except SupersededError as error:
        return _finish("superseded", 1, str(error))
    except Exception as error:
        user_error = to_user_error(error, WorldInfo.from_environment())
        record_failure(user_error)
        if isinstance(user_error, ConfigError | NonFiniteError):
            return 2 if ENV_LAUNCH_DIR in os.environ else fail(str(user_error))
        if ENV_LAUNCH_DIR in os.environ:
            return 1
        raise
    finally:
        STARTUP.stop()
    for line in _final_message(result):
        print_on_main(line)
    succeeded = not result.preempted or result.clock.reached(stop_at)
    return 0 if succeeded else _finish("preempted", EXIT_PREEMPTED)


def _final_message(result: TrainResult) -> list[str]:
    """Return lines that say how the run ended and which commands to use next."""
    clock, path = result.clock, result.location or result.path
    best = "" if clock.best is None else f", best evaluation {clock.best:,.4g}"
    progress = f"{'Stopped' if result.preempted else 'Done'} at {clock.samples:,} steps"
    share = result.evaluation_seconds / max(result.seconds, 1e-9)
    evaluations = f" (evaluations {share:.0%})" if result.evaluation_seconds else ""
    head = f"{progress} in {format_duration(result.seconds)}{evaluations}{best}: {path}"
    watch = f"  watch    lockstep play {path}" if result.playable else f"  test     lockstep eval {path}"
    report = f"  report   lockstep report {path}"
    if result.preempted:
        return [head, f"  resume   lockstep resume {path}", watch, report]
    return [head, watch, report, f"  export   lockstep export {path} --to safetensors"]


def _finish(outcome: str, code: int, message: str = "") -> int:
    """Record how the run ended for our launcher, and return the exit code.

    A launcher restarts processes with a nonzero code, so launched processes return 0. Others return `code`.
    """
    world, directory = WorldInfo.from_environment(), launch_directory()
    if directory is not None and world.local_rank == 0:
        (directory / OUTCOME).write_text(f"{outcome}\n{message}")
    elif message and directory is None:
        warn(message)
    return 0 if world.launched else code


def launch_and_report(arguments: Sequence[str], config: "LaunchConfig") -> int:
    """Start processes. If they fail, print which failed first and why."""
    from lockstep.launch.launcher import launch

    if sys.stderr.isatty():  # the processes print nothing until torch is imported
        warn(f"Starting {config.processes} {'process' if config.processes == 1 else 'processes'}...")
    outcome = launch(arguments, config)
    if outcome.cause:
        warn(outcome.cause)
    return outcome.code
