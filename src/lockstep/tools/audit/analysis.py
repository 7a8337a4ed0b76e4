"""Do the processes of a training script train one model? Findings from what each of them wrote down, step by step.

A record is one process: its steps in fingerprints of tensors, its collectives, and how it ended (see
`tools/audit/recorder.py`). Fingerprints are equal where bits are. Steps are paired by number, tensors by name.
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
"""What an audit looks for, in the words of a script that is right."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: what, in which tensors, since when, why, and what to do."""

    kind: str
    what: str
    fix: str
    tensors: list[str] = field(default_factory=list)
    step: int | None = None
    why: str = ""


@dataclass(frozen=True)
class AuditReport:
    """What an audit came to."""

    findings: list[Finding]
    notes: list[str]
    """What is worth knowing and no fault, and what could not be looked at."""
    steps: int
    """Optimizer steps that every process took."""
    unseen: list[str]
    """Kinds about which nothing can be said, because the script showed nothing of them."""


def analyze(records: Sequence[StepRecord]) -> AuditReport:
    """Compare what the processes wrote down."""
    rows = list(zip(*(record["steps"] for record in records), strict=False))  # a row is one step of every process
    finders = (_collectives, _gradients, _parameters, _state, _buffers, _data)
    found = [finding for finder in finders for finding in finder(records, rows)]
    unseen = [] if any(step["local"] or step["inputs"] for row in rows for step in row) else ["data"]
    return AuditReport(found, [*_endings(records), *_notes(rows)], len(rows), unseen)


RowDigests = Sequence[Sequence[StepRecord]]


# -- who went where ----------------------------------------------------------------------------------------------------


def _collectives(records: Sequence[StepRecord], rows: RowDigests) -> Iterator[Finding]:
    """Processes that took different numbers of steps or stand at different lines, or whose collectives differ."""
    mismatch = _first_mismatch(records)
    if _went_apart(records):
        fewest = min(len(record["steps"]) for record in records)
        left = [r for r in records if r["how"] == "ended" and len(r["steps"]) == fewest]
        yield Finding(
            "collectives",
            f"{_names(left)} left the training loop, and the others did not"
            if left
            else "some processes never get to where the others wait for them",
            "A branch around a collective (early stop, time limit, NaN, best score) must be taken by all processes or"
            " by none: all-reduce the condition first, then branch on the result.",
            step=fewest + 1,
            why="; ".join([*map(_where, records), *([mismatch] if mismatch else [])]),
        )
    elif mismatch:
        yield Finding(
            "collectives",
            f"processes call different collectives: {mismatch}",
            "Have every process call the same collectives in the same order; look for a branch on the rank.",
        )


def _went_apart(records: Sequence[StepRecord]) -> bool:
    """Whether processes ended in different ways, after different numbers of steps, or at different lines where one may
    be waiting for another."""
    endings = {(record["how"], len(record["steps"])) for record in records}
    lines = {record["stack"][-1] for record in records if record["how"] in ("stood", "failed") and record["stack"]}
    return len(endings) > 1 or (len(lines) > 1 and not _only_slow(records))


def _only_slow(records: Sequence[StepRecord]) -> bool:
    """Whether processes that were interrupted had all called the same collectives: none waits there for another."""
    if any(record["how"] != "stood" or not record["collectives"] for record in records):
        return False
    return not _first_mismatch(records)


def _where(record: StepRecord) -> str:
    """Where a process was when the audit ended, in words."""
    line = record["stack"][-1] if record["stack"] else ""
    at = f" at {line}" if line else ""
    after = f"after step {len(record['steps'])}"
    words = {
        "reached": f"took all {len(record['steps'])} steps",
        "ended": f"ended its script {after}",
        "stood": f"still stands {after}{at}",
        "failed": f"failed {after}{at} ({record['error'].splitlines()[0] if record['error'] else 'no word'})",
        "gone": f"was lost {after}{at} ({record['error']})",
    }
    return f"process {record['process']} {words[record['how']]}"


