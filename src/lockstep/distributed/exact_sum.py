"""Exact sums of doubles: the result does not depend on order or grouping, hence not on the number of processes.

A double is an integer times a power of two. It is written into the limbs of an integer that is wide enough for every
double. Limbs add without rounding in one integer all-reduce, whose size depends neither on lanes nor on processes. The
total is rounded once, at the end. On one process, `math.fsum` gives the same bits.

Shapes: L local lanes, K columns.
"""

import math

import numpy as np

_BITS = 32  # value bits of a limb; the other 32 of its 64 bits hold the carries of two billion summands
_LOWEST = 1127  # with a 53-bit integer mantissa, the lowest bit of any double is 2 ** -1127 or above
LIMBS = (971 + _LOWEST + 53) // _BITS + 3
_MASK = np.int64(2**_BITS - 1)


def local_sum(table: np.ndarray) -> list[float]:
    """Sum the columns of a table [L, K]; round each sum once."""
    sums = []
    for column in table.T:
        try:
            sums.append(math.fsum(column) if np.isfinite(column).all() else math.nan)
        except OverflowError:
            sums.append(math.nan)  # outside the range of a double
    return sums


def to_limbs(table: np.ndarray) -> np.ndarray:
    """Sum the columns of a table [L, K] as integers [K, LIMBS + 1]. The last integer counts non-finite values."""
    limbs = np.zeros((table.shape[1], LIMBS + 1), np.int64)
    finite = np.isfinite(table)
    limbs[:, -1] = (~finite).sum(0)
    fraction, exponent = np.frexp(np.where(finite, table, 0.0))
    mantissa = np.ldexp(fraction, 53).astype(np.int64)
    position = exponent.astype(np.int64) - 53 + _LOWEST  # of the lowest mantissa bit
    limb, shift = position // _BITS, position % _BITS
    # Shifted, a mantissa spans up to three limbs.
    low, high = (mantissa & _MASK) << shift, (mantissa >> _BITS) << shift
    columns = np.broadcast_to(np.arange(table.shape[1]), table.shape)
    for above, part in enumerate((low & _MASK, (low >> _BITS) + (high & _MASK), high >> _BITS)):
        np.add.at(limbs, (columns, limb + above), part)
    return limbs


def from_limbs(limbs: np.ndarray) -> list[float]:
    """Convert limbs to sums, each rounded once. A sum with a non-finite summand is NaN."""
    sums = []
    for row in limbs.tolist():
        whole = sum(limb << (_BITS * index) for index, limb in enumerate(row[:-1]))
        try:
            sums.append(math.nan if row[-1] else whole / (1 << _LOWEST))  # Python divides integers correctly rounded
        except OverflowError:
            sums.append(math.nan)
    return sums
