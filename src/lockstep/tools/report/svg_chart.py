"""A chart as SVG: lines with bands around them, axes that can be read, and words under the pointer. No script."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lockstep.tools.report.html import Markup, join, tag, text
from lockstep.tools.report.series import Point, decades, figure, round_ticks, tick_words, wants_decades, widened

STRIPS = 32
"""Upright strips of a chart that say what is under the pointer."""


@dataclass(frozen=True)
class Curve:
    """A line to draw, in one of the page's colours."""

    label: str
    marks: Sequence[Point]
    colour: str
    """The name of a CSS variable, such as c0."""
    band: bool = True
    """Whether the range of each mark is drawn, too."""
    behind: Sequence[Sequence[Point]] = field(default=())
    """Thin lines that it sums up."""
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Frame:
    """Where a chart has its axes."""

    width: int = 460
    height: int = 250
    left: int = 50
    right: int = 14
    top: int = 10
    bottom: int = 38
    ticks: int = 6
    """About how many marks an upright axis has."""
    letter: float = 9.2
    """Room for a letter of an upright axis; on a telephone they are larger, but for those of small charts."""


WIDE, SMALL = Frame(), Frame(width=320, height=184, left=46, bottom=36, ticks=4, letter=7.4)


def lines_of(curves: Sequence[Curve]) -> list[float]:
    """The values of all lines."""
    return [mark.y for curve in curves for line in (curve.marks, *curve.behind) for mark in line]


def values_of(curves: Sequence[Curve]) -> list[float]:
    """All that an upright axis has to show: lines and bands."""
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
    """A chart of curves over samples, at least until there; a log axis only where the values ask for it."""
    shown = [mark for curve in curves for line in (curve.marks, *curve.behind) for mark in line]
    if not shown:
        return Markup("")
    values = values_of(curves)
    log = log and wants_decades(lines_of(curves))
    if log:  # around the lines alone: a band may reach below zero
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

    parts = [_grid(frame, round_ticks(0.0, right, 4), dict(zip(words_y, ys, strict=True)), place_x, place_y)]
    parts += [_curve(curve, place_x, place_y) for curve in curves]
    parts += [_strips(curves, frame, place_x)]
    return tag("svg", *parts, viewBox=f"0 0 {frame.width} {frame.height}", role="img", aria_label=words, class_="chart")


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """From values to places."""
    return lambda value: first + (last - first) * ((value - low) / (high - low))


def _grid(
    frame: Frame,
    xs: Sequence[float],
    ys: dict[str, float],
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
) -> Markup:
    parts = []
    for words, y in ys.items():
        at = place_y(y)
        parts.append(
            f"<line class='grid' x1='{frame.left}' x2='{frame.width - frame.right}' y1='{at:.1f}' y2='{at:.1f}'/>"
        )
        parts.append(f"<text class='y' x='{frame.left - 7}' y='{at + 4:.1f}'>{words}</text>")
    floor = frame.height - frame.bottom
    for words, x in zip(tick_words(xs), xs, strict=True):
        parts.append(f"<text class='x' x='{place_x(x):.1f}' y='{floor + 16}'>{words}</text>")
    middle = (frame.left + frame.width - frame.right) / 2
    parts.append(f"<text class='x unit' x='{middle:.0f}' y='{frame.height - 4}'>samples</text>")
    return Markup("".join(parts))


def _curve(curve: Curve, place_x: Callable[[float], float], place_y: Callable[[float], float]) -> Markup:
    parts = []
    if curve.band and any(mark.high > mark.low for mark in curve.marks):
        over = [(place_x(mark.x), place_y(mark.high)) for mark in curve.marks]
        under = [(place_x(mark.x), place_y(mark.low)) for mark in reversed(curve.marks)]
        parts.append(f"<path class='band' d='M{_path(over + under)}Z'/>")
    for line in curve.behind:
        parts.append(f"<path class='thin' d='M{_path([(place_x(mark.x), place_y(mark.y)) for mark in line])}'/>")
    places = [(place_x(mark.x), place_y(mark.y)) for mark in curve.marks]
    if len(places) > 1:
        parts.append(f"<path class='line' d='M{_path(places)}'/>")
    if curve.dots or len(places) == 1:
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6'/>" for x, y in places]
    return tag(
        "g", Markup("".join(parts)), style=f"--c:var(--{curve.colour})", class_="dashed" if curve.dashed else None
    )


def _path(places: Sequence[tuple[float, float]]) -> str:
    """Places as a path takes them: the first in full, the others as tenths from the one before, which is shorter."""
    rounded = [(round(10 * x), round(10 * y)) for x, y in places]
    steps = [(x - a, y - b) for (a, b), (x, y) in pairwise(rounded)]
    first = f"{rounded[0][0] / 10:g} {rounded[0][1] / 10:g}" if rounded else "0 0"
    return first + ("l" + " ".join(f"{x / 10:g} {y / 10:g}" for x, y in steps) if steps else "")


def _strips(curves: Sequence[Curve], frame: Frame, place_x: Callable[[float], float]) -> Markup:
    """Strips as wide as the marks are apart; each says the values of the marks nearest to it."""
    counted = max(len(curve.marks) for curve in curves)
    if not counted:
        return Markup("")
    longest = max(curves, key=lambda curve: len(curve.marks)).marks
    count = min(STRIPS, counted)
    chosen = sorted({round(n * (len(longest) - 1) / max(1, count - 1)) for n in range(count)})
    centres = [place_x(longest[n].x) for n in chosen]
    edges = [float(frame.left), *((a + b) / 2 for a, b in pairwise(centres))]
    edges.append(float(frame.width - frame.right))
    parts = []
    for number, index in enumerate(chosen):
        x, left, width = longest[index].x, edges[number], max(0.0, edges[number + 1] - edges[number])
        told = [f"{figure(round(x))} samples"]
        near = [(curve, min(curve.marks, key=lambda mark: abs(mark.x - x))) for curve in curves if curve.marks]
        told += [_words(curve, mark) for curve, mark in near]
        middle, floor = f"{centres[number]:.1f}", frame.height - frame.bottom
        guide = f"<line x1='{middle}' x2='{middle}' y1='{frame.top}' y2='{floor}'/>"
        box = f"<rect x='{left:.1f}' y='0' width='{width:.1f}' height='{floor}'/>"
        parts.append(tag("g", Markup(box + guide), tag("title", text("\n".join(told), 2000))))
    return tag("g", join(parts), class_="strips")


def _words(curve: Curve, mark: Point) -> str:
    label = f"{curve.label}: " if curve.label else ""
    ranged = f" ({figure(mark.low)} to {figure(mark.high)})" if curve.band and mark.high > mark.low else ""
    return f"{label}{figure(mark.y)}{ranged}"
