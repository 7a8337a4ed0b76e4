"""Compare the records of all processes of a training script, and report whether they train one model.

A record describes one process: its steps as fingerprints of tensors, its collectives, and how it ended (see
`tools/audit/recorder.py`). Equal bits have equal fingerprints. Steps are paired by number, tensors by name.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

StepRecord = Mapping[str, Any]

KINDS = {
    "collectives": "every process reaches every collective",
    "gradients": "gradients are reduced over all processes",
    "parameters": "parameters are equal on all processes",
    "state": "optimizer state is equal on all processes",
    "buffers": "buffers are equal on all processes",
    "data": "processes learn from different data",
}
"""Checks of an audit, each as a statement that holds for a correct script."""


@dataclass(frozen=True)
class Finding:
    """One problem: what is wrong, in which tensors, from which step, why, and the fix."""

    kind: str
    what: str
    fix: str
    tensors: list[str] = field(default_factory=list)
    step: int | None = None
    why: str = ""


@dataclass(frozen=True)
class AuditReport:
    """Result of an audit."""

    findings: list[Finding]
    notes: list[str]
    """Remarks that are no findings, and what could not be checked."""
    steps: int
    """Number of optimizer steps that every process took."""
    unseen: list[str]
    """Kinds that could not be checked, because nothing was recorded about them."""


def analyze(records: Sequence[StepRecord]) -> AuditReport:
    """Compare the records of all processes."""
    rows = list(zip(*(record["steps"] for record in records), strict=False))  # a row is one step of every process
    finders = (_collectives, _gradients, _parameters, _state, _buffers, _data)
    found = [finding for finder in finders for finding in finder(records, rows)]
    unseen = [] if any(step["local"] or step["inputs"] for row in rows for step in row) else ["data"]
    return AuditReport(found, [*_endings(records), *_notes(rows)], len(rows), unseen)


StepRows = Sequence[Sequence[StepRecord]]


# -- control flow and collectives --------------------------------------------------------------------------------------


def _collectives(records: Sequence[StepRecord], rows: StepRows) -> Iterator[Finding]:
    """Find processes that took different numbers of steps, are at different lines, or called other collectives."""
    mismatch = _first_mismatch(records)
    if _diverged(records):
        fewest = min(len(record["steps"]) for record in records)
        exited = [r for r in records if r["how"] == "ended" and len(r["steps"]) == fewest]
        yield Finding(
            "collectives",
            f"{_process_names(exited)} left the training loop, but the other processes did not"
            if exited
            else "some processes never reach the collective in which the others wait",
            "All-reduce the condition of every branch around a collective (early stop, time limit, NaN, best score),"
            " then branch on the result, so that all processes take the same branch.",
            step=fewest + 1,
            why="; ".join([*map(_describe_end, records), *([mismatch] if mismatch else [])]),
        )
    elif mismatch:
        yield Finding(
            "collectives",
            f"processes call different collectives: {mismatch}",
            "Call the same collectives in the same order on every process; look for a branch on the rank.",
        )


def _diverged(records: Sequence[StepRecord]) -> bool:
    """Return whether processes ended in different ways, after different numbers of steps, or at different lines.

    Different lines count only if one process may be waiting for another.
    """
    endings = {(record["how"], len(record["steps"])) for record in records}
    lines = {record["stack"][-1] for record in records if record["how"] in ("stood", "failed") and record["stack"]}
    return len(endings) > 1 or (len(lines) > 1 and not _only_slow(records))


def _only_slow(records: Sequence[StepRecord]) -> bool:
    """Return whether all interrupted processes had called the same collectives, so that none waits for another."""
    return all(record["how"] == "stood" and record["collectives"] for record in records) and not _first_mismatch(
        records
    )


def _describe_end(record: StepRecord) -> str:
    """Describe where a process was when the audit ended."""
    line = record["stack"][-1] if record["stack"] else ""
    location = f" at {line}" if line else ""
    progress = f"after step {len(record['steps'])}"
    message = record["error"].splitlines()[0] if record["error"] else "no message"
    endings = {
        "reached": f"took all {len(record['steps'])} steps",
        "ended": f"finished its script {progress}",
        "stood": f"is blocked or busy {progress}{location}",
        "failed": f"failed {progress}{location} ({message})",
        "gone": f"exited {progress}{location} ({record['error']})",
    }
    return f"process {record['process']} {endings[record['how']]}"


def _endings(records: Sequence[StepRecord]) -> Iterator[str]:
    """Yield why an audit ended early in the same way on all processes. This is a note, not a finding."""
    if _diverged(records) or records[0]["how"] == "reached":
        return
    prefix = f"Only {len(records[0]['steps'])} steps were recorded: "
    if _only_slow(records):
        endings = "; ".join(map(_describe_end, records))
        why = "All called the same collectives, so no process waits for another."
        yield f"{prefix}{endings}. {why} Increase --step-timeout."
    else:
        yield f"{prefix}{_describe_end(records[0])}, like all other processes."


def _first_mismatch(records: Sequence[StepRecord]) -> str:
    """Describe the first collective of a process group in which two of its processes differ. Empty if none."""
    sequences = [_by_group(record["collectives"]) for record in records]
    for group in sorted({group for sequence in sequences for group in sequence}):
        # A process without any collective of a group is assumed not to be a member of it.
        members = {p: sequence[group] for p, sequence in enumerate(sequences) if group in sequence}
        for index in range(max(map(len, members.values()))):
            calls = {p: calls[index] if index < len(calls) else "none" for p, calls in members.items()}
            if len(set(calls.values())) > 1:
                listed = ", ".join(f"{call} on process {process}" for process, call in calls.items())
                return f"collective {index + 1} of group {group} is {listed}"
    return ""


def _by_group(collectives: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for call in collectives:
        # Only these require equal sizes: processes may gather and scatter unequal parts.
        sized = call["name"] in ("all_reduce", "allreduce", "broadcast")
        grouped.setdefault(call["group"], []).append(f"{call['name']} {call['sizes']}" if sized else call["name"])
    return grouped


# -- tensors -----------------------------------------------------------------------------------------------------------


def _gradients(records: Sequence[StepRecord], rows: StepRows) -> Iterator[Finding]:
    names, step = _differing(rows, "gradients")
    if not names or _averages_parameters(rows):
        return
    why, fix = _why_unreduced(records, rows, step)
    yield Finding(
        "gradients",
        f"gradients are not reduced: {len(names)} of {_count(rows, 'gradients')} differ between processes",
        fix,
        names,
        step,
        why,
    )


def _why_unreduced(records: Sequence[StepRecord], rows: StepRows, step: int) -> tuple[str, str]:
    """Return the likely cause of differing gradients and its fix."""
    wrappers = [wrapper for row in rows for wrapper in row[0]["wrappers"]]
    calls = Counter[str]()
    for wrapper in wrappers:
        calls[wrapper["name"]] += wrapper["calls"]
    bypassed = [name for name, number in calls.items() if number == 0]
    if bypassed:
        name = bypassed[0]
        return (
            f"DistributedDataParallel wraps {name}, but its own forward was never called: DDP reduces nothing if the"
            f" script calls {name}.module or its methods directly",
            f"Call {name}(...) and do the work in its forward; or remove DDP and all-reduce the gradients"
            " after backward.",
        )
    first, last = rows[0][0]["time"], rows[-1][0]["time"]
    between = [call for call in records[0]["collectives"] if first <= call["time"] <= last]
    if len(rows) > 1 and not between:
        return (
            "there is no collective between optimizer steps",
            "All-reduce every gradient and divide by the number of processes, after backward and before the step; or"
            " wrap the module in DistributedDataParallel and call the wrapper.",
        )
    return (
        "there are collectives between steps, but they do not make these gradients equal",
        "Reduce every parameter of the optimizer after its last backward. Usual causes: a parameter created after"
        " the wrapper, a second backward, no_sync(), clipping or noise that differs between processes.",
    )


def _averages_parameters(rows: StepRows) -> bool:
    """Return whether the script averages parameters: they differ after a step and are equal before the next one."""
    return bool(_differing(rows[:-1], "after")[0]) and not _differing(rows, "before")[0]


def _parameters(records: Sequence[StepRecord], rows: StepRows) -> Iterator[Finding]:
    parameter_names = [{name for step in record["steps"] for name in step["before"]} for record in records]
    extra = sorted(set.union(*parameter_names) - set.intersection(*parameter_names))
    if rows and extra:
        yield Finding(
            "parameters",
            f"the optimizers of different processes hold different parameters: {len(extra)} are not held by all",
            "Build the same model and the same optimizers on every process.",
            extra,
            1,
        )
    first = rows[:1]
    names, _ = _differing(first, "before")
    if names:
        yield Finding(
            "parameters",
            f"parameters differ before the first step: {len(names)} of {len(first[0][0]['before'])}",
            "Use the same seed for initialization on all processes, or broadcast the parameters from one process.",
            names,
            1,
        )
        return
    names, step = _differing(rows, "after")
    if names and not _averages_parameters(rows):
        yield Finding(
            "parameters",
            f"parameters diverge: {len(names)} of {_count(rows, 'after')} differ",
            "Reduce gradients before every step. Apply other parameter changes (soft updates, clipping, resets)"
            " equally on all processes.",
            names,
            step,
        )


def _state(records: Sequence[StepRecord], rows: StepRows) -> Iterator[Finding]:
    names, step = _differing(rows, "state")
    if names:
        yield Finding(
            "state",
            f"optimizer state differs between processes: {len(names)} of {_count(rows, 'state')}",
            "Reduce the gradients, which determine it. After a resume, load the same state on every process.",
            names,
            step,
        )


def _buffers(records: Sequence[StepRecord], rows: StepRows) -> Iterator[Finding]:
    names, step = _differing(rows, "buffers")
    names = [name for name in names if not _resynced(name, rows)]
    if names:
        yield Finding(
            "buffers",
            f"buffers differ between processes: {len(names)} of {_count(rows, 'buffers')}",
            "Synchronize running statistics, which each process computes from its own data: use SyncBatchNorm,"
            " all-reduce the statistics, or let DDP broadcast buffers (broadcast_buffers=True, and call the wrapper).",
            names,
            step,
        )


def _resynced(name: str, rows: StepRows) -> bool:
    """Return whether a DDP wrapper that is called broadcasts this buffer from the main process at each forward."""
    roots = {
        wrapper["name"] for row in rows for wrapper in row[0]["wrappers"] if wrapper["buffers"] and wrapper["calls"]
    }
    return any(name.startswith(f"{root}.") for root in roots)


def _count(rows: StepRows, part: str) -> int:
    return len({name for row in rows for name in row[0][part]})


def _differing(rows: StepRows, part: str) -> tuple[list[str], int]:
    """Return the tensors of a part that differ between processes at some step, and the first such step."""
    first: dict[str, int] = {}
    for number, row in enumerate(rows, 1):
        shared = set.intersection(*(set(step[part]) for step in row))
        for name in row[0][part]:
            if name in shared and name not in first and len({step[part][name] for step in row}) > 1:
                first[name] = number
    return list(first), min(first.values(), default=0)


# -- data --------------------------------------------------------------------------------------------------------------


def _data(records: Sequence[StepRecord], rows: StepRows) -> Iterator[Finding]:
    gradients = [[step["local"] for step in row] for row in rows if any(any(s["local"].values()) for s in row)]
    inputs = [[step["inputs"] for step in row] for row in rows if any(step["inputs"] for step in row)]
    same_gradients = bool(gradients) and all(_all_equal(row) for row in gradients)
    same_inputs = bool(inputs) and all(_all_equal(row) for row in inputs)
    if not same_gradients and not same_inputs:
        return
    seeds = _same_seeds(rows)
    observations = [
        "the modules were called with the same inputs" if same_inputs else "",
        "backward computed bit-identical gradients" if same_gradients else "",
    ]
    yield Finding(
        "data",
        f"the same data on every process: {' and '.join(filter(None, observations))} at every step",
        "Give each process its own part: use a DistributedSampler (and set_epoch), or add the rank to the seeds of"
        " environments and generators. Now N processes do the work of one.",
        step=1,
        why=f"the global generators of {' and '.join(seeds)} are in the same state on all processes: the same seed"
        if seeds
        else "",
    )


def _same_seeds(rows: StepRows) -> list[str]:
    """Return libraries whose global generator the script uses and that has the same state on every process."""
    libraries = rows[0][0]["random"] if rows else {}
    return [
        name
        for name in libraries
        if all(_all_equal([step["random"][name] for step in row]) for row in rows)
        and (len({row[0]["random"][name] for row in rows}) > 1 or len(rows) == 1)
    ]


def _all_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _notes(rows: StepRows) -> Iterator[str]:
    seeds = _same_seeds(rows)
    if seeds:
        yield (
            f"All processes draw the same numbers from the global generator of {' and '.join(seeds)}: correct for"
            " initialization, wrong for exploration, dropout and augmentation."
        )
    if rows and _averages_parameters(rows):
        yield "Gradients differ, but parameters are equal before each step: parameters are averaged, not gradients."
    resynced = [name for name in _differing(rows, "buffers")[0] if _resynced(name, rows)]
    if resynced:
        yield (
            f"Buffers ({_join(resynced)}) differ between forwards; DDP broadcasts them from rank 0 at the next forward."
        )
    sharded = sorted({name for row in rows for step in row for name in step["sharded"]})
    if sharded:
        yield f"Not checked, because they are sharded over the processes: {_join(sharded)}."


def _process_names(records: Sequence[StepRecord]) -> str:
    numbers = ", ".join(str(record["process"]) for record in records)
    return f"process {numbers}" if len(records) == 1 else f"processes {numbers}"


def _join(names: Sequence[str], shown: int = 4) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
