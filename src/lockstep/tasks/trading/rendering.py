"""One account as it trades: its equity beside buying and holding, as characters and as a picture."""

from dataclasses import dataclass, field

import numpy as np

from lockstep.tasks.rendering.line_chart import BLUE, DIM, GREEN, INK, RED, Axes, Canvas, add_axes, braille_chart, room

WIDTH, HEIGHT = 640, 400
_SIDES = {-1: ("short", RED), 0: ("flat", DIM), 1: ("long", GREEN)}
_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class EpisodeTrace:
    """What an account came by since somebody began to watch its episode."""

    length: int
    """Steps of an episode."""
    age: list[int] = field(default_factory=list)
    close: list[float] = field(default_factory=list)
    equity: list[float] = field(default_factory=list)
    """With the position valued at the close; 1 at the start of the episode."""
    bought: list[float] = field(default_factory=list)
    """The same for who bought at the first open and held."""
    held: list[float] = field(default_factory=list)
    """Part of equity in the symbol, below zero when short."""
    trades: int = 0
    fees: float = 0.0

    def note(self, age: int, close: float, equity: float, bought: float, held: float, trades: int, fees: float) -> None:
        """Add the close of a bar; the first one of an episode begins anew."""
        if self.age and age <= self.age[-1]:
            for values in (self.age, self.close, self.equity, self.bought, self.held):
                values.clear()
        for values, value in zip(
            (self.close, self.equity, self.bought, self.held), (close, equity, bought, held), strict=True
        ):
            values.append(float(value))
        self.age.append(int(age))
        self.trades, self.fees = int(trades), float(fees)


def as_text(trail: EpisodeTrace) -> str:
    """Prices, position and equity as plots of characters, and what there is in numbers."""
    equity, bought = np.array(trail.equity), np.array(trail.bought)
    up = room(equity, bought, least=0.02)
    labels = f"{up[1] - 1:+.1%}", f"{up[0] - 1:+.1%}"
    plots = {"equity": equity, "buy and hold": bought}
    lines = [f"{name}\n{add_axes(braille_chart(y, 64, 5, trail.length, up), labels)}" for name, y in plots.items()]
    return "\n".join([f"price  {_spark(trail.close)}", f"holds  {_signs(trail.held)}", *lines, _words(trail)])


def _words(trail: EpisodeTrace) -> str:
    return (
        f"bar {trail.age[-1]} of {trail.length}  close {trail.close[-1]:,.2f}  {_position(trail.held[-1])[0]}\n"
        f"equity {trail.equity[-1] - 1:+.2%}  buy and hold {trail.bought[-1] - 1:+.2%}  "
        f"fees {trail.fees:.2%}  trades {trail.trades}"
    )


def as_frame(trail: EpisodeTrace) -> np.ndarray:
    """uint8 [HEIGHT, WIDTH, 3]: above, the price in the colour of the position; below, equity and buy-and-hold."""
    page, age = Canvas(WIDTH, HEIGHT), np.array(trail.age)
    close, equity, bought = (np.array(values) for values in (trail.close, trail.equity, trail.bought))
    held, colour = _position(trail.held[-1])
    page.write(16, 26, f"bar {age[-1]} of {trail.length}", 16)
    page.write(150, 26, held, 16, colour)
    told = f"fees {trail.fees:.2%}   trades {trail.trades}"
    page.write(WIDTH - 16, 26, told, 14, DIM, "rs")

    above = Axes(page, 64, 42, WIDTH - 16, 170, (0, trail.length), room(close, least=0.05 * close[0]))
    for y in above.ends():
        above.level(y, f"{y:,.0f}" if y >= 1000 else f"{y:,.4g}")
    sides = np.sign(trail.held).astype(int)
    # A position that shows at a bar was held on the way to it.
    for side, (_, paint) in _SIDES.items():
        for stop in np.flatnonzero(sides[1:] == side) + 1:
            above.curve(age[stop - 1 : stop + 1], close[stop - 1 : stop + 1], paint)
    page.dot(*above.place(age[-1], close[-1]), 3.5, colour)

    up = room(equity, bought, np.ones(1), least=0.04)
    below = Axes(page, 64, 222, WIDTH - 16, 372, (0, trail.length), up)
    below.level(1.0, "0")
    for y in below.ends():
        if abs(y - 1.0) > 0.12 * (up[1] - up[0]):  # else its words would lie on those of zero
            below.level(y, f"{y - 1:+.1%}")
    for part in (0, 0.25, 0.5, 0.75, 1):
        below.tick(part * trail.length, f"{part * trail.length:.0f}")
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
    """The last numbers as a row of little bars."""
    shown = np.array(values[-64:])
    heights = (shown - shown.min()) / max(float(np.ptp(shown)), 1e-9) * (len(_BARS) - 1)
    return "".join(_BARS[height] for height in heights.round().astype(int))


def _signs(held: list[float]) -> str:
    """The side that was held at each of the last bars."""
    return "".join("+" if part > 0 else "-" if part < 0 else "·" for part in held[-64:])
