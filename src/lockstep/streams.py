"""Randomness as a pure function of (seed, purpose, lane, counter).

A stream has no state: the caller says which draw it wants by a counter, usually the clock's iteration, so a resumed run
draws what the uninterrupted one would have, and nothing about randomness needs saving. Philox makes every
(key, counter) pair an independent generator.

Shapes: L local lanes.
"""

import hashlib
import math
import threading
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

_thread = threading.local()
"""A generator for each thread, put into place before every draw: making one costs more than most draws do."""


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

    @cached_property
    def _key(self) -> np.ndarray:
        key = digest(self.seed, self.purpose, self.lane)
        return np.array([key & (2**64 - 1), key >> 64], dtype=np.uint64)

    def generator(self, counter: int) -> np.random.Generator:
        """This thread's generator, standing at the beginning of draw number `counter`; good until the next call."""
        if not hasattr(_thread, "generator"):
            _thread.generator = np.random.Generator(np.random.Philox(key=0))
        generator: np.random.Generator = _thread.generator
        generator.bit_generator.state = {
            "bit_generator": "Philox",
            # The counter takes the high word: each draw has 2**192 blocks of its own, so draws never overlap.
            "state": {"counter": np.array([0, 0, 0, counter], dtype=np.uint64), "key": self._key},
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return generator

    def uniform(self, counter: int, *shape: int) -> Tensor:
        return torch.from_numpy(self.generator(counter).random(shape, dtype=np.float32))

    def normal(self, counter: int, *shape: int) -> Tensor:
        return torch.from_numpy(self.generator(counter).standard_normal(shape, dtype=np.float32))

    def gumbel(self, counter: int, *shape: int) -> Tensor:
        """Noise whose sum with the logits of a choice is largest at a choice drawn from it."""
        exponential = self.generator(counter).standard_exponential(shape, dtype=np.float32)
        return torch.from_numpy(-np.log(np.maximum(exponential, np.finfo(np.float32).tiny)))

    def rare(self, counter: int, part: float, *shape: int) -> Tensor:
        """True with a small probability, each for itself: drawn are the gaps between them, which are few."""
        generator, count = self.generator(counter), math.prod(shape)
        enough = int(count * part + 6 * math.sqrt(count * part)) + 16
        places = generator.geometric(part, enough).cumsum() - 1
        while places[-1] < count:  # hardly ever
            places = np.concatenate([places, generator.geometric(part, enough).cumsum() + places[-1]])
        found = np.zeros(count, np.bool_)
        found[places[: np.searchsorted(places, count)]] = True
        return torch.from_numpy(found.reshape(shape))

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

    def gumbel(self, counter: int, *shape: int) -> Tensor:
        return torch.stack([stream.gumbel(counter, *shape) for stream in self.streams])  # [L, *shape]

    def rare(self, counter: int, part: float, *shape: int) -> Tensor:
        return torch.stack([stream.rare(counter, part, *shape) for stream in self.streams])  # [L, *shape]

    def integers(self, counter: int, high: int, *shape: int) -> Tensor:
        return torch.stack([stream.integers(counter, high, *shape) for stream in self.streams])  # [L, *shape]

    def permutation(self, counter: int, length: int) -> Tensor:
        return torch.stack([stream.permutation(counter, length) for stream in self.streams])  # [L, length]
