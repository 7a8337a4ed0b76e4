"""Random draws as Triton kernels: one launch for all lanes.

Only `draws` imports this module, and only if there is a CUDA device: Triton is not installed everywhere.

Shapes: L lanes, N elements per lane.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.ops.philox import constants
from lockstep.ops.philox.constants import WIDE, Kind

_BLOCKS = 256
"""Philox blocks per Triton program."""
OPTIONS = {"enable_fp_fusion": False}
"""Launch options. Fused multiply-add would round differently from the other implementations."""
_DTYPES: dict[Kind, torch.dtype] = {"event": torch.bool, "integers": torch.int64, "orders": torch.int64}
"""Dtypes of draws. All others are float32."""

# A kernel may read globals only if they are constexpr. Any is not, so annotations are quoted.
_ROUNDS: tl.constexpr = tl.constexpr(constants.ROUNDS)
_MULTIPLY_0: tl.constexpr = tl.constexpr(constants.MULTIPLY_0)
_MULTIPLY_2: tl.constexpr = tl.constexpr(constants.MULTIPLY_2)
_WEYL_0: tl.constexpr = tl.constexpr(constants.WEYL_0)
_WEYL_1: tl.constexpr = tl.constexpr(constants.WEYL_1)
_LOG_2: tl.constexpr = tl.constexpr(constants.LOG_2)
_ROOT_HALF: tl.constexpr = tl.constexpr(constants.ROOT_HALF_BITS)
_R0, _R1, _R2, _R3, _R4, _R5, _R6 = (tl.constexpr(x) for x in constants.LOG)
_P0, _P1, _P2, _P3, _P4, _P5 = (tl.constexpr(x) for x in constants.NORMAL_P)
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5 = (tl.constexpr(x) for x in constants.NORMAL_Q)


def draw(kind: Kind, keys: Tensor, counter: int | Tensor, count: int, bound: int) -> Tensor:
    """Draw [L, count] for keys [L] int64; `bound` is the bound of integers or the threshold of events.

    A counter in a tensor is read by the kernel.
    """
    result = torch.empty(len(keys), count, dtype=_DTYPES.get(kind, torch.float32), device=keys.device)
    blocks = -(-count // 2) if kind in WIDE else -(-count // 4)
    grid = (-(-blocks // _BLOCKS), len(keys))
    with torch.cuda.device_of(keys):  # a kernel runs on the current device
        if count:
            _draw[grid](result, keys, counter, bound, count, kind, isinstance(counter, Tensor), _BLOCKS, **OPTIONS)
    return result


def integers_at(keys: Tensor, major: Tensor, minor: Tensor, bound: Tensor) -> Tensor:
    """Draw uniform int64 in [0, bound), one for each key and counter of two words, all [N] int64."""
    inputs = [x.contiguous() for x in (keys, major, minor, bound)]
    result = torch.empty_like(inputs[0])
    with torch.cuda.device_of(keys):
        _integers_at[(-(-len(keys) // _BLOCKS),)](result, *inputs, len(keys), _BLOCKS, **OPTIONS)
    return result


@triton.jit(do_not_specialize=["count"])
def _integers_at(
    result: "Any",
    keys: "Any",
    major: "Any",
    minor: "Any",
    bound: "Any",
    count: "Any",
    BLOCKS: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = index < count
    key = tl.load(keys + index, mask=inside, other=0).to(tl.uint64)
    high = tl.load(major + index, mask=inside, other=0).to(tl.uint64)
    low = tl.load(minor + index, mask=inside, other=0).to(tl.uint64)
    width = tl.load(bound + index, mask=inside, other=0).to(tl.uint64)
    word_0, word_1, _, _ = _rounds(key, low, high)
    tl.store(result + index, _below(word_0, word_1, width), mask=inside)


@triton.jit(do_not_specialize=["counter", "bound", "count"])
def _draw(
    result: "Any",
    keys: "Any",
    counter: "Any",
    bound: "Any",
    count: "Any",
    KIND: tl.constexpr,
    IN_MEMORY: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    lane = tl.program_id(1).to(tl.int64)
    key = tl.load(keys + lane).to(tl.uint64)
    if IN_MEMORY:
        counter = tl.load(counter)
    draw = counter.to(tl.uint64)
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block = (first + tl.arange(0, BLOCKS)).to(tl.uint64)
    word_0, word_1, word_2, word_3 = _rounds(key, block, draw)
    if KIND == "integers" or KIND == "orders":
        low, high = tl.interleave(word_0, word_2), tl.interleave(word_1, word_3)
        index = first * 2 + tl.arange(0, BLOCKS * 2)
        if KIND == "integers":
            values = _below(low, high, bound.to(tl.uint64))
        else:
            values = (high.to(tl.int64) << 31) | (low >> 1).to(tl.int64)
        tl.store(result + lane * count + index, values, mask=index < count)
    else:
        words = tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
        index = first * 4 + tl.arange(0, BLOCKS * 4)
        if KIND == "uniform":
            values = (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        elif KIND == "event":
            values = words.to(tl.int64) < bound.to(tl.int64)
        elif KIND == "normal":
            values = _as_normal(words)
        else:
            values = _as_gumbel(words)
        tl.store(result + lane * count + index, values, mask=index < count)


@triton.jit
def _below(low: "Any", high: "Any", bound: "Any") -> "Any":
    """Return the upper half of the product of 64 random bits (two words) and the bound, which is at most 2**32."""
    return ((high.to(tl.uint64) * bound + (low.to(tl.uint64) * bound >> 32)) >> 32).to(tl.int64)


@triton.jit
def _rounds(key: "Any", block: "Any", counter: "Any") -> "Any":
    """Return four words for 128-bit counters: `block` is the lower half, `counter` the upper half."""
    key_0, key_1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    word_0, word_1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    word_2 = tl.zeros_like(word_0) + counter.to(tl.uint32)
    word_3 = tl.zeros_like(word_0) + (counter >> 32).to(tl.uint32)
    multiply_0 = tl.full(word_0.shape, _MULTIPLY_0, tl.uint32)
    multiply_2 = tl.full(word_0.shape, _MULTIPLY_2, tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high_0, low_0 = tl.umulhi(word_0, multiply_0), word_0 * multiply_0
        high_2, low_2 = tl.umulhi(word_2, multiply_2), word_2 * multiply_2
        word_0, word_1 = high_2 ^ word_1 ^ key_0, low_2
        word_2, word_3 = high_0 ^ word_3 ^ key_1, low_0
        key_0, key_1 = key_0 + tl.full((), _WEYL_0, tl.uint32), key_1 + tl.full((), _WEYL_1, tl.uint32)
    return word_0, word_1, word_2, word_3


@triton.jit
def _split(x: "Any") -> "Any":
    """Exponent and mantissa of x = 2**exponent (1 + mantissa), with 1 + mantissa around 1."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT_HALF) >> 23
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _log(exponent: "Any", f: "Any") -> "Any":
    """Logarithm of 2**exponent (1 + f)."""
    series = (((((_R6 * f + _R5) * f + _R4) * f + _R3) * f + _R2) * f + _R1) * f + _R0
    return exponent.to(tl.float32) * _LOG_2 + ((series * f - 0.5) * (f * f) + f)


