"""Failure reports: each process records its error, and the launcher reports which process failed first and why."""

import errno
import itertools
import os
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.config import ConfigError
from lockstep.launch.process_lifetime import BACKEND_FILE, CRASH_FILE, EXIT_PEER_FAILED, PHASE_FILE
from lockstep.launch.stack_traces import is_internal_frame
from lockstep.launch.world import WorldInfo


def record_failure(error: BaseException) -> None:
    """Write an exception to the error file that the launcher of this process reads."""
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        ErrorHandler().record_exception(error)


_MEMORY_ADVICE = (
    "Lower algo.batch_size (memory of backward), or task.num_envs or algo.rollout_steps (memory of a rollout), or use "
    "--run.precision bf16. `lockstep plan RECIPE` estimates the memory of a setting."
)

_OUT_OF_MEMORY = (
    "If no user sent it, the machine ran out of memory (check `dmesg`): lower task.num_envs or algo.batch_size."
)


def to_user_error(error: Exception, world: WorldInfo) -> Exception:
    """Convert errors with a known fix to ConfigError: out of memory, or a port in use. Return others unchanged."""
    first = (str(error).splitlines() or [""])[0]
    process = f"process {world.rank} of {world.size}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in first:
        consumers = getattr(error, "__notes__", [])  # added by `memory_report`
        return ConfigError(f"{process} ran out of memory: {first}", "\n".join([*consumers, _MEMORY_ADVICE]))
    port_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    if port_in_use or "EADDRINUSE" in str(error):
        return ConfigError(
            f"{process} cannot listen on port {os.environ.get('MASTER_PORT', '?')}: another program uses it.",
            "With torchrun, use --standalone or another --master-port. `lockstep train --procs N` finds a free port.",
        )
    return error


_COLLATERAL = ("onnection closed by peer", "onnection reset by peer", "roken pipe", "PeerLostError")
"""Parts of the errors of processes that failed only because another one did."""


def summarize_failures(
    failures: Mapping[int, Any], size: int, shared: Path | None = None, killed_by_launcher: Collection[int] = ()
) -> tuple[str, bool]:
    """Report which process failed first and why, and whether the machine is the cause, so that a restart may succeed.

    `shared` is the directory with the stacks of crashed processes. `killed_by_launcher` are the pids that
    the launcher itself killed because another process had failed.
    """
    # Exit codes of processes that the launcher stopped say nothing. Errors that they recorded before do.
    stopped = {
        rank
        for rank, failure in failures.items()
        if failure.exitcode in (EXIT_PEER_FAILED, -signal.SIGTERM) or failure.pid in killed_by_launcher
    }
    recorded = {rank for rank, failure in failures.items() if _record(failure)}
    killed = {r: f for r, f in failures.items() if f.exitcode < 0 and r not in stopped | recorded}
    independent = {
        rank: failure
        for rank, failure in failures.items()
        if (rank in recorded or rank not in stopped) and not any(part in str(failure.message) for part in _COLLATERAL)
    }
    # The first cause is the earliest kill, else the earliest failure that no other process caused.
    rank, failure = min((killed or independent or failures).items(), key=lambda item: (item[1].timestamp, item[0]))
    process = f"process {rank} of {size} failed first"
    details = _record(failure)
    if failure.exitcode < 0 and not details:
        name = signal.Signals(-failure.exitcode).name
        stack = "\n".join(f"    {line}" for line in crash_stack(shared / CRASH_FILE.format(rank))) if shared else ""
        if not stack:
            memory = name == "SIGKILL" and f" {_OUT_OF_MEMORY}"
            return f"{process}: it was ended by {name}.{memory or ''}", True
        if name == "SIGABRT" and shared and _aborted_by_nccl(shared, rank):
            return f"{process}: NCCL ended it because a collective failed or timed out (SIGABRT).{_NCCL}\n{stack}", True
        hint = _ABORT if name == "SIGABRT" else ""
        phase = _read(shared / PHASE_FILE.format(rank)).strip() if shared else ""
        where = f" in phase {phase}" if phase else ""
        return f"{process}: it crashed in native code ({name}){where}, at (innermost first):\n{stack}{hint}", False
    if not details:
        return f"{process}, with exit code {failure.exitcode}.", failure.exitcode == EXIT_PEER_FAILED
    kind, _, message = str(details["message"]).partition(": ")
    if kind in ("ConfigError", "NonFiniteError"):  # the same on all processes, and after a restart
        return message, False
    if kind == "CollectiveTimeoutError":
        return message, True
    stack = details.get("extraInfo", {}).get("py_callstack", "")
    return f"{process}: {kind}: {message}\n{stack}".rstrip(), rank not in independent


def _record(failure: Any) -> dict[str, Any]:
    """Return the exception that a process recorded before it ended; empty if it recorded none."""
    details = failure.error_file_data.get("message", {}) if failure.error_file_data else {}
    return details if isinstance(details, dict) and "message" in details else {}


_NCCL = """
Another process, its GPU or the connection to it was lost, or a collective took longer than
run.collective_timeout. NCCL's own message is in the output above. This process was at (innermost first):"""


def _aborted_by_nccl(shared: Path, rank: int) -> bool:
    """Return whether NCCL's watchdog aborted a process, rather than other native code.

    The watchdog is a native thread, so the fault handler reports no current Python thread. gloo also aborts from a
    native thread, but then the main thread waits in one of its collectives.
    """
    backend, crash = _read(shared / BACKEND_FILE.format(rank)), _read(shared / CRASH_FILE.format(rank))
    in_collective = f"distributed{os.sep}collectives.py" in crash
    return "nccl" in backend and "Current thread" not in crash and not in_collective


_ABORT = """
gloo aborts a process if the processes call different collectives. If the line above is a collective, look for a
branch around it that only some processes take, and synchronize the condition first."""


def _read(path: Path) -> str:
    """Read a file that a worker may have written; empty if it does not exist."""
    return path.read_text(errors="replace") if path.exists() else ""


def crash_stack(path: Path) -> list[str]:
    """Return the Python stack of the thread that crashed, innermost frame first, from a fault handler report.

    A native thread has none: return the longest stack then, which is that of the main thread.
    """
    threads = _read(path).split("\n\n")
    stacks = {thread: [line.strip() for line in thread.splitlines() if line.startswith("  File")] for thread in threads}
    crashed = [stack for thread, stack in stacks.items() if thread.startswith("Current thread") and stack]
    stack: list[str] = max(crashed or stacks.values(), key=len, default=[])
    ours = list(itertools.dropwhile(is_internal_frame, stack))
    return (ours or stack)[:8]
