"""Choose and build the charts of a page: evaluations first, then training return or loss, then the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from lockstep.experiment.statistics import PERCENT
from lockstep.tools.report.metrics_log import MetricsLog, Series
from lockstep.tools.report.reference_curves import ReferencePoint, first_connected, scores_by_step
from lockstep.tools.report.run_data import ReportedRun, differences
from lockstep.tools.report.series import Point, downsample, format_number, robust_range, seed_curve, use_log
from lockstep.tools.report.svg_chart import SMALL, WIDE, Curve, Frame, draw, line_and_band_values, line_values

COLORS = 6
"""Number of curve colors. Further curves reuse them with dashed lines."""
RETURN = "eval/return_mean"
WITHOUT_CHART = {"eval/return_std", "eval/episodes", "eval/examples", "eval/score", "sync/update"}
"""Metrics without a chart of their own."""
DISPLAY_ORDER = ("loss", "value", "entropy", "kl", "explained_variance", "rate", "clip", "grad_norm")
"""Parts of metric names that are shown first, in this order."""
EVALUATION_DOTS, OTHER_DOTS = 40, 8
"""Largest number of points that are drawn as dots, on curves of evaluations and on other curves."""
POINTS, POINTS_OF_MANY = 240, 100
"""Largest number of points per curve, in charts with few lines and in charts with many."""
VISIBLE_CHARTS = 6
"""Small charts that are always visible. Further charts are collapsed."""


@dataclass(frozen=True)
class ChartGroup:
    """Runs of one experiment with several seeds, with their common label and color."""

    label: str
    runs: Sequence[ReportedRun]
    color: str
    dashed: bool


class Chart(NamedTuple):
    """Chart with its caption."""

    title: str
    notes: str
    svg: Markup


@dataclass(frozen=True)
class Reference:
    """Reference curves of another implementation. `per_sample` of its steps are one sample of a run."""

    name: str
    points: Sequence[ReferencePoint]
    per_sample: float


def name_groups(groups: Sequence[Sequence[ReportedRun]]) -> list[ChartGroup]:
    """Label groups by recipe, by the one or two settings that differ, or by name: of the experiment or first run."""
    firsts = [runs[0] for runs in groups]
    keys = [name for name in differences(firsts) if name != "run.seed"]
    labels = []
    for runs in groups:
        label = runs[0].label
        if len({run.recipe for run in firsts}) == len(firsts) > 1:
            label = runs[0].recipe
        elif 0 < len(keys) <= 2:
            label = ", ".join(f"{name.split('.')[-1]} {_short(runs[0].settings.get(name, '-'))}" for name in keys)
        elif runs[0].experiment is not None:
            label = runs[0].experiment
        elif len(runs) > 1:
            label = runs[0].recipe
        labels.append(label)
    chart_groups = []
    for number, (runs, label) in enumerate(zip(groups, labels, strict=True)):
        if labels.count(label) > 1 and runs[0].experiment is not None:
            label = runs[0].experiment
        chart_groups.append(ChartGroup(label, runs, f"c{number % COLORS}", number >= COLORS))
    return chart_groups


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]


def main_charts(groups: Sequence[ChartGroup], reference: Reference | None) -> list[Chart]:
    """Charts of the evaluations and of the training return or loss, next to each other."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.log.series))
    eval_metric = next(iter(evaluation_names(names)), None)
    train_metric = next((n for n in ("rollout/ep_return_mean", "train/example_loss", "train/loss") if n in names), None)
    charts = [
        chart(groups, name, WIDE, reference if name == RETURN else None, allow_zero=True)
        for name in (eval_metric, train_metric)
        if name
    ]
    return [drawn for drawn in charts if drawn]


