"""What a person watches while a run trains: a live screen in a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.config import Recipe
from lockstep.measures import of_the_whole
from lockstep.protocols import Clock
from lockstep.runtime import Runtime

RETURN, LOSS = "rollout/ep_return_mean", "train/example_loss"
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {
    "env": "blue",
    "act": "cyan",
    "load": "yellow",
    "learn": "green",
    "reduce": "magenta",
    "other": "bright_black",
}


@dataclass(frozen=True)
class Snapshot:
    """One log entry, as the screen needs it."""

    metrics: dict[str, float]
    speed: float
    split: dict[str, float]
    checked: int
    """The update at which the processes were last compared."""
    slow: str = ""
    """Which process the others wait for, if it is steadily the same."""


class Screen(Protocol):
    """Something to look at."""

    def start(self, clock: Clock) -> None: ...
    def tick(self, clock: Clock) -> None: ...
    def show(self, clock: Clock, snapshot: Snapshot) -> None: ...
    def evaluation(self, clock: Clock) -> None: ...
    def note(self, sentence: str) -> None: ...
    def stop(self) -> None: ...


def open_screen(path: Path, recipe: Recipe, runtime: Runtime) -> Screen:
    processes = "1 process" if runtime.size == 1 else f"{runtime.size} processes"
    heading = f"{Path(recipe.name).stem} · {processes} · {runtime.device.type} · {recipe.run.reduction} · {path}"
    return LiveScreen(heading, runtime.size) if sys.stdout.isatty() else Lines(heading, runtime.size)


class Lines:
    """A line for each log entry, for files and pipes."""

    def __init__(self, heading: str, processes: int) -> None:
        self.processes = processes
        self.console = Console(soft_wrap=True, highlight=False)
        self.heading = heading

    def start(self, clock: Clock) -> None:
        self._say(self.heading)

    def tick(self, clock: Clock) -> None: ...

    def show(self, clock: Clock, snapshot: Snapshot) -> None:
        value, loss = snapshot.metrics.get(RETURN), snapshot.metrics.get(LOSS)
        reward = "return   -  " if value is None else f"return {value:8.2f}"
        reward = reward if loss is None else f"loss {loss:8.4f}"
        split = " ".join(f"{name} {share:.0%}" for name, share in snapshot.split.items())
        eta = duration((clock.budget - clock.samples) / max(snapshot.speed, 1e-9))
        line = (
            f"{clock.samples:>12,} of {clock.budget:,} steps  {snapshot.speed:>9,.0f}/s  {reward}  eta {eta}  {split}"
        )
        told = result_words({name.removeprefix("rollout/ep_"): value for name, value in snapshot.metrics.items()})
        told += loss_words(snapshot.metrics)
        line += f"  {', '.join(told)}" if told else ""
        slow = f"  slow: {snapshot.slow}" if snapshot.slow else ""
        self._say(line + _sync_words(self.processes, snapshot.checked) + slow)

    def evaluation(self, clock: Clock) -> None:
        self._say(f"{clock.samples:>12,} {evaluation_words(clock)}")

    def note(self, sentence: str) -> None:
        self._say(sentence)

    def stop(self) -> None: ...

    def _say(self, line: str) -> None:
        with suppress(OSError):  # they may go to a file on a disk that is full, which must not end a run
            self.console.print(line, markup=False)


class LiveScreen:
    """A panel that stays in place: progress, speed, return, time split, and whether all processes hold one agent."""

    def __init__(self, heading: str, processes: int) -> None:
        self.heading, self.processes = heading, processes
        self.console = Console()
        self.live = Live(console=self.console, auto_refresh=False, transient=False)
        self.returns: deque[float] = deque(maxlen=40)
        self.snapshot: Snapshot | None = None
        self.clock: Clock | None = None
        self._drawn = 0.0

    def start(self, clock: Clock) -> None:
        self.clock = clock
        self.live.start()
        self._draw()

    def tick(self, clock: Clock) -> None:
        if time.monotonic() - self._drawn > 0.2:
            self._draw()

    def show(self, clock: Clock, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if RETURN in snapshot.metrics:
            self.returns.append(snapshot.metrics[RETURN])
        self._draw()

    def evaluation(self, clock: Clock) -> None:
        self._draw()

    def note(self, sentence: str) -> None:
        self.console.print(sentence, markup=False)

    def stop(self) -> None:
        if self.live.is_started:
            self._draw()
            self.live.stop()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self.live.update(self._panel(), refresh=True)

    def _panel(self) -> RenderableType:
        assert self.clock is not None
        clock, snapshot = self.clock, self.snapshot
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bright_black", no_wrap=True)
        table.add_column()
        table.add_row("steps", Text(f"{clock.samples:,} of {clock.budget:,} (global)"))
        if snapshot is None:
            table.add_row("", Text("the first iteration is under way", style="italic"))
        else:
            eta = duration((clock.budget - clock.samples) / max(snapshot.speed, 1e-9))
            table.add_row("speed", Text(f"{snapshot.speed:,.0f} steps/s · {eta} to go"))
            if self.returns:
                table.add_row("return", Text(f"{self.returns[-1]:.2f}  {sparkline(list(self.returns))}"))
            told = result_words({name.removeprefix("rollout/ep_"): x for name, x in snapshot.metrics.items()})
            if told:
                table.add_row("episodes", Text(", ".join(told)))
            if losses := loss_words(snapshot.metrics):
                table.add_row("losses", Text(", ".join(losses)))
            if clock.evaluation:
                table.add_row("eval", Text(evaluation_words(clock)))
            table.add_row("time", _split_bar(snapshot.split))
            if self.processes > 1 and snapshot.checked:
                table.add_row("one agent", Text(f"in sync at update {snapshot.checked:,}", style="green"))
            if snapshot.slow:
                table.add_row("slow", Text(snapshot.slow, style="yellow"))
        bar = ProgressBar(total=clock.budget, completed=min(clock.samples, clock.budget))
        return Panel(
            Group(Padding(bar, 0), table),
            title=Text(self.heading, overflow="ellipsis"),
            title_align="left",
            expand=True,
        )


def sparkline(values: list[float]) -> str:
    """Values as a row of little bars, with a gap where one is no number: a screen must not end a run."""
    known = [value / 2 for value in values if math.isfinite(value)]  # halved, so that no difference is infinite
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low or 1.0
    return "".join(
        _BARS[round((value / 2 - low) / span * (len(_BARS) - 1))] if math.isfinite(value) else " " for value in values
    )


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def result_words(means: Mapping[str, float]) -> list[str]:
    """What a task counts over an episode, from means by name; wins are said as a part of the trades they are of."""
    found = {name.removesuffix("_mean"): value for name, value in means.items() if name.endswith("_mean")}
    counts = {name: value for name, value in found.items() if "/" not in name and name not in ("return", "length")}
    words = [f"{name} {value:.2f}" for name, value in counts.items() if name != "wins" or "trades" not in counts]
    if (
        counts.get("trades", 0.0) > 0.0 and "wins" in counts
    ):  # of sums over the same episodes: pooled, not a mean of means
        words.append(f"win rate {counts['wins'] / counts['trades']:.0%}")
    return words


def loss_words(metrics: Mapping[str, float]) -> list[str]:
    """The losses of an algorithm that has several networks, by their names."""
    parts = [name.split("/") for name in metrics if name.startswith("train/") and name.endswith("/loss")]
    return [f"{part[1]} loss {metrics['/'.join(part)]:.4g}" for part in parts if len(part) == 3]


def evaluation_words(clock: Clock) -> str:
    """The last evaluation as a phrase."""
    result = clock.evaluation
    if "score" in result:  # predictions, of which the whole measures are told, not those of parts
        measures = [f"{name} {value:.4g}" for name, value in of_the_whole(result).items()]
        best = "the best so far" if clock.best == result["score"] else f"best score {clock.best:.4g}"
        return ", ".join([f"evaluation: {measures[0]}", *measures[1:], f"{result['examples']:,.0f} examples", best])
    words = f"evaluation: return {result['return_mean']:.2f} ± {result['return_std']:.2f}"
    best = "the best so far" if clock.best == result["return_mean"] else f"best {clock.best:.2f}"
    return ", ".join([words, *result_words(result), f"{result['episodes']:.0f} episodes", best])


def _split_bar(split: dict[str, float], width: int = 24) -> Text:
    bar = Text()
    for name, share in split.items():
        bar.append("█" * round(share * width), style=_COLOURS[name])
    bar.append("  ")
    for name, share in split.items():
        bar.append(f"{name} {share:.0%}  ", style=_COLOURS[name])
    return bar


def _sync_words(processes: int, checked: int) -> str:
    return f"  one agent: in sync at update {checked:,}" if processes > 1 and checked else ""
