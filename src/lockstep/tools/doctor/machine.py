"""Check versions, devices, memory and cores."""

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from lockstep import __version__
from lockstep.launch.device import gpu_sharing, threads_per_process
from lockstep.tools.doctor.finding import CheckResult, failure, ok, warning

GIB = 2**30
_DEFAULT_SHM_BYTES = 64 * 2**20
"""Default size of /dev/shm in a container, in bytes."""
_MIN_OPEN_FILES = 1024


def check_versions() -> Iterator[CheckResult]:
    """Report versions of Lockstep, Python, torch and the libraries below them."""
    yield ok("versions", f"lockstep {__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    yield ok("versions", f"{platform.system()} {platform.release()}, {platform.machine()}")
    names = ("numpy", "numba", "gymnasium", "torch-geometric", "wandb", "onnxruntime")
    found = [f"{name} {version}" for name in names if (version := _version(name))]
    yield ok("versions", ", ".join(found))
    if platform.system() == "Windows":
        yield failure("versions", "Windows is not supported: the launcher needs fork and signals", "Use WSL 2.")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_devices(processes: int) -> Iterator[CheckResult]:
    """Check which devices torch sees, and whether there is one for each of `processes`."""
    cards = nvidia_smi("--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader")
    if not torch.cuda.is_available():
        yield from _without_cuda(cards, processes)
        return
    visible = torch.cuda.device_count()
    for number in range(visible):
        properties = torch.cuda.get_device_properties(number)
        yield ok("devices", f"cuda:{number} {properties.name}, {properties.total_memory / GIB:.0f} GiB")
    if sharing := gpu_sharing("cuda", processes):
        fix = f"Train with --procs {visible}, one process for each GPU."
        yield warning("devices", f"{sharing} This is enough for a check", fix)
    compute_apps = nvidia_smi("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
    if compute_apps:
        yield warning(
            "devices",
            f"other processes use the GPUs: {'; '.join(compute_apps[:4])}",
            "Choose free GPUs with --gpus, or end those processes.",
        )
    if visible > 1:
        pairs = [(a, b) for a in range(visible) for b in range(visible) if a != b]
        unlinked = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        text = f"{len(pairs) - len(unlinked)} of {len(pairs)} pairs of GPUs have peer access"
        if unlinked:
            yield warning("links", text, "Choose GPUs that are directly linked; `nvidia-smi topo -m` shows the links.")
        else:
            yield ok("links", text)


def _without_cuda(cards: list[str], processes: int) -> Iterator[CheckResult]:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cards:
        if torch.version.cuda is None:
            why = "this torch was built without CUDA"
            fix = "Install torch for your driver: https://pytorch.org/get-started/locally"
        elif hidden is not None:
            why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them from torch"
            fix = "unset CUDA_VISIBLE_DEVICES, or set it to GPU indices such as 0,1."
        else:
            why = f"torch finds none: driver too old for CUDA {torch.version.cuda}"
            fix = "Update the driver, or install a torch built for an older CUDA."
        yield failure("devices", f"nvidia-smi lists {len(cards)} GPUs, but {why}", fix)
    elif torch.backends.mps.is_available() and processes > 1:
        yield warning("devices", f"{processes} processes on one MPS device are not faster than one", "Use --procs 1.")
    else:
        yield ok("devices", "no GPU: networks run on the CPU")


def nvidia_smi(*args: str) -> list[str]:
    """Return the lines that `nvidia-smi` prints; an empty list if it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        result = subprocess.run(["nvidia-smi", *args], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []


def check_memory(processes: int, shared: Path = Path("/dev/shm")) -> Iterator[CheckResult]:
    """Check free memory, shared memory, cores and the limit of open files."""
    memory = psutil.virtual_memory()
    message = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < processes * GIB // 2:
        yield failure(
            "memory",
            f"{message}, but each of {processes} processes needs half a GiB for torch alone",
            "End other programs, or use fewer --procs.",
        )
    else:
        yield ok("memory", message)
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) <= _DEFAULT_SHM_BYTES:
        yield warning(
            "memory",
            f"{shared} has {size / 2**20:.0f} MiB, which may be too little for NCCL and data loaders",
            "Start the container with --shm-size 8g (docker) or --ipc=host.",
        )
    cores = threads_per_process(1)
    if processes > cores:
        yield warning("cores", f"{processes} processes share {cores} cores", f"Use at most --procs {cores} on the CPU.")
    else:
        threads = _count(threads_per_process(processes), "thread")
        yield ok("cores", f"{cores} cores, {threads} for each of {_count(processes, 'process')}")
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files < _MIN_OPEN_FILES:
        yield failure("cores", f"the limit of open files is only {max_files}", f"ulimit -n {64 * _MIN_OPEN_FILES}")


def _count(number: int, noun: str) -> str:
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"
