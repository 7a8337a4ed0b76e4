"""One agent, or stop: fingerprints of named tensors, compared over all processes."""

from collections import Counter
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lockstep.protocols import StateDict


class ReplicaMismatchError(RuntimeError):
    """Processes that should hold one agent hold different ones."""


def fingerprints(state: StateDict) -> Tensor:
    """A 64-bit number for each tensor, [tensors] int64: integer sums, which wrap and never round."""
    found = [_fingerprint(tensor.detach()) for tensor in state.values()]
    numbers = torch.empty(len(found), dtype=torch.int64)
    # An agent on a GPU has counters on the host, too: one transfer for each device.
    for device in {number.device for number in found}:
        places = [place for place, number in enumerate(found) if number.device == device]
        numbers[places] = torch.stack([found[place] for place in places]).to("cpu")
    return numbers


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def _fingerprint(tensor: Tensor) -> Tensor:
    """A sum of all words, each times a number of its place: two numbers that move against each other show as well."""
    weights = _weights(tensor.device)
    # Strided anew, because a single element counts as contiguous whatever its stride.
    flat = tensor.contiguous().reshape(-1).as_strided((tensor.numel(),), (1,))
    parts = flat.view(_WORDS[tensor.element_size()]).split(len(weights))
    sums = [(part * weights[: len(part)]).sum() for part in parts]
    return sums[0] if len(sums) == 1 else _fingerprint(torch.stack(sums))


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd, so that no change of one word is lost when the sum wraps; as many as stay in the cache."""
    return torch.arange(1, 2**16 + 1, device=device) * -0x61C8864680B583EB | 1


def payload_bytes(state: StateDict) -> int:
    """Bytes that comparing a state sends."""
    return 2 * 8 * len(state)


def all_equal(mine: Tensor, maximum: Callable[[Tensor], Tensor]) -> bool:
    """Whether all processes hold the same numbers, by one reduction: the largest must be the smallest."""
    # -(x + 1) instead of -x: it has no overflow at the smallest integer.
    both = maximum(torch.cat([mine, ~mine]))
    largest, smallest = both.chunk(2)
    return bool(torch.equal(largest, ~smallest))


def format_mismatch(everybody: list[list[int]], names: list[str], where: str) -> str:
    """Which tensors differ, on which processes, in words."""
    odd: dict[int, list[str]] = {}
    for name, values in zip(names, zip(*everybody, strict=True), strict=True):
        usual, _ = Counter(values).most_common(1)[0]
        for process, value in enumerate(values):
            if value != usual:
                odd.setdefault(process, []).append(name)
    lines = [
        f"  process {process}: {', '.join(tensors[:4])}" + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")
        for process, tensors in sorted(odd.items())
    ]
    return "\n".join(
        [
            f"the processes no longer hold one agent ({where}). They differ from the majority in:",
            *lines,
            "A number that was not shared reached the agent: look for one that was not pooled or agreed.",
            "`lockstep prove` names the first iteration and tensor that go apart.",
        ]
    )
