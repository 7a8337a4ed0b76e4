"""Draw a chart as SVG without scripts: lines, bands, axes and tooltips."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from markupsafe import Markup

from lockstep.tools.report.html import render
from lockstep.tools.report.series import Point, decades, figure, round_ticks, tick_words, wants_decades, widened

STRIPS = 32
"""Largest number of vertical strips of a chart that show a tooltip."""


@dataclass(frozen=True)
class Curve:
    """Line of a chart."""

    label: str
    marks: Sequence[Point]
    colour: str
    """CSS variable of its color, such as c0."""
    band: bool = True
    """Whether to draw the range of each point as a band."""
    behind: Sequence[Sequence[Point]] = field(default=())
    """Curves that this curve averages, drawn as thin lines."""
    dots: bool = False
    dashed: bool = False


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


def lines_of(curves: Sequence[Curve]) -> list[float]:
    """Return the values of all lines."""
    return [mark.y for curve in curves for line in (curve.marks, *curve.behind) for mark in line]


def values_of(curves: Sequence[Curve]) -> list[float]:
    """Return the values of all lines and bands, which the y axis has to include."""
    bands = [value for curve in curves if curve.band for mark in curve.marks for value in (mark.low, mark.high)]
    return lines_of(curves) + bands


def draw(
    curves: Sequence[Curve],
    words: str,
    frame: Frame = WIDE,
    until: float = 0.0,
    limits: tuple[float, float] | None = None,
    log: bool = False,
) -> Markup:
    """Draw curves over samples. `words` is the alternative text.

    The x axis ends at `until` or later. `log` uses a logarithmic y axis if the values span enough decades.
    """
    shown = [mark for curve in curves for line in (curve.marks, *curve.behind) for mark in line]
    if not shown:
        return Markup("")
    values = values_of(curves)
    log = log and wants_decades(lines_of(curves))
    if log:  # limits from the lines only: a band may extend below zero
        ys = decades(min(lines_of(curves)), max(values))
        low, high = math.log10(ys[0]), math.log10(ys[-1])
    else:
        low, high = widened(*(limits or (min(values), max(values))))
        ys = round_ticks(low, high, frame.ticks)
    words_y = tick_words(ys)
    frame = replace(frame, left=max(frame.left, round(11 + frame.letter * max(map(len, words_y)))))
    right = max(1.0, until, *(mark.x for mark in shown))
    place_x = _scale(0.0, right, frame.left, frame.width - frame.right)
    flat = _scale(low, high, frame.height - frame.bottom, frame.top)

    def place_y(value: float) -> float:
        return flat(math.log10(max(value, ys[0]))) if log else flat(min(max(value, low), high))

    xs = round_ticks(0.0, right, 4)
    return render(
        "chart.svg.j2",
        words=words,
        frame=frame,
        xs=[(label, place_x(x)) for label, x in zip(tick_words(xs), xs, strict=True)],
        ys=[(label, place_y(y)) for label, y in zip(words_y, ys, strict=True)],
        curves=[_shape(curve, place_x, place_y) for curve in curves],
        strips=_strips(curves, frame, place_x),
    )


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """Return a linear map from values to coordinates."""
    return lambda value: first + (last - first) * ((value - low) / (high - low))


def _shape(curve: Curve, place_x: Callable[[float], float], place_y: Callable[[float], float]) -> dict[str, object]:
    """Return the paths of a curve, each with its CSS class, and its dots."""
    paths = []
    if curve.band and any(mark.high > mark.low for mark in curve.marks):
        over = [(place_x(mark.x), place_y(mark.high)) for mark in curve.marks]
        under = [(place_x(mark.x), place_y(mark.low)) for mark in reversed(curve.marks)]
        paths.append(("band", _path(over + under) + "Z"))
    paths += [("thin", _path([(place_x(mark.x), place_y(mark.y)) for mark in line])) for line in curve.behind]
    places = [(place_x(mark.x), place_y(mark.y)) for mark in curve.marks]
    if len(places) > 1:
        paths.append(("line", _path(places)))
    dots = places if curve.dots or len(places) == 1 else []
    return {"colour": curve.colour, "dashed": curve.dashed, "paths": paths, "dots": dots}


def _path(places: Sequence[tuple[float, float]]) -> Markup:
    """Format coordinates as SVG path data: the first absolute, the others relative, in tenths, to save bytes."""
    rounded = [(round(10 * x), round(10 * y)) for x, y in places]
    steps = [(x - a, y - b) for (a, b), (x, y) in pairwise(rounded)]
    first = f"{rounded[0][0] / 10:g} {rounded[0][1] / 10:g}" if rounded else "0 0"
    return Markup(f"M{first}" + ("l" + " ".join(f"{x / 10:g} {y / 10:g}" for x, y in steps) if steps else ""))


def _strips(
    curves: Sequence[Curve], frame: Frame, place_x: Callable[[float], float]
) -> list[tuple[float, float, float, str]]:
    """Return invisible strips, one per shown point: left edge, width, center and tooltip.

    The tooltip lists the nearest value of each curve.
    """
    longest = max(curves, key=lambda curve: len(curve.marks)).marks
    if not longest:
        return []
    count = min(STRIPS, len(longest))
    chosen = sorted({round(n * (len(longest) - 1) / max(1, count - 1)) for n in range(count)})
    centres = [place_x(longest[n].x) for n in chosen]
    edges = [float(frame.left), *((a + b) / 2 for a, b in pairwise(centres))]
    edges.append(float(frame.width - frame.right))
    strips = []
    for index, centre, (left, right) in zip(chosen, centres, pairwise(edges), strict=True):
        x = longest[index].x
        near = [(curve, min(curve.marks, key=lambda mark: abs(mark.x - x))) for curve in curves if curve.marks]
        lines = [f"{figure(round(x))} samples", *(_tooltip(curve, mark) for curve, mark in near)]
        strips.append((left, max(0.0, right - left), centre, "\n".join(lines)))
    return strips


def _tooltip(curve: Curve, mark: Point) -> str:
    label = f"{curve.label}: " if curve.label else ""
    ranged = f" ({figure(mark.low)} to {figure(mark.high)})" if curve.band and mark.high > mark.low else ""
    return f"{label}{figure(mark.y)}{ranged}"
