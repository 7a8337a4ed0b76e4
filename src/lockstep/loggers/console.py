"""Console output of a run: a live panel in a terminal, plain lines in files and pipes."""

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.clock import TrainState
from lockstep.config import Recipe
from lockstep.distributed import Runtime
from lockstep.distributed.heartbeat import UtilizationReport
from lockstep.io.rich_console import PrintableConsole
from lockstep.io.status_line import STARTUP, StatusLine
from lockstep.loggers.formatting import (
    format_duration,
    format_evaluation,
    format_losses,
    format_replica_check,
    format_resources,
    format_results,
    format_speed,
    format_utilization,
    sparkline,
)
from lockstep.ops.compilation import COMPILE

RETURN, LOSS = "rollout/ep_return_mean", "train/example_loss"
_COLORS = {
    "env": "blue",
    "act": "cyan",
    "load": "yellow",
    "learn": "green",
    "reduce": "magenta",
    "evaluate": "red",
    COMPILE: "bright_yellow",
    "other": "bright_black",
}
_PHASE_LABELS = {"evaluate": " · evaluating", "copy": " · saving", COMPILE: " · compiling kernels"}
"""Phases that the console shows, because they pause training for long."""


@dataclass(frozen=True)
class Snapshot:
    """One log entry, with the values that the console shows."""

    metrics: dict[str, float]
    speed: float
    """Training samples per second, without the time of evaluations."""
    eta: float
    """Seconds until the end of the run, with the evaluations still to come."""
    split: dict[str, float]
    checked: int
    """The last update at which replicas were compared."""
    usage: UtilizationReport = field(default_factory=UtilizationReport)


class PlainConsole:
    """Prints one line per log entry, for files and pipes."""

    def __init__(self, heading: str, processes: int, phase: Callable[[], str] = str) -> None:
        self.processes, self.phase = processes, phase
        self._status = StatusLine()
        self.console = PrintableConsole(soft_wrap=True)
        self.heading = heading

    def start(self, clock: TrainState) -> None:
        STARTUP.stop()
        self._print(self.heading)
        # Compilation and a long first iteration would leave the user without output.
        self._status.start(lambda: f"{clock.samples:,} steps{_PHASE_LABELS.get(self.phase(), '')}")

    def show(self, clock: TrainState, snapshot: Snapshot) -> None:
        self._status.stop()
        value, loss = snapshot.metrics.get(RETURN), snapshot.metrics.get(LOSS)
        reward = "return   -  " if value is None else f"return {value:8.2f}"
        reward = reward if loss is None else f"loss {loss:8.4f}"
        split = " ".join(f"{name} {share:.0%}" for name, share in snapshot.split.items())
        eta = format_duration(snapshot.eta)
        steps = f"{clock.samples:>12,} of {clock.total_samples:,} steps"
        line = f"{steps}  {snapshot.speed:>9,.0f}/s  {reward}  eta {eta}  {split}"
        results = format_results(snapshot.metrics) + format_losses(snapshot.metrics)
        sync = format_replica_check(self.processes, snapshot.checked)
        more = {"": ", ".join(results), "load ": format_utilization(snapshot.usage.utilization)}
        more |= {"one agent: ": sync, "slow: ": snapshot.usage.slow}
        self._print(line + "".join(f"  {name}{text}" for name, text in more.items() if text))

    def evaluation(self, clock: TrainState) -> None:
        self._print(f"{clock.samples:>12,} {format_evaluation(clock)}")

    def message(self, text: str) -> None:
        self._print(text)

    def stop(self) -> None:
        self._status.stop()

    def _print(self, line: str) -> None:
        with suppress(OSError):  # output may go to a file on a full disk, which must not end a run
            self.console.print(line)


