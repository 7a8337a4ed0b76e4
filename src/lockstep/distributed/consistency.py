"""Replica consistency: compare fingerprints of named tensors between all processes."""

from collections import Counter
from functools import cache

import torch
from torch import Tensor

from lockstep.protocols import StateDict
from lockstep.transfer import download


class ReplicaMismatchError(RuntimeError):
    """Model replicas differ between processes."""


def fingerprints(state: StateDict) -> Tensor:
    """Return a 64-bit fingerprint for each tensor, [tensors] int64. Integer sums wrap and never round."""
    # An agent on a GPU also has counters on the host. Use one transfer for each device.
    found = download([_fingerprint(tensor.detach()) for tensor in state.values()])
    return torch.stack(found) if found else torch.empty(0, dtype=torch.int64)


def fold(state: StateDict) -> int:
    """Return one 64-bit fingerprint of all tensors, without names. The host reads one word per device and dtype."""
    flat: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in state.values():
        flat.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach().reshape(-1))
    words = download([_fingerprint(torch.cat(tensors)) for tensors in flat.values()])
    return int(_fingerprint(torch.stack(words))) % 2**64 if words else 0


_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def _fingerprint(tensor: Tensor) -> Tensor:
    """Sum all words, each times a weight that depends on its position, so that swapped values change the sum, too."""
    weights = _weights(tensor.device)
    # Set the stride explicitly, because a single element counts as contiguous with any stride.
    flat = tensor.contiguous().reshape(-1).as_strided((tensor.numel(),), (1,))
    parts = flat.view(_INTEGER_DTYPES[tensor.element_size()]).split(len(weights))
    sums = [(part * weights[: len(part)]).sum() for part in parts]
    return sums[0] if len(sums) == 1 else _fingerprint(torch.stack(sums))


@cache
def _weights(device: torch.device) -> Tensor:
    """Return odd weights, so that a change of one word always changes the wrapped sum. Their number fits the cache."""
    return torch.arange(1, 2**16 + 1, device=device) * -0x61C8864680B583EB | 1


def format_mismatch(by_process: list[list[int]], names: list[str], where: str) -> str:
    """Format a message that names the differing tensors and processes. `by_process` has the fingerprints of each."""
    differing: dict[int, list[str]] = {}
    for name, values in zip(names, zip(*by_process, strict=True), strict=True):
        majority, _ = Counter(values).most_common(1)[0]
        for process, value in enumerate(values):
            if value != majority:
                differing.setdefault(process, []).append(name)
    lines = [
        f"  process {process}: {', '.join(tensors[:4])}" + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")
        for process, tensors in sorted(differing.items())
    ]
    return "\n".join(
        [
            f"the replicas of the agent differ between processes ({where}). These tensors differ from the majority:",
            *lines,
            "The update used a rank-local value. Look for a statistic or decision that is not all-reduced.",
            "Run `lockstep prove` to find the first iteration and tensor that diverge.",
        ]
    )
