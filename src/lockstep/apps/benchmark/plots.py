"""Learning curves of a suite as one SVG file: a panel for each task, with published scores as dashed lines."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from lockstep.apps.benchmark.results import SeedGroup
from lockstep.apps.benchmark.suites import PROTOCOLS, Suite
from lockstep.apps.benchmark.table import format_steps
from lockstep.experiment.statistics import PERCENT
from lockstep.tools.report.html import render
from lockstep.tools.report.series import Point, format_score, seed_curve
from lockstep.tools.report.svg_chart import Curve, Frame, draw

COLUMNS = 2
POINTS = 100
"""Largest number of points of a curve."""
FRAME = Frame(bottom=38)
TITLE_HEIGHT, LEGEND_HEIGHT, MARGIN = 26, 17, 14
"""Height of a panel's title and of a line of its legend, and space around panels, in SVG units."""
EVALUATION_DOTS = 40
"""Largest number of evaluations that are drawn as dots."""


def draw_suite(suite: Suite, groups: Sequence[SeedGroup]) -> str:
    """Return the SVG file of a suite."""
    panels = [_panel(group) for group in groups]
    height = TITLE_HEIGHT + FRAME.height + LEGEND_HEIGHT * max(len(panel["legend"]) for panel in panels) + MARGIN
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    return str(
        render(
            "suite.svg.j2",
            title=f"{suite.title}: return by steps, IQM over runs with {PERCENT} intervals",
            frame=FRAME,
            panels=[
                panel | {"x": MARGIN + (FRAME.width + MARGIN) * (n % columns), "y": 40 + height * (n // columns)}
                for n, panel in enumerate(panels)
            ],
            width=MARGIN + (FRAME.width + MARGIN) * columns,
            height=40 + height * rows,
            title_height=TITLE_HEIGHT,
            legend_height=LEGEND_HEIGHT,
        )
    )


def _panel(group: SeedGroup) -> dict[str, Any]:
    """Return title, chart and legend of the runs of a task."""
    evaluations = seed_curve([result.evaluations for result in group.results], POINTS)
    training = seed_curve([result.training for result in group.results], POINTS)
    curves = [Curve("evaluations", evaluations, "c0", dots=len(evaluations) <= EVALUATION_DOTS)] if evaluations else []
    curves += [Curve("training episodes", training, "c1")] if training else []
    until = max([float(group.steps), *(point.x for curve in curves for point in curve.points)])
    legend = [(curve.label, curve.color, False) for curve in curves]
    for number, published in enumerate(group.task.published):
        color, note = f"c{2 + number % 4}", PROTOCOLS[published.protocol]
        if published.steps != group.steps:
            note += f", {format_steps(published.steps)} steps"
        line = [Point(x, published.score, published.score, published.score) for x in (0.0, until)]
        curves.append(Curve(published.source, line, color, band=False, dashed=True))
        if published.env:
            note += f", {published.env}"
        legend.append((f"{published.source}: {format_score(published.score)} ({note})", color, True))
    runs = f"{len(group.results)} run{'s' * (len(group.results) != 1)}"
    chart = draw(curves, f"Return on {group.label}", FRAME, until=until) if curves else Markup("")
    return {"title": f"{group.label}: {group.results[0].recipe}, {runs}", "chart": chart, "legend": legend}
