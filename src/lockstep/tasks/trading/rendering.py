"""Rendering of one account: its equity next to buy and hold, as text and as an image."""

from typing import NamedTuple

import numpy as np

from lockstep.tasks.rendering.line_chart import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    RED,
    WHITE,
    Axes,
    Canvas,
    add_axes,
    braille_chart,
)
from lockstep.tasks.trading.price_data import format_time

WIDTH, HEIGHT = 640, 400
_SIDES = {-1: ("short", RED), 0: ("flat", GRAY), 1: ("long", GREEN)}
_BARS = "▁▂▃▄▅▆▇█"


class RecordedBar(NamedTuple):
    """An account at the close of a bar."""

    age: int
    """Steps of the episode so far."""
    equity: float
    """Equity with the position valued at the close; 1 at the start of the episode."""
    position: float
    """Fraction of equity in the symbol; negative when short."""
    trades: int
    fees: float


class WholeEpisode(NamedTuple):
    """An episode from its first bar to its last. The bars to come set the range of the axes only.

    Shapes: N steps of the episode, plus one.
    """

    symbol: str
    """Empty for the simulated market."""
    time: np.ndarray
    """[N] float64: seconds since 1970. Empty for the simulated market."""
    close: np.ndarray
    """[N] float64."""
    buy_and_hold: np.ndarray
    """[N] float64: equity of buying at the first open and holding."""
    part: str = ""
    """Part of the file that the bars are from. Empty for the simulated market."""

    def title(self) -> str:
        """Return the symbol with the first and the last date; empty for the simulated market."""
        return f"{self.symbol}, {self.date(0)} to {self.date(-1)}" if self.symbol else ""

    def date(self, age: int) -> str:
        """Return the date of a bar, with the time of the day if it is not midnight."""
        return format_time(self.time[age]) if self.symbol else ""


def as_text(bars: list[RecordedBar], episode: WholeEpisode) -> str:
    """Draw price, position and equity of an episode as text plots, with a summary line."""
    age, equity, positions, _, _ = np.array(bars).T
    length, ages = len(episode.close) - 1, age.astype(int)
    close, buy_and_hold = episode.close[ages], episode.buy_and_hold[ages]
    y_range = _equity_range(equity, episode)
    labels = f"{y_range[1] - 1:+.1%}", f"{y_range[0] - 1:+.1%}"
    plots = {"equity": equity, "buy and hold": buy_and_hold}
    lines = [f"{name}\n{add_axes(braille_chart(y, 64, 5, length, y_range), labels)}" for name, y in plots.items()]
    last = bars[-1]
    summary = (
        f"bar {last.age} of {length}  close {close[-1]:,.2f}  {_describe_position(last.position)[0]}\n"
        f"equity {last.equity - 1:+.2%}  buy and hold {buy_and_hold[-1] - 1:+.2%}  "
        f"fees {last.fees:.2%}  trades {last.trades}"
    )
    sides = "".join("+" if position > 0 else "-" if position < 0 else "·" for position in positions[-64:])
    part = [f"{episode.symbol}: {episode.part}"] if episode.part else []
    return "\n".join([*part, f"price  {_sparkline(close)}", f"holds  {sides}", *lines, summary])


def as_frame(bars: list[RecordedBar], episode: WholeEpisode) -> np.ndarray:
    """Draw an image, uint8 [HEIGHT, WIDTH, 3]. Top: price, colored by position. Bottom: equity, buy and hold."""
    canvas, last = Canvas(WIDTH, HEIGHT), bars[-1]
    age, equity, positions, _, _ = np.array(bars).T
    length, ages = len(episode.close) - 1, age.astype(int)
    close, buy_and_hold = episode.close[ages], episode.buy_and_hold[ages]
    position_text, color = _describe_position(last.position)
    canvas.write(16, 26, f"bar {last.age} of {length}", 16)
    canvas.write(150, 26, position_text, 16, color)
    canvas.write(WIDTH - 16, 26, f"fees {last.fees:.2%}   trades {last.trades}", 14, GRAY, "rs")

    if episode.part:
        canvas.write(WIDTH - 16, 208, episode.part, 14, ORANGE if "IN SAMPLE" in episode.part else GRAY, "rs")

    price_range = _padded_range(episode.close, min_size=0.05 * close[0])
    price_axes = Axes(canvas, 64, 42, WIDTH - 16, 170, (0, length), price_range)
    for y in price_axes.label_values():
        price_axes.gridline(y, f"{y:,.0f}" if y >= 1000 else f"{y:,.4g}")
    sides = np.sign(positions)
    # The position at a bar was held from the previous bar to it.
    for side, (_, side_color) in _SIDES.items():
        for stop in np.flatnonzero(sides[1:] == side) + 1:
            price_axes.curve(age[stop - 1 : stop + 1], close[stop - 1 : stop + 1], side_color)
    canvas.dot(*price_axes.to_pixels(age[-1], close[-1]), 3.5, color)

    y_range = _equity_range(equity, episode)
    equity_axes = Axes(canvas, 64, 222, WIDTH - 16, 372, (0, length), y_range)
    equity_axes.gridline(1.0, "0")
    for y in equity_axes.label_values():
        if abs(y - 1.0) > 0.12 * (y_range[1] - y_range[0]):  # otherwise the label would overlap that of zero
            equity_axes.gridline(y, f"{y - 1:+.1%}")
    for fraction in (0, 0.25, 0.5, 0.75, 1):
        equity_axes.tick(fraction * length, f"{fraction * length:.0f}")
    equity_axes.curve(age, buy_and_hold, GRAY, 1.5)
    equity_axes.curve(age, equity, BLUE, 2.5)
    canvas.dot(*equity_axes.to_pixels(age[-1], equity[-1]), 4, WHITE)
    canvas.write(64, 208, f"equity {equity[-1] - 1:+.2%}", 16, BLUE)
    canvas.write(230, 208, f"buy and hold {buy_and_hold[-1] - 1:+.2%}", 16, GRAY)
    return canvas.to_array()


def _equity_range(equity: np.ndarray, episode: WholeEpisode) -> tuple[float, float]:
    """Return a range around 1 that contains buy and hold until the end. It is doubled where equity leaves it."""
    half = max(0.02, 1.05 * float(np.abs(episode.buy_and_hold - 1.0).max()))
    while np.abs(equity - 1.0).max() > half:
        half *= 2.0
    return 1.0 - half, 1.0 + half


def _padded_range(values: np.ndarray, min_size: float) -> tuple[float, float]:
    """Return the range of some values with a margin, at least `min_size` wide."""
    low, high = float(values.min()), float(values.max())
    margin = max(0.05 * (high - low), (min_size - (high - low)) / 2, 1e-9 * abs(high))
    return low - margin, high + margin


def _describe_position(position: float) -> tuple[str, tuple[int, int, int]]:
    name, color = _SIDES[int(np.sign(position))]
    return (f"{name} {abs(position):.0%}" if position else name), color


def _sparkline(values: np.ndarray) -> str:
    """Draw the last values as a sparkline."""
    recent = values[-64:]
    heights = (recent - recent.min()) / max(float(np.ptp(recent)), 1e-9) * (len(_BARS) - 1)
    return "".join(_BARS[height] for height in heights.round().astype(int))
