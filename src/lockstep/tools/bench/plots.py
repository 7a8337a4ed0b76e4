"""Plot a bench report as SVG: one bar per measurement, colored by phase, next to a bar of its bare work."""

from itertools import accumulate
from typing import Any

from markupsafe import Markup

from lockstep.tools.report.html import render

COLORS = {
    "env": "#3b82c4",
    "inference": "#38a3a5",
    "loading": "#c98b3b",
    "learning": "#57a773",
    "reduction": "#b565a7",
    "rest": "#8a8f98",
    "bare": "#d9a441",
}
_WIDTH, _LEFT = 720, 110


def draw(reports: list[dict[str, Any]]) -> Markup:
    """Return an SVG with the milliseconds of one iteration and of its bare work, for each number of processes."""
    scale = (_WIDTH - _LEFT - 90) / max(max(report["seconds"]["wall"], _bare(report)) for report in reports)
    rows = []
    for report in reports:
        count = report["processes"]
        seconds = {name: share * report["seconds"]["wall"] for name, share in report["split"].items()}
        rows.append((f"{count} process{'es' if count > 1 else ''}", _bars(seconds, scale)))
        rows.append(("bare engine", _bars({"bare": _bare(report)}, scale)))
    legend = zip(accumulate((30 + 8 * len(name) for name in COLORS), initial=_LEFT), COLORS.items(), strict=False)
    return render("bench.svg.j2", recipe=reports[0]["recipe"], width=_WIDTH, left=_LEFT, rows=rows, legend=list(legend))


def _bare(report: dict[str, Any]) -> float:
    return float(report["ratio_to_bare"] * report["seconds"]["wall"])


def _bars(seconds: dict[str, float], scale: float) -> list[tuple[str, str, float, float, float]]:
    """Return name, color, left edge, width and milliseconds of each part of a bar."""
    edges = accumulate((duration * scale for duration in seconds.values()), initial=float(_LEFT))
    return [
        (name, COLORS[name], x, duration * scale, 1e3 * duration)
        for x, (name, duration) in zip(edges, seconds.items(), strict=False)
    ]
