"""Record versions, GPUs, architectures and topology of the machine, and test a matrix product on every GPU."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable
from typing import Any

import psutil
import torch

from lockstep import __version__
from lockstep.tools.doctor.bug_report import shown_variables
from lockstep.tools.doctor.gpu.worker import Failure, ResultRecord
from lockstep.tools.doctor.machine import check_devices, nvidia_smi

INNER = 1024
"""Inner dimension of the matrix product whose rounding error is measured."""
_SMI_FIELDS = (
    *("index", "name", "driver_version", "memory.total", "compute_mode", "persistence_mode", "ecc.mode.current"),
    *("mig.mode.current", "pcie.link.gen.current", "pcie.link.width.current", "power.limit", "clocks.max.sm"),
)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def machine(record: ResultRecord) -> None:
    """Record facts about the machine. Fails if a GPU cannot run this torch."""
    record.add("versions", versions())
    record.add("host", host())
    record.add("environment", shown_variables())
    record.add("nvidia_smi", driver_info())
    record.add("topology", [_ESCAPES.sub("", line) for line in nvidia_smi("topo", "-m")])
    if not torch.cuda.is_available():
        record.add("gpus", [])
        raise Failure(no_gpu())
    architectures = torch.cuda.get_arch_list()
    record.add("architectures", architectures)
    gpus = [gpu_info(index, architectures) for index in range(torch.cuda.device_count())]
    record.add("gpus", gpus)
    record.add("peer_access", peer_access(len(gpus)))
    for index, gpu in enumerate(gpus):
        with record.part(f"cuda:{index}"):
            if gpu["architecture"] == "not supported":
                raise Failure(f"sm_{gpu['capability'].replace('.', '')} is not in {', '.join(architectures)}")
            gpu["product_error"] = product_error(f"cuda:{index}", torch.float32)
            if not gpu["product_error"] < 1e-4:
                raise Failure(f"a matrix product differs from the CPU's by {gpu['product_error']:.1e}")
    record.add("gpus", gpus)


def no_gpu() -> str:
    """Explain why torch sees no GPU."""
    failures = [f"{line.message}. {line.fix}" for line in check_devices(1) if line.level == "trouble"]
    built = "was built without CUDA" if torch.version.cuda is None else f"was built for CUDA {torch.version.cuda}"
    return " ".join(failures) or f"torch {torch.__version__} {built}, but nvidia-smi lists no GPU on this machine."


def versions() -> dict[str, Any]:
    """Versions of Lockstep, Python, torch and the libraries that torch uses."""
    return {
        "lockstep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "cudnn": or_none(torch.backends.cudnn.version),
        "nccl": or_none(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
        "triton": or_none(lambda: importlib.metadata.version("triton")),
        "numpy": or_none(lambda: importlib.metadata.version("numpy")),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def host() -> dict[str, Any]:
    """Cores and memory."""
    memory = psutil.virtual_memory()
    return {
        "cpus": os.cpu_count(),
        "usable_cpus": or_none(lambda: len(os.sched_getaffinity(0))),
        "processor": or_none(_processor),
        "memory_bytes": memory.total,
        "free_memory_bytes": memory.available,
        "shared_memory_bytes": or_none(lambda: psutil.disk_usage("/dev/shm").total),
    }


def driver_info() -> list[dict[str, str]]:
    """Return facts about each GPU from nvidia-smi, without serial numbers and UUIDs. Empty without nvidia-smi."""
    lines = nvidia_smi(f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader")
    return [dict(zip(_SMI_FIELDS, map(str.strip, line.split(",")), strict=False)) for line in lines]


def gpu_info(index: int, architectures: list[str]) -> dict[str, Any]:
    """Name, memory and architecture of one GPU."""
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "architecture": architecture_support(properties.major, properties.minor, architectures),
        "memory_bytes": properties.total_memory,
        "free_memory_bytes": or_none(lambda: torch.cuda.mem_get_info(index)[0]),
        "multiprocessors": properties.multi_processor_count,
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }


def architecture_support(major: int, minor: int, architectures: list[str]) -> str:
    """How this torch supports an architecture: compiled for it, for an older one of the family, or from PTX."""
    if any(re.fullmatch(rf"sm_{major}{minor}[af]?", name) for name in architectures):
        return "compiled"
    numbers = {name: int(found[2]) for name in architectures if (found := re.fullmatch(r"(sm|compute)_(\d+)", name))}
    capability = 10 * major + minor
    if any(name.startswith("sm") and n // 10 == major and n <= capability for name, n in numbers.items()):
        return "compatible"
    if any(name.startswith("compute") and n <= capability for name, n in numbers.items()):
        return "from PTX"
    return "not supported"


def peer_access(gpus: int) -> list[list[bool]]:
    """Return for each pair of GPUs whether they have peer access."""
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(gpus)] for a in range(gpus)]


def product_error(device: str, dtype: torch.dtype) -> float:
    """Relative difference between a matrix product on a GPU and in double precision on the CPU."""
    a = torch.linspace(-1.0, 1.0, 64 * INNER).view(64, INNER).sin()
    expected = a.double() @ a.double().T
    on_gpu = a.to(device, dtype)
    return float(((on_gpu @ on_gpu.T).cpu().double() - expected).norm() / expected.norm())


def or_none(function: Callable[[], Any]) -> Any:
    """Call a function that may fail on some machines. Return None if it raises."""
    try:
        return function()
    except Exception:
        return None


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
