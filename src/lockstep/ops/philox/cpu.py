"""Draws on the CPU, as numba kernels.

Words are written into the memory of the result and converted in place: two loops that LLVM vectorizes. numba keeps IEEE
rounding, because LLVM does not fuse multiply and add without fast-math flags.

numba's cache only detects changes in the file of a compiled kernel, not in the files it imports. After a change of the
constants, delete the `__pycache__` of this folder; after a change of this file, that of `tasks`.

Shapes: L lanes, N elements and W words per lane.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lockstep.ops.philox import constants
from lockstep.ops.philox.constants import ROUNDS, Kind

# numba promotes uint64 with int64 to float, so words and shifts are uint64.
_MULTIPLY_0, _MULTIPLY_2 = np.uint64(constants.MULTIPLY_0), np.uint64(constants.MULTIPLY_2)
_WEYL_0, _WEYL_1 = np.uint64(constants.WEYL_0), np.uint64(constants.WEYL_1)
_LOW, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
_BIT, _BYTE, _MANTISSA = np.uint32(1), np.uint32(8), np.int32(23)

_R0, _R1, _R2, _R3, _R4, _R5, _R6 = (np.float32(x) for x in constants.LOG)
_P0, _P1, _P2, _P3, _P4, _P5 = (np.float32(x) for x in constants.NORMAL_P)
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5 = (np.float32(x) for x in constants.NORMAL_Q)
_LOG_2, _ROOT_HALF = np.float32(constants.LOG_2), np.int32(constants.ROOT_HALF_BITS)
_ZERO, _HALF, _ONE, _TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)
_STEP_24, _STEP_31, _LAST_31 = np.float32(2.0**-24), np.float32(2.0**-31), np.int32(2**31 - 1)


_DIGIT_BITS = 10
"""Maximum bits per pass of the radix sort: more than 1,024 buckets are slower for long rows."""


def draw(kind: Kind, keys: np.ndarray, counter: int, count: int, bound: int) -> Tensor:
    """Draw [L, count] for keys [L] uint64; `bound` is the bound of integers or the threshold of events."""
    dtype, words, kernel = _KERNELS[kind]
    result = np.empty((len(keys), count), dtype)
    kernel(keys, np.uint64(counter), np.uint64(bound), result.view(words))
    return torch.from_numpy(result)


@njit(cache=True, nogil=True, inline="always")  # inlined, because loops around a call are not vectorized
def rounds(key_0: Any, key_1: Any, word_0: Any, word_1: Any, word_2: Any, word_3: Any) -> tuple[Any, Any, Any, Any]:
    """Encrypt a counter of four words with a key of two. All are 32-bit numbers held as uint64."""
    for _ in range(ROUNDS):
        product_0, product_2 = _MULTIPLY_0 * word_0, _MULTIPLY_2 * word_2
        word_0, word_1 = (product_2 >> _WORD) ^ word_1 ^ key_0, product_2 & _LOW
        word_2, word_3 = (product_0 >> _WORD) ^ word_3 ^ key_1, product_0 & _LOW
        key_0, key_1 = (key_0 + _WEYL_0) & _LOW, (key_1 + _WEYL_1) & _LOW
    return word_0, word_1, word_2, word_3


@njit(cache=True, nogil=True)
def below(bits: Any, bound: Any) -> Any:
    """Map 64 random bits to [0, bound), for a bound up to 2**32: the upper half of their product, computed in halves.

    There is no rejection step, so the probabilities of two numbers differ by up to 2**-64.
    """
    return ((bits >> _WORD) * bound + ((bits & _LOW) * bound >> _WORD)) >> _WORD


# -- one element -------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _split(x: Any) -> tuple[Any, Any]:
    """Exponent and f of x = 2**exponent (1 + f), with 1 + f between sqrt(1/2) and sqrt(2)."""
    bits = np.float32(x).view(np.int32)
    exponent = np.int32(np.int32(bits - _ROOT_HALF) >> _MANTISSA)
    return exponent, np.int32(bits - np.int32(exponent << _MANTISSA)).view(np.float32) - _ONE


@njit(cache=True, nogil=True)
def _log(exponent: Any, f: Any) -> Any:
    """Logarithm of 2**exponent (1 + f)."""
    series = (((((_R6 * f + _R5) * f + _R4) * f + _R3) * f + _R2) * f + _R1) * f + _R0
    return np.float32(exponent) * _LOG_2 + ((series * f - _HALF) * (f * f) + f)


@njit(cache=True, nogil=True)
def _uniform_pair(word: Any) -> tuple[Any, Any]:
    """Return a uniform number u in (0, 1) from the upper 31 bits, and 1 - u. Each is exact near zero."""
    bits = np.int32(word >> _BIT)
    return (np.float32(bits) + _HALF) * _STEP_31, (np.float32(np.int32(_LAST_31 - bits)) + _HALF) * _STEP_31


@njit(cache=True, nogil=True, error_model="numpy")
def _as_normal(word: Any) -> Any:
    tail, x = _uniform_pair(word)
    exponent, f = _split(tail * (_TWO - tail))
    w = _ZERO - _log(exponent, f)
    p = ((((_P5 * w + _P4) * w + _P3) * w + _P2) * w + _P1) * w + _P0
    q = ((((_Q5 * w + _Q4) * w + _Q3) * w + _Q2) * w + _Q1) * w + _Q0
    z = x * (p / q)
    return z if word & _BIT else -z


@njit(cache=True, nogil=True)
def _as_gumbel(word: Any) -> Any:
    tail, u = _uniform_pair(word)
    exponent, f = _split(u)
    exponent, f = _split(_ZERO - _log(exponent, f if exponent else -tail))  # near 1, the tail is more precise than u
    return _ZERO - _log(exponent, f)


# -- all elements ------------------------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _fill(key: Any, counter: Any, words: Any) -> None:
    """Write the first words of a draw, [W] uint32."""
    key_0, key_1, word_2, word_3 = key & _LOW, key >> _WORD, counter & _LOW, counter >> _WORD
    blocks = len(words) // 4
    for block in range(blocks):
        low, high, index = np.uint64(block) & _LOW, np.uint64(block) >> _WORD, 4 * block
        a, b, c, d = rounds(key_0, key_1, low, high, word_2, word_3)
        words[index], words[index + 1], words[index + 2], words[index + 3] = a, b, c, d
    last_block = rounds(key_0, key_1, np.uint64(blocks) & _LOW, np.uint64(blocks) >> _WORD, word_2, word_3)
    for index in range(len(words) % 4):
        words[4 * blocks + index] = last_block[index]


@njit(cache=True, nogil=True)
def _uniform(keys: Any, counter: Any, bound: Any, result: Any) -> None:
    for lane in range(len(keys)):
        words = result[lane]
        _fill(keys[lane], counter, words)
        for index in range(len(words)):
            words[index] = np.float32(np.float32(np.int32(words[index] >> _BYTE)) * _STEP_24).view(np.uint32)


@njit(cache=True, nogil=True, error_model="numpy")
def _normal(keys: Any, counter: Any, bound: Any, result: Any) -> None:
    for lane in range(len(keys)):
        words = result[lane]
        _fill(keys[lane], counter, words)
        for index in range(len(words)):
            words[index] = np.float32(_as_normal(words[index])).view(np.uint32)


@njit(cache=True, nogil=True)
def _gumbel(keys: Any, counter: Any, bound: Any, result: Any) -> None:
    for lane in range(len(keys)):
        words = result[lane]
        _fill(keys[lane], counter, words)
        for index in range(len(words)):
            words[index] = np.float32(_as_gumbel(words[index])).view(np.uint32)


@njit(cache=True, nogil=True)
def _integers(keys: Any, counter: Any, bound: Any, result: Any) -> None:
    for lane in range(len(keys)):
        _fill(keys[lane], counter, result[lane])
        bits = result[lane].view(np.uint64)
        for index in range(len(bits)):
            bits[index] = below(bits[index], bound)


@njit(cache=True, nogil=True)
def _orders(keys: Any, counter: Any, bound: Any, result: Any) -> None:
    for lane in range(len(keys)):
        _fill(keys[lane], counter, result[lane])
        bits = result[lane].view(np.uint64)
        for index in range(len(bits)):
            bits[index] >>= np.uint64(1)


@njit(cache=True, nogil=True)
def _event(keys: Any, counter: Any, bound: Any, result: Any) -> None:
    """Compute and compare words block by block, because the result has only one byte per word."""
    word_2, word_3 = counter & _LOW, counter >> _WORD
    blocks = result.shape[1] // 4
    for lane in range(len(keys)):
        key_0, key_1, row = keys[lane] & _LOW, keys[lane] >> _WORD, result[lane]
        for block in range(blocks):
            low, high, index = np.uint64(block) & _LOW, np.uint64(block) >> _WORD, 4 * block
            a, b, c, d = rounds(key_0, key_1, low, high, word_2, word_3)
            row[index], row[index + 1], row[index + 2], row[index + 3] = a < bound, b < bound, c < bound, d < bound
        last_block = rounds(key_0, key_1, np.uint64(blocks) & _LOW, np.uint64(blocks) >> _WORD, word_2, word_3)
        for index in range(len(row) % 4):
            row[4 * blocks + index] = last_block[index] < bound


_KERNELS: dict[Kind, tuple[Any, Any, Any]] = {
    "uniform": (np.float32, np.uint32, _uniform),
    "event": (np.bool_, np.bool_, _event),
    "normal": (np.float32, np.uint32, _normal),
    "gumbel": (np.float32, np.uint32, _gumbel),
    "integers": (np.int64, np.uint32, _integers),
    "orders": (np.int64, np.uint32, _orders),
}
"""For each kind of draw: dtype of the result, dtype in which the kernel writes it, and the kernel."""


# -- sorting -----------------------------------------------------------------------------------------------------------


def order(keys: Tensor) -> Tensor:
    """Argsort rows of random keys [R, N] int64, uniform in [0, 2**63); see `constants`."""
    result = torch.empty_like(keys)
    _sort(keys.numpy(), result.numpy())
    return result


@njit(cache=True, nogil=True)
def _sort(keys: Any, result: Any) -> None:
    """Radix sort by the leading bits that distinguish most keys, then insertion sort: linear time for uniform keys."""
    count, bits = keys.shape[1], 1
    while 1 << bits < count:
        bits += 1
    passes = (bits + _DIGIT_BITS - 1) // _DIGIT_BITS
    width = (bits + passes - 1) // passes
    low, mask = (1 << bits) - 1, (1 << width) - 1
    current, buffer = np.empty(count, np.int64), np.empty(count, np.int64)
    offsets = np.empty(1 << width, np.int64)
    for row in range(len(keys)):
        row_keys, order_row = keys[row], result[row]
        for index in range(count):
            current[index] = row_keys[index] & ~low | index
        for digit in range(passes):  # from the lowest of the leading digits; each pass is stable
            shift = 63 - width * (passes - digit)
            offsets[:] = 0
            for index in range(count):
                offsets[current[index] >> shift & mask] += 1
            total = 0
            for bucket in range(len(offsets)):
                size, offsets[bucket] = offsets[bucket], total
                total += size
            for index in range(count):
                bucket = current[index] >> shift & mask
                buffer[offsets[bucket]] = current[index]
                offsets[bucket] += 1
            current, buffer = buffer, current
        for index in range(1, count):
            key, position = current[index], index
            while position > 0 and current[position - 1] > key:
                current[position] = current[position - 1]
                position -= 1
            current[position] = key
        for index in range(count):
            order_row[index] = current[index] & low
