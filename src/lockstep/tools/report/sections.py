"""The parts of a page, from the first figures to the whole config: plain functions from runs to markup."""

import base64
import math
from collections.abc import Sequence
from typing import Any

from lockstep.loggers.formatting import format_duration
from lockstep.ops.prediction_metrics import overall_metrics
from lockstep.tools.report.charts import ChartGroup
from lockstep.tools.report.html import Markup, details, join, table, tag
from lockstep.tools.report.metrics_log import PHASES, MetricsLog, number
from lockstep.tools.report.run_data import Run, differences
from lockstep.tools.report.series import figure

FILMS = 4
"""Films a page shows at most."""


def of(count: float, one: str, many: str) -> str:
    """A number of things, in words."""
    return f"{figure(count)} {one if count == 1 else many}"


# ---------------------------------------------------------------------------------------------------- the first figures


def tiles(run: Run) -> Markup:
    """One run at a glance."""
    log, best, last = run.log, headline(run.log.best), headline(run.log.last)
    budget = run.settings.get("run.total_samples")
    whole = isinstance(budget, int) and 0 < budget < 10**15
    shown = [
        ("state", run.state, _why(run)),
        ("samples", figure(log.samples), f"of {figure(float(budget))}" if whole else ""),  # type: ignore[arg-type]
        (
            f"best {best[0]}" if best else "best",
            best[1] if best else "-",
            f"at {figure(log.best['samples'])}" if best else "",
        ),
        (f"last {last[0]}" if last else "last", last[1] if last else "-", last[2] if last else ""),
        ("speed", figure(round(log.speed)) if log.speed > 0 else "-", "samples a second"),
        ("time", _time(log.seconds), "as logged"),
        ("processes", _processes(run), of(len(run.starts), "start", "starts") if run.starts else ""),
    ]
    return _tiles(shown)


def _processes(run: Run) -> str:
    """How many there were, start after start."""
    known = [str(start.processes) for start in run.starts if start.processes]
    changed = [count for number, count in enumerate(known) if number == 0 or count != known[number - 1]]
    return " → ".join(changed[-4:]) if len(changed) > 1 else str(run.processes or "-")


def _time(seconds: float) -> str:
    return format_duration(seconds) if seconds < 1e10 else "-"


def _tiles(shown: Sequence[tuple[object, object, object]]) -> Markup:
    return tag("dl", *(tag("div", tag("dt", a), tag("dd", b), tag("small", c)) for a, b, c in shown), class_="tiles")


def experiments(groups: Sequence[ChartGroup]) -> Markup:
    """What seeds come to together: tiles for one experiment, a table for several; nothing where none has seeds."""
    if all(len(group.runs) == 1 for group in groups):
        return Markup("")
    told = [(group, _together(group, "best"), _together(group, "last")) for group in groups]
    if len(groups) > 1:
        rows = [
            (_swatched(group, group.label), len(group.runs), *(f"{a} {b}" for _, a, b in (best, last)))
            for group, best, last in told
        ]
        return table(("experiment", "seeds", "best, mean and range", "last, mean and range"), rows, "figures")
    ((group, best, last),) = told
    ended = sum(run.state == "finished" for run in group.runs)
    seconds = sum(run.log.seconds for run in group.runs)
    shown = [
        ("seeds", len(group.runs), f"{ended} finished"),
        (f"best {best[0]}, mean", best[1], best[2]),
        (f"last {last[0]}, mean", last[1], last[2]),
        ("samples", figure(max(run.log.samples for run in group.runs)), "each"),
        ("time", _time(seconds), "all together"),
    ]
    return _tiles(shown)


def _together(group: ChartGroup, which: str) -> tuple[str, str, str]:
    """The headline of several runs: its name, its mean, and its range in brackets."""
    found = [told for run in group.runs if (told := measure_of(getattr(run.log, which)))]
    values = [value for _, value in found if not math.isnan(value)]
    if not values:
        return "evaluation", "-", ""
    return found[0][0], figure(sum(values) / len(values)), f"({figure(min(values))} to {figure(max(values))})"


def _swatched(group: ChartGroup, label: str) -> Markup:
    return join([tag("i", style=f"--c:var(--{group.colour})", class_="swatch"), label])


def runs_table(groups: Sequence[ChartGroup]) -> Markup:
    """Several runs at a glance, a row each."""
    rows = []
    for group in groups:
        for run in group.runs:
            best, last = headline(run.log.best), headline(run.log.last)
            speed = figure(round(run.log.speed)) if run.log.speed > 0 else "-"
            figures = (figure(run.log.samples), best[1] if best else "-", last[1] if last else "-", speed)
            who = (_swatched(group, run.label), run.state, run.recipe, run.settings.get("run.seed", "-"))
            rows.append((*who, *figures, _time(run.log.seconds), run.processes or "-"))
    heads = ("run", "state", "recipe", "seed", "samples", "best", "last", "samples/s", "time", "processes")
    return table(heads, rows, "figures runs")


