"""Randomness as a pure function of (seed, purpose, lane, counter).

A stream has no state: the caller says which draw it wants by a counter, usually the clock's iteration, so a resumed run
draws what the uninterrupted one would have, and nothing about randomness needs saving. Philox makes every
(key, counter) pair an independent generator.

Shapes: L local lanes.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def digest(*parts: object) -> int:
    """128 well-mixed bits that depend on the parts alone; never `hash()`, which Python salts for each process."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


@dataclass(frozen=True)
class Stream:
    """The draws for one purpose, on one lane or (lane None) shared by all lanes."""

    seed: int
    purpose: str
    lane: int | None = None

    def generator(self, counter: int) -> np.random.Generator:
        """A generator that stands at the beginning of draw number `counter`."""
        key = digest(self.seed, self.purpose, self.lane)
        words = np.array([key & (2**64 - 1), key >> 64], dtype=np.uint64)
        # The counter takes the high word: each draw has 2**192 blocks of its own, so draws never overlap.
        return np.random.Generator(np.random.Philox(key=words, counter=counter << 192))

    def uniform(self, counter: int, *shape: int) -> Tensor:
        return torch.from_numpy(self.generator(counter).random(shape, dtype=np.float32))

    def normal(self, counter: int, *shape: int) -> Tensor:
        return torch.from_numpy(self.generator(counter).standard_normal(shape, dtype=np.float32))

    def integers(self, counter: int, high: int, *shape: int) -> Tensor:
        return torch.from_numpy(self.generator(counter).integers(high, size=shape))

    def permutation(self, counter: int, length: int) -> Tensor:
        return torch.from_numpy(self.generator(counter).permutation(length))

    def number(self, counter: int, bits: int = 63) -> int:
        """One non-negative integer: a seed for something that wants one."""
        return digest(self.seed, self.purpose, self.lane, counter) & ((1 << bits) - 1)


@dataclass(frozen=True)
class LaneStreams:
    """The same purpose on several lanes; a draw has the lanes as its first axis."""

    streams: tuple[Stream, ...]

    def uniform(self, counter: int, *shape: int) -> Tensor:
        return torch.stack([stream.uniform(counter, *shape) for stream in self.streams])  # [L, *shape]

    def normal(self, counter: int, *shape: int) -> Tensor:
        return torch.stack([stream.normal(counter, *shape) for stream in self.streams])  # [L, *shape]

    def integers(self, counter: int, high: int, *shape: int) -> Tensor:
        return torch.stack([stream.integers(counter, high, *shape) for stream in self.streams])  # [L, *shape]

    def permutation(self, counter: int, length: int) -> Tensor:
        return torch.stack([stream.permutation(counter, length) for stream in self.streams])  # [L, length]
