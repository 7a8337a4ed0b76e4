"""The page: all parts in one file that asks for nothing else and runs nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lockstep import __version__
from lockstep.tools.report import charts, consistency, sections
from lockstep.tools.report.css import STYLE
from lockstep.tools.report.html import Markup, details, join, tag, text
from lockstep.tools.report.run_data import Run, group

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Should a stranger's word ever get past the escaping, the browser still fetches nothing and runs nothing."""


@dataclass(frozen=True)
class Extras:
    """What is shown beside the runs themselves."""

    reference: charts.Reference | None = None
    proof: Any = None
    bench: Any = None
    gif: bytes | None = None


def write_page(runs: Sequence[Run], extras: Extras) -> str:
    """The whole page."""
    groups = charts.name_groups(group(runs))
    title = _title(runs, groups)
    first = sections.tiles(runs[0]) if len(runs) == 1 else sections.experiments(groups)
    body = [
        tag("header", tag("h1", title), tag("p", _lead(runs), class_="lead")),
        tag("div", first, sections.films(runs, extras.gif), class_="top"),
        sections.runs_table(groups) if len(runs) > 1 else "",
        *_curves(groups, extras),
        _section("Evaluations", sections.evaluations(groups)),
        _section("Speed", _speed(groups), *_benches(runs, extras)),
        _section("One agent", consistency.checks(runs), consistency.starts(runs), _proof(extras)),
        _section("Config", sections.config(groups)),
        _footer(runs),
    ]
    head = join(
        [
            Markup("<meta charset='utf-8'>"),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            Markup("<meta name='viewport' content='width=device-width,initial-scale=1'>"),
            Markup("<meta name='color-scheme' content='light dark'>"),
            Markup("<link rel='icon' href='data:,'>"),  # or a browser may look for one beside the file
            tag("title", title),
            Markup(f"<style>{STYLE}</style>"),
        ]
    )
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n{join(body, chr(10))}\n</body></html>\n"


def _title(runs: Sequence[Run], groups: Sequence[charts.ChartGroup]) -> str:
    if len(runs) == 1:
        return runs[0].label
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    what = recipes[0] if len(recipes) == 1 else f"{len(recipes)} recipes"
    return f"{what}: {len(runs)} {'seeds' if len(groups) == 1 else 'runs'}"


def _lead(runs: Sequence[Run]) -> Markup:
    """What was trained on what, in a line."""
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    tasks = dict.fromkeys(task for run in runs for key in ("task.id", "task.tasks") if (task := _listed(run, key)))
    alone = [f"seed {_listed(runs[0], 'run.seed')}"] if len(runs) == 1 else []
    return text(" · ".join([", ".join(recipes[:5]), *list(tasks)[:3], *alone]))


def _listed(run: Run, key: str) -> str:
    value = run.settings.get(key, "")
    return ", ".join(str(part)[:60] for part in value[:5]) if isinstance(value, list) else str(value)[:60]


def _curves(groups: Sequence[charts.ChartGroup], extras: Extras) -> list[Markup]:
    small, more, count = charts.small_charts(groups)
    several = len(groups) > 1
    parts = [
        charts.legend(groups) if several else "",
        charts.main_charts(groups, extras.reference),
        tag("p", words, class_="quiet") if (words := charts.spoken(groups)) else "",
        small,
        details(f"{count} more curves" if count > 1 else "1 more curve", more) if count else "",
    ]
    return [_section("Curves", *parts)]


def _speed(groups: Sequence[charts.ChartGroup]) -> Markup:
    split = sections.time_split(groups)
    chart = charts.speed_chart(groups)
    heading = tag("figcaption", tag("b", "Where the time went"))
    return tag("div", chart, tag("figure", heading, split) if split else "", class_="charts wide")


def _benches(runs: Sequence[Run], extras: Extras) -> list[Markup]:
    measured = [extras.bench] if extras.bench is not None else [run.bench for run in runs if run.bench is not None][:4]
    return [join([tag("h3", "As measured by lockstep bench"), sections.bench(each)]) for each in measured]


def _proof(extras: Extras) -> Markup:
    return Markup("") if extras.proof is None else consistency.proof(extras.proof)


def _footer(runs: Sequence[Run]) -> Markup:
    notes = [note for run in runs for note in run.notes]
    versions = ", ".join(dict.fromkeys(run.version for run in runs))
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    words = f"Written by lockstep {__version__} report on {now}; trained with lockstep {versions}."
    return tag("footer", *(tag("p", note) for note in notes), tag("p", words))


def _section(heading: str, *inside: object) -> Markup:
    return tag("section", tag("h2", heading), *inside)
