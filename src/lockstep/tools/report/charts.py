"""Which charts a page has: evaluations first, then what is seen while training, then the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.tools.report.html import Markup, join, tag
from lockstep.tools.report.metrics_log import MetricsLog, Series
from lockstep.tools.report.reference_curves import ReferencePoint, scores_by_step
from lockstep.tools.report.run_data import Run, differences
from lockstep.tools.report.series import Point, band, downsample, figure, thin_marks, trimmed, wants_decades
from lockstep.tools.report.svg_chart import SMALL, WIDE, Curve, Frame, draw, lines_of, values_of

COLOURS = 6
"""Colours that the page has for curves; further ones begin again, dashed."""
RETURN = "eval/return_mean"
QUIET = {"eval/return_std", "eval/episodes", "eval/examples", "eval/score", "sync/update"}
"""Quantities that have no chart of their own."""
FIRST = ("loss", "value", "entropy", "kl", "explained_variance", "rate", "clip", "grad_norm")
"""Words in the names of what is most asked for, in this order."""
DOTS, FEW = 40, 8
"""A curve of evaluations with at most so many marks shows each of them, and any other with so few."""
POINTS, FEWER_POINTS = 240, 100
"""Points of a curve that are drawn, where lines are few and where they are many."""
SHOWN = 6
"""Small charts that stand open; more are folded."""


@dataclass(frozen=True)
class ChartGroup:
    """Runs that are one experiment with several seeds, under one name and in one colour."""

    label: str
    runs: Sequence[Run]
    colour: str
    dashed: bool


@dataclass(frozen=True)
class Reference:
    """Somebody else's curves, in steps of which so many are a sample of ours."""

    name: str
    points: Sequence[ReferencePoint]
    per_sample: float


def name_groups(groups: Sequence[Sequence[Run]]) -> list[ChartGroup]:
    """Groups by what sets them apart: one or two settings, or else the name of their first run."""
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


def main_charts(groups: Sequence[ChartGroup], reference: Reference | None) -> Markup:
    """The evaluation and what is seen while training, side by side."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.log.series))
    score = next(iter(evaluation_names(names)), None)
    seen = next((n for n in ("rollout/ep_return_mean", "train/example_loss", "train/loss") if n in names), None)
    charts = []
    if score:
        charts.append(chart(groups, score, WIDE, reference if score == RETURN else None, flat=True))
    if seen:
        charts.append(chart(groups, seen, WIDE, flat=True))
    return tag("div", *charts, class_="charts wide")


def small_charts(groups: Sequence[ChartGroup]) -> tuple[Markup, Markup, int]:
    """The other quantities of learning, those most asked for, those to be folded and how many these are."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.log.series))
    shown_above = {"rollout/ep_return_mean", "train/example_loss", *list(evaluation_names(names))[:1]}
    if "train/example_loss" in names:
        shown_above.add("train/loss")  # the same curve but for what is added to it
    learning = sorted((n for n in names if n.startswith("train/")), key=_asked_for)
    others = [n for n in names if n.startswith("rollout/")] + evaluation_names(names)
    charts = [each for n in learning + others if n not in shown_above and (each := chart(groups, n, SMALL))]
    first, rest = charts[:SHOWN], charts[SHOWN:]
    return tag("div", *first, class_="charts"), tag("div", *rest, class_="charts"), len(rest)


def speed_chart(groups: Sequence[ChartGroup]) -> Markup:
    return chart(groups, "time/global_fps", WIDE)


def evaluation_names(names: Sequence[str]) -> list[str]:
    """Measures of the whole: the return first, else in the order they were written."""
    found = [name for name in names if name.startswith("eval/") and name.count("/") == 1 and name not in QUIET]
    return sorted(found, key=lambda name: name != RETURN)


def _asked_for(name: str) -> int:
    return next((number for number, word in enumerate(FIRST) if word in name), len(FIRST))