@triton.jit
def _uniform_pair(words: "Any") -> "Any":
    """Return uniform numbers u in (0, 1) of 31 bits, and 1 - u. Each is exact near zero."""
    bits = (words >> 1).to(tl.int32)
    step = 4.656612873077393e-10  # 2**-31
    return (bits.to(tl.float32) + 0.5) * step, ((2147483647 - bits).to(tl.float32) + 0.5) * step


@triton.jit
def _as_normal(words: "Any") -> "Any":
    tail, x = _uniform_pair(words)
    exponent, f = _split(tail * (2.0 - tail))
    w = 0.0 - _log(exponent, f)
    p = ((((_P5 * w + _P4) * w + _P3) * w + _P2) * w + _P1) * w + _P0
    q = ((((_Q5 * w + _Q4) * w + _Q3) * w + _Q2) * w + _Q1) * w + _Q0
    z = x * tl.div_rn(p, q)
    return tl.where((words & 1) != 0, z, 0.0 - z)


@triton.jit
def _as_gumbel(words: "Any") -> "Any":
    tail, u = _uniform_pair(words)
    exponent, f = _split(u)
    f = tl.where(exponent == 0, 0.0 - tail, f)  # near 1, the tail is more precise than u
    exponent, f = _split(0.0 - _log(exponent, f))
    return 0.0 - _log(exponent, f)
