"""Environment variables that do nothing, or harm."""

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
"""Variables that no library reads any more, or ever did, and what does what they promise."""
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked by another one",
    "NCCL_P2P_DISABLE": "GPUs talk to each other through the host",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
    "NCCL_SHM_DISABLE": "processes on one host talk through the network",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
}
"""Variables that make training slow, while they are set to anything but these."""
_OFF = ("", "0", "OFF", "off", "false")
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check_variables(environment: Mapping[str, str], interfaces: Iterable[str], processes: int) -> Iterator[CheckResult]:
    """Look at what is set; `interfaces` are the names of this machine's network interfaces."""
    lines = [
        *_without_effect(environment),
        *_slow(environment),
        *_left_over(environment),
        *_interfaces(environment, list(interfaces)),
        *_threads(environment, processes),
    ]
    yield from lines or [ok("variables", "none that does nothing or harms")]


def _without_effect(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    for name, instead in WITHOUT_EFFECT.items():
        if name in environment:
            yield warning("variables", f"{name} is set, and nothing reads it", f"unset {name}; use {instead}.")


def _slow(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    for name, why in SLOW.items():
        if environment.get(name, "") not in _OFF:
            yield warning(
                "variables", f"{name}={environment[name]}: {why}", f"unset {name}, unless you look for a fault."
            )
    if environment.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        yield warning(
            "variables",
            "OMP_WAIT_POLICY=ACTIVE: threads that wait keep the cores from those that work",
            "unset OMP_WAIT_POLICY; lockstep sets it to PASSIVE.",
        )


def _left_over(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    left = [name for name in LAUNCHER_VARIABLES if name in environment]
    if left:
        yield failure(
            "variables",
            f"{', '.join(left)} set outside a launcher: a command will wait for processes that nobody starts",
            f"unset {' '.join(left)}",
        )


def _interfaces(environment: Mapping[str, str], interfaces: list[str]) -> Iterator[CheckResult]:
    for name in INTERFACES:
        wanted = environment.get(name, "")
        # NCCL takes prefixes, `=name` for a whole name and `^name` for all but that one.
        excluded, words = wanted.startswith("^"), [word for word in wanted.lstrip("^=").split(",") if word]
        if excluded or not words:
            continue
        exact = name.startswith("GLOO") or wanted.startswith("=")
        found = [i for i in interfaces for word in words if (i == word if exact else i.startswith(word))]
        if not found:
            yield failure(
                "variables",
                f"{name}={wanted} names no interface of this machine ({', '.join(interfaces)})",
                f"unset {name}: the right one is found by itself; or name one of those.",
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
