"""Log file of one process: logs/process-0.log and so on in the run directory."""

import os
import platform
import socket
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep import __version__
from lockstep.clock import TrainState
from lockstep.distributed import Runtime
from lockstep.io.jsonl import LOGS
from lockstep.io.printable import printable


class ProcessLog:
    """Log of one process, for finding problems on one of many hosts. That of the main process is a RunLogger.

    Write errors are ignored, so that a full disk does not end a run.
    """

    def __init__(self, run: Path, runtime: Runtime) -> None:
        self.run, self.runtime = run, runtime
        self.path = run / LOGS / f"process-{runtime.rank}.log"
        self._since = time.perf_counter()
        self.evaluation_seconds = 0.0
        """Seconds of evaluations up to the last call of `take_times`."""

    def begin(self, clock: TrainState, notes: list[str]) -> None:
        runtime, lanes = self.runtime, self.runtime.lanes.local
        self.record(
            f"process {runtime.rank} of {runtime.size} on {socket.gethostname()} (pid {os.getpid()}), {runtime.device},"
            f" lanes {lanes.start} to {lanes.stop - 1} of {runtime.lanes.num_lanes}, from {clock.samples:,} samples;"
            f" lockstep {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        )
        for text in notes:
            self.message(text)
        self.take_times()

    def set_eval_interval(self, samples: int | None) -> None:
        """Set the samples between evaluations, for the expected time of the run."""

    def on_iteration_end(self, clock: TrainState, updates: int) -> None:
        while self.runtime.pending_messages:
            self.message(self.runtime.pending_messages.pop(0))

    def write(self, clock: TrainState, metrics: dict[str, float]) -> None:
        seconds, shares = self.take_times()
        self.record_progress(clock, seconds, shares)

    def record_progress(self, clock: TrainState, seconds: float, shares: dict[str, float]) -> None:
        """Log the progress of this process and its time split since the last call."""
        split = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
        self.record(f"{clock.samples:,} samples, iteration {clock.iteration:,}; of {seconds:.1f} s: {split}")

    def evaluation(self, clock: TrainState) -> None: ...

    def digests(self, clock: TrainState, values: dict[str, Any]) -> None: ...

    def message(self, text: str) -> None:
        """Tell the user something."""
        self.record(text)

    def record(self, text: str) -> None:
        """Append a line with a timestamp to the log file of this process."""
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")

    def failed(self, error: BaseException) -> None:
        self.record("".join(traceback.format_exception(error)).rstrip())

    def finish(self) -> None: ...

    def close(self) -> None:
        self.record("log closed")

    def take_times(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last call, and the fraction of them spent in each phase."""
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        seconds = self.runtime.timer.take()
        self.evaluation_seconds += seconds.get("evaluate", 0.0)
        return elapsed, {name: value / elapsed for name, value in seconds.items()}
