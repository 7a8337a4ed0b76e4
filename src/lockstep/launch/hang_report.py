"""Hang reports of the launcher: phase and thread stacks of every worker.

On the signal STACKS a worker writes its stacks. The handler is C code, so it runs even while the worker waits for the
kernel or another thread holds the GIL.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.bucket.working_directory import URL_FILE
from lockstep.io.jsonl import HANG_REPORT
from lockstep.launch.process_lifetime import STACKS, STACKS_FILE
from lockstep.launch.progress import WorkerProgress
from lockstep.launch.stack_traces import is_internal_frame

_LINES = 12
SEND_SECONDS = 30.0
"""Seconds that the upload of a report may take."""


def report(workers: Mapping[int, WorkerProgress], pids: Mapping[int, int], overdue: list[int], shared: Path) -> str:
    """Describe all workers, with phase and stacks, those that do not wait in a collective first."""
    ranks = {local: int(workers[local].message.get("rank", local)) for local in pids}
    stacks = collect_stacks({ranks[local]: pid for local, pid in pids.items()}, shared)
    lines = []
    for local in sorted(pids, key=lambda local: (bool(workers[local].message.get("waits_in")), local)):
        message = workers[local].message
        process = f"process {ranks[local]} on {socket.gethostname()} (pid {pids[local]})"
        doing = f"waits in collective '{message['waits_in']}'" if message.get("waits_in") else "made no progress"
        where = f"in phase {message.get('phase', '?')} (update {message.get('update', '?')})"
        state = "" if local in overdue else "; within its limit"
        lines.append(f"{process} {doing} for {workers[local].idle.seconds:.0f} s {where}{state}, at:")
        lines += stacks.get(ranks[local]) or ["    (it wrote no stack: it is stopped, or waits for a disk or a device)"]
    limit = workers[overdue[0]].message.get("allowed", 0.0)
    lines.append(f"The limit is {limit:.0f} s (see run.collective_timeout), so the launcher ends all processes.")
    return "\n".join(lines)


def collect_stacks(pids: Mapping[int, int], shared: Path, seconds: float = 2.0) -> dict[int, list[str]]:
    """Request the stacks of all threads from workers, by rank; wait up to `seconds` until they are written."""
    for pid in pids.values():
        with suppress(OSError):
            os.kill(pid, STACKS)
    found: dict[int, list[str]] = {}
    deadline = time.monotonic() + seconds
    while len(found) < len(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
        found = {rank: lines for rank in pids if (lines := _read(shared / STACKS_FILE.format(rank)))}
    return found


def _read(path: Path) -> list[str]:
    """Read the threads from a fault handler report, main thread first, each with its innermost frame first."""
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
    """A process made no progress, or did not arrive at a collective, within the run's timeout."""


def in_time(action: Callable[[], object], seconds: float = 3.0) -> None:
    """Run an action that may block on a disk or a lost process; continue without it after `seconds`."""
    thread = threading.Thread(target=action, name="in time", daemon=True)
    thread.start()
    thread.join(seconds)


def write_report(run: Path, message: str, seconds: float = 3.0) -> None:
    """Write a hang report to a run directory; continue without it after `seconds`. Ignore disk errors.

    A child process writes it. A process cannot exit while one of its threads waits for a frozen disk.
    """
    code = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    with suppress(OSError, subprocess.TimeoutExpired):
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, run / HANG_REPORT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        child.communicate(message + "\n", timeout=seconds)
    send_report(run)


def send_report(run: Path) -> None:
    """Upload the hang report of a run in a bucket. A child process does it, because the bucket may not answer."""
    if (run / URL_FILE).is_file():
        command = [sys.executable, "-P", "-m", "lockstep.bucket.send", str(run / HANG_REPORT), str(run / URL_FILE)]
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SEND_SECONDS)


def written_since(path: Path, since: float) -> bool:
    """Return whether a file was written after a time. An earlier attempt may have left one, too."""
    try:
        return path.stat().st_mtime > since
    except OSError:
        return False
