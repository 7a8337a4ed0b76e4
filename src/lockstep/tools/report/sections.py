"""Contents of the sections of a page, from key figures to the full config: plain functions from runs to tables."""

import base64
import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from lockstep.experiment.statistics import PERCENT
from lockstep.loggers.formatting import format_duration
from lockstep.ops.prediction_metrics import overall_metrics
from lockstep.process_hours import read_process_hours
from lockstep.tools.report.charts import ChartGroup
from lockstep.tools.report.comparison import final_scores
from lockstep.tools.report.html import Table
from lockstep.tools.report.metrics_log import PHASES, number
from lockstep.tools.report.run_data import ReportedRun, differences
from lockstep.tools.report.series import format_estimate, format_interval, format_number, format_score

VIDEOS = 4
"""Largest number of videos on a page."""

Tile = tuple[str, object, str]
"""Name, value and note of a key figure."""


PhaseShare = tuple[str, str, float]
"""Phase of an iteration, its label and its fraction of the time."""


# ---------------------------------------------------------------------------------------------------------- key figures


def tiles(run: ReportedRun, price: float | None = None) -> list[Tile]:
    """Key figures of one run. `price`: dollars of one process for an hour."""
    log, best, last = run.log, headline(run.log.best), headline(run.log.last)
    budget = run.settings.get("run.total_samples")
    total = f"of {format_number(budget)}" if isinstance(budget, int) and 0 < budget < 10**15 else ""
    starts = len(run.starts)
    return [
        ("state", run.state, str(run.status.get("why") or "")[:120]),
        ("samples", format_number(log.samples), total),
        (f"best {best[0]}".rstrip(), best[1], f"at {format_number(log.best['samples'])}" if best[0] else ""),
        (f"last {last[0]}".rstrip(), *last[1:]),
        ("speed", _speed(run), "samples per second"),
        ("time", _time(log.seconds), "as logged"),
        ("processes", _processes(run), f"{starts} start{'s' if starts > 1 else ''}" if starts else ""),
        *_hours([run], price),
    ]


def _hours(runs: Sequence[ReportedRun], price: float | None) -> list[Tile]:
    """Return the process-hours used and lost, and what they cost. Empty: no run has recorded them."""
    known = [hours for run in runs if (hours := read_process_hours(run.status)) is not None]
    if not known:
        return []
    used, lost = (sum(amounts) / 3600 for amounts in zip(*((hours.total, hours.lost) for hours in known), strict=True))
    share = f"{format_number(round(lost, 3))} of them lost to restarts" if lost else "none lost to restarts"
    tiles: list[Tile] = [("process-hours", format_number(round(used, 3)), share)]
    if price is not None:
        tiles.append(("cost", f"${used * price:,.2f}", f"${lost * price:,.2f} of it lost, at ${price:,.2f} an hour"))
    return tiles


def _processes(run: ReportedRun) -> str:
    """Return the number of processes, and how it changed between starts."""
    known = [str(start.processes) for start in run.starts if start.processes]
    changed = [count for number, count in enumerate(known) if number == 0 or count != known[number - 1]]
    return " → ".join(changed[-4:]) if len(changed) > 1 else str(run.processes or "-")


def _time(seconds: float) -> str:
    return format_duration(seconds) if seconds < 1e10 else "-"


def _speed(run: ReportedRun) -> str:
    return format_number(round(run.log.speed)) if run.log.speed > 0 else "-"


def seed_tiles(groups: Sequence[ChartGroup], price: float | None = None) -> list[Tile]:
    """Key figures of one experiment with several seeds. Of several experiments: their process-hours only."""
    hours = _hours([run for group in groups for run in group.runs], price)
    if len(groups) > 1:
        return hours
    (group,) = groups
    best, final, scores = _best_mean_and_range(group), final_scores(group), final_scores(group).estimate
    iqm = "-" if scores is None else format_score(scores.iqm)
    interval = "" if scores is None or scores.interval is None else f"{PERCENT}: {format_interval(scores.interval)}"
    return [
        ("seeds", len(group.runs), f"{sum(run.state == 'finished' for run in group.runs)} finished"),
        (f"final {final.name}, IQM", iqm, interval),
        (f"best {best[0]}, mean", *best[1:]),
        ("samples", format_number(max(run.log.samples for run in group.runs)), "each"),
        ("time", _time(sum(run.log.seconds for run in group.runs)), "total"),
        *hours,
    ]


def experiments(groups: Sequence[ChartGroup]) -> Table | None:
    """Table of several experiments. None if there is only one, or if none of them has several seeds."""
    if len(groups) == 1 or all(len(group.runs) == 1 for group in groups):
        return None
    rows = []
    for group in groups:
        final, scores = final_scores(group), final_scores(group).estimate
        figures = ("-", "-", "-")
        if scores is not None:
            spread = "" if scores.standard_deviation is None else f" ± {format_score(scores.standard_deviation)}"
            figures = (final.name, format_estimate(scores), f"{format_score(scores.mean)}{spread}")
        rows.append((group.label, len(group.runs), *figures, " ".join(_best_mean_and_range(group)[1:])))
    heads = ("experiment", "seeds", "final score", f"IQM [{PERCENT} interval]", "mean ± SD", "best, mean and range")
    return Table(heads, rows, "figures", [group.color for group in groups])


