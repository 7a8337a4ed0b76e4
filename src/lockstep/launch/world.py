"""Where a process finds itself once started: its place among the others, its device, backend, threads and memory."""

import contextlib
import faulthandler
import mmap
import os
import signal
import socket
import sys
from dataclasses import dataclass

from lockstep.io.printable import write_text
from lockstep.launch.process_lifetime import STACKS, backend_file, crash_file, launch_directory, phase_file, stacks_file

EXIT_PREEMPTED = 75
"""The exit code of a run that was asked to stop and can go on (EX_TEMPFAIL)."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and stop."""
PHASE_BYTES = 32
"""Room for the name of a phase."""
SIGNAL_DEBOUNCE_SECONDS = 3.0
"""Signals within so many seconds count as one; a later one means at once."""


@dataclass(frozen=True)
class WorldInfo:
    """Which process this is, as the launcher says; alone when there was no launcher."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0
    launched: bool = False
    """Whether a launcher started this process."""
    job_id: str = ""
    """What the launcher calls its job: the same after a restart, and on every host."""

    @classmethod
    def from_environment(cls) -> "WorldInfo":
        if "RANK" not in os.environ:
            return cls()
        read = {field: int(os.environ.get(name, default)) for field, (name, default) in _ENVIRONMENT.items()}
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        # torchrun without a rendezvous calls every job "none"; its own process tells them apart.
        job = f"{socket.gethostname()}:{os.getppid()}" if job == "none" else job
        return cls(**read, launched=True, job_id=job)


_ENVIRONMENT = {
    "rank": ("RANK", "0"),
    "size": ("WORLD_SIZE", "1"),
    "local_rank": ("LOCAL_RANK", "0"),
    "local_size": ("LOCAL_WORLD_SIZE", "1"),
    "restarts": ("TORCHELASTIC_RESTART_COUNT", "0"),
}


LAUNCHER_VARIABLES = tuple(name for name, _ in _ENVIRONMENT.values() if name != "TORCHELASTIC_RESTART_COUNT")
"""What a launcher sets: found outside of one, they are left over and make a process wait for others."""


def enable_crash_traceback(place: WorldInfo) -> None:
    """Have a process that crashes in native code leave its Python stack where our launcher finds it."""
    shared = launch_directory()
    if shared is None:
        return
    # Left open for good: they are written to when nothing else can be done any more.
    if not faulthandler.is_enabled():
        faulthandler.enable((shared / crash_file(place.rank)).open("w"))
    if hasattr(faulthandler, "register"):
        faulthandler.register(STACKS, (shared / stacks_file(place.rank)).open("w"), all_threads=True)


def note_backend(place: WorldInfo, backend: str) -> None:
    """Have the launcher find over what a process talked to the others, should it crash."""
    shared = launch_directory()
    if shared is not None:
        with contextlib.suppress(OSError):
            (shared / backend_file(place.rank)).write_text(backend)


def open_phase_file(place: WorldInfo) -> mmap.mmap | None:
    """PHASE_BYTES of memory where our launcher finds the phase of a process that is no more: writing it is no call."""
    shared = launch_directory()
    if shared is None:
        return None
    with contextlib.suppress(OSError):
        path = shared / phase_file(place.rank)
        path.write_bytes(b" " * PHASE_BYTES)
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), PHASE_BYTES)
    return None


def warn_user(sentence: str) -> None:
    """Tell the user at once, whichever process this is; the disk under a redirected output may be full."""
    with contextlib.suppress(OSError):
        write_text(sys.stderr, f"lockstep: {sentence}\n")