def measure_of(evaluation: dict[str, float]) -> tuple[str, float] | None:
    """The one number of an evaluation, and what it is called."""
    if "score" in evaluation:
        parts = {name: value for name, value in evaluation.items() if name != "samples"}
        name, value = next(iter(overall_metrics(parts).items()), ("score", evaluation["score"]))
        return name.replace("_", " "), value
    return ("return", evaluation["return_mean"]) if "return_mean" in evaluation else None


def headline(evaluation: dict[str, float]) -> tuple[str, str, str] | None:
    """The same as it is shown, with how far episodes scatter."""
    told, deviation = measure_of(evaluation), evaluation.get("return_std", math.nan)
    if told is None:
        return None
    return told[0], figure(told[1]), "" if math.isnan(deviation) else f"± {figure(deviation)}"


def _why(run: Run) -> str:
    return str(run.status.get("why") or "")[:120]


def films(runs: Sequence[Run], chosen: bytes | None) -> Markup:
    """Films, as part of the page."""
    shown = [("", chosen)] if chosen else [(run.label, run.gif) for run in runs if run.gif][:FILMS]
    figures = []
    for label, film in shown:
        source = Markup(f"data:image/gif;base64,{base64.b64encode(film or b'').decode()}")
        image = tag("img", src=source, alt=f"The agent of {label}" if label else "The agent")
        figures.append(tag("figure", image, tag("figcaption", label) if label and len(shown) > 1 else ""))
    return tag("div", *figures, class_="films") if figures else Markup("")


# ---------------------------------------------------------------------------------------------------------- evaluations


def evaluations(groups: Sequence[ChartGroup]) -> Markup:
    """The last and the best evaluation, all their measures."""
    runs = [run for group in groups for run in group.runs if run.log.last]
    if not runs:
        return tag("p", "There is no evaluation in the log.", class_="quiet")
    if len(runs) == 1:
        log = runs[0].log
        rows = [("at samples", *(figure(each["samples"]) for each in (log.last, log.best)))]
        rows += [(_measure(n), *(_value(each, n) for each in (log.last, log.best))) for n in _measures([log])]
        return table(("measure", "last", "best"), rows, "figures")
    few = len(runs) <= 4
    parts: list[object] = [tag("h3", "The best of each"), _evaluations_of(groups, "best", each=few)]
    parts += [] if few else [details("The best of each run", _evaluations_of(groups, "best", together=False))]
    return join([*parts, details("The last of each run", _evaluations_of(groups, "last", together=few))])


def _evaluations_of(groups: Sequence[ChartGroup], which: str, each: bool = True, together: bool = True) -> Markup:
    """A column for each run, and for seeds one of what they come to together."""
    heads, columns = [], []
    for group in groups:
        found = [run for run in group.runs if run.log.last]
        if (each or len(found) == 1) and found:
            columns += [[getattr(run.log, which)] for run in found]
            heads += [run.label for run in found]
        if together and len(found) > 1:
            columns.append([getattr(run.log, which) for run in found])
            heads.append(f"mean of {len(found)}" if len(groups) == 1 else f"{group.label}, mean of {len(found)}")
    logs = [run.log for group in groups for run in group.runs]
    rows = [("at samples", *(_pooled(column, "samples") for column in columns))]
    rows += [(_measure(name), *(_pooled(column, name) for column in columns)) for name in _measures(logs)]
    return table(("measure", *heads), rows, "figures")


def _pooled(evaluations: Sequence[dict[str, float]], name: str) -> str:
    values = [each[name] for each in evaluations if name in each and not math.isnan(each[name])]
    if len(evaluations) == 1 or not values:
        return figure(values[0]) if values else "-"
    return f"{figure(sum(values) / len(values))} ({figure(min(values))} to {figure(max(values))})"


def _measures(logs: Sequence[MetricsLog]) -> list[str]:
    names = dict.fromkeys(name for log in logs for name in log.last if name != "samples")
    return sorted(names, key=lambda name: (not name.startswith("return"), name.partition("/")[2] != ""))


def _measure(name: str) -> str:
    whole, _, part = name.removesuffix("_mean").partition("/")
    words = whole.replace("_", " ")
    return f"{words}, {part}" if part else words


def _value(evaluation: dict[str, float], name: str) -> str:
    return figure(evaluation[name]) if name in evaluation else "-"


# ---------------------------------------------------------------------------------------------------------------- speed