def _best_mean_and_range(group: ChartGroup) -> tuple[str, str, str]:
    """Return name, mean and range of the main metric of the best evaluations of several runs."""
    found = [main for run in group.runs if (main := main_metric(run.log.best))]
    values = [value for _, value in found if not math.isnan(value)]
    if not values:
        return "evaluation", "-", ""
    mean = format_number(sum(values) / len(values))
    return found[0][0], mean, f"({format_number(min(values))} to {format_number(max(values))})"


def runs_table(groups: Sequence[ChartGroup]) -> Table:
    """Table with one row of key figures for each run."""
    rows = []
    for run in (run for group in groups for run in group.runs):
        identity = (run.label, run.state, run.recipe, run.settings.get("run.seed", "-"))
        results = (format_number(run.log.samples), headline(run.log.best)[1], headline(run.log.last)[1])
        rows.append((*identity, *results, _speed(run), _time(run.log.seconds), run.processes or "-"))
    heads = ("run", "state", "recipe", "seed", "samples", "best", "last", "samples/s", "time", "processes")
    return Table(heads, rows, "figures runs", [group.color for group in groups for _ in group.runs])


def main_metric(evaluation: dict[str, float]) -> tuple[str, float] | None:
    """Return name and value of the main metric of an evaluation."""
    if "score" in evaluation:
        parts = {name: value for name, value in evaluation.items() if name != "samples"}
        name, value = next(iter(overall_metrics(parts).items()), ("score", evaluation["score"]))
        return name.replace("_", " "), value
    return ("return", evaluation["return_mean"]) if "return_mean" in evaluation else None


def headline(evaluation: dict[str, float]) -> tuple[str, str, str]:
    """Return name, formatted value and standard deviation over episodes of an evaluation's main metric."""
    main, deviation = main_metric(evaluation), evaluation.get("return_std", math.nan)
    if main is None:
        return "", "-", ""
    return main[0], format_number(main[1]), "" if math.isnan(deviation) else f"± {format_number(deviation)}"


def videos(runs: Sequence[ReportedRun], chosen: bytes | None) -> list[tuple[str, Markup]]:
    """Return labels and data URLs of the videos of the agents."""
    shown = [("", chosen)] if chosen else [(run.label, run.gif) for run in runs if run.gif][:VIDEOS]
    return [(label, Markup(f"data:image/gif;base64,{base64.b64encode(gif or b'').decode()}")) for label, gif in shown]


# ---------------------------------------------------------------------------------------------------------- evaluations


def evaluations(groups: Sequence[ChartGroup]) -> list[tuple[str, Table]]:
    """Tables with all metrics of the last and the best evaluation. Tables with a summary are collapsed."""
    runs = [run for group in groups for run in group.runs if run.log.last]
    if not runs:
        return []
    if len(runs) == 1:
        log = runs[0].log
        return [("", _metrics_table([("last", [log.last]), ("best", [log.best])]))]
    few = len(runs) <= 4
    tables = [("", _evaluations_of(groups, "best", per_run=few))]
    tables += [] if few else [("Best evaluation of each run", _evaluations_of(groups, "best", mean=False))]
    return [*tables, ("Last evaluation of each run", _evaluations_of(groups, "last", mean=few))]


def _evaluations_of(groups: Sequence[ChartGroup], which: str, per_run: bool = True, mean: bool = True) -> Table:
    """Table with one column for each run, and one for the mean of several seeds."""
    columns = []
    for group in groups:
        found = [run for run in group.runs if run.log.last]
        if per_run or len(found) == 1:
            columns += [(run.label, [getattr(run.log, which)]) for run in found]
        if mean and len(found) > 1:
            head = f"mean of {len(found)}" if len(groups) == 1 else f"{group.label}, mean of {len(found)}"
            columns.append((head, [getattr(run.log, which) for run in found]))
    return _metrics_table(columns)


def _metrics_table(columns: Sequence[tuple[str, list[dict[str, float]]]]) -> Table:
    """Table of all metrics. A column has a head and one or several evaluations."""
    names = dict.fromkeys(name for _, evaluations in columns for evaluation in evaluations for name in evaluation)
    names.pop("samples")
    ordered = sorted(names, key=lambda name: (not name.startswith("return"), name.partition("/")[2] != ""))
    rows = [("at samples", *(_format_values(column, "samples") for _, column in columns))]
    rows += [(_metric_label(name), *(_format_values(column, name) for _, column in columns)) for name in ordered]
    return Table(("metric", *(head for head, _ in columns)), rows, "figures")


