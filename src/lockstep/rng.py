"""Random numbers as a pure function of (seed, purpose, lane, counter), with the same bits on every device.

A stream has no state. The caller names a draw by a counter, usually the clock's iteration, so a resumed run draws what
the uninterrupted run would have drawn, and nothing about randomness is saved. Every (key, counter) pair of Philox is an
independent sequence; `philox.constants` says how its words become numbers.

Shapes: L local lanes.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from lockstep.ops.philox.constants import Kind
from lockstep.ops.philox.draws import Counter, Device, Philox

_thread = threading.local()
"""A NumPy generator for each thread, repositioned before every use: creating one costs more than most draws."""


def stable_hash(*parts: object) -> int:
    """Return a 128-bit hash of the parts. Unlike `hash()`, it is equal in every process."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


class RandomStream(Philox):
    """The draws [*shape] for one purpose, on one lane or (lane None) shared by all lanes.

    Draws with the same counter use the same random words: give each draw its own counter or purpose.
    """

    def __init__(self, seed: int, name: str, lane: int | None = None) -> None:
        self.seed, self.name, self.lane = seed, name, lane
        self.key = stable_hash(seed, name, lane)
        """128 bits; draws use the lower 64."""
        super().__init__([self.key])

    def _draw(self, kind: Kind, counter: Counter, shape: tuple[int, ...], device: Device, bound: int = 0) -> Tensor:
        return super()._draw(kind, counter, shape, device, bound)[0]

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
        super().__init__([stream.key for stream in streams])


@contextmanager
def seeded_torch(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators in the block, for layers that draw from them. They are restored afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def watch_draws(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the block has drawn from torch's global generator of a device."""

    def state() -> Tensor:
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    before = state()
    yield lambda: not torch.equal(before, state())


@contextmanager
def seeded_init(stream: RandomStream) -> Iterator[None]:
    """Initialize modules in the block from a stream that all lanes share. Torch's global generator is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream.draw_seed(0))
        yield
