"""Curves as numbers: what is drawn of a long one, what several come to together, and where axes have their marks."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Point(NamedTuple):
    """A place of a curve: its value, and the range it stands for."""

    x: float
    y: float
    low: float
    high: float


def downsample(xs: Sequence[float], ys: Sequence[float], limit: int) -> list[Point]:
    """At most so many marks of a curve: means of neighbours, with their range, so that no spike is lost."""
    size = max(1, math.ceil(len(xs) / limit))
    parts = [(xs[start : start + size], ys[start : start + size]) for start in range(0, len(xs), size)]
    return [Point(sum(x) / len(x), sum(y) / len(y), min(y), max(y)) for x, y in parts]


def thin_marks(marks: Sequence[Point], limit: int) -> list[Point]:
    """The same for marks that stand for a range already."""
    size = max(1, math.ceil(len(marks) / limit))
    if size == 1:
        return list(marks)
    parts = [marks[start : start + size] for start in range(0, len(marks), size)]
    return [
        Point(
            sum(mark.x for mark in part) / len(part),
            sum(mark.y for mark in part) / len(part),
            min(mark.low for mark in part),
            max(mark.high for mark in part),
        )
        for part in parts
    ]


def band(curves: Sequence[Sequence[Point]], limit: int) -> list[Point]:
    """The mean of several curves and the range from the lowest to the highest, where all of them have values."""
    if not curves or not all(curves):
        return []
    first, last = max(curve[0].x for curve in curves), min(curve[-1].x for curve in curves)
    places = sorted({mark.x for curve in curves for mark in curve if first <= mark.x <= last})
    if len(places) > limit:
        places = [places[round(n * (len(places) - 1) / (limit - 1))] for n in range(limit)]
    marks = []
    for x in places:
        values = [_value_at(curve, x) for curve in curves]
        marks.append(Point(x, sum(values) / len(values), min(values), max(values)))
    return marks


def _value_at(curve: Sequence[Point], x: float) -> float:
    """Along a straight line between two marks."""
    after = bisect_left(curve, x, key=lambda mark: mark.x)
    if curve[after].x == x or after == 0:
        return curve[after].y
    left, right = curve[after - 1], curve[after]
    return left.y + (right.y - left.y) * (x - left.x) / (right.x - left.x)


def widened(low: float, high: float) -> tuple[float, float]:
    """A little more than a range, so that no line lies on an edge; not below zero where nothing is."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-90):  # a flat line stands in the middle
        room = 0.1 * size if size > 1e-80 else 1.0
        return low - room, high + room
    room = (high - low) * 0.05
    return (0.0 if 0 <= low < 0.35 * high else low - room), high + room


def trimmed(values: Sequence[float]) -> tuple[float, float]:
    """The range of some values; without the few outermost where these would press all others into a line."""
    ordered, few = sorted(values), round(0.03 * len(values))
    low, high = ordered[few], ordered[-1 - few]
    core = high - low
    if few == 0 or core <= 0 or ordered[-1] - ordered[0] <= 5 * core:
        return ordered[0], ordered[-1]
    return max(ordered[0], low - core), min(ordered[-1], high + core)


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """About so many round numbers between two others: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough * (1 - 1e-9))
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten around two positive numbers, few enough to be read."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 4))
    return [10.0**n for n in range(first, last + every, every)]


def wants_decades(values: Sequence[float]) -> bool:
    """Whether a curve falls so far that a straight axis would show only its beginning."""
    return bool(values) and min(values) > 1e-12 and max(values) / min(values) >= 300


def tick_words(ticks: Sequence[float]) -> list[str]:
    """Marks of an axis as words, with as many digits as tell each from the next."""
    apart = min((abs(b - a) for a, b in pairwise(ticks)), default=0.0)
    enough = (n for n in range(4, 12) if all(abs(float(f"{tick:.{n}g}") - tick) <= 1e-3 * apart for tick in ticks))
    digits = next(enough, 12 if apart else 4)
    return [short(tick, digits) for tick in ticks]


def short(value: float, digits: int = 4) -> str:
    """A number as an axis says it: 12k, 1.5M, 0.002, 2e-5."""
    if value == 0:
        return "0"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1000 * size:
            return f"{value / size:.{digits}g}{letter}"
    if 1e-3 <= abs(value) < 1000:
        return f"{value:.{digits}g}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def figure(value: float) -> str:
    """A number as a table says it: with thousands set apart, and four digits that matter."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == round(value) and abs(value) < 1e12:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1e9:
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        words = f"{value:,.{digits}f}"
        return words.rstrip("0").rstrip(".") if "." in words else words
    return f"{value:.3e}"