def time_split(groups: Sequence[ChartGroup]) -> Markup:
    """Where the time went: a bar for each run, or for each experiment where runs are many, and words with figures."""
    runs = [run for group in groups for run in group.runs]
    bars = [(run.label, [run]) for run in runs] if len(runs) <= 4 else [(group.label, group.runs) for group in groups]
    split = [(label, shares) for label, each in bars if (shares := _shares(each))]
    whole = _shares(runs)
    names = [name for name in (*PHASES, "other") if whole.get(name, 0) >= 0.0005]
    drawn = [
        tag("div", tag("span", label) if len(split) > 1 else "", tag("div", *_parts(shares, names), class_="bar"))
        for label, shares in split
    ]
    words = [
        tag("li", tag("i", style=f"--c:var(--{name})"), f"{_phase(name)} ", tag("b", f"{whole[name]:.1%}"))
        for name in names
    ]
    return join([tag("div", *drawn, class_="bars"), tag("ul", *words, class_="words")]) if drawn else Markup("")


def _shares(runs: Sequence[Run]) -> dict[str, float]:
    """Parts of the time of some runs together: a long one counts for more."""
    total = sum(run.log.seconds for run in runs)
    names = dict.fromkeys(name for run in runs for name in run.log.shares)
    return {name: sum(run.log.shares.get(name, 0.0) * run.log.seconds for run in runs) / total for name in names}


def _parts(shares: dict[str, float], names: Sequence[str]) -> list[Markup]:
    found = [(name, shares.get(name, 0.0)) for name in names]
    return [
        tag("i", style=f"width:{100 * share:.2f}%;--c:var(--{name})", title=f"{_phase(name)} {share:.1%}")
        for name, share in found
    ]


def _phase(name: str) -> str:
    return PHASES.get(name, "all else")


def bench(measured: Any) -> Markup:
    """The picture of `lockstep bench`, and what it says; words where a file is none of its own."""
    from lockstep.tools.bench.plots import draw

    try:
        reports = [_measured(report) for report in (measured.get("scaling") or [measured])[:20]]
        picture = Markup(draw(reports))
    except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError):
        return tag("p", "The measurement is left out: it is not what lockstep bench writes.", class_="quiet")
    keys = ("processes", "steps_per_second", "speedup", "ratio_to_bare")
    rows = [[figure(report[key]) for key in keys] for report in reports]
    told = table(("processes", "samples a second", "speed-up", "ratio to bare"), rows, "figures")
    return join([tag("figure", picture), told, tag("p", reports[-1]["verdict"])])


def _measured(report: Any) -> dict[str, Any]:
    """One measurement, with numbers that can be drawn where a picture needs them."""
    split = {name: _positive(share) for name, share in report["split"].items()}
    found = {key: _positive(report[key]) for key in ("steps_per_second", "speedup", "ratio_to_bare")}
    wall = {"wall": _positive(report["seconds"]["wall"])}
    words = {"recipe": str(report["recipe"])[:100], "verdict": str(report.get("verdict", ""))[:500]}
    return words | found | {"processes": int(_positive(report["processes"])), "seconds": wall, "split": split}


def _positive(value: object) -> float:
    found = number(value)
    if not 0 <= found < 1e12:
        raise ValueError("not a measurement")
    return found


# --------------------------------------------------------------------------------------------------------------- config


def config(groups: Sequence[ChartGroup]) -> Markup:
    """What differs between runs, and everything, folded."""
    runs = [run for group in groups for run in group.runs]
    parts: list[object] = []
    if len(runs) > 1:
        apart = differences(runs)
        rows = [(name, *(_setting(run.settings.get(name, "-")) for run in runs)) for name in apart]
        nothing = tag("p", "No setting differs.", class_="quiet")
        parts.append(table(("differs", *(run.label for run in runs)), rows, "words") if apart else nothing)
    for group in groups:
        others = f" and the {len(group.runs) - 1} others but for their seeds" if len(group.runs) > 1 else ""
        whole = f"The whole config of {group.runs[0].label}{others}"
        parts.append(details(whole, _whole(group.runs[0]), open_=len(runs) == 1))
    return join(parts)


def _whole(run: Run) -> Markup:
    groups: dict[str, list[tuple[str, object]]] = {}
    for name, value in run.settings.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first if rest else "", []).append((rest or name, _setting(value)))
    tables = [
        tag("div", tag("h3", name) if name else "", table(("setting", "value"), rows)) for name, rows in groups.items()
    ]
    return tag("div", *tables, class_="config")


def _setting(value: object) -> object:
    if value is None or value == "":
        return "none" if value is None else "(empty)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"[{', '.join(str(_setting(part)) for part in value[:20])}{', …' if len(value) > 20 else ''}]"
    return value
