"""Device, backend, threads and memory of a process."""

import contextlib
import ctypes
import json
import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.base import Algorithm
from lockstep.config import ConfigError, RunConfig
from lockstep.launch.world import WorldInfo


def device_type(requested: str) -> str:
    """Resolve `run.device` to a device type on this machine. Detects GPUs without initializing CUDA."""
    if requested != "auto":
        return requested
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def require_gpus(requested: str, processes: int, share_gpu: bool) -> None:
    """Refuse more processes than this machine has GPUs, before any of them starts."""
    if device_type(requested) != "cuda":
        return
    visible = torch.cuda.device_count()
    if not visible:
        raise _no_gpu()
    if processes > visible and not share_gpu:
        gpus = "1 GPU is" if visible == 1 else f"{visible} GPUs are"
        raise ConfigError(
            f"{processes} processes need a GPU each, and {gpus} visible on this machine.",
            f"Use --procs {visible} (or --procs auto), make more GPUs visible with --gpus, train on the CPU with "
            "--run.device cpu, or allow several processes on one GPU with --run.share-gpu.",
        )


def gpu_sharing(requested: str, processes: int) -> str:
    """Return a message if processes have to share GPUs; empty if each has its own GPU, or none uses one."""
    if device_type(requested) != "cuda" or processes <= (visible := torch.cuda.device_count()):
        return ""
    return f"{processes} processes share {visible} visible GPU{'s' * (visible > 1)}: reductions go over gloo, not NCCL."


def _no_gpu() -> ConfigError:
    """Create the error for `--run.device cuda` when torch sees no GPU, with the likely cause."""
    if torch.version.cuda is None and torch.version.hip is None:
        fix = "This torch is built without CUDA: install a build with it (https://pytorch.org/get-started)"
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        fix = "CUDA_VISIBLE_DEVICES hides all GPUs: unset it"
    else:
        fix = "Check that nvidia-smi lists a GPU on this machine"
    problem = f"--run.device is cuda, and torch {torch.__version__} sees no CUDA device."
    return ConfigError(problem, f"{fix}, or use --run.device cpu (with eval and play, --device cpu).")


def choose_device(requested: str, world: WorldInfo, share_gpu: bool = False) -> torch.device:
    """Choose the device of this process: its own GPU if there are CUDA GPUs, else MPS or the CPU."""
    requested = device_type(requested)
    if requested == "cuda":
        if not torch.cuda.is_available():
            raise _no_gpu()
        # A scheduler may make one GPU visible to each process, as `srun --gpus-per-task=1` does. `share_gpus` checks
        # later, when the processes have joined the store, whether two of them see the same GPU.
        if torch.cuda.device_count() > 1:
            require_gpus(requested, world.local_size, share_gpu)
        index = world.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if requested == "mps" and world.size > 1:
        logging.getLogger("lockstep").warning(
            "%d processes share one MPS device: nothing is gained over --procs 1.", world.size
        )
    if requested not in ("cpu", "mps"):
        raise ConfigError(f"--run.device is {requested!r}.", "Use auto, cpu, cuda or mps.")
    return torch.device(requested)


def device_notes(device: torch.device, algorithm: Algorithm, config: Any) -> list[str]:
    """Return a message if updates are so small that a CPU core may be faster than launching GPU kernels.

    An update of PPO takes about 100 launches of 5 to 7 us, and a core does about 2e10 operations per second.
    """
    batch_size = getattr(config, "batch_size", None)
    if device.type == "cpu" or batch_size is None:
        return []
    parameters = sum(tensor.numel() for tensor in algorithm.model_state_dict().values() if tensor.requires_grad)
    launching, computing = 100 * 6e-6, 6 * parameters * batch_size / 2e10
    if computing > launching:
        return []
    return [
        f"The network is small ({parameters:,} parameters, batches of {batch_size:,}): the CPU may be faster than "
        f"{device.type}. Compare with --run.device cpu (`lockstep bench` measures both)."
    ]


def choose_backend(device: torch.device, shared: bool) -> str:
    """Choose NCCL for CUDA tensors where it is available (Linux), and gloo for tensors on the host.

    NCCL does not support two processes on one GPU. There, CUDA tensors are reduced over gloo, through host memory.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() and not shared else "gloo"


def share_gpus(store: dist.Store, world: WorldInfo, device: torch.device, allowed: bool) -> bool:
    """Return whether any ranks share a GPU, on every process. Raise ConfigError if that is not allowed.

    Only the main process compares all ranks, so the number of store requests is linear in the number of processes.
    """
    uuid = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else ""
    identity = f"{socket.gethostname()} {uuid}" if uuid else ""
    store.set(f"device/{world.rank}", identity)
    if world.rank == 0:
        ranks: dict[str, list[int]] = {}
        for rank in range(world.size):
            ranks.setdefault(store.get(f"device/{rank}").decode(), []).append(rank)
        store.set("devices", json.dumps([found for gpu, found in ranks.items() if gpu and len(found) > 1]))
    shared: list[list[int]] = json.loads(store.get("devices"))
    if shared and not allowed:
        store.set(f"refused/{world.rank}", "")
        if world.rank == 0:  # it hosts the store: others must have read their answer before it exits
            with contextlib.suppress(dist.DistError):  # a process that is gone does not change the error
                store.wait([f"refused/{rank}" for rank in range(world.size)], timedelta(seconds=10))
        raise ConfigError(
            f"processes {', '.join(map(str, shared[0]))} are on the same GPU.",
            "Give each process its own GPU, or allow several on one with --run.share-gpu.",
        )
    return bool(shared)


def configure_torch(run: RunConfig, world: WorldInfo) -> None:
    """Configure threads, memory and determinism of torch."""
    disable_malloc_trim()
    # Sums depend on the number of threads, so exact mode always uses one.
    if run.reduction == "exact":
        torch.set_num_threads(1)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import the compiler
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        return
    # By default torch allows TF32 in convolutions, but not in matrix products. Here both follow run.tf32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = run.tf32
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_process(world.local_size))


def disable_malloc_trim() -> None:
    """Make glibc keep freed memory for reuse. No effect without glibc.

    By default glibc returns large buffers to the system immediately. An update of a CNN then spends a quarter of its
    time on page faults for the same memory. Peak memory is unchanged.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 2**26)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def threads_per_process(processes: int) -> int:
    """Return the number of threads for each of N processes on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // processes if hasattr(os, "sched_getaffinity") else 1)
