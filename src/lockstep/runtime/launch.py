"""Starting processes, and where one finds itself once started: place, device, backend, threads."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config import ConfigError, RunConfig

LAUNCHED = "LOCKSTEP_LAUNCHED"
"""Set in the processes our own launcher starts: it tells the user of their failures, so they need not."""


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

    @classmethod
    def from_environment(cls) -> "Place":
        if "RANK" not in os.environ:
            return cls()
        read = {field: int(os.environ.get(name, default)) for field, (name, default) in _ENVIRONMENT.items()}
        return cls(**read, started=True)


_ENVIRONMENT = {
    "rank": ("RANK", "0"),
    "size": ("WORLD_SIZE", "1"),
    "local_rank": ("LOCAL_RANK", "0"),
    "local_size": ("LOCAL_WORLD_SIZE", "1"),
    "restarts": ("TORCHELASTIC_RESTART_COUNT", "0"),
}


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
        torch.use_deterministic_algorithms(True)
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


def launch(
    arguments: Sequence[str], processes: int, environment: Mapping[str, str] | None = None, quiet: bool = False
) -> str | None:
    """Run `lockstep ARGUMENTS` on several processes of this machine; None, or why the first one failed.

    This is torch's own elastic launcher, run inside the calling process so that it can say who failed first and why.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    settings = {
        # Restarted workers read stale addresses from a store that is shared with the rendezvous.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        LAUNCHED: "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores_for(processes))),
        **(environment or {}),
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        with tempfile.TemporaryDirectory(prefix="lockstep-") as logs:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL if quiet else Std.NONE),
            )
            elastic_launch(config, sys.executable)("-m", "lockstep", *arguments)
    except ChildFailedError as error:
        return _explain(error.failures, processes)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return None


def record_failure(error: BaseException) -> None:
    """Leave an exception where the launcher that started this process looks for it."""
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        ErrorHandler().record_exception(error)


def _explain(failures: dict[int, Any], processes: int) -> str:
    """Who failed first, and why. A process that was killed comes before those whose connection to it then broke."""
    killed = {r: f for r, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
    independent = {r: f for r, f in failures.items() if "onnection closed by peer" not in str(f.message)}
    rank, failure = min((killed or independent or failures).items(), key=lambda item: (item[1].timestamp, item[0]))
    who = f"process {rank} of {processes} failed first"
    if failure.exitcode < 0:
        return f"{who}: it was ended by {signal.Signals(-failure.exitcode).name}."
    details = failure.error_file_data.get("message", {}) if failure.error_file_data else {}
    if not isinstance(details, dict) or "message" not in details:
        return f"{who}, with exit code {failure.exitcode}."
    kind, _, words = str(details["message"]).partition(": ")
    if kind == "ConfigError":
        return words
    return f"{who}: {kind}: {words}\n{details.get('extraInfo', {}).get('py_callstack', '')}".rstrip()
