"""The machine and the library versions that computed a checkpoint.

Exact reduction gives the same bits on any number of processes of one kind of machine. Another CPU capability (AVX2 or
AVX-512), another GPU or another version of torch may round differently, so a checkpoint records them.
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
"""What is compared, and how a message names it."""


def describe_machine(device: torch.device | str = "cpu") -> Machine:
    """What may change the bits of a computation: CPU capability, device, and versions of the libraries that compute."""
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
    """What differs, as "NAME was A and is B"; a value that one side does not record is not compared."""
    return [
        f"{name} was {str(one[key])[:100]} and is {str(other[key])[:100]}"
        for key, name in NAMES.items()
        if one.get(key) and other.get(key) and one[key] != other[key]
    ]


def compare_machines(saved: Mapping[str, Any], machines: Sequence[Machine], run: RunConfig) -> list[str]:
    """Compare the machine of a checkpoint with those of all processes.

    Returns:
        Sentences for the log: one for all differences.

    Raises:
        ConfigError: Something differs, the reduction is exact, and `run.allow_other_machine` is not set.
    """
    found: dict[str, int] = {}
    for rank, machine in enumerate(machines):
        for difference in differences(saved, machine):
            found.setdefault(difference, rank)
    if not found:
        return []
    listed = "; ".join(f"{words}{f' on process {rank}' if rank else ''}" for words, rank in found.items())
    if run.reduction == "exact" and not run.allow_other_machine:
        raise ConfigError(
            f"this machine differs from the one that wrote the checkpoint: {listed}. Exact mode promises the bits of "
            "the uninterrupted run, and they may differ here.",
            "Use the same kind of machine and versions. To accept other bits, add: run.allow_other_machine=true",
        )
    return [f"This machine differs from the one that wrote the checkpoint: {listed}. Results may differ slightly."]
