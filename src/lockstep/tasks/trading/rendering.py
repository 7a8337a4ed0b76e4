"""Rendering of one account: its equity next to buy and hold, as text and as an image."""

from typing import NamedTuple

import numpy as np

from lockstep.tasks.rendering.line_chart import BLUE, DIM, GREEN, INK, RED, Axes, Canvas, add_axes, braille_chart, room

WIDTH, HEIGHT = 640, 400
_SIDES = {-1: ("short", RED), 0: ("flat", DIM), 1: ("long", GREEN)}
_BARS = "▁▂▃▄▅▆▇█"


class RecordedBar(NamedTuple):
    """An account at the close of a bar."""

    age: int
    """Steps of the episode so far."""
    close: float
    equity: float
    """Equity with the position valued at the close; 1 at the start of the episode."""
    bought: float
    """Equity of buying at the first open and holding."""
    held: float
    """Fraction of equity in the symbol; negative when short."""
    trades: int
    fees: float


def as_text(bars: list[RecordedBar], length: int) -> str:
    """Draw price, position and equity of an episode with `length` steps as text plots, with a summary line."""
    _, close, equity, bought, held, _, _ = np.array(bars).T
    up = room(equity, bought, least=0.02)
    labels = f"{up[1] - 1:+.1%}", f"{up[0] - 1:+.1%}"
    plots = {"equity": equity, "buy and hold": bought}
    lines = [f"{name}\n{add_axes(braille_chart(y, 64, 5, length, up), labels)}" for name, y in plots.items()]
    last = bars[-1]
    summary = (
        f"bar {last.age} of {length}  close {last.close:,.2f}  {_position(last.held)[0]}\n"
        f"equity {last.equity - 1:+.2%}  buy and hold {last.bought - 1:+.2%}  "
        f"fees {last.fees:.2%}  trades {last.trades}"
    )
    return "\n".join([f"price  {_spark(close)}", f"holds  {_signs(held)}", *lines, summary])


def as_frame(bars: list[RecordedBar], length: int) -> np.ndarray:
    """Draw an image, uint8 [HEIGHT, WIDTH, 3]. Top: price, colored by position. Bottom: equity, buy and hold."""
    page, last = Canvas(WIDTH, HEIGHT), bars[-1]
    age, close, equity, bought, held, _, _ = np.array(bars).T
    position, colour = _position(last.held)
    page.write(16, 26, f"bar {last.age} of {length}", 16)
    page.write(150, 26, position, 16, colour)
    page.write(WIDTH - 16, 26, f"fees {last.fees:.2%}   trades {last.trades}", 14, DIM, "rs")

    above = Axes(page, 64, 42, WIDTH - 16, 170, (0, length), room(close, least=0.05 * close[0]))
    for y in above.ends():
        above.level(y, f"{y:,.0f}" if y >= 1000 else f"{y:,.4g}")
    sides = np.sign(held)
    # The position at a bar was held from the previous bar to it.
    for side, (_, paint) in _SIDES.items():
        for stop in np.flatnonzero(sides[1:] == side) + 1:
            above.curve(age[stop - 1 : stop + 1], close[stop - 1 : stop + 1], paint)
    page.dot(*above.place(age[-1], close[-1]), 3.5, colour)

    up = room(equity, bought, np.ones(1), least=0.04)
    below = Axes(page, 64, 222, WIDTH - 16, 372, (0, length), up)
    below.level(1.0, "0")
    for y in below.ends():
        if abs(y - 1.0) > 0.12 * (up[1] - up[0]):  # otherwise the label would overlap that of zero
            below.level(y, f"{y - 1:+.1%}")
    for part in (0, 0.25, 0.5, 0.75, 1):
        below.tick(part * length, f"{part * length:.0f}")
    below.curve(age, bought, DIM, 1.5)
    below.curve(age, equity, BLUE, 2.5)
    page.dot(*below.place(age[-1], equity[-1]), 4, INK)
    page.write(64, 208, f"equity {equity[-1] - 1:+.2%}", 16, BLUE)
    page.write(230, 208, f"buy and hold {bought[-1] - 1:+.2%}", 16, DIM)
    return page.picture()


def _position(held: float) -> tuple[str, tuple[int, int, int]]:
    name, colour = _SIDES[int(np.sign(held))]
    return (f"{name} {abs(held):.0%}" if held else name), colour


def _spark(values: np.ndarray) -> str:
    """Draw the last values as a sparkline."""
    shown = values[-64:]
    heights = (shown - shown.min()) / max(float(np.ptp(shown)), 1e-9) * (len(_BARS) - 1)
    return "".join(_BARS[height] for height in heights.round().astype(int))


def _signs(held: np.ndarray) -> str:
    """Draw the side held at each of the last bars."""
    return "".join("+" if part > 0 else "-" if part < 0 else "·" for part in held[-64:])
