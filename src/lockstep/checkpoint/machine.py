"""The machine and the library versions that computed a checkpoint.

Exact reduction gives the same bits on any number of processes of one kind of machine. A different CPU capability (AVX2
or AVX-512), GPU or version of torch may round differently, so a checkpoint records them.
"""

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lockstep import __version__
from lockstep.config import ConfigError, RunConfig

Machine = dict[str, str]
NAMES = {
    "cpu_capability": "CPU capability",
    "architecture": "architecture",
    "device": "device",
    "torch": "torch",
    "numpy": "numpy",
    "numba": "numba",
    "lockstep": "Lockstep",
}
"""Compared keys, and their names in messages."""


def describe_machine(device: torch.device | str = "cpu") -> Machine:
    """Describe what affects the bits of results: CPU capability, device and versions of the numerical libraries."""
    kind = torch.device(device)
    return {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "architecture": platform.machine(),
        "device": torch.cuda.get_device_name(kind) if kind.type == "cuda" else kind.type,
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "numba": _version("numba"),
        "lockstep": __version__,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """List the differences as "NAME was A and is B". A value missing on either side is not compared."""
    return [
        f"{name} was {str(one[key])[:100]} and is {str(other[key])[:100]}"
        for key, name in NAMES.items()
        if one.get(key) and other.get(key) and one[key] != other[key]
    ]


def compare_machines(saved: Mapping[str, Any], machines: Sequence[Machine], run: RunConfig) -> list[str]:
    """Compare the machine of a checkpoint with those of all processes.

    Returns:
        Messages for the log: at most one, which lists all differences.

    Raises:
        ConfigError: Something differs, the reduction is exact, and `run.allow_other_machine` is not set.
    """
    found: dict[str, int] = {}
    for rank, machine in enumerate(machines):
        for difference in differences(saved, machine):
            found.setdefault(difference, rank)
    if not found:
        return []
    listed = "; ".join(f"{difference}{f' on process {rank}' if rank else ''}" for difference, rank in found.items())
    if run.reduction == "exact" and not run.allow_other_machine:
        raise ConfigError(
            f"this machine differs from the one that wrote the checkpoint: {listed}. Exact mode requires bit-identical "
            "results, and the bits may differ on this machine.",
            "Use the same kind of machine and versions. To accept different bits, add: run.allow_other_machine=true",
        )
    return [f"This machine differs from the one that wrote the checkpoint: {listed}. Results may differ slightly."]
