"""Run a suite: start runs as subprocesses, several at a time, and resume those that were interrupted."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.apps.benchmark.planned_runs import PlannedRun, source_commit
from lockstep.apps.benchmark.progress import SuiteProgress
from lockstep.apps.benchmark.results import BenchmarkResult, append_result, read_results
from lockstep.launch.process_lifetime import ENV_PARENT_PID
from lockstep.launch.world import EXIT_PREEMPTED, STOP_SIGNALS
from lockstep.loggers.formatting import format_duration
from lockstep.tools.report.series import format_number

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


@dataclass
class SuiteRunner:
    """Trains the runs of a suite that have no result yet, at most `parallel` at a time."""

    planned: Sequence[PlannedRun]
    data: Path
    """Data file of the suite."""
    parallel: int
    progress: SuiteProgress
    start: Start = start_lockstep
    failed: list[PlannedRun] = field(default_factory=list)
    """Runs that ended with an error."""
    stopped: bool = False
    """Whether a signal, to this process or to a run, ended training early."""
    _signals: int = 0
    _done: int = 0

    def run(self) -> None:
        """Train until all runs have ended or a stop signal arrives. Every finished run is recorded at once."""
        self.data.parent.mkdir(parents=True, exist_ok=True)
        recorded = {result.command for result in read_results(self.data)}
        waiting = deque(run for run in self.planned if run.command not in recorded)
        self._done = len(self.planned) - len(waiting)
        if self._done:
            self.progress.event(f"{self._done} of {len(self.planned)} runs are in {self.data}.")
        active: dict[PlannedRun, subprocess.Popen[bytes]] = {}
        remaining = RemainingTime(list(waiting))
        commit, forwarded, shown = source_commit(), 0, 0.0
        with self._stop_signals():
            try:
                while active or (waiting and not self.stopped):
                    while waiting and not self.stopped and len(active) < self.parallel:
                        self._begin(waiting.popleft(), commit, active)
                    for run, process in list(active.items()):
                        if process.poll() is not None:
                            del active[run]
                            self._ended(run, process.returncode)
                    if self._signals > forwarded:
                        forwarded, self.stopped = self._signals, True
                        self.progress.event(f"Stopping. Active runs save their state: {len(active)}")
                        _terminate(active.values())
                    if time.monotonic() - shown >= STATUS_SECONDS:
                        shown = time.monotonic()
                        self.progress.update(self._describe(active, remaining))
                    time.sleep(POLL_SECONDS)
            finally:
                self.progress.stop()
                _terminate(active.values())  # none is active, except after an error
                for process in active.values():
                    process.wait()

    def _begin(self, run: PlannedRun, commit: str, active: dict[PlannedRun, "subprocess.Popen[bytes]"]) -> None:
        """Start or resume a run. A run that finished without being recorded is recorded."""
        if run.finished:
            self._record(run)
            return
        arguments = run.prepare(commit)
        verb = "resumed" if arguments[0] == "resume" else "started"
        active[run] = self.start(arguments, run.log)
        self.progress.event(f"{run.label}: {verb}, output in {run.log}")

    def _ended(self, run: PlannedRun, code: int) -> None:
        if code == 0 and run.finished:
            self._record(run)
        elif code == EXIT_PREEMPTED or self.stopped:  # a run that is still starting ends by the signal itself
            self.stopped = True
            self.progress.event(f"{run.label}: stopped at {run.samples:,} steps")
        else:
            self.failed.append(run)
            output = run.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if run.log.exists() else []
            lines = [f"{run.label}: failed with exit code {code}", *(f"    {line}" for line in output)]
            self.progress.event("\n".join(lines))

    def _record(self, run: PlannedRun) -> None:
        result = run.result()
        append_result(self.data, result)
        self._done += 1
        self.progress.event(f"{run.label}: {describe_scores(result)}, {format_duration(result.seconds)}")

    def _describe(self, active: dict[PlannedRun, "subprocess.Popen[bytes]"], remaining: "RemainingTime") -> str:
        parts = [f"{run.label} {min(1.0, run.samples / run.steps):.0%}" for run in list(active)[:SHOWN_RUNS]]
        parts += [f"{len(active) - SHOWN_RUNS} more"] if len(active) > SHOWN_RUNS else []
        left = remaining.seconds()
        eta = "" if left is None else f"; about {format_duration(left)} left"
        return f"{self._done} of {len(self.planned)} runs done; {', '.join(parts) or 'none active'}{eta}"

    @contextmanager
    def _stop_signals(self) -> Iterator[None]:
        """Count stop signals instead of ending. Every one is passed on to the runs as SIGTERM."""

        def count(number: int, frame: object) -> None:
            self._signals += 1

        before = {number: signal.signal(number, count) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class RemainingTime:
    """Estimates the time that runs still need, from the steps trained since it was created."""

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
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
        return sum(min(run.samples, run.steps) for run in self._runs)


def describe_scores(result: BenchmarkResult) -> str:
    """Return the scores of a run as one line."""
    scores = {
        "training": result.training_return,
        "last evaluation": result.last_evaluation,
        "best": result.best_evaluation,
    }
    known = [f"{name} {format_number(score)}" for name, score in scores.items() if score is not None]
    return ", ".join(known) or "no episode ended"


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _terminate(processes: Iterable["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
