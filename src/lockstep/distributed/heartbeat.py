"""Heartbeats: messages in which every process reports its progress, and hang reports made from them.

Each process writes one small file to a shared directory. Files can still be read if the main process is stuck or
stopped. The store cannot, because the main process hosts it; only hosts without a common directory use it.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from lockstep.distributed.kv_store import KeyValueStore

_STOP = "heartbeat/stop"


@dataclass(frozen=True)
class Heartbeat:
    """State of one process at one time."""

    process: int
    host: str
    pid: int
    sequence: int
    """Incremented with every write. If it does not change, the process is stopped or dead."""
    phase: str
    update: int
    collective: int
    """Number of collectives begun."""
    name: str
    """Name of the latest collective."""
    wait_seconds: float | None
    """Seconds that the process, or its device, has waited in that collective; None if it does not wait."""
    busy: float
    """Seconds since the start in which the process did not wait for other processes."""
    age: float = 0.0
    """Seconds since the start."""
    resources: dict[str, float] = field(default_factory=dict)
    """CPU, GPU and memory usage, by metric name."""
    stack: list[str] = field(default_factory=list)
    """Stack of the main thread, innermost frame last."""
    launched_at: str = ""
    """Line that launched the collective, if the device waits in it and the host has continued."""
    device_behind: bool = False
    """Whether the host has launched the collective, but the device still runs earlier kernels."""

    @property
    def line(self) -> str:
        return self.launched_at or (self.stack[-1] if self.stack else "an unknown line")

    @property
    def process_name(self) -> str:
        return f"process {self.process} on {self.host} (pid {self.pid})"


class HeartbeatFiles:
    """Heartbeats in a directory that all processes share, and a flag with which one asks all to stop."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._stop = directory, directory / "stop"

    def write(self, heartbeat: Heartbeat) -> None:
        """Write a heartbeat. Ignore disk errors, which must not stop training."""
        with suppress(OSError):
            partial = self._directory / f".{heartbeat.process}"
            partial.write_text(json.dumps(asdict(heartbeat)))
            partial.replace(self._directory / f"{heartbeat.process}.json")

    def read(self) -> dict[int, Heartbeat]:
        """Read the latest heartbeat of every process; skip unreadable files."""
        heartbeats = {}
        with suppress(OSError):
            for path in self._directory.glob("*.json"):
                with suppress(OSError, ValueError, TypeError):
                    heartbeat = Heartbeat(**json.loads(path.read_text()))
                    heartbeats[heartbeat.process] = heartbeat
        return heartbeats

    def request_stop(self) -> None:
        with suppress(OSError):
            self._stop.touch()

    def stop_requested(self) -> bool:
        try:
            return self._stop.exists()
        except OSError:
            return False


class HeartbeatStore:
    """The same in the store, for hosts without a common directory. They cannot be read if the main process is stuck."""

    def __init__(self, store: KeyValueStore, size: int) -> None:
        self._store, self._size = store, size

    def write(self, heartbeat: Heartbeat) -> None:
        """Write a heartbeat. Ignore a lost connection: collectives report it."""
        with suppress(RuntimeError):
            self._store.set(f"heartbeat/{heartbeat.process}", json.dumps(asdict(heartbeat)))

    def read(self) -> dict[int, Heartbeat]:
        """Read the latest heartbeat of every process; none until all have sent one."""
        with suppress(RuntimeError, ValueError, TypeError):
            keys = [f"heartbeat/{process}" for process in range(self._size)]
            if self._store.has(keys):
                heartbeats = [Heartbeat(**json.loads(text)) for text in self._store.read(keys)]
                return {heartbeat.process: heartbeat for heartbeat in heartbeats}
        return {}

    def request_stop(self) -> None:
        with suppress(RuntimeError):
            self._store.set(_STOP, "")

    def stop_requested(self) -> bool:
        with suppress(RuntimeError):
            return self._store.has([_STOP])
        return False


def stale_processes(before: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat]) -> set[int]:
    """Return the processes that wrote no heartbeat since `before`: they are stopped or dead."""
    return {process for process, p in before.items() if process in now and now[process].sequence == p.sequence}