def small_charts(groups: Sequence[ChartGroup]) -> list[Chart]:
    """Return the charts of all other metrics, the most important ones first."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.log.series))
    shown_above = {"rollout/ep_return_mean", "train/example_loss", *list(evaluation_names(names))[:1]}
    if "train/example_loss" in names:
        shown_above.add("train/loss")  # example_loss plus regularization: nearly the same curve
    learning = sorted((n for n in names if n.startswith("train/")), key=_display_order)
    others = [n for n in names if n.startswith("rollout/")] + evaluation_names(names)
    return [drawn for n in learning + others if n not in shown_above and (drawn := chart(groups, n, SMALL))]


def evaluation_names(names: Sequence[str]) -> list[str]:
    """Return the evaluation metrics over all tasks: the return first, then in the order of the log."""
    found = [name for name in names if name.startswith("eval/") and name.count("/") == 1 and name not in WITHOUT_CHART]
    return sorted(found, key=lambda name: name != RETURN)


def _display_order(name: str) -> int:
    return next((number for number, part in enumerate(DISPLAY_ORDER) if part in name), len(DISPLAY_ORDER))


def chart(
    groups: Sequence[ChartGroup], name: str, frame: Frame, reference: Reference | None = None, allow_zero: bool = False
) -> Chart | None:
    """Chart of one metric of all runs. None if all values are zero, unless `allow_zero` is set."""
    found = [(group, [run.log.series.get(name, Series()) for run in group.runs]) for group in groups]
    drawn = [(group, [series for series in all_series if series.x]) for group, all_series in found]
    columns = [series.y for _, all_series in drawn for series in all_series]
    if not columns or not (allow_zero or any(any(column) for column in columns)):
        return None
    lines = len(columns)
    limit = POINTS if lines <= 4 else POINTS_OF_MANY
    curves = [_make_curve(group, shown, name, limit, show_band=lines <= 3) for group, shown in drawn if shown]
    notes = []
    if reference is not None:
        until = max((curve.points[-1].x for curve in curves if curve.points), default=0.0)
        curves = [_reference_curve(reference, until), *curves]
        notes.append(f"Gray: {reference.name}, the reference: its own points, from its lowest to its highest seed.")
    skipped = sum(series.skipped for _, all_series in found for series in all_series)
    if skipped:
        notes.append(f"{skipped:,} value{'s' if skipped > 1 else ''} not drawn (NaN, infinite or too large).")
    limits, log = None, "loss" in name and use_log(line_values(curves))
    if name.startswith("train/") and not log and (values := line_and_band_values(curves)):
        limits = robust_range(values)
        extremes = (min(values), max(values))
        cut_off = [format_number(end) for end, limit in zip(extremes, limits, strict=True) if end != limit]
        notes += [f"The axis is cut: values reach {' and '.join(cut_off)}."] if cut_off else []
    title = title_of(name)
    end = max(run.log.samples for group in groups for run in group.runs)  # one axis for all charts of a page
    return Chart(title, " ".join(notes), draw(curves, title, frame, end, limits, log))


def _make_curve(group: ChartGroup, all_series: Sequence[Series], name: str, limit: int, show_band: bool) -> Curve:
    """Curve of one run with its range; for several runs, their IQM and its interval in front of the single curves."""
    downsampled = [downsample(series.x, series.y, limit) for series in all_series]
    several = len(all_series) > 1
    points = seed_curve(downsampled, min(limit, POINTS_OF_MANY)) if several else downsampled[0]
    if name == RETURN and not several:
        points = _with_std_range(points, group.runs[0].log)
    dots = len(points) <= (EVALUATION_DOTS if name.startswith("eval/") else OTHER_DOTS)
    thin_lines = downsampled if several else ()
    return Curve(group.label, points, group.color, several or show_band, thin_lines, dots, group.dashed)


def _with_std_range(points: Sequence[Point], log: MetricsLog) -> list[Point]:
    """Set the range of evaluations to one standard deviation of their episodes to either side, if it was logged."""
    found = log.series.get("eval/return_std", Series())
    deviation = dict(zip(found.x, found.y, strict=True))
    pairs = [(point, deviation.get(point.x)) for point in points]
    return [point if d is None else Point(point.x, point.y, point.y - d, point.y + d) for point, d in pairs]


def _reference_curve(reference: Reference, until: float) -> Curve:
    """Curve of the reference up to the end of the runs and one point beyond. A longer one would dwarf the runs.

    It consists of the reference's own points, never of means of neighbors.
    """
    steps = scores_by_step(reference.points, until * reference.per_sample)
    points = [Point(step / reference.per_sample, sum(s) / len(s), min(s), max(s)) for step, s in steps]
    points = points[:: -max(1, -(-len(points) // POINTS))][::-1]  # every nth, with the last
    few = len(points) <= EVALUATION_DOTS
    start = first_connected([point.x for point in points])
    return Curve(reference.name, points, "muted", band=not few, dots=few, ranges=few, line_from=start)


def title_of(name: str) -> str:
    """Return the title of a metric's chart."""
    known = {
        RETURN: "Return of evaluations",
        "rollout/ep_return_mean": "Return while training",
        "train/example_loss": "Loss while training",
        "time/global_fps": "Samples per second",
    }
    part, _, rest = name.partition("/")
    label = rest.removeprefix("ep_").removesuffix("_mean").replace("_", " ").replace("/", " ")
    label = "KL" if label == "kl" else label
    before = {"eval": "Evaluation: ", "rollout": "Training: "}.get(part, "")
    return known.get(name, f"{before}{label}" if before else label[:1].upper() + label[1:])


def explain_lines(groups: Sequence[ChartGroup]) -> str:
    """Return sentences that explain the lines and bands of the charts."""
    if any(len(group.runs) > 1 for group in groups):
        return (
            f"Lines are interquartile means over seeds, bands are their {PERCENT} bootstrap intervals, thin lines are "
            "single seeds."
        )
    notes = []
    logs = [group.runs[0].log for group in groups] if len(groups) <= 3 else []
    if any("return_std" in log.last for log in logs):
        notes.append("The band of an evaluation is one standard deviation of its episodes to either side.")
    if any(len(series.x) > POINTS for log in logs for series in log.series.values()):
        notes.append("Points of long curves are means of neighboring values, with a band from lowest to highest.")
    return " ".join(notes)