def _format_values(evaluations: Sequence[dict[str, float]], name: str) -> str:
    if len(evaluations) == 1:
        return format_number(evaluations[0][name]) if name in evaluations[0] else "-"
    values = [evaluation[name] for evaluation in evaluations if name in evaluation and not math.isnan(evaluation[name])]
    if not values:
        return "-"
    return f"{format_number(sum(values) / len(values))} ({format_number(min(values))} to {format_number(max(values))})"


def _metric_label(name: str) -> str:
    metric, _, part = name.removesuffix("_mean").partition("/")
    label = metric.replace("_", " ")
    return f"{label}, {part}" if part else label


# ---------------------------------------------------------------------------------------------------------------- speed


def time_split(groups: Sequence[ChartGroup]) -> tuple[list[tuple[str, list[PhaseShare]]], list[PhaseShare]]:
    """Return the time by phase: one bar for each run, or for each experiment if there are many runs, and a legend.

    Phases that take less than 0.05 % of all runs are skipped.
    """
    runs = [run for group in groups for run in group.runs]
    bars = [(run.label, [run]) for run in runs] if len(runs) <= 4 else [(group.label, group.runs) for group in groups]
    all_shares = _shares(runs)
    names = [name for name in (*PHASES, "other") if all_shares.get(name, 0) >= 0.0005]
    split = [(label, _phases(shares, names)) for label, runs_of_bar in bars if (shares := _shares(runs_of_bar))]
    return split, _phases(all_shares, names)


def _shares(runs: Sequence[ReportedRun]) -> dict[str, float]:
    """Return fractions of the time by phase over several runs, weighted by their duration."""
    total = sum(run.log.seconds for run in runs)
    names = dict.fromkeys(name for run in runs for name in run.log.shares)
    return {name: sum(run.log.shares.get(name, 0.0) * run.log.seconds for run in runs) / total for name in names}


def _phases(shares: dict[str, float], names: Sequence[str]) -> list[PhaseShare]:
    return [(name, PHASES.get(name, "other"), shares.get(name, 0.0)) for name in names]


def bench(measured: Any) -> dict[str, object] | None:
    """Return plot, table and verdict of a record of `lockstep bench`. None if the record is invalid."""
    from lockstep.tools.bench.plots import draw

    try:
        reports = [_checked_report(report) for report in (measured.get("scaling") or [measured])[:20]]
        plot = draw(reports)
    except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    keys = ("processes", "steps_per_second", "speedup", "ratio_to_bare")
    rows = [[format_number(report[key]) for key in keys] for report in reports]
    shown = Table(("processes", "samples per second", "speedup", "ratio to bare"), rows, "figures")
    return {"plot": plot, "table": shown, "verdict": reports[-1]["verdict"]}


def _checked_report(report: Any) -> dict[str, Any]:
    """Return the parts of one benchmark that are shown. Raises ValueError if a number cannot be drawn."""
    split = {name: _positive(share) for name, share in report["split"].items()}
    numbers = {key: _positive(report[key]) for key in ("steps_per_second", "speedup", "ratio_to_bare")}
    wall = {"wall": _positive(report["seconds"]["wall"])}
    texts = {"recipe": str(report["recipe"])[:100], "verdict": str(report.get("verdict", ""))[:500]}
    return texts | numbers | {"processes": int(_positive(report["processes"])), "seconds": wall, "split": split}


def _positive(value: object) -> float:
    found = number(value)
    if not 0 <= found < 1e12:
        raise ValueError("not a measurement")
    return found


# --------------------------------------------------------------------------------------------------------------- config


def config_differences(runs: Sequence[ReportedRun]) -> Table | None:
    """Table of settings that differ between runs. None if there are none."""
    rows = [(name, *(_setting(run.settings.get(name, "-")) for run in runs)) for name in differences(runs)]
    return Table(("differs", *(run.label for run in runs)), rows, "words") if rows else None


def configs(groups: Sequence[ChartGroup]) -> list[tuple[str, dict[str, Table]]]:
    """Return the full config of each experiment, with a summary: one table for each group of settings."""
    shown = []
    for group in groups:
        others = f" (equal in {len(group.runs) - 1} other runs, except for the seed)" if len(group.runs) > 1 else ""
        parts: dict[str, list[tuple[str, object]]] = {}
        for name, value in group.runs[0].settings.items():
            first, _, rest = name.partition(".")
            parts.setdefault(first if rest else "", []).append((rest or name, _setting(value)))
        tables = {name: Table(("setting", "value"), rows) for name, rows in parts.items()}
        shown.append((f"Full config of {group.runs[0].label}{others}", tables))
    return shown


def _setting(value: object) -> object:
    if value is None or value == "":
        return "none" if value is None else "(empty)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"[{', '.join(str(_setting(part)) for part in value[:20])}{', …' if len(value) > 20 else ''}]"
    return value
