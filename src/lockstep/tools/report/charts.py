"""Choose and build the charts of a page: evaluations first, then training return or loss, then the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from lockstep.tools.report.metrics_log import MetricsLog, Series
from lockstep.tools.report.reference_curves import ReferencePoint, scores_by_step
from lockstep.tools.report.run_data import ReportedRun, differences
from lockstep.tools.report.series import Point, band, downsample, downsample_ranges, figure, trimmed, wants_decades
from lockstep.tools.report.svg_chart import SMALL, WIDE, Curve, Frame, draw, lines_of, values_of

COLOURS = 6
"""Number of curve colors. Further curves reuse them with dashed lines."""
RETURN = "eval/return_mean"
QUIET = {"eval/return_std", "eval/episodes", "eval/examples", "eval/score", "sync/update"}
"""Metrics without a chart of their own."""
FIRST = ("loss", "value", "entropy", "kl", "explained_variance", "rate", "clip", "grad_norm")
"""Parts of metric names that are shown first, in this order."""
DOTS, FEW = 40, 8
"""Largest number of points that are drawn as dots, on curves of evaluations and on other curves."""
POINTS, FEWER_POINTS = 240, 100
"""Largest number of points per curve, in charts with few lines and in charts with many."""
SHOWN = 6
"""Small charts that are always visible. Further charts are collapsed."""


@dataclass(frozen=True)
class ChartGroup:
    """Runs of one experiment with several seeds, with their common label and color."""

    label: str
    runs: Sequence[ReportedRun]
    colour: str
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
    """Label groups by recipe, by the one or two settings that differ, or by the name of their first run."""
    firsts = [runs[0] for runs in groups]
    apart = [name for name in differences(firsts) if name != "run.seed"]
    named = []
    for number, runs in enumerate(groups):
        label = runs[0].label
        if len({run.recipe for run in firsts}) == len(firsts) > 1:
            label = runs[0].recipe
        elif 0 < len(apart) <= 2:
            label = ", ".join(f"{name.split('.')[-1]} {str(runs[0].settings.get(name, '-'))[:40]}" for name in apart)
        elif len(runs) > 1:
            label = runs[0].recipe
        named.append(ChartGroup(label, runs, f"c{number % COLOURS}", number >= COLOURS))
    return named


def main_charts(groups: Sequence[ChartGroup], reference: Reference | None) -> list[Chart]:
    """Charts of the evaluations and of the training return or loss, next to each other."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.log.series))
    score = next(iter(evaluation_names(names)), None)
    seen = next((n for n in ("rollout/ep_return_mean", "train/example_loss", "train/loss") if n in names), None)
    charts = [chart(groups, score, WIDE, reference if score == RETURN else None, flat=True)] if score else []
    charts += [chart(groups, seen, WIDE, flat=True)] if seen else []
    return [each for each in charts if each]


