"""Line charts that grow frame by frame: images on a dark background, and Braille dots for a terminal.

Pillow draws the images, in milliseconds each. Sizes are in pixels, colors in RGB. Non-finite values of a curve are
skipped.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

INK, DIM, FAINT, GROUND = (236, 239, 244), (140, 150, 165), (52, 58, 70), (22, 25, 33)
GREEN, RED, BLUE, ORANGE = (72, 187, 120), (229, 83, 83), (96, 165, 250), (245, 158, 66)
_SMOOTH = 2
"""Supersampling factor: images are drawn this many times larger and shrunk, so that edges are smooth."""

Colour = tuple[int, int, int]


class Canvas:
    """An image to draw text and curves on."""

    def __init__(self, width: int, height: int) -> None:
        self._image = Image.new("RGB", (_SMOOTH * width, _SMOOTH * height), GROUND)
        self._draw = ImageDraw.Draw(self._image)

    def write(self, x: float, y: float, label: str, size: int, colour: Colour = INK, anchor: str = "ls") -> None:
        """Draw text with its Pillow anchor at a position; by default the left end of the baseline."""
        self._draw.text((_SMOOTH * x, _SMOOTH * y), label, colour, font=_font(_SMOOTH * size), anchor=anchor)

    def line(self, places: Sequence[tuple[float, float]], colour: Colour, width: float = 2.0) -> None:
        if len(places) > 1:
            scaled = [(_SMOOTH * x, _SMOOTH * y) for x, y in places]
            self._draw.line(scaled, colour, round(_SMOOTH * width), joint="curve")

    def dash(self, start: tuple[float, float], end: tuple[float, float], colour: Colour, width: float = 1.0) -> None:
        """Draw a dashed line."""
        (x, y), (across, down) = start, (end[0] - start[0], end[1] - start[1])
        count = max(1, round(float(np.hypot(across, down)) / 8))
        for part in range(count):
            ends = [(x + share * across, y + share * down) for share in (part / count, (part + 0.5) / count)]
            self.line(ends, colour, width)

    def dot(self, x: float, y: float, radius: float, colour: Colour) -> None:
        box = (x - radius, y - radius, x + radius, y + radius)
        self._draw.ellipse([_SMOOTH * edge for edge in box], colour)

    def picture(self) -> np.ndarray:
        """Return the image, uint8 [height, width, 3]."""
        return np.asarray(self._image.reduce(_SMOOTH))


class Axes(NamedTuple):
    """A rectangle of a canvas, and the data range that it shows."""

    page: Canvas
    left: float
    top: float
    right: float
    bottom: float
    across: tuple[float, float]
    """Data values at the left and the right side."""
    up: tuple[float, float]
    """Data values at the bottom and the top."""

    def place(self, x: float, y: float) -> tuple[float, float]:
        share, height = (x - self.across[0]) / _span(self.across), (y - self.up[0]) / _span(self.up)
        return self.left + share * (self.right - self.left), self.bottom - height * (self.bottom - self.top)

    def ends(self) -> tuple[float, float]:
        """Return two data values near the bottom and the top."""
        return self.up[0] + 0.04 * _span(self.up), self.up[1] - 0.04 * _span(self.up)

    def level(self, y: float, label: str, colour: Colour = FAINT) -> None:
        """Draw a thin horizontal line at a height, with a label left of it."""
        self.page.line([self.place(self.across[0], y), self.place(self.across[1], y)], colour, 1.0)
        self.page.write(self.left - 6, self.place(0.0, y)[1], label, 12, DIM, "rm")

    def tick(self, x: float, label: str) -> None:
        """Draw a tick label below the axes."""
        self.page.write(self.place(x, 0.0)[0], self.bottom + 6, label, 12, DIM, "mt")

    def curve(self, x: np.ndarray, y: np.ndarray, colour: Colour, width: float = 2.0) -> None:
        known = np.isfinite(y)
        self.page.line([self.place(*at) for at in zip(x[known], y[known], strict=True)], colour, width)


def room(*curves: np.ndarray, least: float) -> tuple[float, float]:
    """Return the range of the values of some curves with a margin, at least `least` wide."""
    values = np.concatenate(curves)
    low, high = float(values.min()), float(values.max())
    more = max(0.05 * (high - low), (least - (high - low)) / 2, 1e-9 * abs(high))
    return low - more, high + more


def braille_chart(curve: np.ndarray, width: int, rows: int, whole: int, up: tuple[float, float]) -> list[str]:
    """Draw a curve as rows of Braille characters with 2 by 4 dots each. Its x axis has room for `whole` values."""
    dots = np.zeros((4 * rows, 2 * width), bool)
    heights = np.clip((np.asarray(curve, np.float64) - up[0]) / _span(up), 0.0, 1.0)
    before: tuple[int, int] | None = None
    for place, height in enumerate(heights):
        if not np.isfinite(height):
            before = None
            continue
        column = min(place * 2 * width // max(whole, 1), 2 * width - 1)
        row = round((1.0 - height) * (4 * rows - 1))
        first, start = before or (column, row)
        last = start
        for between in range(min(first + 1, column), column + 1):  # connect to the previous point
            here = round(start + (row - start) * (between - first) / max(column - first, 1))
            dots[min(last, here) : max(last, here) + 1, between] = True
            last = here
        before = column, row
    marks = (dots.reshape(rows, 4, width, 2) * _DOTS[None, :, None, :]).sum(axis=(1, 3))
    return ["".join(chr(0x2800 + int(mark)) for mark in line) for line in marks]


def add_axes(lines: list[str], labels: tuple[str, str]) -> str:
    """Add a vertical axis on the left of the rows, with labels at its top and bottom."""
    width = max(map(len, labels))
    names = [labels[0], *[""] * (len(lines) - 2), labels[1]]
    return "\n".join(f"{name:>{width}} ┤{line}" for name, line in zip(names, lines, strict=True))


_DOTS = np.array([[1, 8], [2, 16], [4, 32], [64, 128]])
"""Bit of each of the 4 by 2 dots in the code of a Braille character."""


def _span(ends: tuple[float, float]) -> float:
    return ends[1] - ends[0] or 1.0


@lru_cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)