def chart(
    groups: Sequence[ChartGroup], name: str, frame: Frame, reference: Reference | None = None, flat: bool = False
) -> Markup:
    """One quantity of all runs; where it never was anything but zero, only if `flat` asks for it."""
    found = [(group, [run.log.series[name] for run in group.runs if name in run.log.series]) for group in groups]
    found = [(group, [series for series in each if len(series.x)]) for group, each in found]
    columns = [series.y for _, each in found for series in each]
    if not columns or not (flat or any(any(column) for column in columns)):
        return Markup("")
    lines = sum(len(each) for _, each in found)
    limit = POINTS if lines <= 4 else FEWER_POINTS
    curves = [_curve_of(group, each, name, limit, alone=lines <= 3) for group, each in found if each]
    told = []
    if reference is not None:
        curves = [
            *_curve_of_reference(reference, max((curve.marks[-1].x for curve in curves if curve.marks), default=0.0)),
            *curves,
        ]
        told.append(f"Grey: {reference.name}, the reference, from its lowest to its highest seed.")
    left_out = sum(run.log.series[name].left_out for group in groups for run in group.runs if name in run.log.series)
    if left_out:
        told.append(f"{left_out:,} value{'s' if left_out > 1 else ''} that cannot be drawn (NaN, infinite) left out.")
    limits, log = None, "loss" in name and wants_decades(lines_of(curves))
    if name.startswith("train/") and not log and (values := values_of(curves)):
        limits = trimmed(values)
        beyond = [figure(end) for end, limit in zip((min(values), max(values)), limits, strict=True) if end != limit]
        told += [f"The axis is cut: values reach {' and '.join(beyond)}."] if beyond else []
    words = title_of(name)
    caption = tag("figcaption", tag("b", words), *([" ", tag("span", " ".join(told))] if told else []))
    until = max(run.log.samples for group in groups for run in group.runs)  # one axis for all charts of a page
    return tag("figure", caption, draw(curves, words, frame, until, limits, log))


def _curve_of(group: ChartGroup, each: Sequence[Series], name: str, limit: int, alone: bool) -> Curve:
    """A line for a run, with what it scatters; for several, their mean and range in front of each."""
    thinned = [downsample(series.x, series.y, limit) for series in each]
    label = group.label

    def dots(marks: Sequence[Point]) -> bool:
        return len(marks) <= (DOTS if name.startswith("eval/") else FEW)

    if len(each) > 1:
        marks = band(thinned, limit)
        return Curve(label, marks, group.colour, behind=thinned, dots=dots(marks), dashed=group.dashed)
    marks = thinned[0]
    if name == RETURN:
        marks = _scattered(marks, group.runs[0].log)
    return Curve(label, marks, group.colour, band=alone, dots=dots(marks), dashed=group.dashed)


def _scattered(marks: Sequence[Point], log: MetricsLog) -> list[Point]:
    """Evaluations with one standard deviation of their episodes to either side, where that was logged."""
    found = log.series.get("eval/return_std", Series())
    deviation = dict(zip(found.x, found.y, strict=True))
    known = [(mark, deviation.get(mark.x)) for mark in marks]
    return [mark if d is None else Point(mark.x, mark.y, mark.y - d, mark.y + d) for mark, d in known]


def _curve_of_reference(reference: Reference, until: float) -> list[Curve]:
    """As far as our own runs came, and one point beyond: a curve that goes on for long would hide them."""
    steps = scores_by_step(reference.points, until * reference.per_sample)
    marks = [Point(step / reference.per_sample, sum(s) / len(s), min(s), max(s)) for step, s in steps]
    return [Curve(reference.name, thin_marks(marks, POINTS), "muted")]


def title_of(name: str) -> str:
    """What people call a quantity."""
    known = {
        RETURN: "Return of evaluations",
        "rollout/ep_return_mean": "Return while training",
        "train/example_loss": "Loss while training",
        "time/global_fps": "Samples a second",
    }
    part, _, rest = name.partition("/")
    words = rest.removeprefix("ep_").removesuffix("_mean").replace("_", " ").replace("/", " ")
    words = "KL" if words == "kl" else words
    before = {"eval": "Evaluation: ", "rollout": "Training: "}.get(part, "")
    return known.get(name, f"{before}{words}" if before else words[:1].upper() + words[1:])


def legend(groups: Sequence[ChartGroup]) -> Markup:
    """Which colour is which, in words."""
    swatches = [
        tag(
            "span", tag("i", style=f"--c:var(--{group.colour})", class_="dashed" if group.dashed else None), group.label
        )
        for group in groups
    ]
    return tag("p", join(swatches, " "), class_="legend")


def spoken(groups: Sequence[ChartGroup]) -> str:
    """How the bands of the charts are to be read."""
    if any(len(group.runs) > 1 for group in groups):
        return "Lines are means over seeds, bands reach from the lowest seed to the highest, thin lines are the seeds."
    told = []
    if len(groups) <= 3 and any("return_std" in group.runs[0].log.last for group in groups):
        told.append("The band of an evaluation is one standard deviation of its episodes to either side.")
    if len(groups) <= 3 and any(
        len(series.x) > POINTS for group in groups for series in group.runs[0].log.series.values()
    ):
        told.append(
            "Long curves are drawn by means of neighbouring values, with a band from the lowest to the highest."
        )
    return " ".join(told)
