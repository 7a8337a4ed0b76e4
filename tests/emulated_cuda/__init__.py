"""Emulated CUDA devices on torch's CPU build, for tests of multi-GPU code without a GPU.

`device.cpp` says what is emulated. This module builds it once per torch version, and gives `torch.cuda` the functions
that a CPU build lacks. It proves device placement, ordering and control flow. It says nothing about speed, numerics of
GPU kernels, or NCCL itself.

A process has the devices when it starts with `environment(gpus)` in its environment: `site/sitecustomize.py` installs
an import hook, so that the devices are there before torch looks for them and nothing is loaded before torch is.
"""

import atexit
import contextlib
import fcntl
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import types
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "device.cpp"
EXTENSION = "emulated_cuda_device"


def environment(gpus: int, **settings: str) -> dict[str, str]:
    """Environment variables that give a process, and all that it starts, so many emulated GPUs."""
    build()
    path = os.pathsep.join([str(HERE / "site"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {"EMULATED_GPUS": str(gpus), "PYTHONPATH": path, **settings}


# -- building ----------------------------------------------------------------------------------------------------------


def build() -> Path:
    """Compile the extension for the installed torch, unless that was done before; its path."""
    torch = Path(importlib.machinery.PathFinder.find_spec("torch").origin).parent
    version = (torch / "version.py").read_bytes()
    # Built for torch at its place: the extension finds torch's libraries by their path.
    wanted = SOURCE.read_bytes() + version + f"{sys.version}{torch}".encode()
    key = hashlib.sha256(wanted).hexdigest()[:16]
    # Not XDG_CACHE_HOME: tests point that at a directory of their own.
    cache = Path(os.environ.get("EMULATED_CUDA_CACHE", Path.home() / ".cache" / "lockstep-emulated-cuda"))
    built = cache / key / f"{EXTENSION}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that start together build once
        if not built.exists():
            unfinished = built.with_suffix(".unfinished")
            _compile(torch, unfinished)
            unfinished.replace(built)
    return built


def _compile(torch: Path, output: Path) -> None:
    headers = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = ["c10", "torch_cpu", "torch", "torch_python"]
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-w", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED"]
    command += [f"-DTORCH_EXTENSION_NAME={EXTENSION}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    command += [part for header in headers for part in ("-isystem", str(header))]
    command += [str(SOURCE), "-o", str(output), f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    command += [f"-l{library}" for library in libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the emulated CUDA device could not be built:\n{done.stderr[-4000:]}")


# -- installing --------------------------------------------------------------------------------------------------------


def install() -> None:
    """Have `import torch` find emulated devices; call it before torch is imported."""
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the emulated devices: it asks for devices only once.")
    sys.meta_path.insert(0, _Hook())


class _Hook(importlib.abc.MetaPathFinder):
    """Acts where torch is about to import what it finds missing in a CPU build."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            _load_extension()
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                _complete_torch()

            spec.loader.exec_module = exec_module
            return spec
        if name == "torch.cuda":
            _complete_bindings()
        if name == "torch.distributed.distributed_c10d":
            _offer_nccl()
        return None


def _load_extension() -> None:
    path = build()
    loader = importlib.machinery.ExtensionFileLoader(EXTENSION, str(path))
    spec = importlib.util.spec_from_file_location(EXTENSION, path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    atexit.register(module.stop_streams)
    sys.modules[EXTENSION] = module


def _complete_bindings() -> None:
    """What the CUDA build of torch has in `torch._C`, before `torch.cuda` looks for it."""
    import torch

    device = sys.modules[EXTENSION]

    class StreamBase(torch.Stream):
        def __new__(cls, priority=0, stream_id=None, device_index=None, device_type=None, stream_ptr=0):
            if stream_id is not None:
                return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
            return super().__new__(cls, device=torch.device("cuda", device.get_device()), priority=priority)

        cuda_stream = property(lambda self: self.stream_id)
        __eq__ = torch.Stream.__eq__
        __hash__ = torch.Stream.__hash__

    class EventBase(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

        def record(self, stream=None):
            super().record(torch.cuda.current_stream() if stream is None else stream)

        def elapsed_time(self, end_event):
            return device.elapsed_time(self.event_id, end_event.event_id)

        def wait(self, stream=None):
            super().wait(torch.cuda.current_stream() if stream is None else stream)

    def stream_of(index: int) -> tuple[int, int, int]:
        return device.current_stream(index), index, _CUDA_TYPE

    def memory_stats(index: int) -> dict:
        current, peak, _ = device.memory(index)
        sizes = {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}
        return {"allocated_bytes": {"all": sizes}, "reserved_bytes": {"all": sizes}, "num_ooms": 0}

    def free_memory(index: int) -> tuple[int, int]:
        device.create_context()
        current, _, total = device.memory(index)
        return total - current, total

    runtime = types.SimpleNamespace(
        cudaError=types.SimpleNamespace(success=0), cudaMemGetInfo=free_memory, cudaGetErrorString=str
    )
    torch._C.__dict__.update(
        _CudaStreamBase=StreamBase,
        _CudaEventBase=EventBase,
        _CUDAGraph=device.Graph,
        _graph_pool_handle=lambda: (0, 1),
        _cuda_isCurrentStreamCapturing=device.is_capturing,
        _CudaDeviceProperties=Properties,
        _cudart=runtime,
        _cuda_init=device.create_context,
        _cuda_isInBadFork=device.in_bad_fork,
        _cuda_getDeviceCount=device.device_count,
        _cuda_getDevice=device.get_device,
        _cuda_setDevice=device.set_device,
        _cuda_exchangeDevice=device.exchange_device,
        _cuda_maybeExchangeDevice=device.exchange_device,
        _cuda_canDeviceAccessPeer=lambda a, b: True,
        _cuda_getCurrentStream=stream_of,
        _cuda_getDefaultStream=lambda index: (0, index, _CUDA_TYPE),
        _cuda_setStream=lambda stream_id, device_index, device_type: device.set_stream(stream_id, device_index),
        _cuda_getCurrentRawStream=device.current_stream,
        _cuda_synchronize=device.synchronize,
        _cuda_sleep=device.sleep,
        _cuda_set_sync_debug_mode=device.set_sync_debug_mode,
        _cuda_get_sync_debug_mode=device.get_sync_debug_mode,
        _cuda_memoryStats=memory_stats,
        _cuda_resetPeakMemoryStats=device.reset_peak_memory,
        _cuda_emptyCache=lambda: None,
        _cuda_getArchFlags=lambda: "sm_90",
        _cuda_ipc_collect=lambda: None,
        _host_emptyCache=lambda: None,
    )
    device.set_line_finder(_calling_line)


_CUDA_TYPE = 1
"""Number of the device type in c10."""


class Properties:
    """What `torch.cuda.get_device_properties` returns. EMULATED_GPU_CAPABILITY=7.5 makes it a T4."""

    def __init__(self, index: int) -> None:
        device = sys.modules[EXTENSION]
        capability = os.environ.get("EMULATED_GPU_CAPABILITY", "9.0")
        self.major, self.minor = map(int, capability.split("."))
        self.name = "Emulated GPU"
        self.total_memory = device.memory(index)[2]
        self.multi_processor_count = 1
        self.pci_bus_id = device.physical_device(index)
        self.uuid = f"GPU-emulated-{device.physical_device(index)}"
        self.gcnArchName = ""
        self.is_integrated = self.is_multi_gpu_board = 0
        self.warp_size = 32


def _complete_torch() -> None:
    """What the CUDA build has elsewhere in torch."""
    import torch

    device = sys.modules[EXTENSION]
    if not device.has_hooks():
        raise RuntimeError("torch asked for CUDA hooks before the emulated devices were registered.")

    def get_device_properties(which=None):
        torch.cuda._lazy_init()
        index = torch.cuda._utils._get_device_index(which, optional=True)
        if not 0 <= index < device.device_count():
            raise AssertionError("Invalid device id")
        return Properties(index)

    torch.cuda.get_device_properties = get_device_properties
    torch.cuda._is_in_bad_fork = torch._C._cuda_isInBadFork
    torch.cuda.get_rng_state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda state, device="cuda": None
    torch.cuda.manual_seed_all = torch.cuda.manual_seed = lambda seed: None
    torch.backends.cuda.is_built = lambda: True
    torch.__config__.show = lambda: "PyTorch built with:\n  - emulated CUDA\n"

    deepcopy = torch.Tensor.__deepcopy__

    def copied(self, memo):
        """A CPU build cannot make a bare CUDA storage, which copying a buffer takes."""
        if self.device.type != "cuda" or isinstance(self, torch.nn.Parameter):
            return deepcopy(self, memo)
        memo[id(self)] = copy = self.detach().clone().requires_grad_(self.requires_grad)
        return copy

    torch.Tensor.__deepcopy__ = copied


def _offer_nccl() -> None:
    """Let `torch.distributed` find a class where the CUDA build has ProcessGroupNCCL."""
    import json

    import torch._C._distributed_c10d as c10d

    device = sys.modules[EXTENSION]

    class Meta(type):
        def __instancecheck__(cls, instance) -> bool:
            return isinstance(instance, c10d.Backend) and instance.name() == "nccl"

    class ProcessGroupNCCL(metaclass=Meta):
        class Options:
            pass

        def __new__(cls, store, rank, size, options):
            # Without a limit: the emulated watchdog ends what takes too long, as NCCL's does.
            from datetime import timedelta

            gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("emulated", store), rank, size, timedelta(days=1))
            _kept.append(gloo)
            return device.backend(gloo, rank, size, int(options._timeout.total_seconds() * 1000))

    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d.Backend._group_start = c10d.Backend._group_end = lambda self: None
    c10d._dump_nccl_trace_json = lambda *_, **__: json.dumps({"entries": device.flight_record()}).encode()


_kept: list = []
"""Process groups that the emulated ones send through."""


# -- looking -----------------------------------------------------------------------------------------------------------


def _calling_line() -> str:
    """The innermost line of Lockstep that the calling thread is in, `file.py:123`."""
    frame = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if f"{os.sep}lockstep{os.sep}" in path:
            return f"{path.split(f'{os.sep}lockstep{os.sep}')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def one_launch():
    """Count what the block launches as one kernel: for operations that a real GPU has a kernel of its own for."""
    device = sys.modules[EXTENSION]
    before, _ = device.counts()
    yield
    device.set_launches(before + 1)


class Counted:
    """Launches and host synchronizations of a block of code."""

    launches = syncs = 0
    by_line: Counter
    by_name: dict[str, int]


@contextlib.contextmanager
def counting():
    """Count launches and host synchronizations, with the lines that synchronize."""
    device = sys.modules[EXTENSION]
    counted = Counted()
    before = device.counts()
    names = Counter(device.launches_by_name())
    logged = len(device.sync_log())
    device.log_syncs(True)
    try:
        yield counted
    finally:
        device.log_syncs(False)
        after = device.counts()
        counted.launches, counted.syncs = (now - then for now, then in zip(after, before, strict=True))
        counted.by_line = Counter(f"{line or '?'} ({what})" for what, line in device.sync_log()[logged:])
        counted.by_name = dict(Counter(device.launches_by_name()) - names)
