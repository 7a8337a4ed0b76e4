"""What a person watches while a run trains: a live screen in a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.config import Recipe
from lockstep.console import Console
from lockstep.protocols import Clock
from lockstep.run.phrases import (
    duration,
    evaluation_words,
    load_words,
    loss_words,
    result_words,
    sparkline,
    speed_words,
    sync_words,
    use_words,
)
from lockstep.runtime import Runtime
from lockstep.runtime.presence import Work

RETURN, LOSS = "rollout/ep_return_mean", "train/example_loss"
_COLOURS = {
    "env": "blue",
    "act": "cyan",
    "load": "yellow",
    "learn": "green",
    "reduce": "magenta",
    "other": "bright_black",
}
_DOING = {"evaluate": " · evaluating", "copy": " · saving"}
"""What is told beside training, where a person might wonder."""


@dataclass(frozen=True)
class Snapshot:
    """One log entry, as the screen needs it."""

    metrics: dict[str, float]
    speed: float
    split: dict[str, float]
    checked: int
    """The update at which the processes were last compared."""
    work: Work = field(default_factory=Work)


class Screen(Protocol):
    """Something to look at."""

    def start(self, clock: Clock) -> None: ...
    def show(self, clock: Clock, snapshot: Snapshot) -> None: ...
    def evaluation(self, clock: Clock) -> None: ...
    def note(self, sentence: str) -> None: ...
    def stop(self) -> None: ...


def open_screen(path: Path, recipe: Recipe, runtime: Runtime) -> Screen:
    processes = "1 process" if runtime.size == 1 else f"{runtime.size} processes"
    heading = f"{Path(recipe.name).stem} · {processes} · {runtime.device.type} · {recipe.run.reduction}"
    if sys.stdout.isatty():
        return LiveScreen(heading, str(path), runtime.size, lambda: runtime.watchdog.undertaking)
    return Lines(f"{heading} · {path}", runtime.size)


class Lines:
    """A line for each log entry, for files and pipes."""

    def __init__(self, heading: str, processes: int) -> None:
        self.processes = processes
        self.console = Console(soft_wrap=True)
        self.heading = heading

    def start(self, clock: Clock) -> None:
        self._say(self.heading)

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
        sync = sync_words(self.processes, snapshot.checked)
        more = {"": ", ".join(told), "load ": load_words(snapshot.work.loads)}
        more |= {"one agent: ": sync, "slow: ": snapshot.work.slow}
        self._say(line + "".join(f"  {name}{words}" for name, words in more.items() if words))

    def evaluation(self, clock: Clock) -> None:
        self._say(f"{clock.samples:>12,} {evaluation_words(clock)}")

    def note(self, sentence: str) -> None:
        self._say(sentence)

    def stop(self) -> None: ...

    def _say(self, line: str) -> None:
        with suppress(OSError):  # they may go to a file on a disk that is full, which must not end a run
            self.console.print(line)


class LiveScreen:
    """A panel that stays in place: how far, how fast, how good, where the time goes, and that it is one agent.

    It is drawn by a thread of its own, twice a second, so that it lives while an iteration or an evaluation is long.
    """

    def __init__(self, heading: str, path: str, processes: int, phase: Callable[[], str] = str) -> None:
        self.heading, self.path, self.processes, self.phase = heading, path, processes, phase
        self.console = Console()
        self.returns: deque[float] = deque(maxlen=40)
        self.snapshot: Snapshot | None = None
        self.loads: dict[int, float] = {}
        self.clock: Clock | None = None
        self._since = time.monotonic()
        self.live = Live(console=self.console, get_renderable=self._panel, refresh_per_second=2)

    def start(self, clock: Clock) -> None:
        self.clock = clock
        self.live.start(refresh=True)

    def show(self, clock: Clock, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.loads = snapshot.work.loads or self.loads  # entries may be closer together than words of processes
        if RETURN in snapshot.metrics:
            self.returns.append(snapshot.metrics[RETURN])

    def evaluation(self, clock: Clock) -> None: ...

    def note(self, sentence: str) -> None:
        self.console.print(sentence)

    def stop(self) -> None:
        self.phase = str
        if self.live.is_started:
            self.live.stop()

    def _panel(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bright_black", no_wrap=True, min_width=9)
        table.add_column(overflow="fold")
        for name, told in self._rows().items():
            table.add_row(name, told)
        return Panel(table, title=Text(self.heading), title_align="left", expand=True)

    def _rows(self) -> dict[str, RenderableType]:
        clock, snapshot = self.clock, self.snapshot
        rows: dict[str, RenderableType] = {"run": Text(self.path)}
        if clock is None:
            return rows
        bar = ProgressBar(total=clock.budget, completed=min(clock.samples, clock.budget))
        rows["steps"] = Group(Text(f"{clock.samples:,} of {clock.budget:,} (global) · {clock.progress:.0%}"), bar)
        spent = duration(time.monotonic() - self._since)
        if snapshot is None:
            rows["now"] = Text(f"the first iteration is under way, since {spent}", style="italic")
            return rows
        rows["speed"] = Text(speed_words(snapshot.speed, self.loads))
        left = duration((clock.budget - clock.samples) / max(snapshot.speed, 1e-9))
        rows["clock"] = Text(f"{spent} so far · {left} to go{_DOING.get(self.phase(), '')}")
        if self.returns:
            rows["return"] = Text(f"{self.returns[-1]:.2f}  {sparkline(list(self.returns))}")
        if LOSS in snapshot.metrics:
            rows["loss"] = Text(f"{snapshot.metrics[LOSS]:.4f}")
        means = {name.removeprefix("rollout/ep_"): value for name, value in snapshot.metrics.items()}
        rows["episodes"] = Text(", ".join(result_words(means)))
        rows["losses"] = Text(", ".join(loss_words(snapshot.metrics)))
        rows["eval"] = Text(evaluation_words(clock).removeprefix("evaluation: ") if clock.evaluation else "")
        rows["time"] = _split_bar(snapshot.split)
        rows["load"] = Text(load_words(self.loads))
        rows |= {name: Text(words) for name, words in use_words(snapshot.work.use).items()}
        rows["one agent"] = Text(sync_words(self.processes, snapshot.checked), style="green")
        rows["slow"] = Text(snapshot.work.slow, style="yellow")
        return {name: told for name, told in rows.items() if not isinstance(told, Text) or told.plain}


def _split_bar(split: dict[str, float], width: int = 40) -> RenderableType:
    """Where the time goes, as a bar, with what its colours mean below it."""
    bar, legend = Text(), Text()
    for name, share in split.items():
        bar.append("█" * round(share * width), style=_COLOURS[name])
        legend.append(f"{name} {share:.0%}  ", style=_COLOURS[name])
    return Group(bar, legend)
