"""Line charts that grow frame by frame: images on a dark background, and Braille dots for a terminal.

Pillow draws the images, in milliseconds each. Sizes are in pixels, colors in RGB. Non-finite values of a curve are
skipped.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WHITE, GRAY, DARK_GRAY, BACKGROUND = (236, 239, 244), (140, 150, 165), (52, 58, 70), (22, 25, 33)
GREEN, RED, BLUE, ORANGE = (72, 187, 120), (229, 83, 83), (96, 165, 250), (245, 158, 66)
_SCALE = 2
"""Supersampling factor: images are drawn this many times larger and shrunk, so that edges are smooth."""

Color = tuple[int, int, int]


class Canvas:
    """An image to draw text and curves on."""

    def __init__(self, width: int, height: int) -> None:
        self._image = Image.new("RGB", (_SCALE * width, _SCALE * height), BACKGROUND)
        self._draw = ImageDraw.Draw(self._image)

    def write(self, x: float, y: float, label: str, size: int, color: Color = WHITE, anchor: str = "ls") -> None:
        """Draw text with its Pillow anchor at a position; by default the left end of the baseline."""
        self._draw.text((_SCALE * x, _SCALE * y), label, color, font=_font(_SCALE * size), anchor=anchor)

    def line(self, points: Sequence[tuple[float, float]], color: Color, width: float = 2.0) -> None:
        if len(points) > 1:
            scaled = [(_SCALE * x, _SCALE * y) for x, y in points]
            self._draw.line(scaled, color, round(_SCALE * width), joint="curve")

    def dash(self, start: tuple[float, float], end: tuple[float, float], color: Color, width: float = 1.0) -> None:
        """Draw a dashed line."""
        (x, y), (dx, dy) = start, (end[0] - start[0], end[1] - start[1])
        count = max(1, round(float(np.hypot(dx, dy)) / 8))
        for part in range(count):
            points = [(x + fraction * dx, y + fraction * dy) for fraction in (part / count, (part + 0.5) / count)]
            self.line(points, color, width)

    def dot(self, x: float, y: float, radius: float, color: Color) -> None:
        box = (x - radius, y - radius, x + radius, y + radius)
        self._draw.ellipse([_SCALE * edge for edge in box], color)

    def to_array(self) -> np.ndarray:
        """Return the image, uint8 [height, width, 3]."""
        return np.asarray(self._image.reduce(_SCALE))


class Axes(NamedTuple):
    """A rectangle of a canvas, and the data range that it shows."""

    canvas: Canvas
    left: float
    top: float
    right: float
    bottom: float
    x_range: tuple[float, float]
    """Data values at the left and the right side."""
    y_range: tuple[float, float]
    """Data values at the bottom and the top."""

    def to_pixels(self, x: float, y: float) -> tuple[float, float]:
        x_fraction = (x - self.x_range[0]) / _span(self.x_range)
        y_fraction = (y - self.y_range[0]) / _span(self.y_range)
        return self.left + x_fraction * (self.right - self.left), self.bottom - y_fraction * (self.bottom - self.top)

    def label_values(self) -> tuple[float, float]:
        """Return two data values near the bottom and the top."""
        return self.y_range[0] + 0.04 * _span(self.y_range), self.y_range[1] - 0.04 * _span(self.y_range)

    def gridline(self, y: float, label: str, color: Color = DARK_GRAY) -> None:
        """Draw a thin horizontal line at a height, with a label left of it."""
        self.canvas.line([self.to_pixels(self.x_range[0], y), self.to_pixels(self.x_range[1], y)], color, 1.0)
        self.canvas.write(self.left - 6, self.to_pixels(0.0, y)[1], label, 12, GRAY, "rm")

    def tick(self, x: float, label: str) -> None:
        """Draw a tick label below the axes."""
        self.canvas.write(self.to_pixels(x, 0.0)[0], self.bottom + 6, label, 12, GRAY, "mt")

    def curve(self, x: np.ndarray, y: np.ndarray, color: Color, width: float = 2.0) -> None:
        finite = np.isfinite(y)
        self.canvas.line([self.to_pixels(*point) for point in zip(x[finite], y[finite], strict=True)], color, width)


def braille_chart(curve: np.ndarray, width: int, rows: int, num_values: int, y_range: tuple[float, float]) -> list[str]:
    """Draw a curve as rows of Braille characters with 2 by 4 dots each. Its x axis has room for `num_values` values."""
    dots = np.zeros((4 * rows, 2 * width), bool)
    heights = np.clip((np.asarray(curve, np.float64) - y_range[0]) / _span(y_range), 0.0, 1.0)
    previous: tuple[int, int] | None = None
    for index, height in enumerate(heights):
        if not np.isfinite(height):
            previous = None
            continue
        column = min(index * 2 * width // max(num_values, 1), 2 * width - 1)
        row = round((1.0 - height) * (4 * rows - 1))
        start_x, start_y = previous or (column, row)
        last_y = start_y
        for x in range(min(start_x + 1, column), column + 1):  # connect to the previous point
            y = round(start_y + (row - start_y) * (x - start_x) / max(column - start_x, 1))
            dots[min(last_y, y) : max(last_y, y) + 1, x] = True
            last_y = y
        previous = column, row
    marks = (dots.reshape(rows, 4, width, 2) * _DOTS[None, :, None, :]).sum(axis=(1, 3))
    return ["".join(chr(0x2800 + int(mark)) for mark in line) for line in marks]


def add_axes(lines: list[str], labels: tuple[str, str]) -> str:
    """Add a vertical axis on the left of the rows, with labels at its top and bottom."""
    width = max(map(len, labels))
    names = [labels[0], *[""] * (len(lines) - 2), labels[1]]
    return "\n".join(f"{name:>{width}} ┤{line}" for name, line in zip(names, lines, strict=True))


_DOTS = np.array([[1, 8], [2, 16], [4, 32], [64, 128]])
"""Bit of each of the 4 by 2 dots in the code of a Braille character."""


def fitting_size(label: str, width: float, largest: int, smallest: int = 8) -> int:
    """Return the largest font size at which text fits into a width."""
    return next((size for size in range(largest, smallest, -1) if _font(size).getlength(label) <= width), smallest)


def _span(bounds: tuple[float, float]) -> float:
    return bounds[1] - bounds[0] or 1.0


_font = lru_cache(ImageFont.load_default)
