"""Draw a chart as SVG without scripts: lines, bands, axes and tooltips."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from markupsafe import Markup

from lockstep.tools.report.html import render
from lockstep.tools.report.series import Point, format_number, format_ticks, log_ticks, pad_range, round_ticks, use_log

STRIPS = 32
"""Largest number of vertical strips of a chart that show a tooltip."""


@dataclass(frozen=True)
class Curve:
    """Line of a chart."""

    label: str
    points: Sequence[Point]
    color: str
    """CSS variable of its color, such as c0."""
    band: bool = True
    """Whether to draw the range of each point as a band."""
    thin_lines: Sequence[Sequence[Point]] = field(default=())
    """Curves that this curve averages, drawn as thin lines."""
    dots: bool = False
    dashed: bool = False
    ranges: bool = False
    """Whether to draw the range of each point as a vertical line."""
    line_from: int = 0
    """Index of the point at which the line and the band start."""


@dataclass(frozen=True)
class Frame:
    """Size, margins and ticks of a chart, in SVG units."""

    width: int = 460
    height: int = 250
    left: int = 50
    right: int = 14
    top: int = 10
    bottom: int = 38
    ticks: int = 6
    """Approximate number of ticks of the y axis."""
    letter: float = 9.2
    """Width of a character of y tick labels. Wide charts reserve more, because phones use a larger font for them."""


WIDE, SMALL = Frame(), Frame(width=320, height=184, left=46, bottom=36, ticks=4, letter=7.4)


def line_values(curves: Sequence[Curve]) -> list[float]:
    """Return the values of all lines."""
    return [point.y for curve in curves for line in (curve.points, *curve.thin_lines) for point in line]


def line_and_band_values(curves: Sequence[Curve]) -> list[float]:
    """Return the values of all lines and bands, which the y axis has to include."""
    bands = [
        value
        for curve in curves
        if curve.band or curve.ranges
        for point in curve.points
        for value in (point.low, point.high)
    ]
    return line_values(curves) + bands


def draw(
    curves: Sequence[Curve],
    alt_text: str,
    frame: Frame = WIDE,
    until: float = 0.0,
    limits: tuple[float, float] | None = None,
    log: bool = False,
) -> Markup:
    """Draw curves over samples. `alt_text` is its alternative text.

    The x axis ends at `until` or later. `log` uses a logarithmic y axis if the values span enough decades.
    """
    shown = [point for curve in curves for line in (curve.points, *curve.thin_lines) for point in line]
    if not shown:
        return Markup("")
    values = line_and_band_values(curves)
    log = log and use_log(line_values(curves))
    if log:  # limits from the lines only: a band may extend below zero
        ys = log_ticks(min(line_values(curves)), max(values))
        low, high = math.log10(ys[0]), math.log10(ys[-1])
    else:
        low, high = pad_range(*(limits or (min(values), max(values))))
        ys = round_ticks(low, high, frame.ticks)
    y_labels = format_ticks(ys)
    frame = replace(frame, left=max(frame.left, round(11 + frame.letter * max(map(len, y_labels)))))
    right = max(1.0, until, *(point.x for point in shown))
    x_scale = _scale(0.0, right, frame.left, frame.width - frame.right)
    linear_y = _scale(low, high, frame.height - frame.bottom, frame.top)

    def y_scale(value: float) -> float:
        return linear_y(math.log10(max(value, ys[0]))) if log else linear_y(min(max(value, low), high))

    xs = round_ticks(0.0, right, 4)
    return render(
        "chart.svg.j2",
        alt_text=alt_text,
        frame=frame,
        xs=[(label, x_scale(x)) for label, x in zip(format_ticks(xs), xs, strict=True)],
        ys=[(label, y_scale(y)) for label, y in zip(y_labels, ys, strict=True)],
        curves=[_shape(curve, x_scale, y_scale) for curve in curves],
        strips=_strips(curves, frame, x_scale),
    )


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """Return a linear map from values to coordinates."""
    return lambda value: first + (last - first) * ((value - low) / (high - low))


def _shape(curve: Curve, x_scale: Callable[[float], float], y_scale: Callable[[float], float]) -> dict[str, object]:
    """Return the paths of a curve, each with its CSS class, and its dots."""
    paths, connected = [], curve.points[curve.line_from :]
    if curve.band and any(point.high > point.low for point in connected):
        over = [(x_scale(point.x), y_scale(point.high)) for point in connected]
        under = [(x_scale(point.x), y_scale(point.low)) for point in reversed(connected)]
        paths.append(("band", _path(over + under) + "Z"))
    paths += [("thin", _path([(x_scale(point.x), y_scale(point.y)) for point in line])) for line in curve.thin_lines]
    coordinates = [(x_scale(point.x), y_scale(point.y)) for point in curve.points]
    if curve.ranges:
        ends = [[(x_scale(point.x), y_scale(end)) for end in (point.low, point.high)] for point in curve.points]
        paths += [("range", _path(pair)) for pair in ends]
    if len(connected) > 1:
        paths.append(("line", _path(coordinates[curve.line_from :])))
    dots = coordinates if curve.dots or len(coordinates) == 1 else []
    return {"color": curve.color, "dashed": curve.dashed, "paths": paths, "dots": dots}


def _path(coordinates: Sequence[tuple[float, float]]) -> Markup:
    """Format coordinates as SVG path data: the first absolute, the others relative, in tenths, to save bytes."""
    rounded = [(round(10 * x), round(10 * y)) for x, y in coordinates]
    steps = [(x - a, y - b) for (a, b), (x, y) in pairwise(rounded)]
    first = f"{rounded[0][0] / 10:g} {rounded[0][1] / 10:g}" if rounded else "0 0"
    return Markup(f"M{first}" + ("l" + " ".join(f"{x / 10:g} {y / 10:g}" for x, y in steps) if steps else ""))


def _strips(
    curves: Sequence[Curve], frame: Frame, x_scale: Callable[[float], float]
) -> list[tuple[float, float, float, str]]:
    """Return invisible strips, one per shown point: left edge, width, center and tooltip.

    The tooltip lists the nearest value of each curve.
    """
    longest = max(curves, key=lambda curve: len(curve.points)).points
    if not longest:
        return []
    count = min(STRIPS, len(longest))
    chosen = sorted({round(n * (len(longest) - 1) / max(1, count - 1)) for n in range(count)})
    centers = [x_scale(longest[n].x) for n in chosen]
    middles = ((a + b) / 2 for a, b in pairwise(centers))
    edges = [float(frame.left), *middles, float(frame.width - frame.right)]
    strips = []
    for index, center, (left, right) in zip(chosen, centers, pairwise(edges), strict=True):
        x = longest[index].x
        nearest = [(curve, min(curve.points, key=lambda point: abs(point.x - x))) for curve in curves if curve.points]
        lines = [f"{format_number(round(x))} samples", *(_tooltip(curve, point) for curve, point in nearest)]
        strips.append((left, max(0.0, right - left), center, "\n".join(lines)))
    return strips


def _tooltip(curve: Curve, point: Point) -> str:
    text = f"{curve.label}: {format_number(point.y)}" if curve.label else format_number(point.y)
    if (curve.band or curve.ranges) and point.high > point.low:
        text += f" ({format_number(point.low)} to {format_number(point.high)})"
    return text
