"""Where a process finds itself once started: its place among the others, its device, backend, threads and memory."""

import contextlib
import ctypes
import faulthandler
import logging
import mmap
import os
import signal
import socket
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.config import ConfigError, RunConfig
from lockstep.parent import crash_file, launch_directory, phase_file

PREEMPTED = 75
"""The exit code of a run that was asked to stop and can go on (EX_TEMPFAIL)."""
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and stop."""
PHASE_BYTES = 32
"""Room for the name of a phase."""
ONE_REQUEST = 3.0
"""Signals within so many seconds count as one; a later one means at once."""


@dataclass(frozen=True)
class Place:
    """Which process this is, as the launcher says; alone when there was no launcher."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0
    started: bool = False
    """Whether a launcher started this process."""
    job: str = ""
    """What the launcher calls its job: the same after a restart, and on every host."""

    @classmethod
    def from_environment(cls) -> "Place":
        if "RANK" not in os.environ:
            return cls()
        read = {field: int(os.environ.get(name, default)) for field, (name, default) in _ENVIRONMENT.items()}
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        # torchrun without a rendezvous calls every job "none"; its own process tells them apart.
        job = f"{socket.gethostname()}:{os.getppid()}" if job == "none" else job
        return cls(**read, started=True, job=job)


_ENVIRONMENT = {
    "rank": ("RANK", "0"),
    "size": ("WORLD_SIZE", "1"),
    "local_rank": ("LOCAL_RANK", "0"),
    "local_size": ("LOCAL_WORLD_SIZE", "1"),
    "restarts": ("TORCHELASTIC_RESTART_COUNT", "0"),
}


LAUNCHER_VARIABLES = tuple(name for name, _ in _ENVIRONMENT.values() if name != "TORCHELASTIC_RESTART_COUNT")
"""What a launcher sets: found outside of one, they are left over and make a process wait for others."""


def choose_device(wanted: str, place: Place) -> torch.device:
    """The device of this process: its own GPU where there are GPUs, else what the machine has."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("--run.device is cuda, and torch sees no CUDA device.", "Use --run.device cpu or auto.")
        if place.local_size > torch.cuda.device_count():
            raise ConfigError(
                f"{place.local_size} processes were started on {torch.cuda.device_count()} visible GPUs.",
                f"Start --procs {torch.cuda.device_count()}, or make more GPUs visible with --gpus.",
            )
        torch.cuda.set_device(place.local_rank)
        return torch.device("cuda", place.local_rank)
    if wanted == "mps" and place.size > 1:
        logging.getLogger("lockstep").warning(
            "%d processes share one MPS device: nothing is gained over --procs 1.", place.size
        )
    if wanted not in ("cpu", "mps"):
        raise ConfigError(f"--run.device is {wanted!r}.", "Use auto, cpu, cuda or mps.")
    return torch.device(wanted)


def choose_backend(device: torch.device) -> str:
    """NCCL for CUDA tensors where it exists (Linux); gloo for everything on the host."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def set_arithmetic(run: RunConfig, place: Place) -> None:
    """Threads, memory and determinism. One and two threads sum in different orders, so exact always takes one."""
    keep_freed_memory()
    if run.reduction == "exact":
        torch.set_num_threads(1)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports the compiler to tell it, too
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_for(place.local_size))


def keep_freed_memory() -> None:
    """Make glibc keep what is freed for the next use, where there is glibc.

    It gives large buffers back to the system at once, and an update of a CNN then spends a quarter of its time on
    having the same pages handed out and cleared again. The most a process ever held is unchanged.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 2**26)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def cores_for(processes: int) -> int:
    """Threads for each of some processes on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // processes if hasattr(os, "sched_getaffinity") else 1)


def leave_stack_on_crash(place: Place) -> None:
    """Have a process that crashes in native code leave its Python stack where our launcher finds it."""
    shared = launch_directory()
    if shared is not None and not faulthandler.is_enabled():
        # Left open for good: it is written to when nothing else can be done any more.
        faulthandler.enable((shared / crash_file(place.rank)).open("w"))


def open_phase_note(place: Place) -> mmap.mmap | None:
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


def say(sentence: str) -> None:
    """Tell the user at once, whichever process this is; the disk under a redirected output may be full."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"lockstep: {sentence}\n")
        sys.stderr.flush()
