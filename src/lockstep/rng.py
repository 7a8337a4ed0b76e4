"""Random numbers as a pure function of (seed, purpose, lane, counter), with the same bits on every device.

A stream has no state. The caller names a draw by a counter, usually the clock's iteration, so a resumed run draws what
the uninterrupted run would have drawn, and nothing about randomness is saved. Every (key, counter) pair of Philox is an
independent sequence; `philox.constants` says how its words become numbers.

Shapes: L local lanes.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lockstep.ops.philox.draws import Counter, Device, Philox

_thread = threading.local()
"""A NumPy generator for each thread, repositioned before every use: creating one costs more than most draws."""


def stable_hash(*parts: object) -> int:
    """Return a 128-bit hash of the parts. Unlike `hash()`, it is equal in every process."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


@dataclass(frozen=True)
class RandomStream:
    """The draws for one purpose, on one lane or (lane None) shared by all lanes.

    Draws with the same counter use the same random words: give each draw its own counter or purpose.
    """

    seed: int
    name: str
    lane: int | None = None

    @cached_property
    def key(self) -> int:
        """128 bits; draws use the lower 64."""
        return stable_hash(self.seed, self.name, self.lane)

    @cached_property
    def _alone(self) -> "LaneStreams":
        return LaneStreams((self,))

    def uniform(self, counter: Counter, *shape: int, device: Device = "cpu") -> Tensor:
        """Uniform float32 in [0, 1)."""
        return self._alone.uniform(counter, *shape, device=device)[0]

    def normal(self, counter: Counter, *shape: int, device: Device = "cpu") -> Tensor:
        """Standard normal float32."""
        return self._alone.normal(counter, *shape, device=device)[0]

    def gumbel(self, counter: Counter, *shape: int, device: Device = "cpu") -> Tensor:
        """Standard Gumbel float32: the argmax of logits plus this noise is a draw from their softmax."""
        return self._alone.gumbel(counter, *shape, device=device)[0]

    def bernoulli_sparse(self, counter: Counter, part: float, *shape: int, device: Device = "cpu") -> Tensor:
        """Independent bool, true with probability `part`, which is rounded to a multiple of 2**-32."""
        return self._alone.bernoulli_sparse(counter, part, *shape, device=device)[0]

    def integers(self, counter: Counter, high: int, *shape: int, device: Device = "cpu") -> Tensor:
        """Uniform int64 in [0, high), for a bound up to 2**32."""
        return self._alone.integers(counter, high, *shape, device=device)[0]

    def permutation(self, counter: Counter, *shape: int, device: Device = "cpu") -> Tensor:
        """A permutation of range(length) int64, where the last axis has that length; one for each of the other axes."""
        return self._alone.permutation(counter, *shape, device=device)[0]

    def draw_seed(self, counter: int, bits: int = 63) -> int:
        """One non-negative integer, for example to seed a library."""
        return stable_hash(self.seed, self.name, self.lane, counter) & ((1 << bits) - 1)

    def generator(self, counter: int) -> np.random.Generator:
        """This thread's NumPy generator at the beginning of draw `counter`, for host code; valid until the next call.

        It is Philox4x64, a separate sequence: it is independent of the draws above.
        """
        if not hasattr(_thread, "generator"):
            _thread.generator = np.random.Generator(np.random.Philox(key=0))
        generator: np.random.Generator = _thread.generator
        generator.bit_generator.state = {
            "bit_generator": "Philox",
            # The counter takes the high word: each draw has 2**192 blocks of its own, so draws never overlap.
            "state": {
                "counter": np.array([0, 0, 0, counter], dtype=np.uint64),
                "key": np.array([self.key & (2**64 - 1), self.key >> 64], dtype=np.uint64),
            },
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return generator


class LaneStreams(Philox):
    """Streams of one purpose on several lanes, drawn together as [L, *shape]."""

    def __init__(self, streams: Sequence[RandomStream]) -> None:
        super().__init__([stream.key & (2**64 - 1) for stream in streams])


@contextmanager
def seeded_init(stream: RandomStream) -> Iterator[None]:
    """Initialize modules in the block from a stream that all lanes share. Torch's global generator is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream.draw_seed(0))
        yield
