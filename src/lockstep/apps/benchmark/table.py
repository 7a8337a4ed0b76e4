"""Table of a suite: interquartile means with intervals next to published scores, and the commands that made them."""

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.apps.benchmark.results import SeedGroup, normalized_scores
from lockstep.apps.benchmark.suites import PROTOCOLS, SOURCES, PublishedScore, Suite
from lockstep.experiment.statistics import PERCENT, Estimate, estimate
from lockstep.loggers.formatting import format_duration
from lockstep.tools.report.comparison import statistics_note
from lockstep.tools.report.series import format_estimate, format_score, format_tick

HEADINGS = ("task", "score", f"Lockstep, IQM [{PERCENT} interval]", "mean ± SD", "runs", "published")
TERMINAL_HEADINGS = ("score", f"IQM [{PERCENT} interval]", "mean ± SD", "runs")
SHORT_COMMIT = 10
"""Characters of a commit that are shown."""


class ScoreRow(NamedTuple):
    """Row of the table: one task and protocol."""

    task: str
    protocol: str
    estimate: Estimate
    published: Sequence[PublishedScore] = ()
    note: str = ""

    @property
    def mean(self) -> str:
        return format_mean(self.estimate.mean, self.estimate.standard_deviation)

    @property
    def cells(self) -> tuple[str, ...]:
        """Text of the row on a page, one cell for each heading."""
        published = "; ".join([*map(format_published, self.published), *([self.note] if self.note else [])])
        scores = self.estimate
        return self.task, self.protocol, format_estimate(scores), self.mean, str(scores.runs), published or "-"


def score_rows(suite: Suite, groups: Sequence[SeedGroup]) -> list[ScoreRow]:
    """Return a row for each task and protocol, and rows of the whole suite if every task has all scores."""
    rows = []
    for group in groups:
        for protocol, name in PROTOCOLS.items():
            if scores := group.scores(protocol):
                published = [score for score in group.task.published if score.protocol == protocol]
                rows.append(ScoreRow(group.label, name, estimate([scores]), published))
    if len(suite.tasks) > 1:
        sources = ", ".join(dict.fromkeys(task.published[0].source for task in suite.tasks if task.published))
        for procs in sorted({group.procs for group in groups}):
            if tasks := normalized_scores(suite, groups, procs):
                label = "all tasks" + (f", {procs} processes" if procs > 1 else "")
                note = f"0: random actions, 1: {sources}"
                rows.append(ScoreRow(label, "normalized score", estimate(tasks), note=note))
    return rows


def terminal_rows(rows: Sequence[ScoreRow]) -> list[tuple[str, ...]]:
    """Return the rows for 80 columns: a line for each task, and published scores below ours."""
    lines: list[tuple[str, ...]] = []
    for task in dict.fromkeys(row.task for row in rows):
        lines.append((task, "", "", ""))
        for row in rows:
            if row.task != task:
                continue
            lines.append((f"  {row.protocol}", format_estimate(row.estimate), row.mean, str(row.estimate.runs)))
            for score in row.published:
                details = ", ".join([score.source, *([score.env] if score.env else []), format_steps(score.steps)])
                mean, runs = format_mean(score.score, score.spread), str(score.seeds or "-")
                lines.append((f"    {details}", "", mean, runs))
            if row.note:
                lines.append((f"    {row.note}", "", "", ""))
    return lines


def markdown(suite: Suite, groups: Sequence[SeedGroup], rows: Sequence[ScoreRow]) -> str:
    """Return the page of a suite: table, commands with commits, and sources."""
    lines = [f"# {suite.title}", "", f"Written by `lockstep benchmark {suite.name} --plot`. {statistics_note()}", ""]
    lines += [_line(HEADINGS), _line(["---"] * len(HEADINGS)), *(_line(row.cells) for row in rows)]
    lines += ["", "## Commands", "", *(f"- {text}" for text in command_notes(groups))]
    lines += ["", "## Sources of published scores", "", *(f"- {text}" for text in source_notes(groups))]
    return "\n".join(lines) + "\n"


def command_notes(groups: Sequence[SeedGroup]) -> list[str]:
    """Return the command, seeds, commits, versions and time of each group of runs."""
    notes = []
    for group in groups:
        seeds = ", ".join(str(result.seed) for result in group.results)
        commits = dict.fromkeys(_short(commit) for result in group.results for commit in result.commit.split(", "))
        versions = dict.fromkeys(f"{k} {v}" for result in group.results for k, v in result.versions.items())
        seconds = sum(result.seconds for result in group.results) / len(group.results)
        notes.append(
            f"{group.label}: `{group.command}`, S = {seeds}; commit {', '.join(commits)}; {', '.join(versions)}; "
            f"{format_duration(seconds)} a run"
        )
    return notes


def source_notes(groups: Sequence[SeedGroup]) -> list[str]:
    """Return the sources of the published scores that are shown."""
    sources = dict.fromkeys(published.source for group in groups for published in group.task.published)
    return [f"{source}: {SOURCES[source]}" for source in sources]


def format_published(published: PublishedScore) -> str:
    """Format a published score with what it was measured on."""
    runs = [] if published.seeds is None else [f"{published.seeds} run{'s' * (published.seeds != 1)}"]
    details = ", ".join([*([published.env] if published.env else []), f"{format_steps(published.steps)} steps", *runs])
    return f"{published.source} {format_mean(published.score, published.spread)} ({details})"


def format_mean(mean: float, spread: float | None) -> str:
    """Format a mean and its standard deviation, if any."""
    return format_score(mean) + ("" if spread is None else f" ± {format_score(spread)}")


def format_steps(steps: int) -> str:
    """Format steps as 300k or 2.5M."""
    return format_tick(float(steps))


def _short(commit: str) -> str:
    name, dash, state = commit.partition("-")
    return name[:SHORT_COMMIT] + dash + state


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
