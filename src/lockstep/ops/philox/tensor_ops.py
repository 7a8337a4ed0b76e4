"""Random draws by torch operations, on any device.

Words are int64 tensors that hold 32 bits. Products of two words wrap around at 64 bits, and right shifts copy the sign.

Shapes: L lanes, N elements per lane, N / 4 or N / 2 blocks.
"""

import torch
from torch import Tensor

from lockstep.ops.philox import constants
from lockstep.ops.philox.constants import WIDE, Kind

_LOW = 0xFFFFFFFF


def draw(kind: Kind, keys: Tensor, counter: int | Tensor, count: int, bound: int) -> Tensor:
    """Draw [L, count] for keys [L] int64; `bound` is the bound of integers or the threshold of events.

    A counter in a tensor is read on the device by operations that a CUDA graph can capture.
    """
    words = _words(keys, counter, 2 * count if kind in WIDE else count)
    if kind in WIDE:
        low, high = words.unflatten(1, (-1, 2)).unbind(-1)
        result = below(low, high, bound) if kind == "integers" else (high << 31) | (low >> 1)
    elif kind == "uniform":
        result = (words >> 8).float() * 2.0**-24
    elif kind == "event":
        result = words < bound
    else:
        result = _as_normal(words) if kind == "normal" else _as_gumbel(words)
    return result[:, :count].contiguous()


def integers_at(keys: Tensor, major: Tensor, minor: Tensor, bound: Tensor) -> Tensor:
    """Draw uniform int64 in [0, bound), one for each key and counter of two words, all [N] int64."""
    low, high, *_ = rounds(keys, minor & _LOW, minor >> 32, major & _LOW, major >> 32)
    return below(low, high, bound)


def order(keys: Tensor) -> Tensor:
    """Argsort rows of random keys [..., N] int64; see `constants`."""
    count = keys.shape[-1]
    low = (1 << max(1, (count - 1).bit_length())) - 1
    return ((keys & ~low) | torch.arange(count, device=keys.device)).sort(dim=-1).values & low


def rounds(keys: Tensor, word_0: Tensor, word_1: Tensor, word_2: Tensor, word_3: Tensor) -> list[Tensor]:
    """Encrypt counters of four words with keys of 64 bits; all broadcast.

    Only factors need a mask, because the upper halves of other values never affect a lower half.
    """
    numbers = torch.arange(constants.ROUNDS, device=keys.device).view(-1, *(1,) * keys.dim())
    for key_0, key_1 in zip(keys + numbers * constants.WEYL_0, (keys >> 32) + numbers * constants.WEYL_1, strict=True):
        product_0, product_2 = word_0 * constants.MULTIPLY_0, word_2 * constants.MULTIPLY_2
        word_0, word_1 = ((product_2 >> 32) ^ word_1 ^ key_0) & _LOW, product_2
        word_2, word_3 = ((product_0 >> 32) ^ word_3 ^ key_1) & _LOW, product_0
    return [word_0, word_1 & _LOW, word_2, word_3 & _LOW]


def below(low: Tensor, high: Tensor, bound: int | Tensor) -> Tensor:
    """Return the upper half of the product of 64 random bits (two words) and the bound, which is at most 2**32."""
    return ((high * bound + ((low * bound >> 32) & _LOW)) >> 32) & _LOW


def _words(keys: Tensor, counter: int | Tensor, count: int) -> Tensor:
    """Return the first words of a draw, in whole blocks, [L, 4 x blocks]."""
    block = torch.arange((count + 3) // 4, device=keys.device)  # [N / 4]
    zero = torch.zeros_like(block)
    words = rounds(keys.unsqueeze(1), block & _LOW, block >> 32, zero + (counter & _LOW), zero + (counter >> 32 & _LOW))
    return torch.stack(words, dim=-1).flatten(1)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Exponent and mantissa of x = 2**exponent (1 + mantissa), with 1 + mantissa around 1."""
    bits = x.view(torch.int32)
    exponent = (bits - constants.ROOT_HALF_BITS) >> 23
    return exponent, (bits - (exponent << 23)).view(torch.float32) - 1.0


def _log(exponent: Tensor, f: Tensor) -> Tensor:
    """Logarithm of 2**exponent (1 + f)."""
    return exponent.float() * constants.LOG_2 + ((_horner(constants.LOG, f) * f - 0.5) * (f * f) + f)


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Evaluate a polynomial; the constant coefficient comes first."""
    *rest, last = coefficients
    value = x * last + rest[-1]
    for coefficient in rest[-2::-1]:
        value = value * x + coefficient
    return value


def _uniform_pair(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return uniform numbers u in (0, 1) of 31 bits, and 1 - u. Each is exact near zero."""
    bits = (words >> 1).int()
    return (bits.float() + 0.5) * 2.0**-31, ((2**31 - 1 - bits).float() + 0.5) * 2.0**-31


def _as_normal(words: Tensor) -> Tensor:
    tail, x = _uniform_pair(words)
    w = 0.0 - _log(*_split(tail * (2.0 - tail)))
    z = x * (_horner(constants.NORMAL_P, w) / _horner(constants.NORMAL_Q, w))
    return torch.where((words & 1).bool(), z, -z)


def _as_gumbel(words: Tensor) -> Tensor:
    tail, u = _uniform_pair(words)
    exponent, f = _split(u)
    f = torch.where(exponent == 0, -tail, f)  # near 1, the tail is more precise than u
    return 0.0 - _log(*_split(0.0 - _log(exponent, f)))
