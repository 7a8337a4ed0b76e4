"""Log of a run: metrics.jsonl, TensorBoard, console output and optionally W&B.

Only the main process writes it, with metrics pooled over all processes. Every process also writes a small log file.
"""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.base.dataset import has_playback
from lockstep.clock import TrainState
from lockstep.config import ConfigError, Recipe
from lockstep.distributed import Runtime
from lockstep.distributed.resource_usage import MAX_REPORTED_PROCESSES
from lockstep.io.jsonl import DIGESTS, METRICS, append_jsonl, truncate_after
from lockstep.loggers.console import Snapshot, open_console
from lockstep.loggers.evaluation_cost import EvaluationCost
from lockstep.loggers.process_log import ProcessLog
from lockstep.loggers.video import VideoRecorder
from lockstep.loggers.wandb_logger import WandbLog
from lockstep.ops.compilation import COMPILE

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SPLIT = ("env", "act", "load", "learn", "reduce", "evaluate", COMPILE)
"""Phases of the time split, if a run has them; the rest is `other`."""


class RunLogger(ProcessLog):
    """Log of the main process. It also writes metrics and messages of the whole run to all other outputs."""

    def __init__(
        self, run: Path, recipe: Recipe, runtime: Runtime, wandb: WandbLog | None = None, location: str = ""
    ) -> None:
        super().__init__(run, runtime)
        self.console = open_console(location or str(run), recipe, runtime)
        self._tensorboard: SummaryWriter | None = None
        self._wandb = wandb
        self._checked, self._check_every = 0, recipe.run.replica_check_every
        self._samples = 0
        self._evaluations = EvaluationCost(recipe.run)
        records_video = recipe.run.record_video and has_playback(recipe.task)
        self.video = VideoRecorder(run, records_video, self.message, lambda: self._tensorboard)

    def begin(self, clock: TrainState, notes: list[str]) -> None:
        """Open the outputs; remove entries that a killed run wrote after the checkpoint it resumes from."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import; only the main process needs it

        try:
            truncate_after(self.run / METRICS, clock.samples)
            # A start without a checkpoint writes the line before the first iteration again.
            truncate_after(self.run / DIGESTS, clock.samples if clock.iteration else -1)
            age_event_files(self.run / "tensorboard", int(time.time()))
            # TensorBoard drops everything from this step on when it reads the new file.
            self._tensorboard = SummaryWriter(str(self.run / "tensorboard"), purge_step=clock.samples + 1)
        except OSError as error:
            raise ConfigError(f"{self.run} cannot be written: {error}.", "Free disk space, then resume.") from None
        self._samples = clock.samples
        self.console.start(clock)
        super().begin(clock, [*notes, *(self._wandb.notes if self._wandb else ())])

    def set_eval_interval(self, samples: int | None) -> None:
        self._evaluations.eval_every = samples

    def on_iteration_end(self, clock: TrainState, updates: int) -> None:
        """Check the video recorder and write pending messages."""
        self._checked = updates - updates % self._check_every
        self.video.poll()
        super().on_iteration_end(clock, updates)

    def write(self, clock: TrainState, metrics: dict[str, float]) -> None:
        """Write pooled metrics, with the training speed and the time split since the last entry."""
        elapsed, shares = self.take_times()
        training = elapsed * (1.0 - min(shares.get("evaluate", 0.0), 0.999))
        speed, self._samples = (clock.samples - self._samples) / training, clock.samples
        self._evaluations.measured(elapsed - training, clock)
        eta = max(0, clock.total_samples - clock.samples) / max(speed, 1e-9)
        eta += self._evaluations.remaining_seconds(clock)
        split = {name: shares[name] for name in SPLIT if name in shares}
        split["other"] = max(0.0, 1.0 - sum(split.values()))
        times = {"time/global_fps": speed, "time/seconds": elapsed}
        times |= {f"time/{name}": share for name, share in (shares | split).items()}
        usage = self.runtime.watchdog.utilization_report()
        loads = {process: load for process, load in usage.utilization.items() if process < MAX_REPORTED_PROCESSES}
        system = usage.resources | {f"process{process}_load_percent": 100 * load for process, load in loads.items()}
        checked = {"sync/update": float(self._checked)} if self.runtime.size > 1 else {}  # for `lockstep report`
        self._put(clock, metrics | times | checked | {f"system/{name}": value for name, value in system.items()})
        self.record_progress(clock, elapsed, shares)
        self.console.show(clock, Snapshot(metrics, speed, eta, split, self._checked, usage))

    def evaluation(self, clock: TrainState) -> None:
        self._put(clock, {f"eval/{name}": value for name, value in clock.evaluation.items()})
        self.console.evaluation(clock)
        self.video.evaluation(clock)

    def digests(self, clock: TrainState, values: dict[str, Any]) -> None:
        self._append(DIGESTS, clock, values)

    def message(self, text: str) -> None:
        self.console.message(text)
        super().message(text)

    def finish(self) -> None:
        """Wait briefly for the last video. Called if the run is complete, not after a stop request."""
        self.video.finish(lambda: self.runtime.status.stop_requested)

    def close(self) -> None:
        self.video.close()
        self.console.stop()
        super().close()
        if self._wandb is not None:
            self._wandb.close()
        if self._tensorboard is not None:
            with contextlib.suppress(OSError):  # the disk may be full, which was reported before
                self._tensorboard.close()

    def _put(self, clock: TrainState, values: dict[str, float]) -> None:
        self._append(METRICS, clock, values)
        if self._wandb is not None:
            self._wandb.put(clock.samples, values)
        if self._tensorboard is None:
            return
        try:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, clock.samples)
        except OSError as error:  # its writer thread has ended
            self._tensorboard = None
            self.message(f"Writing the TensorBoard file failed: {error}. Metrics are still written to {METRICS}.")

    def _append(self, name: str, clock: TrainState, values: dict[str, Any]) -> None:
        """Append a line to a JSON Lines file; report a write error without ending the run."""
        try:
            append_jsonl(self.run / name, {"samples": clock.samples, "iteration": clock.iteration} | values)
        except OSError as error:
            self.message(f"{name}: the line of {clock.samples:,} samples could not be written: {error}.")


def age_event_files(directory: Path, now: int) -> None:
    """Rename the event files of earlier starts so that a file opened at `now` sorts after them.

    TensorBoard reads files in the order of their names, `events.out.tfevents.SECONDS.HOST.PID.COUNTER`. A start within
    the same second, or on a machine with a slower clock, would be read before the start it continues.
    """
    # Files with other names, which a foreign run may contain, are left alone.
    files = sorted(path for path in directory.glob("events.out.tfevents.*") if path.name.split(".")[3].isdecimal())
    if not files or int(files[-1].name.split(".")[3]) < now:
        return
    for number, path in enumerate(files):
        parts = path.name.split(".")
        parts[3] = f"{number:010d}"
        path.rename(path.with_name(".".join(parts)))


def open_log(path: Path, recipe: Recipe, runtime: Runtime, location: str = "") -> ProcessLog:
    """Open the log of the run on the main process, or a process log on the others. Its location may be a URL."""
    wandb_logs: list[WandbLog] = []
    if recipe.run.wandb:  # may be slow: the other processes wait at the store, not in a collective
        runtime.run_on_main(lambda: wandb_logs.append(WandbLog(path, recipe)))
    if not runtime.is_main:
        return ProcessLog(path, runtime)
    return RunLogger(path, recipe, runtime, next(iter(wandb_logs), None), location)