def describe_hang(before: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat], size: int, me: Heartbeat) -> str:
    """Report which processes have not arrived at the collective that `me` waits in, and where they are.

    `before` holds the heartbeats of some seconds earlier. Processes without a newer one are stopped or dead.
    """
    known = [now[process] for process in range(size) if process in now]
    unknown = [process for process in range(size) if process not in now]
    silent = stale_processes(before, now) - {me.process}
    stale = [p for p in known if p.process in silent]
    missing = [p for p in known if p not in stale and (p.collective < me.collective or p.wait_seconds is None)]
    waiting = [p for p in known if p not in stale and p not in missing]
    lines = [
        f"{_names(waiting)} waited {me.wait_seconds or 0:.0f} s at collective {me.collective}"
        f" ('{me.name}', phase {me.phase}, update {me.update}) for:"
    ]
    for p in stale:
        lines.append(
            f"  {p.process_name}: it has sent no heartbeat for some seconds (stopped, or its host is down);"
            f" last seen in phase {p.phase} at {p.line}"
        )
    for p in missing:
        collective = f"collective {p.collective} ('{p.name}')"
        state = f"it is in phase {p.phase}, after {collective}, at {p.line}"
        if p.device_behind:
            state = f"it launched {collective} at {p.line}, and its device still runs earlier kernels"
        lines += [f"  {p.process_name}: {state}", *(f"      {frame}" for frame in p.stack[-8:])]
    lines += [f"  process {process}: it has never sent a heartbeat" for process in unknown]
    if not stale and not missing and not unknown:
        lines = describe_mismatch(waiting, me)
    return "\n".join(lines)


def describe_mismatch(waiting: Sequence[Heartbeat], me: Heartbeat) -> list[str]:
    """Report that all processes wait, but in different collectives, because some took a branch that others did not."""
    groups: dict[tuple[str, str], list[Heartbeat]] = {}
    for p in waiting:
        groups.setdefault((p.name, p.line), []).append(p)
    lines = [f"all processes wait at collective {me.collective} (update {me.update}), but not at the same one:"]
    for (name, line), group in sorted(groups.items(), key=lambda item: len(item[1])):
        lines.append(f"  {_names(group)}: '{name}' (phase {group[0].phase}), at {line}")
        lines += [f"      {frame}" for frame in group[0].stack[-8:]]
    if len(groups) > 1:
        lines.append("  Only some processes took a branch around a collective. Synchronize the condition first.")
    return lines


def _names(group: Sequence[Heartbeat]) -> str:
    if len(group) == 1:
        return group[0].process_name
    numbers = ", ".join(str(p.process) for p in group[:8]) + (f" and {len(group) - 8} more" if len(group) > 8 else "")
    return f"processes {numbers}"


@dataclass(frozen=True)
class UtilizationReport:
    """Utilization of the processes since the previous report."""

    utilization: dict[int, float] = field(default_factory=dict)
    """Fraction of time in which each process did not wait for others; empty for a single process."""
    resources: dict[str, float] = field(default_factory=dict)
    """CPU, GPU and memory usage of all processes, by metric name."""
    slow: str = ""
    """Description of the straggler, if two reports in a row have the same one."""


def utilization(before: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat]) -> dict[int, float]:
    """Return the fraction of time between two heartbeats in which each process did not wait for others."""
    changes = {p: (now[p].busy - before[p].busy, now[p].age - before[p].age) for p in sorted(now) if p in before}
    return {p: min(1.0, max(0.0, busy / age)) for p, (busy, age) in changes.items() if age > 0}


def find_straggler(before: Mapping[int, Heartbeat], now: Mapping[int, Heartbeat]) -> tuple[Heartbeat, float] | None:
    """Return the process that works longest and its time relative to the median of the others; None if balanced."""
    busy = {p: now[p].busy - before[p].busy for p in now if p in before}
    if len(busy) < 2:
        return None
    process = max(busy, key=lambda p: busy[p])
    typical = median(seconds for p, seconds in busy.items() if p != process)
    ratio = busy[process] / typical if typical > 0 else 1.0
    return (now[process], ratio) if ratio > 1.25 else None
