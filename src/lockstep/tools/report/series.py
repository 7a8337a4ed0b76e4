"""Numeric helpers for charts: downsample curves, combine seeds, choose axis limits and ticks, format numbers."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np

from lockstep.experiment.statistics import CURVE_SAMPLES, Estimate, bootstrap_interval, interquartile_mean


class Point(NamedTuple):
    """Point of a curve: its value, and the range of the values that it represents."""

    x: float
    y: float
    low: float
    high: float


def downsample(
    xs: Sequence[float], ys: Sequence[float], limit: int, ranges: tuple[Sequence[float], Sequence[float]] | None = None
) -> list[Point]:
    """Reduce a curve to at most `limit` points: means of neighbors, with their range, so that no spike is lost.

    `ranges` are the low and high ends of points that already have a range.
    """
    lows, highs = ranges or (ys, ys)
    size = max(1, math.ceil(len(xs) / limit))
    parts = [slice(start, start + size) for start in range(0, len(xs), size)]
    return [Point(fmean(xs[part]), fmean(ys[part]), min(lows[part]), max(highs[part])) for part in parts]


def seed_curve(seeds: Sequence[Sequence[Sequence[float]]], limit: int) -> list[Point]:
    """Return the interquartile mean over seeds and its interval, where all seeds have values.

    Args:
        seeds: Points of each seed, which begin with x and y. Between them, a seed is interpolated linearly.
        limit: Largest number of points of the result.
    """
    if not seeds or not all(seeds):
        return []
    first, last = max(points[0][0] for points in seeds), min(points[-1][0] for points in seeds)
    xs = sorted({point[0] for points in seeds for point in points if first <= point[0] <= last})
    if len(xs) > limit:
        xs = [xs[round(n * (len(xs) - 1) / (limit - 1))] for n in range(limit)]
    lines = np.stack([np.interp(xs, [p[0] for p in points], [p[1] for p in points]) for points in seeds])
    curve = []
    for x, scores in zip(xs, lines.T, strict=True):
        mean = float(interquartile_mean(scores))
        low, high = bootstrap_interval([scores], CURVE_SAMPLES) if len(scores) > 1 else (mean, mean)
        curve.append(Point(float(x), mean, low, high))
    return curve


def pad_range(low: float, high: float) -> tuple[float, float]:
    """Widen a range, so that no line lies on an edge. A low end that is not negative and near zero becomes zero."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-90):  # center a flat line
        margin = 0.1 * size if size > 1e-80 else 1.0
        return low - margin, high + margin
    margin = (high - low) * 0.05
    return (0.0 if 0 <= low < 0.35 * high else low - margin), high + margin


def robust_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of values, without outliers that would flatten all other values into a line."""
    ordered, trimmed = sorted(values), round(0.03 * len(values))
    low, high = ordered[trimmed], ordered[-1 - trimmed]
    core = high - low
    if trimmed == 0 or core <= 0 or ordered[-1] - ordered[0] <= 5 * core:
        return ordered[0], ordered[-1]
    return max(ordered[0], low - core), min(ordered[-1], high + core)


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between `low` and `high`, spaced by 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough * (1 - 1e-9))
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return about five powers of ten that enclose two positive numbers."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 4))
    return [10.0**n for n in range(first, last + every, every)]


def use_log(values: Sequence[float]) -> bool:
    """Return whether positive values differ by a factor that needs a logarithmic axis."""
    return bool(values) and min(values) > 1e-12 and max(values) / min(values) >= 300


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Format axis ticks with enough digits to distinguish neighbors."""
    spacing = min((abs(b - a) for a, b in pairwise(ticks)), default=0.0)
    enough = (n for n in range(4, 12) if all(abs(float(f"{tick:.{n}g}") - tick) <= 1e-3 * spacing for tick in ticks))
    digits = next(enough, 12 if spacing else 4)
    return [format_tick(tick, digits) for tick in ticks]


def format_tick(value: float, digits: int = 4) -> str:
    """Format a number for an axis: 12k, 1.5M, 0.002, 2e-5."""
    if value == 0:
        return "0"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1000 * size:
            return f"{value / size:.{digits}g}{letter}"
    if 1e-3 <= abs(value) < 1000:
        return f"{value:.{digits}g}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def format_number(value: float) -> str:
    """Format a number for a table: thousands separators and four significant digits."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == round(value) and abs(value) < 1e12:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1e9:
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        decimal = f"{value:,.{digits}f}"
        return decimal.rstrip("0").rstrip(".") if "." in decimal else decimal
    return f"{value:.3e}"


def format_score(score: float) -> str:
    """Format a score with about four significant digits, and no digits of thousands after the point."""
    return f"{score:,.0f}" if abs(score) >= 1000 else format_number(round(score, 3))


def format_estimate(scores: Estimate) -> str:
    """Format an interquartile mean and its interval."""
    if scores.interval is None:
        return format_score(scores.iqm)
    return f"{format_score(scores.iqm)} {format_interval(scores.interval)}"


def format_interval(interval: tuple[float, float]) -> str:
    """Format the ends of an interval."""
    return f"[{format_score(interval[0])}, {format_score(interval[1])}]"
