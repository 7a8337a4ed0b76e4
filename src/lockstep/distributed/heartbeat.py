"""Where every process of a run is, as each one last wrote it down, and what that says when somebody is missing.

Each process keeps one small file in a directory that all of them see. Files, not the store or a collective: they can
be read when the main process, which holds the store, is the one that is stuck or stopped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Heartbeat:
    """One process at one moment."""

    process: int
    host: str
    pid: int
    sequence: int
    """Grows while the process runs; one that stays the same belongs to a process that is stopped or gone."""
    phase: str
    update: int
    collective: int
    """How many collectives it has begun."""
    name: str
    """The last of them."""
    wait_seconds: float | None
    """Seconds it, or its device, has been waiting in that one; None when it does something else."""
    busy: float
    """Seconds since it started in which it waited for nobody."""
    age: float = 0.0
    """Seconds since it started."""
    resources: dict[str, float] = field(default_factory=dict)
    """What it takes of its machine, by name."""
    stack: list[str] = field(default_factory=list)
    """Its main thread, innermost last."""
    launched_at: str = ""
    """Line that launched the collective, where the device waits in it and the host has moved on."""
    device_behind: bool = False
    """Whether the device still computes what comes before the collective, which the host has launched."""

    @property
    def line(self) -> str:
        return self.launched_at or (self.stack[-1] if self.stack else "an unknown line")

    @property
    def who(self) -> str:
        return f"process {self.process} on {self.host} (pid {self.pid})"


def write(directory: Path, presence: Heartbeat) -> None:
    """Leave word; a disk that cannot take it must not disturb the work."""
    try:
        beside = directory / f".{presence.process}"
        beside.write_text(json.dumps(asdict(presence)))
        beside.replace(directory / f"{presence.process}.json")
    except OSError:
        return


def read(directory: Path) -> dict[int, Heartbeat]:
    """Everybody's last word; one that cannot be read is left out."""
    everybody = {}
    try:
        paths = list(directory.glob("*.json"))
    except OSError:
        return {}
    for path in paths:
        try:
            presence = Heartbeat(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        everybody[presence.process] = presence
    return everybody


def stale_processes(before: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat]) -> set[int]:
    """Who has written nothing since then: stopped, or gone."""
    return {process for process, p in before.items() if process in now and now[process].sequence == p.sequence}


def describe_hang(before: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat], size: int, me: Heartbeat) -> str:
    """Who has not arrived at the collective that `me` waits in, where that process is, and who waits for it.

    `before` is what the same processes wrote some seconds earlier: who has written nothing since is stopped or gone.
    """
    others = [now.get(process) for process in range(size)]
    quiet = stale_processes(before, now) - {me.process}
    gone = [p for p in others if p and p.process in quiet]
    unknown = [process for process in range(size) if process not in now]
    missing = [p for p in others if p and p not in gone and (p.collective < me.collective or p.wait_seconds is None)]
    waiting = [p for p in others if p and p not in gone and p not in missing]
    lines = [
        f"{_names(waiting)} waited {me.wait_seconds or 0:.0f} s at collective {me.collective}"
        f" ('{me.name}', phase {me.phase}, update {me.update}) for:"
    ]
    for p in gone:
        lines.append(
            f"  {p.who}: it has said nothing for some seconds (stopped, or its host is gone);"
            f" last seen in phase {p.phase} at {p.line}"
        )
    for p in missing:
        if p.device_behind:
            lines.append(
                f"  {p.who}: it launched collective {p.collective} ('{p.name}') at {p.line},"
                " and its device still computes what comes before it"
            )
        else:
            lines.append(
                f"  {p.who}: it is in phase {p.phase}, after collective {p.collective} ('{p.name}'), at {p.line}"
            )
        lines += [f"      {frame}" for frame in p.stack[-8:]]
    lines += [f"  process {process}: it has never said where it is" for process in unknown]
    if not gone and not missing and not unknown:
        lines = describe_mismatch(waiting, me)
    return "\n".join(lines)


def describe_mismatch(waiting: Sequence[Heartbeat], me: Heartbeat) -> list[str]:
    """Everybody waits, but not for the same thing: some process took a branch that others did not."""
    places: dict[tuple[str, str], list[Heartbeat]] = {}
    for p in waiting:
        places.setdefault((p.name, p.line), []).append(p)
    lines = [f"all processes wait at collective {me.collective} (update {me.update}), and not at the same one:"]
    for (name, line), there in sorted(places.items(), key=lambda item: len(item[1])):
        lines.append(f"  {_names(there)}: '{name}' (phase {there[0].phase}), at {line}")
        lines += [f"      {frame}" for frame in there[0].stack[-8:]]
    if len(places) > 1:
        lines.append("  A branch around a collective was taken by some of them only: agree on it first.")
    return lines


def _names(there: Sequence[Heartbeat]) -> str:
    if len(there) == 1:
        return there[0].who
    numbers = ", ".join(str(p.process) for p in there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
    return f"processes {numbers}"


@dataclass(frozen=True)
class UtilizationReport:
    """What the processes did over some time."""

    utilization: dict[int, float] = field(default_factory=dict)
    """By process, the part of the time in which it waited for nobody; nothing of a process that is alone."""
    resources: dict[str, float] = field(default_factory=dict)
    """What they take of their machines, by name."""
    slow: str = ""
    """Which process the others wait for, if it is steadily the same."""


def utilization(before: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat]) -> dict[int, float]:
    """By process, the part of the time between two words in which it waited for nobody."""
    both = {p: (now[p].busy - before[p].busy, now[p].age - before[p].age) for p in sorted(now) if p in before}
    return {p: min(1.0, max(0.0, busy / age)) for p, (busy, age) in both.items() if age > 0}


def find_straggler(before: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat]) -> tuple[Heartbeat, float] | None:
    """The process that the others wait for, and how many times longer its work takes; None when they are even."""
    worked = {p: now[p].busy - before[p].busy for p in now if p in before}
    if len(worked) < 2:
        return None
    process = max(worked, key=lambda p: worked[p])
    usual = median(seconds for p, seconds in worked.items() if p != process)
    ratio = worked[process] / usual if usual > 0 else 1.0
    return (now[process], ratio) if ratio > 1.25 else None
