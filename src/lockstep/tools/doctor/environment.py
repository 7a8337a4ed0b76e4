"""Check environment variables that have no effect, slow training down or break it."""

import os
from collections.abc import Iterable, Iterator, Mapping

from lockstep.launch.world import LAUNCHER_VARIABLES
from lockstep.tools.doctor.finding import CheckResult, failure, ok, warning

WITHOUT_EFFECT = {
    "NCCL_TIMEOUT": "--run.collective-timeout SECONDS",
    "GLOO_TIMEOUT": "--run.collective-timeout SECONDS",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING, whose default is right",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT, whose default is right",
}
"""Variables that no library reads, and what to use instead."""
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is verified by another collective",
    "NCCL_P2P_DISABLE": "GPUs communicate through the host",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
    "NCCL_SHM_DISABLE": "processes on one host communicate over the network",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
}
"""Variables that slow training down, unless their value is in `_OFF_VALUES`, and why."""
_OFF_VALUES = ("", "0", "OFF", "off", "false")
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check_variables(environment: Mapping[str, str], interfaces: Iterable[str], processes: int) -> Iterator[CheckResult]:
    """Check the variables in `environment`. `interfaces` are the names of this machine's network interfaces."""
    results = [
        *_useless_or_slow(environment),
        *_left_over(environment),
        *_interfaces(environment, list(interfaces)),
        *_threads(environment, processes),
    ]
    yield from results or [ok("variables", "none without effect, none that slows or breaks training")]


def _useless_or_slow(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    for name, instead in WITHOUT_EFFECT.items():
        if name in environment:
            yield warning("variables", f"{name} is set, but no library reads it", f"unset {name}; use {instead}.")
    for name, why in SLOW.items():
        if environment.get(name, "") not in _OFF_VALUES:
            yield warning("variables", f"{name}={environment[name]}: {why}", f"unset {name}, unless you are debugging.")
    if environment.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        yield warning(
            "variables",
            "OMP_WAIT_POLICY=ACTIVE: waiting threads take cores from working threads",
            "unset OMP_WAIT_POLICY; lockstep sets it to PASSIVE.",
        )


def _left_over(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    leftover = [name for name in LAUNCHER_VARIABLES if name in environment]
    if leftover:
        yield failure(
            "variables",
            f"{', '.join(leftover)} set outside a launcher: commands would wait for processes that are never started",
            f"unset {' '.join(leftover)}",
        )


def _interfaces(environment: Mapping[str, str], interfaces: list[str]) -> Iterator[CheckResult]:
    for name in INTERFACES:
        value = environment.get(name, "")
        # NCCL accepts prefixes, `=name` for an exact name and `^name` to exclude a name.
        excluded, names = value.startswith("^"), [part for part in value.lstrip("^=").split(",") if part]
        if excluded or not names:
            continue
        exact = name.startswith("GLOO") or value.startswith("=")
        matches = [i for i in interfaces for part in names if (i == part if exact else i.startswith(part))]
        if not matches:
            yield failure(
                "variables",
                f"{name}={value} matches no interface of this machine ({', '.join(interfaces)})",
                f"unset {name} to choose the interface automatically, or set it to one of those.",
            )


def _threads(environment: Mapping[str, str], processes: int) -> Iterator[CheckResult]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 1 and int(threads) * processes > cores:
        yield warning(
            "variables",
            f"OMP_NUM_THREADS={threads}: {processes} processes would run {int(threads) * processes} threads on"
            f" {cores} cores",
            "unset OMP_NUM_THREADS: each process then gets its share.",
        )