def _endings(records: Sequence[StepRecord]) -> Iterator[str]:
    """What cut an audit short on all processes alike, which is no finding."""
    if _went_apart(records) or records[0]["how"] == "reached":
        return
    few = f"Only {len(records[0]['steps'])} steps were seen: "
    if _only_slow(records):
        where = "; ".join(map(_where, records))
        yield (
            few
            + f"{where}. All have called the same collectives, so nobody waits for another: give more --step-timeout."
        )
    else:
        yield few + f"{_where(records[0])}, and so did the others."


def _first_mismatch(records: Sequence[StepRecord]) -> str:
    """The first place in the sequence of a group's collectives at which two of its processes differ, in words."""
    sequences = [_by_group(record["collectives"]) for record in records]
    for group in sorted({group for sequence in sequences for group in sequence}):
        # A process without a single collective of a group is taken for no member of it.
        members = {p: sequence[group] for p, sequence in enumerate(sequences) if group in sequence}
        for place in range(max(map(len, members.values()))):
            calls = {p: calls[place] if place < len(calls) else "nothing more" for p, calls in members.items()}
            if len(set(calls.values())) > 1:
                told = ", ".join(f"process {process} {call}" for process, call in calls.items())
                return f"number {place + 1} of group {group} is {told}"
    return ""


def _by_group(collectives: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for call in collectives:
        # Sizes must be equal in these alone: processes may gather and scatter unequal parts.
        sized = call["name"] in ("all_reduce", "allreduce", "broadcast")
        grouped.setdefault(call["group"], []).append(f"{call['name']} {call['sizes']}" if sized else call["name"])
    return grouped


# -- what they hold ----------------------------------------------------------------------------------------------------


def _gradients(records: Sequence[StepRecord], rows: RowDigests) -> Iterator[Finding]:
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


def _why_unreduced(records: Sequence[StepRecord], rows: RowDigests, step: int) -> tuple[str, str]:
    """Why gradients differ, as far as can be seen from outside, and what to do about it."""
    wrappers = [wrapper for row in rows for wrapper in row[0]["wrappers"]]
    calls = Counter[str]()
    for wrapper in wrappers:
        calls[wrapper["name"]] += wrapper["calls"]
    bypassed = [name for name, number in calls.items() if number == 0]
    if bypassed:
        name = bypassed[0]
        return (
            f"DistributedDataParallel wraps {name}, but its own forward was never called: DDP reduces nothing when a"
            f" method or a part of {name}.module is called past it",
            f"Call {name}(...) itself and have its forward do the work; or leave DDP out and all-reduce the gradients"
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
        "See that every parameter the optimizer holds is reduced, after its last backward. Usual causes: a parameter"
        " made after the wrapper, a second backward, no_sync(), clipping or noise that is not the same everywhere.",
    )


def _averages_parameters(rows: RowDigests) -> bool:
    """Whether unequal gradients are made up for: parameters that differ after a step are equal before the next one."""
    return bool(_differing(rows[:-1], "after")[0]) and not _differing(rows, "before")[0]


def _parameters(records: Sequence[StepRecord], rows: RowDigests) -> Iterator[Finding]:
    held = [{name for step in record["steps"] for name in step["before"]} for record in records]
    if len(rows) > 0 and len(set(map(frozenset, held))) > 1:
        extra = sorted(set.union(*held) - set.intersection(*held))
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
            "Seed the initialisation with the same number everywhere, or broadcast the parameters from one process.",
            names,
            1,
        )
        return
    names, step = _differing(rows, "after")
    if names and not _averages_parameters(rows):
        yield Finding(
            "parameters",
            f"parameters drift apart: {len(names)} of {_count(rows, 'after')} differ",
            "Reduce gradients before every step; what changes a parameter otherwise (soft updates, clipping, resets)"
            " must do the same everywhere.",
            names,
            step,
        )


def _state(records: Sequence[StepRecord], rows: RowDigests) -> Iterator[Finding]:
    names, step = _differing(rows, "state")
    if names:
        yield Finding(
            "state",
            f"optimizer state differs between processes: {len(names)} of {_count(rows, 'state')}",
            "It follows the gradients: reduce them. After a resume, load the same state on every process.",
            names,
            step,
        )


