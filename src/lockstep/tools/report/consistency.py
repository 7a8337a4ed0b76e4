"""Evidence that processes trained one agent: checks of every run, its starts, and the record of a proof."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

from lockstep.tools.report.html import Table
from lockstep.tools.report.metrics_log import Series
from lockstep.tools.report.run_data import ReportedRun
from lockstep.tools.report.series import format_number


def checks(runs: Sequence[ReportedRun]) -> Table:
    """Table of reduction mode, replica checks and digests. Runs with equal rows share one row."""
    found: dict[tuple[object, ...], list[str]] = {}
    for run in runs:
        found.setdefault(_check_columns(run), []).append(run.label)
    rows = [
        (f"all {len(labels)} runs" if len(labels) == len(runs) > 1 else ", ".join(labels), *columns)
        for columns, labels in found.items()
    ]
    return Table(("run", "gradient reduction", "replica checks", "digests"), rows, "words")


def _check_columns(run: ReportedRun) -> tuple[object, ...]:
    check_every, (times, tensors) = run.settings.get("run.replica_check_every"), run.digests
    reduction = run.settings.get("run.reduction", "-")
    descriptions = {"exact": "exact: the same bits on any number of processes", "fast": "fast: in floating point"}
    updates = run.log.series.get("sync/update", Series()).y
    if "ReplicaMismatchError" in str(run.status.get("why", "")):
        comparison = "replicas differed, and the run stopped"
    elif updates and not updates[-1]:
        comparison = f"at the start; the run ended before the next check, {check_every} updates later"
    elif updates:
        comparison = f"every {check_every} updates; in sync at update {format_number(updates[-1])}, the last in the log"
    elif run.processes == 1:
        comparison = "one process: nothing to compare"
    else:
        comparison = f"every {check_every} updates; not in the log"
    digests = "not enabled (run.digest_every)"
    if times:
        what = f"{format_number(tensors)} tensors" if tensors else "the agent and its metrics"
        digests = f"{format_number(times)} times, of {what}"
    return descriptions.get(str(reduction), str(reduction)), comparison, digests


def starts(runs: Sequence[ReportedRun]) -> tuple[str, Table] | None:
    """Table with one row for each start of each run, and a summary if it is to be collapsed."""
    rows = []
    for run in runs:
        for number, (start, next_start) in enumerate(zip_longest(run.starts, run.starts[1:]), 1):
            reached = float(next_start.samples) if next_start else run.log.samples
            event = "new run" if number == 1 and not start.samples else f"resumed at {format_number(start.samples)}"
            event = f"forked at {format_number(start.samples)}" if number == 1 and run.fork else event
            result = "resumed by the next start" if next_start else run.state
            processes = start.processes or (run.processes if next_start is None else None) or "-"
            rows.append((run.label, number, _date(start.timestamp), processes, event, format_number(reached), result))
    if not rows:
        return None
    summary = f"{len(rows)} starts, one of each run" if len(rows) == len(runs) > 1 else ""
    heads = ("run", "start", "time (UTC)", "processes", "", "samples reached", "ended")
    return summary, Table(heads, rows, "words")


def _date(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def proof(record: Any) -> dict[str, object] | None:
    """Check the record of `lockstep prove`; None if invalid. The verdict follows from the hashes, not from the file."""
    try:
        rows = [{str(key): value for key, value in row.items()} for row in record["rows"][:100]]
        recipe, date = str(record["recipe"])[:100], str(record.get("date", ""))[:40]
    except (AttributeError, LookupError, TypeError):
        return None
    hashes = [str(row.get("hash") or "")[:64] for row in rows]
    one_agent = all(hashes) and len(set(hashes)) == 1
    verdict = f"One agent: {len(rows)} runs, one hash." if one_agent else "Not one agent."
    cells = [
        (row.get("processes"), row.get("event") or "-", value[:32] or "failed", row.get("problem") or "")
        for row, value in zip(rows, hashes, strict=True)
    ]
    versions = ", ".join(
        f"{name} {record[name]}"[:60] for name in ("lockstep", "torch", "python", "cpu_capability") if record.get(name)
    )
    settings = record.get("settings")
    arguments = " ".join(str(argument)[:100] for argument in settings[:50]) if isinstance(settings, list) else ""
    table = Table(("processes", "event", "SHA-256 of the run", ""), cells, "words")
    about = f"{recipe} · {date} · {versions}"
    return {"one_agent": one_agent, "verdict": verdict, "table": table, "about": about, "arguments": arguments}
