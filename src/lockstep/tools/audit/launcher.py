"""Start the processes of an audit, wait until all took their steps or none progresses, and read their records."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lockstep.launch.failures import crash_stack
from lockstep.launch.process_lifetime import CRASH_FILE
from lockstep.tools.audit.recorder import END, STEPS, STOP

_EXIT_SECONDS = 5.0
"""Seconds in which processes record their stacks when the audit is over."""
_FIRST_STEP_FACTOR = 10
"""Factor by which the first step may take longer, because scripts load data and models before it."""


def run(
    args: Sequence[str], directory: Path, processes: int, steps: int, step_timeout: float, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run a script on several processes for some optimizer steps. Return the record of each process."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [_start(args, directory, rank, processes, port, steps) for rank in range(processes)]
    try:
        _wait(workers, directory, step_timeout, report)
        (directory / STOP).touch()
        deadline = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in workers):
            time.sleep(0.05)
    finally:
        for process in workers:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [_read(directory, rank, process.returncode) for rank, process in enumerate(workers)]


def _start(
    args: Sequence[str], directory: Path, rank: int, processes: int, port: int, steps: int
) -> subprocess.Popen[bytes]:
    """Start a process with the environment that torchrun sets on one host."""
    environment = os.environ | {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(processes)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"audit-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_FR_BUFFER_SIZE": "20000",  # large enough for every collective of an audit
        "TORCHDYNAMO_DISABLE": "1",  # compiled code bypasses Module.__call__, and compiling takes long
        "PYTHONUNBUFFERED": "1",
    }
    with (directory / f"output-{rank}.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep.tools.audit.worker", str(directory), str(steps), *args],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its process group can be killed with all its children
        )


def _wait(
    workers: Sequence[subprocess.Popen[bytes]], directory: Path, step_timeout: float, report: Callable[[str], None]
) -> None:
    """Wait until every process has written its end record or exited, or until no process progresses."""
    total, last_progress = -1, time.monotonic()
    while True:
        steps = [_count_lines(directory / STEPS.format(rank)) for rank in range(len(workers))]
        if sum(steps) != total:
            total, last_progress = sum(steps), time.monotonic()
            report(f"optimizer steps by process: {', '.join(map(str, steps))}")
        if all((directory / END.format(rank)).exists() or p.poll() is not None for rank, p in enumerate(workers)):
            return
        if time.monotonic() - last_progress > step_timeout * (1 if total else _FIRST_STEP_FACTOR):
            return
        time.sleep(0.1)


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _read(directory: Path, rank: int, code: int) -> dict[str, Any]:
    steps, end = directory / STEPS.format(rank), directory / END.format(rank)
    lines = steps.read_text().split("\n")[:-1] if steps.exists() else []  # text after the last newline is incomplete
    record: dict[str, Any] = {"how": "gone", "error": "", "stack": [], "collectives": []}
    if end.exists():
        record = json.loads(end.read_text())
    elif code < 0:
        stack = crash_stack(directory / CRASH_FILE.format(rank))
        record |= {"error": f"killed by {signal.Signals(-code).name}", "stack": stack[::-1]}
    else:
        record |= {"error": f"exit code {code}"}
    output = directory / f"output-{rank}.txt"
    record["output"] = output.read_text(errors="replace")[-4000:]
    return record | {"process": rank, "steps": [json.loads(line) for line in lines]}
