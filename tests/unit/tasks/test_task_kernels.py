"""Kernel random numbers are Philox, and kernel buffers share memory with tensors."""

import numpy as np
import pytest
import torch

from lockstep.tasks.kernels import Buffers, philox, random_below


# Known-answer tests of Random123: counter, key and result as 32-bit words, lowest first.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_matches_random123_known_answers(counter, key, answer):
    def join(words):
        return [np.uint64(int(high + low, 16)) for low, high in zip(words[::2], words[1::2], strict=True)]

    minor, major = join(counter.split())
    assert philox(*join(key.split()), major, minor) == tuple(join(answer.split()))


def test_philox_treats_negative_words_as_unsigned():
    negative, positive = [np.int64(-word) for word in (1, 2, 3)], [np.uint64(2**64 - word) for word in (1, 2, 3)]
    assert philox(*negative) == philox(*positive)


def test_philox_depends_on_every_word_of_key_and_counter():
    words = [0, 1, 2**32, 2**62]
    draws = {philox(key, major, minor) for key in words for major in words for minor in words}
    assert len(draws) == len(words) ** 3


def test_random_below_is_upper_part_of_exact_product():
    for bound in (1, 2, 3, 141, 2**32 - 5, 2**32):
        for draw in range(50):
            assert random_below(bound, 7, 0, draw) == int(philox(7, 0, draw)[0]) * bound >> 64


@pytest.mark.parametrize("along", ["key", "major", "minor"])
def test_random_below_is_uniform_over_keys_and_counters(along):
    bound, draws = 37, 37_000
    place = {"key": 5, "major": 5, "minor": 5}
    counts = np.bincount([random_below(bound, **place | {along: draw}) for draw in range(draws)], minlength=bound)
    chi_squared = ((counts - draws / bound) ** 2 / (draws / bound)).sum()
    assert len(counts) == bound
    assert 12 < chi_squared < 80  # 36 degrees of freedom: outside with probability 1e-4 on either side


def test_buffers_on_cpu_share_memory_with_tensors():
    buffers = Buffers(torch.device("cpu"), reward=(torch.float32, (4,)))
    before = buffers.copy_to_device()["reward"]
    buffers.arrays["reward"][:] = [1, 2, 3, 4]
    assert before.tolist() == [1, 2, 3, 4]
    assert buffers.copy_to_device()["reward"] is before


def test_buffers_on_other_device_allocate_there():
    tensors = Buffers(torch.device("meta"), obs=(torch.uint8, (4, 2)), done=(torch.bool, (4,))).copy_to_device()
    assert {name: (tensor.device.type, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "obs": ("meta", (4, 2)),
        "done": ("meta", (4,)),
    }
