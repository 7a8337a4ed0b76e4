"""Assemble the sections of a report into one HTML file without scripts and external resources."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from lockstep import __version__
from lockstep.tools.report import charts, comparison, consistency, sections
from lockstep.tools.report.html import render
from lockstep.tools.report.run_data import ReportedRun, group
from lockstep.tools.report.svg_chart import WIDE
from lockstep.tools.report.sweep_charts import SweepSection


def write_page(
    runs: Sequence[ReportedRun],
    reference: charts.Reference | None = None,
    proof: Any = None,
    bench: Any = None,
    gif: bytes | None = None,
    sweeps: Sequence[SweepSection] = (),
    price: float | None = None,
) -> str:
    """Return the report as an HTML document, with optional contents in addition to the runs."""
    groups = charts.name_groups(group(runs))
    small_charts = charts.small_charts(groups)
    time_bars, time_legend = sections.time_split(groups)
    several_runs = len(runs) > 1
    benches = [run.bench for run in runs if run.bench is not None][:4] if bench is None else [bench]
    return render(
        "page.html.j2",
        title=_title(runs, groups),
        lead=_lead(runs),
        forks=[f"{run.label}: {run.fork}" for run in runs if run.fork],
        tiles=sections.seed_tiles(groups, price) if several_runs else sections.tiles(runs[0], price),
        experiments=sections.experiments(groups),
        improvements=comparison.improvements_table(groups),
        statistics_note=comparison.statistics_note() if any(len(group.runs) > 1 for group in groups) else None,
        videos=sections.videos(runs, gif),
        runs=sections.runs_table(groups) if several_runs else None,
        sweeps=sweeps,
        groups=groups,
        main_charts=charts.main_charts(groups, reference),
        explanation=charts.explain_lines(groups),
        small_charts=small_charts[: charts.VISIBLE_CHARTS],
        more_charts=small_charts[charts.VISIBLE_CHARTS :],
        evaluations=sections.evaluations(groups),
        speed_chart=charts.chart(groups, "time/global_fps", WIDE),
        time_bars=time_bars,
        time_legend=time_legend,
        benches=[sections.bench(record) for record in benches],
        checks=consistency.checks(runs),
        starts=consistency.starts(runs),
        proofs=[] if proof is None else [consistency.proof(proof)],
        differences=sections.config_differences(runs),
        configs=sections.configs(groups),
        notes=[note for run in runs for note in run.notes],
        origin=_origin(runs),
    )


def _title(runs: Sequence[ReportedRun], groups: Sequence[charts.ChartGroup]) -> str:
    if len(runs) == 1:
        return runs[0].label
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    what = recipes[0] if len(recipes) == 1 else f"{len(recipes)} recipes"
    return f"{what}: {len(runs)} {'seeds' if len(groups) == 1 else 'runs'}"


def _lead(runs: Sequence[ReportedRun]) -> str:
    """Return one line with recipes, tasks and, for a single run, the seed."""
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    tasks = dict.fromkeys(task for run in runs for key in ("task.id", "task.tasks") if (task := _listed(run, key)))
    seed = [f"seed {_listed(runs[0], 'run.seed')}"] if len(runs) == 1 else []
    return " · ".join([", ".join(recipes[:5]), *list(tasks)[:3], *seed])


def _listed(run: ReportedRun, key: str) -> str:
    value = run.settings.get(key, "")
    return ", ".join(str(part)[:60] for part in value[:5]) if isinstance(value, list) else str(value)[:60]


def _origin(runs: Sequence[ReportedRun]) -> str:
    versions = ", ".join(dict.fromkeys(run.version for run in runs))
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return f"Written by lockstep {__version__} report on {now}; trained with lockstep {versions}."
