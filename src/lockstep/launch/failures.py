"""Why processes failed: each leaves word of itself, and whoever started them says who was first and why."""

import errno
import os
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.config import ConfigError
from lockstep.launch.process_lifetime import EXIT_PEER_FAILED, backend_file, crash_file, phase_file
from lockstep.launch.stack_traces import is_internal_frame
from lockstep.launch.world import WorldInfo


def record_failure(error: BaseException) -> None:
    """Leave an exception where the launcher that started this process looks for it."""
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        ErrorHandler().record_exception(error)


_LOWER = (
    "Lower algo.batch_size (what backward keeps shrinks with it), or task.num_envs or algo.rollout_steps (what a "
    "rollout"
    " takes), or use --run.precision bf16; `lockstep plan RECIPE` says what a setting takes."
)

_IF_NOBODY = "If nobody did that, memory ran out (`dmesg` tells): lower task.num_envs or algo.batch_size."


def to_user_error(error: Exception, place: WorldInfo) -> Exception:
    """The error as a sentence with what to do, where that is known: when memory ran out, or a port is taken."""
    first = (str(error).splitlines() or [""])[0]
    who = f"process {place.rank} of {place.size}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in first:
        return ConfigError(f"{who} ran out of memory: {first}", _LOWER)
    taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    if taken or "EADDRINUSE" in str(error):
        return ConfigError(
            f"{who} cannot listen at port {os.environ.get('MASTER_PORT', '?')}, which another program holds.",
            "With torchrun: --standalone, or another --master-port. `lockstep train --procs N` finds a free one.",
        )
    return error


_COLLATERAL = ("onnection closed by peer", "onnection reset by peer", "roken pipe", "PeerLostError")
"""What the failures of those look like whose connection to the failed one broke."""


def summarize_failures(
    failures: Mapping[int, Any], size: int, shared: Path | None = None, dismissed: Collection[int] = ()
) -> tuple[str, bool]:
    """Who failed first and why, and whether the machine is to blame, so that a new start may well succeed.

    `shared` is where processes that crash in native code leave their stacks; `dismissed` are the pids of those that
    the launcher itself killed because another process had failed.
    """
    # How a process ended tells nothing once the launcher ends all of them: what it recorded before that does.
    sent_away = {
        rank
        for rank, failure in failures.items()
        if failure.exitcode in (EXIT_PEER_FAILED, -signal.SIGTERM) or failure.pid in dismissed
    }
    recorded = {rank for rank, failure in failures.items() if _record(failure)}
    killed = {r: f for r, f in failures.items() if f.exitcode < 0 and r not in sent_away | recorded}
    independent = {
        rank: failure
        for rank, failure in failures.items()
        if (rank in recorded or rank not in sent_away)
        and not any(words in str(failure.message) for words in _COLLATERAL)
    }
    rank, failure = min((killed or independent or failures).items(), key=lambda item: (item[1].timestamp, item[0]))
    who = f"process {rank} of {size} failed first"
    details = _record(failure)
    if failure.exitcode < 0 and not details:
        name = signal.Signals(-failure.exitcode).name
        stack = "\n".join(f"    {line}" for line in crash_stack(shared / crash_file(rank))) if shared else ""
        if not stack:
            memory = name == "SIGKILL" and f" {_IF_NOBODY}"
            return f"{who}: it was ended by {name}.{memory or ''}", True
        if name == "SIGABRT" and shared and _aborted_by_nccl(shared, rank):
            return f"{who}: NCCL ended it because a collective failed or timed out (SIGABRT).{_NCCL}\n{stack}", True
        hint = _ABORT if name == "SIGABRT" else ""
        phase = _phase(shared / phase_file(rank)) if shared else ""
        return f"{who}: it crashed in native code ({name}){phase}, at (innermost first):\n{stack}{hint}", False
    if not details:
        return f"{who}, with exit code {failure.exitcode}.", failure.exitcode == EXIT_PEER_FAILED
    kind, _, words = str(details["message"]).partition(": ")
    if kind in ("ConfigError", "NonFiniteError"):  # all processes say the same, and would say it again
        return words, False
    if kind == "CollectiveTimeoutError":
        return words, True
    stack = details.get("extraInfo", {}).get("py_callstack", "")
    return f"{who}: {kind}: {words}\n{stack}".rstrip(), rank not in independent


def _record(failure: Any) -> dict[str, Any]:
    """The exception that a process recorded before it ended; empty if it recorded none."""
    details = failure.error_file_data.get("message", {}) if failure.error_file_data else {}
    return details if isinstance(details, dict) and "message" in details else {}


_NCCL = """
Another process, its GPU or the connection to it went away, or a collective took longer than
run.collective_timeout. NCCL's own message is in the output above. This process was at (innermost first):"""


def _aborted_by_nccl(shared: Path, rank: int) -> bool:
    """Whether NCCL's watchdog aborted a process, rather than the code that it ran.

    The watchdog is a native thread, so the fault handler names no current thread. gloo aborts from a native thread,
    too, but then the main thread waits in one of its collectives.
    """
    backend, crash = shared / backend_file(rank), shared / crash_file(rank)
    if not backend.exists() or "nccl" not in backend.read_text(errors="replace"):
        return False
    text = crash.read_text(errors="replace")
    return "Current thread" not in text and f"distributed{os.sep}collectives.py" not in text


_ABORT = """
gloo aborts a process that meets the others in another collective than theirs: if the line above is one, look for a
branch around it that only some processes take, and agree on it first."""


def _phase(path: Path) -> str:
    """In which phase of an iteration a process was when it ended."""
    name = path.read_text(errors="replace").strip() if path.exists() else ""
    return f" in phase {name}" if name else ""


def crash_stack(path: Path) -> list[str]:
    """The Python stack of the thread that did the work, innermost first, from what the fault handler wrote."""
    threads = path.read_text(errors="replace").split("\n\n") if path.exists() else []
    stacks = [[line.strip() for line in thread.splitlines() if line.startswith("  File")] for thread in threads]
    longest: list[str] = max(stacks, key=len, default=[])
    while longest and is_internal_frame(longest[0]):
        longest.pop(0)
    return longest[:8]
