"""What a launcher reports about workers that stand still: where each of them is, with the stacks of its threads.

A worker writes its stacks when it gets STACKS, by a handler in C that runs even while the worker waits for the kernel
or another thread holds the interpreter.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.launch.process_lifetime import STACKS, stacks_file
from lockstep.launch.progress import Watched
from lockstep.launch.stack_traces import is_internal_frame

_LINES = 12


def report(workers: Mapping[int, Watched], pids: Mapping[int, int], overdue: list[int], shared: Path) -> str:
    """Name the workers that are overdue, by local rank, with what each one does and where."""
    ranks = {local: int(workers[local].told.get("rank", local)) for local in pids}
    stacks = collect_stacks({ranks[local]: pid for local, pid in pids.items()}, shared)
    lines = []
    for local in sorted(pids, key=lambda local: (bool(workers[local].told.get("waits_in")), local)):
        told = workers[local].told
        who = f"process {ranks[local]} on {socket.gethostname()} (pid {pids[local]})"
        doing = f"waits in collective '{told['waits_in']}'" if told.get("waits_in") else "made no progress"
        where = f"in phase {told.get('phase', '?')} (update {told.get('update', '?')})"
        state = "" if local in overdue else "; it is not late itself"
        lines.append(f"{who} {doing} for {workers[local].idle.seconds:.0f} s {where}{state}, at:")
        lines += stacks.get(ranks[local]) or ["    (it wrote no stack: it is stopped, or waits for a disk or a device)"]
    limit = workers[overdue[0]].told.get("allowed", 0.0)
    lines.append(f"The limit is {limit:.0f} s (see run.collective_timeout), so the launcher ends all processes.")
    return "\n".join(lines)


def collect_stacks(pids: Mapping[int, int], shared: Path, seconds: float = 2.0) -> dict[int, list[str]]:
    """Ask workers, by rank, for the stacks of all their threads, and wait a little until they are written."""
    for pid in pids.values():
        with suppress(OSError):
            os.kill(pid, STACKS)
    found: dict[int, list[str]] = {}
    deadline = time.monotonic() + seconds
    while len(found) < len(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
        found = {rank: lines for rank in pids if (lines := _read(shared / stacks_file(rank)))}
    return found


def _read(path: Path) -> list[str]:
    """The threads in a file that the fault handler wrote, main thread first, each from its innermost frame."""
    with suppress(OSError):
        threads = path.read_text(errors="replace").strip().split("\n\n")
        lines = []
        for number, thread in enumerate(reversed(threads)):
            frames = [line.strip() for line in thread.splitlines() if line.startswith("  File")]
            while len(frames) > 1 and is_internal_frame(frames[0]):
                frames.pop(0)
            if frames and (number == 0 or not is_internal_frame(frames[0])):
                lines.append(f"  {'main thread' if number == 0 else 'another thread'}, innermost first:")
                lines += [f"      {frame}" for frame in frames[:_LINES]]
        return lines
    return []


def kill_group(pid: int) -> None:
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


class CollectiveTimeoutError(RuntimeError):
    """A process made no progress, or did not come to where the others waited for it, within the run's timeout."""


def in_time(action: Callable[[], object], seconds: float = 3.0) -> None:
    """Do something that may wait for a disk that does not answer, and go on without it after some seconds."""
    thread = threading.Thread(target=action, name="report", daemon=True)
    thread.start()
    thread.join(seconds)


def write_report(run: Path, words: str) -> None:
    """Leave a report of a hang in a run directory, if its disk takes it."""
    with suppress(OSError):
        (run / "hang.txt").write_text(words + "\n")


def written_since(path: Path, moment: float) -> bool:
    """Whether a file was written after a moment; one of an earlier start may lie there, too."""
    try:
        return path.stat().st_mtime > moment
    except OSError:
        return False
