"""Rank and world size of a process, and the files in which it reports crashes and its phase to the launcher."""

import contextlib
import faulthandler
import mmap
import os
import signal
import socket
import sys
from dataclasses import dataclass

from lockstep.io.printable import write_text
from lockstep.launch.process_lifetime import BACKEND_FILE, CRASH_FILE, PHASE_FILE, STACKS, STACKS_FILE, launch_directory

AUTO_JOB = "auto-"
"""Prefix of a job ID that was derived from a command line. It does not resume a finished run."""
EXIT_PREEMPTED = 75
"""Exit code of a run that stopped on request and can be resumed (EX_TEMPFAIL)."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and stop."""
PHASE_BYTES = 32
"""Maximum length of a phase name."""
SIGNAL_DEBOUNCE_SECONDS = 3.0
"""Signals within this time count as one stop request. A later signal ends the run immediately."""


@dataclass(frozen=True)
class WorldInfo:
    """Rank and world size, from the launcher's environment variables; one process if there is no launcher."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0
    launched: bool = False
    """Whether a launcher started this process."""
    job_id: str = ""
    """The launcher's job id: the same after a restart, and on every host."""

    @classmethod
    def from_environment(cls) -> "WorldInfo":
        if "RANK" not in os.environ:
            return cls()
        values = {field: int(os.environ.get(name, default)) for field, (name, default) in _ENVIRONMENT.items()}
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        # torchrun without a rendezvous calls every job "none". Host and pid of torchrun identify the job.
        job = f"{socket.gethostname()}:{os.getppid()}" if job == "none" else job
        return cls(**values, launched=True, job_id=job)


_ENVIRONMENT = {
    "rank": ("RANK", "0"),
    "size": ("WORLD_SIZE", "1"),
    "local_rank": ("LOCAL_RANK", "0"),
    "local_size": ("LOCAL_WORLD_SIZE", "1"),
    "restarts": ("TORCHELASTIC_RESTART_COUNT", "0"),
}


LAUNCHER_VARIABLES = tuple(name for name, _ in _ENVIRONMENT.values() if name != "TORCHELASTIC_RESTART_COUNT")
"""Variables set by a launcher. If they are left over in a shell, a process waits for ranks that do not exist."""


def enable_crash_traceback(world: WorldInfo) -> None:
    """Write the Python stack of a process that crashes in native code to a file that our launcher reads."""
    shared = launch_directory()
    if shared is None:
        return
    # The files stay open, because the fault handler cannot open files during a crash.
    if not faulthandler.is_enabled():
        faulthandler.enable((shared / CRASH_FILE.format(world.rank)).open("w"))
    if hasattr(faulthandler, "register"):
        faulthandler.register(STACKS, (shared / STACKS_FILE.format(world.rank)).open("w"), all_threads=True)


def note_backend(world: WorldInfo, backend: str) -> None:
    """Record the backend of the process group, for the launcher to read after a crash."""
    shared = launch_directory()
    if shared is not None:
        with contextlib.suppress(OSError):
            (shared / BACKEND_FILE.format(world.rank)).write_text(backend)


def open_phase_file(world: WorldInfo) -> mmap.mmap | None:
    """Map a file for the current phase, which the launcher reads after a crash. Writes need no system call."""
    shared = launch_directory()
    if shared is None:
        return None
    with contextlib.suppress(OSError):
        path = shared / PHASE_FILE.format(world.rank)
        path.write_bytes(b" " * PHASE_BYTES)
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), PHASE_BYTES)
    return None


def warn_user(message: str) -> None:
    """Print a message to standard error from any rank. Ignore errors: output may be redirected to a full disk."""
    with contextlib.suppress(OSError):
        write_text(sys.stderr, f"lockstep: {message}\n")
