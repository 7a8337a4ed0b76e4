"""Random draws for several keys at once, on any device: numba on the CPU, Triton on CUDA, torch operations elsewhere.

All three give the same bits. On CUDA only the keys are copied from the host, once, and nothing synchronizes.

Shapes: L lanes, one key each.
"""

import logging
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lockstep.ops.philox import tensor_ops
from lockstep.ops.philox.constants import MAX_BOUND, Kind

Counter: TypeAlias = int | Tensor
"""Number of a draw. A tensor (0-dim int64) is read on its device, so that a CUDA graph can capture the draw."""
Device: TypeAlias = torch.device | str
_DRAWN_ON_HOST = frozenset({"cpu", "mps"})
"""Devices whose numbers are generated on the CPU. MPS lacks some operations on 64-bit integers, so it gets copies."""
_ALL_BITS = 2**64 - 1


class Philox:
    """Draws [L, *shape] for L keys; see `constants` for the definition of an element."""

    def __init__(self, keys: Sequence[int]) -> None:
        """Set the keys of the lanes. Draws use their lower 64 bits."""
        self._keys = np.array([key & _ALL_BITS for key in keys], np.uint64)
        self._on_device: dict[torch.device, Tensor] = {}

    def uniform(self, counter: Counter, *shape: int, device: Device = "cpu") -> Tensor:
        """Uniform float32 in [0, 1)."""
        return self._draw("uniform", counter, shape, device)

    def normal(self, counter: Counter, *shape: int, device: Device = "cpu") -> Tensor:
        """Standard normal float32."""
        return self._draw("normal", counter, shape, device)

    def gumbel(self, counter: Counter, *shape: int, device: Device = "cpu") -> Tensor:
        """Standard Gumbel float32: the argmax of logits plus this noise is a draw from their softmax."""
        return self._draw("gumbel", counter, shape, device)

    def bernoulli_sparse(self, counter: Counter, probability: float, *shape: int, device: Device = "cpu") -> Tensor:
        """Independent bool, True with a probability that is rounded to a multiple of 2**-32."""
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"the probability is {probability}. Use a number from 0 to 1.")
        return self._draw("event", counter, shape, device, round(probability * 2**32))

    def integers(self, counter: Counter, high: int, *shape: int, device: Device = "cpu") -> Tensor:
        """Uniform int64 in [0, high), for a bound up to 2**32."""
        if not 1 <= high <= MAX_BOUND:
            raise ValueError(f"the bound of random integers is {high}. Use a number from 1 to 2**32.")
        return self._draw("integers", counter, shape, device, high)

    def permutation(self, counter: Counter, *shape: int, device: Device = "cpu") -> Tensor:
        """A permutation of range(length) int64, where the last axis has that length; one for each of the other axes."""
        device = torch.device(device)
        if device.type not in _DRAWN_ON_HOST:
            return tensor_ops.order(self._draw("orders", counter, shape, device))
        keys = self._draw("orders", counter, shape, "cpu")
        order: Tensor = _kernels().order(keys.unsqueeze(0).flatten(0, -2))
        return order.view(keys.shape).to(device)

    def _draw(self, kind: Kind, counter: Counter, shape: tuple[int, ...], device: Device, bound: int = 0) -> Tensor:
        device, count = torch.device(device), math.prod(shape)
        if device.type in _DRAWN_ON_HOST:
            result: Tensor = _kernels().draw(kind, self._keys, int(counter) & _ALL_BITS, count, bound).to(device)
        else:
            keys = self._keys_on(device)
            result = _implementation(keys.device).draw(kind, keys, counter, count, bound)
        return result.view(len(self._keys), *shape)

    def _keys_on(self, device: torch.device) -> Tensor:
        if device.index is None:  # "cuda" is the current device, which may change
            device = torch.empty(0, device=device).device
        if device not in self._on_device:
            self._on_device[device] = torch.from_numpy(self._keys.view(np.int64)).to(device)
        return self._on_device[device]


@cache
def _kernels() -> Any:
    """Import the compiled kernels at the first draw, so that processes that never draw start faster."""
    from lockstep.ops.philox import cpu

    return cpu


def integers_at(keys: Tensor, major: Tensor, minor: Tensor, bound: Tensor) -> Tensor:
    """Draw uniform int64 in [0, bound), one for each key and counter of two words; all [N] int64 on one device.

    The numbers are the same as those of `tasks.kernels.random_below`.
    """
    drawn: Tensor = _implementation(keys.device).integers_at(keys, major, minor, bound)
    return drawn


@cache
def _implementation(device: torch.device) -> Any:
    """Return the module with the Triton kernels on CUDA if they work, otherwise the one with torch operations."""
    if device.type != "cuda" or (torch.version.cuda is None and torch.version.hip is None):
        return tensor_ops
    try:
        from lockstep.ops.philox import triton_kernel

        # Test with a launch: unlike the import, it compiles, which needs a supported driver and a C compiler.
        triton_kernel.draw("event", torch.zeros(1, dtype=torch.int64, device=device), 0, 1, 0)
    except Exception as error:
        logging.getLogger("lockstep").warning(
            "Triton does not work on %s (%s: %s). Random numbers are generated by torch operations instead: "
            "the same numbers, with more kernel launches. Install triton and a C compiler.",
            device,
            type(error).__name__,
            error,
        )
        return tensor_ops
    return triton_kernel
