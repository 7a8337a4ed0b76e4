"""Shared parts of compiled tasks: a counter-based random generator for kernels, and the buffers that kernels write.

A draw is a pure function of a key (the environment) and a counter (the draw), as in `lockstep.rng`. An environment
needs no generator state, and its randomness does not depend on the other environments of the batch.

Caution: numba's cache tracks changes in the file of a compiled kernel, not in the files that the kernel calls. Delete
the `__pycache__` directories under `tasks` after a change here.
"""

from typing import TypeAlias

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lockstep.ops.philox.cpu import below, rounds
from lockstep.transfer import Uploader

Integer: TypeAlias = "int | np.integer"

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@njit(cache=True, nogil=True)
def philox(key: Integer, major: Integer, minor: Integer) -> tuple[np.uint64, np.uint64]:
    """Return 128 random bits for a 64-bit key and a 128-bit counter in two words, such as an episode and a draw."""
    key, major, minor = np.uint64(key), np.uint64(major), np.uint64(minor)
    word_0, word_1, word_2, word_3 = rounds(
        key & _LOW, key >> _HALF, minor & _LOW, minor >> _HALF, major & _LOW, major >> _HALF
    )
    return word_1 << _HALF | word_0, word_3 << _HALF | word_2


@njit(cache=True, nogil=True)
def random_below(bound: Integer, key: Integer, major: Integer, minor: Integer) -> np.int64:
    """Return a random integer in [0, bound), for a bound up to 2**32."""
    return np.int64(below(philox(key, major, minor)[0], np.uint64(bound)))


class Buffers:
    """Host arrays that a kernel writes, and their copies on the device.

    On the CPU both share memory and nothing is copied.
    """

    def __init__(self, device: torch.device, **shapes: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self._host = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
        self._upload = Uploader(device)
        self.arrays: dict[str, np.ndarray] = {name: host.numpy() for name, host in self._host.items()}
        self.tensors: dict[str, Tensor] = self._upload(self._host)

    def copy_to_device(self) -> dict[str, Tensor]:
        """Copy the arrays that the kernel wrote to the device."""
        self.tensors = self._upload(self._host)
        return self.tensors
