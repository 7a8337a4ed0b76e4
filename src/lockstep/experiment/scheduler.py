"""Train runs as subprocesses, several at a time, and resume those that were interrupted."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from lockstep.checkpoint.lineage import lineage, list_checkpoints
from lockstep.experiment.progress import RunsProgress
from lockstep.io.jsonl import CHECKPOINTS, METRICS, newest_values, read_status
from lockstep.launch.process_lifetime import ENV_PARENT_PID
from lockstep.launch.world import EXIT_PREEMPTED, STOP_SIGNALS
from lockstep.loggers.formatting import format_duration

POLL_SECONDS = 0.2
"""Seconds between two checks of the runs."""
STATUS_SECONDS = 2.0
"""Seconds between two updates of the progress line, which reads the logs of the runs."""
LOG_LINES = 5
"""Lines of output that are shown of a run that failed."""

SHOWN_RUNS = 4
"""Largest number of active runs that the progress line names."""

Start = Callable[[Sequence[str], Path], "subprocess.Popen[bytes]"]
"""Starts lockstep with arguments; its output is appended to a file."""


class ScheduledRun(Protocol):
    """Run that a scheduler trains."""

    @property
    def label(self) -> str:
        """Name in messages."""

    @property
    def path(self) -> Path:
        """Run directory."""

    @property
    def log(self) -> Path:
        """File with the output of the run."""

    @property
    def steps(self) -> int:
        """Global samples to train for."""

    @property
    def procs(self) -> int:
        """Processes of the run."""


RunT = TypeVar("RunT", bound=ScheduledRun)


class RunQueue(Protocol[RunT]):
    """Runs whose order depends on results, such as the trials of a sweep."""

    def take(self) -> RunT | None:
        """Remove and return the next run that can start now. None: none can, before an active run has ended."""

    def is_done(self, run: RunT) -> bool:
        """Return whether a run has trained as far as it should."""

    def handle_failure(self, run: RunT, code: int) -> str | None:
        """Return a message if a failure is handled here, such as by another attempt, else None."""

    def describe(self, active: Sequence[RunT], done: int) -> str:
        """Return the progress of all runs, as one line."""


class _ActiveRun(NamedTuple):
    process: "subprocess.Popen[bytes]"
    slot: int


@dataclass
class RunScheduler(Generic[RunT]):
    """Trains runs that are not finished yet, at most `parallel` at a time."""

    runs: "Sequence[RunT] | RunQueue[RunT]"
    """Runs to train, in this order, or a queue."""
    prepare: Callable[[RunT, int], list[str]]
    """Returns the arguments of lockstep that start or resume a run in a slot, from 0 to `parallel` - 1."""
    record: Callable[[RunT], str]
    """Called once for each finished run. Returns its results as one line."""
    parallel: int
    progress: RunsProgress
    start: Start
    done: int = 0
    """Number of finished runs, of which some may have been finished before."""
    failed: list[RunT] = field(default_factory=list)
    """Runs that ended with an error."""
    stopped: bool = False
    """Whether a signal, to this process or to a run, ended training early."""
    _signals: int = 0
    _active: dict[RunT, _ActiveRun] = field(default_factory=dict)

    def run(self) -> None:
        """Train until all runs have ended or a stop signal arrives."""
        queue: RunQueue[RunT] = _RunList(self.runs, self.done) if isinstance(self.runs, Sequence) else self.runs
        free_slots = list(range(self.parallel))
        forwarded, shown = 0, 0.0
        with self._stop_signals():
            try:
                while True:
                    while free_slots and not self.stopped and (following := queue.take()) is not None:
                        self._begin(queue, following, free_slots)
                    if not self._active:
                        break
                    for run, (process, slot) in list(self._active.items()):
                        if process.poll() is not None:
                            del self._active[run]
                            free_slots.append(slot)
                            self._ended(queue, run, process.returncode)
                    if self._signals > forwarded:
                        forwarded, self.stopped = self._signals, True
                        self.progress.event(f"Stopping. Active runs save their state: {len(self._active)}")
                        self._terminate()
                    if time.monotonic() - shown >= STATUS_SECONDS:
                        shown = time.monotonic()
                        self.progress.update(queue.describe(list(self._active), self.done))
                    if self._active:
                        time.sleep(POLL_SECONDS)
            finally:
                self.progress.stop()
                self._terminate()  # none is active, except after an error
                for process, _ in self._active.values():
                    process.wait()

    def _begin(self, queue: RunQueue[RunT], run: RunT, free_slots: list[int]) -> None:
        """Start or resume a run. A run that finished without being recorded is recorded."""
        if queue.is_done(run):
            self._record(run)
            return
        slot = free_slots.pop(0)
        arguments = self.prepare(run, slot)
        verb = "resumed" if arguments[0] == "resume" else "started"
        self._active[run] = _ActiveRun(self.start(arguments, run.log), slot)
        self.progress.event(f"{run.label}: {verb}, output in {run.log}")

    def _ended(self, queue: RunQueue[RunT], run: RunT, code: int) -> None:
        if code == 0 and queue.is_done(run):
            self._record(run)
        elif code == EXIT_PREEMPTED or self.stopped:  # a run that is still starting ends by the signal itself
            self.stopped = True
            self.progress.event(f"{run.label}: stopped at {trained_samples(run.path):,} steps")
        elif (message := queue.handle_failure(run, code)) is not None:
            self.progress.event(f"{run.label}: {message}")
        else:
            self.failed.append(run)
            output = run.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if run.log.exists() else []
            lines = [f"{run.label}: failed with exit code {code}", *(f"    {line}" for line in output)]
            self.progress.event("\n".join(lines))

    def _record(self, run: RunT) -> None:
        results = self.record(run)
        self.done += 1
        self.progress.event(f"{run.label}: {results}")

    @contextmanager
    def _stop_signals(self) -> Iterator[None]:
        """Count stop signals instead of ending. Every one is passed on to the runs as SIGTERM."""

        def count(number: int, frame: object) -> None:
            self._signals += 1

        if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
            yield
            return
        before = {number: signal.signal(number, count) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _terminate(self) -> None:
        for process, _ in self._active.values():
            if process.poll() is None:
                process.terminate()


class _RunList(Generic[RunT]):
    """Queue of runs in a fixed order, each of which is trained to its end."""

    def __init__(self, runs: Sequence[RunT], done: int) -> None:
        self._waiting, self._total, self._remaining = deque(runs), done + len(runs), RemainingTime(runs)

    def take(self) -> RunT | None:
        return self._waiting.popleft() if self._waiting else None

    def is_done(self, run: RunT) -> bool:
        return is_finished(run.path)

    def handle_failure(self, run: RunT, code: int) -> str | None:
        return None

    def describe(self, active: Sequence[RunT], done: int) -> str:
        return describe_runs(active, done, self._total, self._remaining)


class RemainingTime:
    """Estimates the time that runs still need, from the steps trained since it was created."""

    def __init__(self, runs: Sequence[ScheduledRun]) -> None:
        self._runs, self._since = runs, time.monotonic()
        self._before = self._trained()

    def seconds(self) -> float | None:
        """Return the estimate in seconds; None if nothing has been trained yet."""
        trained = self._trained()
        if trained <= self._before:
            return None
        left = max(0, sum(run.steps for run in self._runs) - trained)
        return (time.monotonic() - self._since) * left / (trained - self._before)

    def _trained(self) -> int:
        return sum(min(trained_samples(run.path), run.steps) for run in self._runs)


def start_lockstep(arguments: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start lockstep on one thread per process. It is killed if this process dies, so that none trains unnoticed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", ENV_PARENT_PID: str(os.getpid())}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep", *arguments],  # -P: import nothing from the working directory
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process only, which then asks the runs to stop
        )


def start_or_resume(
    run: ScheduledRun, arguments: Sequence[str], stop_at: int | None = None, gpus: Sequence[str] = ()
) -> list[str]:
    """Return the arguments of lockstep that resume a run; `arguments` if it has no checkpoint to resume from.

    The directory of a run that was killed before its first checkpoint is removed.

    Args:
        run: The run.
        arguments: Arguments that start it.
        stop_at: Samples to stop at. None: train to the end.
        gpus: GPUs to use. Empty: all visible ones.
    """
    options = [] if stop_at is None else ["--stop-at", str(stop_at)]
    options += ["--gpus", ",".join(gpus)] if gpus else []
    checkpoints = run.path / CHECKPOINTS
    # Also without a config: `resume` then refuses, and no checkpoint is deleted.
    if checkpoints.is_dir() and list_checkpoints(checkpoints):
        return ["resume", str(run.path), "--procs", str(run.procs), *options]
    if run.path.exists():
        shutil.rmtree(run.path)
    return [*arguments, *options]


def describe_runs(active: Sequence[ScheduledRun], done: int, total: int, remaining: RemainingTime) -> str:
    """Return the progress of runs that are all trained to their end."""
    left = remaining.seconds()
    eta = "" if left is None else f"; about {format_duration(left)} left"
    return f"{done} of {total} runs done; {describe_active(active)}{eta}"


def describe_active(active: Sequence[ScheduledRun]) -> str:
    """Return the labels of active runs, each with its share of its steps."""
    parts = [f"{run.label} {min(1.0, trained_samples(run.path) / run.steps):.0%}" for run in active[:SHOWN_RUNS]]
    parts += [f"{len(active) - SHOWN_RUNS} more"] if len(active) > SHOWN_RUNS else []
    return ", ".join(parts) or "none active"


def trained_samples(run: Path) -> int:
    """Return the samples that a run has trained so far, as logged."""
    samples = newest_values(run / METRICS, ["samples"]).get("samples", 0)
    return int(samples) if 0 <= samples < 1e18 else 0


def has_reached(run: Path, stop_at: int | None) -> bool:
    """Return whether a run has finished, perhaps by early stopping, or has been saved at these samples."""
    if stop_at is None or is_finished(run):
        return is_finished(run)
    checkpoints = run / CHECKPOINTS
    saved = lineage(checkpoints) if checkpoints.is_dir() else []
    return bool(saved) and saved[0].samples >= stop_at


def is_finished(run: Path) -> bool:
    """Return whether a run has trained for all its samples."""
    return read_status(run).get("state") == "finished"


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
