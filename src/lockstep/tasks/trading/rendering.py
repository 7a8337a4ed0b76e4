"""Rendering of one account: its equity next to buy and hold, as text and as an image."""

from dataclasses import dataclass, field

import numpy as np

from lockstep.tasks.rendering.line_chart import BLUE, DIM, GREEN, INK, RED, Axes, Canvas, add_axes, braille_chart, room

WIDTH, HEIGHT = 640, 400
_SIDES = {-1: ("short", RED), 0: ("flat", DIM), 1: ("long", GREEN)}
_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class EpisodeTrace:
    """History of an account since recording of its episode started."""

    length: int
    """Steps of an episode."""
    age: list[int] = field(default_factory=list)
    close: list[float] = field(default_factory=list)
    equity: list[float] = field(default_factory=list)
    """Equity with the position valued at the close; 1 at the start of the episode."""
    bought: list[float] = field(default_factory=list)
    """Equity of buying at the first open and holding."""
    held: list[float] = field(default_factory=list)
    """Fraction of equity in the symbol; negative when short."""
    trades: int = 0
    fees: float = 0.0

    def note(self, age: int, close: float, equity: float, bought: float, held: float, trades: int, fees: float) -> None:
        """Add the close of a bar. The first bar of an episode clears the history."""
        if self.age and age <= self.age[-1]:
            for values in (self.age, self.close, self.equity, self.bought, self.held):
                values.clear()
        for values, value in zip(
            (self.close, self.equity, self.bought, self.held), (close, equity, bought, held), strict=True
        ):
            values.append(float(value))
        self.age.append(int(age))
        self.trades, self.fees = int(trades), float(fees)


def as_text(trace: EpisodeTrace) -> str:
    """Draw price, position and equity as text plots, with a summary line."""
    equity, bought = np.array(trace.equity), np.array(trace.bought)
    up = room(equity, bought, least=0.02)
    labels = f"{up[1] - 1:+.1%}", f"{up[0] - 1:+.1%}"
    plots = {"equity": equity, "buy and hold": bought}
    lines = [f"{name}\n{add_axes(braille_chart(y, 64, 5, trace.length, up), labels)}" for name, y in plots.items()]
    return "\n".join([f"price  {_spark(trace.close)}", f"holds  {_signs(trace.held)}", *lines, _summary(trace)])


def _summary(trace: EpisodeTrace) -> str:
    return (
        f"bar {trace.age[-1]} of {trace.length}  close {trace.close[-1]:,.2f}  {_position(trace.held[-1])[0]}\n"
        f"equity {trace.equity[-1] - 1:+.2%}  buy and hold {trace.bought[-1] - 1:+.2%}  "
        f"fees {trace.fees:.2%}  trades {trace.trades}"
    )


def as_frame(trace: EpisodeTrace) -> np.ndarray:
    """Draw an image, uint8 [HEIGHT, WIDTH, 3]. Top: price, colored by position. Bottom: equity, buy and hold."""
    page, age = Canvas(WIDTH, HEIGHT), np.array(trace.age)
    close, equity, bought = (np.array(values) for values in (trace.close, trace.equity, trace.bought))
    held, colour = _position(trace.held[-1])
    page.write(16, 26, f"bar {age[-1]} of {trace.length}", 16)
    page.write(150, 26, held, 16, colour)
    label = f"fees {trace.fees:.2%}   trades {trace.trades}"
    page.write(WIDTH - 16, 26, label, 14, DIM, "rs")

    above = Axes(page, 64, 42, WIDTH - 16, 170, (0, trace.length), room(close, least=0.05 * close[0]))
    for y in above.ends():
        above.level(y, f"{y:,.0f}" if y >= 1000 else f"{y:,.4g}")
    sides = np.sign(trace.held).astype(int)
    # The position at a bar was held from the previous bar to it.
    for side, (_, paint) in _SIDES.items():
        for stop in np.flatnonzero(sides[1:] == side) + 1:
            above.curve(age[stop - 1 : stop + 1], close[stop - 1 : stop + 1], paint)
    page.dot(*above.place(age[-1], close[-1]), 3.5, colour)

    up = room(equity, bought, np.ones(1), least=0.04)
    below = Axes(page, 64, 222, WIDTH - 16, 372, (0, trace.length), up)
    below.level(1.0, "0")
    for y in below.ends():
        if abs(y - 1.0) > 0.12 * (up[1] - up[0]):  # otherwise the label would overlap that of zero
            below.level(y, f"{y - 1:+.1%}")
    for part in (0, 0.25, 0.5, 0.75, 1):
        below.tick(part * trace.length, f"{part * trace.length:.0f}")
    below.curve(age, bought, DIM, 1.5)
    below.curve(age, equity, BLUE, 2.5)
    page.dot(*below.place(age[-1], equity[-1]), 4, INK)
    page.write(64, 208, f"equity {equity[-1] - 1:+.2%}", 16, BLUE)
    page.write(230, 208, f"buy and hold {bought[-1] - 1:+.2%}", 16, DIM)
    return page.picture()


def _position(held: float) -> tuple[str, tuple[int, int, int]]:
    name, colour = _SIDES[int(np.sign(held))]
    return (f"{name} {abs(held):.0%}" if held else name), colour


def _spark(values: list[float]) -> str:
    """Draw the last values as a sparkline."""
    shown = np.array(values[-64:])
    heights = (shown - shown.min()) / max(float(np.ptp(shown)), 1e-9) * (len(_BARS) - 1)
    return "".join(_BARS[height] for height in heights.round().astype(int))


def _signs(held: list[float]) -> str:
    """Draw the side held at each of the last bars."""
    return "".join("+" if part > 0 else "-" if part < 0 else "·" for part in held[-64:])