def _buffers(records: Sequence[StepRecord], rows: RowDigests) -> Iterator[Finding]:
    names, step = _differing(rows, "buffers")
    names = [name for name in names if not _resynced(name, rows)]
    if names:
        yield Finding(
            "buffers",
            f"buffers differ between processes: {len(names)} of {_count(rows, 'buffers')}",
            "Running statistics of each process's own data are not the model's: use SyncBatchNorm, all-reduce the"
            " statistics, or let DDP broadcast buffers (broadcast_buffers=True, and call the wrapper).",
            names,
            step,
        )


def _resynced(name: str, rows: RowDigests) -> bool:
    """Whether a DDP wrapper that is called sends this buffer out again at each forward: saved is the main process's."""
    roots = {
        wrapper["name"] for row in rows for wrapper in row[0]["wrappers"] if wrapper["buffers"] and wrapper["calls"]
    }
    return any(name.startswith(f"{root}.") for root in roots)


def _count(rows: RowDigests, part: str) -> int:
    return len({name for row in rows for name in row[0][part]})


def _differing(rows: RowDigests, part: str) -> tuple[list[str], int]:
    """The tensors of a part that are not equal on all processes at some step, and the first such step."""
    first: dict[str, int] = {}
    for number, row in enumerate(rows, 1):
        shared = set.intersection(*(set(step[part]) for step in row))
        for name in row[0][part]:
            if name in shared and name not in first and len({step[part][name] for step in row}) > 1:
                first[name] = number
    return list(first), min(first.values(), default=0)


# -- what they learn from ----------------------------------------------------------------------------------------------


def _data(records: Sequence[StepRecord], rows: RowDigests) -> Iterator[Finding]:
    gradients = [[step["local"] for step in row] for row in rows if any(any(s["local"].values()) for s in row)]
    inputs = [[step["inputs"] for step in row] for row in rows if any(step["inputs"] for step in row)]
    same_gradients = bool(gradients) and all(_all_equal(row) for row in gradients)
    same_inputs = bool(inputs) and all(_all_equal(row) for row in inputs)
    if not same_gradients and not same_inputs:
        return
    seeds = _same_seeds(rows)
    evidence = [
        "the modules were called with the same inputs" if same_inputs else "",
        "backward brought the same gradients, bit by bit," if same_gradients else "",
    ]
    yield Finding(
        "data",
        f"the same data on every process: {' and '.join(filter(None, evidence))} at every step",
        "Give each process its own part: a DistributedSampler (and set_epoch), or environments and generators seeded"
        " with the rank added. As it is, N processes do the work of one.",
        step=1,
        why=f"the global generators of {' and '.join(seeds)} stand at the same place on all processes: the same seed"
        if seeds
        else "",
    )


def _same_seeds(rows: RowDigests) -> list[str]:
    """Libraries whose global generator is drawn from, and gives the same numbers on every process."""
    libraries = rows[0][0]["random"] if rows else {}
    return [
        name
        for name in libraries
        if all(_all_equal([step["random"][name] for step in row]) for row in rows)
        and (len({row[0]["random"][name] for row in rows}) > 1 or len(rows) == 1)
    ]


def _all_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _notes(rows: RowDigests) -> Iterator[str]:
    seeds = _same_seeds(rows)
    if seeds:
        yield (
            f"All processes draw the same numbers from the global generator of {' and '.join(seeds)}: right for"
            " initialisation, wrong for exploration, dropout and augmentation."
        )
    if rows and _averages_parameters(rows):
        yield "Gradients differ and parameters are made equal after each step: parameters are averaged, not gradients."
    resynced = [name for name in _differing(rows, "buffers")[0] if _resynced(name, rows)]
    if resynced:
        yield (
            f"Buffers ({_list(resynced)}) differ between forwards; DDP sends the main process's to all at the next one."
        )
    sharded = sorted({name for row in rows for step in row for name in step["sharded"]})
    if sharded:
        yield f"Not looked at, because every process holds another part: {_list(sharded)}."


def _names(records: Sequence[StepRecord]) -> str:
    numbers = ", ".join(str(record["process"]) for record in records)
    return f"process {numbers}" if len(records) == 1 else f"processes {numbers}"


def _list(names: Sequence[str], shown: int = 4) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