class LiveConsole:
    """Live panel with progress, speed, results, time split and replica check.

    A thread redraws it twice per second, so that it also updates during long iterations and evaluations.
    """

    def __init__(self, heading: str, path: str, processes: int, phase: Callable[[], str] = str) -> None:
        self.heading, self.path, self.processes, self.phase = heading, path, processes, phase
        self.console = PrintableConsole()
        self.returns: deque[float] = deque(maxlen=40)
        self.snapshot: Snapshot | None = None
        self.loads: dict[int, float] = {}
        self.clock: TrainState | None = None
        self._since = self._shown = time.monotonic()
        self.live = Live(console=self.console, get_renderable=self._panel, refresh_per_second=2)

    def start(self, clock: TrainState) -> None:
        self.clock = clock
        STARTUP.stop()
        self.live.start(refresh=True)

    def show(self, clock: TrainState, snapshot: Snapshot) -> None:
        self.snapshot, self._shown = snapshot, time.monotonic()
        self.loads = snapshot.usage.utilization or self.loads  # log entries may be more frequent than heartbeats
        if RETURN in snapshot.metrics:
            self.returns.append(snapshot.metrics[RETURN])

    def evaluation(self, clock: TrainState) -> None: ...

    def message(self, text: str) -> None:
        self.console.print(text)

    def stop(self) -> None:
        self.phase = str
        if self.live.is_started:
            self.live.stop()

    def _panel(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bright_black", no_wrap=True, min_width=9)
        table.add_column(overflow="fold")
        for name, content in self._rows().items():
            table.add_row(name, content)
        return Panel(table, title=Text(self.heading), title_align="left", expand=True)

    def _rows(self) -> dict[str, RenderableType]:
        clock, snapshot = self.clock, self.snapshot
        rows: dict[str, RenderableType] = {"run": Text(self.path)}
        if clock is None:
            return rows
        bar = ProgressBar(total=clock.total_samples, completed=min(clock.samples, clock.total_samples))
        rows["steps"] = Group(
            Text(f"{clock.samples:,} of {clock.total_samples:,} (global) · {clock.progress:.0%}"), bar
        )
        elapsed = format_duration(time.monotonic() - self._since)
        if snapshot is None:
            label = _PHASE_LABELS.get(self.phase(), "")
            rows["now"] = Text(f"first iteration, running for {elapsed}{label}", style="italic")
            return rows
        rows["speed"] = Text(format_speed(snapshot.speed, self.loads))
        remaining = format_duration(snapshot.eta - (time.monotonic() - self._shown))
        rows["clock"] = Text(f"{elapsed} so far · {remaining} to go{_PHASE_LABELS.get(self.phase(), '')}")
        if self.returns:
            rows["return"] = Text(f"{self.returns[-1]:.2f}  {sparkline(list(self.returns))}")
        if LOSS in snapshot.metrics:
            rows["loss"] = Text(f"{snapshot.metrics[LOSS]:.4f}")
        rows["episodes"] = Text(", ".join(format_results(snapshot.metrics)))
        rows["losses"] = Text(", ".join(format_losses(snapshot.metrics)))
        rows["eval"] = Text(format_evaluation(clock).removeprefix("evaluation: ") if clock.evaluation else "")
        rows["time"] = _split_bar(snapshot.split)
        rows["load"] = Text(format_utilization(self.loads))
        rows |= {name: Text(text) for name, text in format_resources(snapshot.usage.resources).items()}
        rows["one agent"] = Text(format_replica_check(self.processes, snapshot.checked), style="green")
        rows["slow"] = Text(snapshot.usage.slow, style="yellow")
        return {name: content for name, content in rows.items() if not isinstance(content, Text) or content.plain}


def _split_bar(split: dict[str, float], width: int = 40) -> RenderableType:
    """Render the time split as a colored bar with a legend below."""
    bar, legend = Text(), Text()
    for name, share in split.items():
        bar.append("█" * round(share * width), style=_COLORS[name])
        legend.append(f"{name} {share:.0%}  ", style=_COLORS[name])
    return Group(bar, legend)


def open_console(location: str, recipe: Recipe, runtime: Runtime) -> LiveConsole | PlainConsole:
    processes = "1 process" if runtime.size == 1 else f"{runtime.size} processes"
    heading = f"{Path(recipe.name).stem} · {processes} · {runtime.device.type} · {recipe.run.reduction}"

    def phase() -> str:
        return COMPILE if COMPILE in runtime.status.phases else runtime.watchdog.outer_phase

    if sys.stdout.isatty():
        return LiveConsole(heading, location, runtime.size, phase)
    return PlainConsole(f"{heading} · {location}", runtime.size, phase)