def small_charts(groups: Sequence[ChartGroup]) -> list[Chart]:
    """Return the charts of all other metrics, the most important ones first."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.log.series))
    shown_above = {"rollout/ep_return_mean", "train/example_loss", *list(evaluation_names(names))[:1]}
    if "train/example_loss" in names:
        shown_above.add("train/loss")  # example_loss plus regularization: nearly the same curve
    learning = sorted((n for n in names if n.startswith("train/")), key=_asked_for)
    others = [n for n in names if n.startswith("rollout/")] + evaluation_names(names)
    return [each for n in learning + others if n not in shown_above and (each := chart(groups, n, SMALL))]


def evaluation_names(names: Sequence[str]) -> list[str]:
    """Return the evaluation metrics over all tasks: the return first, then in the order of the log."""
    found = [name for name in names if name.startswith("eval/") and name.count("/") == 1 and name not in QUIET]
    return sorted(found, key=lambda name: name != RETURN)


def _asked_for(name: str) -> int:
    return next((number for number, word in enumerate(FIRST) if word in name), len(FIRST))


def chart(
    groups: Sequence[ChartGroup], name: str, frame: Frame, reference: Reference | None = None, flat: bool = False
) -> Chart | None:
    """Chart of one metric of all runs. None if all values are zero, unless `flat` is set."""
    found = [(group, [run.log.series[name] for run in group.runs if name in run.log.series]) for group in groups]
    found = [(group, [series for series in each if len(series.x)]) for group, each in found]
    columns = [series.y for _, each in found for series in each]
    if not columns or not (flat or any(any(column) for column in columns)):
        return None
    lines = len(columns)
    limit = POINTS if lines <= 4 else FEWER_POINTS
    curves = [_curve_of(group, each, name, limit, alone=lines <= 3) for group, each in found if each]
    notes = []
    if reference is not None:
        until = max((curve.marks[-1].x for curve in curves if curve.marks), default=0.0)
        curves = [_curve_of_reference(reference, until), *curves]
        notes.append(f"Gray: {reference.name}, the reference, from its lowest to its highest seed.")
    left_out = sum(run.log.series[name].left_out for group in groups for run in group.runs if name in run.log.series)
    if left_out:
        notes.append(f"{left_out:,} value{'s' if left_out > 1 else ''} not drawn (NaN, infinite or too large).")
    limits, log = None, "loss" in name and wants_decades(lines_of(curves))
    if name.startswith("train/") and not log and (values := values_of(curves)):
        limits = trimmed(values)
        beyond = [figure(end) for end, limit in zip((min(values), max(values)), limits, strict=True) if end != limit]
        notes += [f"The axis is cut: values reach {' and '.join(beyond)}."] if beyond else []
    title = title_of(name)
    end = max(run.log.samples for group in groups for run in group.runs)  # one axis for all charts of a page
    return Chart(title, " ".join(notes), draw(curves, title, frame, end, limits, log))


def _curve_of(group: ChartGroup, each: Sequence[Series], name: str, limit: int, alone: bool) -> Curve:
    """Curve of one run with its range; for several runs, their mean and range in front of the single curves."""
    thinned = [downsample(series.x, series.y, limit) for series in each]
    several = len(each) > 1
    marks = band(thinned, limit) if several else thinned[0]
    if name == RETURN and not several:
        marks = _scattered(marks, group.runs[0].log)
    dots = len(marks) <= (DOTS if name.startswith("eval/") else FEW)
    behind = thinned if several else ()
    return Curve(group.label, marks, group.colour, several or alone, behind, dots, group.dashed)


def _scattered(marks: Sequence[Point], log: MetricsLog) -> list[Point]:
    """Set the range of evaluations to one standard deviation of their episodes to either side, if it was logged."""
    found = log.series.get("eval/return_std", Series())
    deviation = dict(zip(found.x, found.y, strict=True))
    known = [(mark, deviation.get(mark.x)) for mark in marks]
    return [mark if d is None else Point(mark.x, mark.y, mark.y - d, mark.y + d) for mark, d in known]


def _curve_of_reference(reference: Reference, until: float) -> Curve:
    """Curve of the reference up to the end of the runs and one point beyond. A longer one would dwarf the runs."""
    steps = scores_by_step(reference.points, until * reference.per_sample)
    marks = [Point(step / reference.per_sample, sum(s) / len(s), min(s), max(s)) for step, s in steps]
    xs, ys, lows, highs = zip(*marks, strict=True)
    return Curve(reference.name, downsample_ranges(xs, ys, lows, highs, POINTS), "muted")


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


def spoken(groups: Sequence[ChartGroup]) -> str:
    """Return sentences that explain the lines and bands of the charts."""
    if any(len(group.runs) > 1 for group in groups):
        return "Lines are means over seeds, bands show the range over seeds, thin lines are single seeds."
    notes = []
    if len(groups) <= 3 and any("return_std" in group.runs[0].log.last for group in groups):
        notes.append("The band of an evaluation is one standard deviation of its episodes to either side.")
    if len(groups) <= 3 and any(
        len(series.x) > POINTS for group in groups for series in group.runs[0].log.series.values()
    ):
        notes.append("Points of long curves are means of neighboring values, with a band from lowest to highest.")
    return " ".join(notes)
