"""Whether it is one agent: what every run checked, who trained it, and the record of a proof."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from lockstep.tools.report.html import Markup, details, join, table, tag, text
from lockstep.tools.report.run_data import Run
from lockstep.tools.report.series import figure


def checks(runs: Sequence[Run]) -> Markup:
    """What every run found out about itself."""
    found: dict[tuple[object, ...], list[str]] = {}
    for run in runs:
        found.setdefault(_checked(run), []).append(run.label)
    rows = [
        (f"all {len(each)} runs" if len(each) == len(runs) > 1 else ", ".join(each), *told)
        for told, each in found.items()
    ]
    return table(("run", "gradients summed", "processes compared", "digests"), rows, "words")


def _checked(run: Run) -> tuple[object, ...]:
    every, digested = run.settings.get("run.replica_check_every"), run.digests
    reduction = run.settings.get("run.reduction", "-")
    sums = {"exact": "exactly: the same bits on any number of processes", "fast": "in floating point (fast)"}
    series = run.log.series.get("sync/update")
    if "ReplicaMismatchError" in str(run.status.get("why", "")):
        compared = "they came apart, and the run stopped"
    elif series is not None and len(series.y) and not series.y[-1]:
        compared = f"at the start; {every} updates later, when it would be done again, the run was over"
    elif series is not None and len(series.y):
        compared = f"every {every} updates; in sync at update {figure(series.y[-1])}, the last in the log"
    elif run.processes == 1:
        compared = "one process: there is nobody to compare with"
    else:
        compared = f"every {every} updates; the log does not say how often"
    digests = (
        f"{figure(digested[0])} times, of {figure(digested[1])} tensors"
        if digested[0]
        else "not asked for (run.log_tensor_digests)"
    )
    return sums.get(str(reduction), str(reduction)), compared, digests


def starts(runs: Sequence[Run]) -> Markup:
    """Who trained it: a row for each start."""
    rows = []
    for run in runs:
        for number, start in enumerate(run.starts):
            later = run.starts[number + 1] if number + 1 < len(run.starts) else None
            until = float(later.begin) if later else run.log.samples
            event = "began" if number == 0 and not start.begin else f"went on from {figure(start.begin)}"
            ended = "another start went on from there" if later else run.state
            processes = start.processes or (run.processes if later is None else None) or "-"
            rows.append((run.label, number + 1, _date(start.began), processes, event, figure(until), ended))
    if not rows:
        return Markup("")
    told = table(("run", "start", "when (UTC)", "processes", "", "came to", "then"), rows, "words")
    return details(f"{len(rows)} starts, one of each run", told) if len(rows) == len(runs) > 1 else told


def _date(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def proof(record: Any) -> Markup:
    """The record of `lockstep prove`; its verdict is taken from the hashes, not from what the file says of itself."""
    try:
        rows = [{str(key): value for key, value in row.items()} for row in record["rows"][:100]]
        recipe, when = str(record["recipe"])[:100], str(record.get("date", ""))[:40]
    except (AttributeError, LookupError, TypeError):
        return tag("p", "The proof is left out: the file is not what lockstep prove --json writes.", class_="quiet")
    hashes = [str(row.get("hash") or "")[:64] for row in rows]
    one = bool(hashes) and all(hashes) and len(set(hashes)) == 1
    words = f"One agent: {len(rows)} runs, one hash." if one else "Not one agent."
    shown = [
        (row.get("processes"), row.get("event") or "-", tag("code", value[:32] or "failed"), row.get("problem") or "")
        for row, value in zip(rows, hashes, strict=True)
    ]
    versions = ", ".join(
        f"{name} {record[name]}"[:60] for name in ("lockstep", "torch", "python", "cpu_capability") if record.get(name)
    )
    settings = record.get("settings")
    words_given = " ".join(str(word)[:100] for word in settings[:50]) if isinstance(settings, list) else ""
    about = join([f"{recipe} · {when} · {versions}", tag("br"), tag("code", text(words_given, 1000))])
    return join(
        [
            tag("h3", "Proof"),
            tag("p", tag("strong", words, class_="good" if one else "bad")),
            table(("processes", "event", "SHA-256 of the run", ""), shown, "words"),
            tag("p", about, class_="quiet"),
        ]
    )
