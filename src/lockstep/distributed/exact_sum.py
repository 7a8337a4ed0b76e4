"""Sums of doubles that no order and no grouping can change: what makes statistics the same on any number of processes.

A double is an integer times a power of two. Written into limbs of a number wide enough for all of them, it adds without
rounding, by one ordinary integer reduction whose size depends neither on lanes nor on processes. The total is rounded
once, at the end; `math.fsum` gives the same bits where there is nobody to ask.

Shapes: L local lanes, K columns.
"""

import math

import numpy as np

_BITS = 32  # of a limb; the rest of its 64 takes up carries, of two thousand million summands
_LOWEST = 1127  # the last bit of any double stands at 2 ** -1127 or above, once its mantissa is a 53-bit integer
LIMBS = (971 + _LOWEST + 53) // _BITS + 3
_MASK = np.int64(2**_BITS - 1)


def payload_bytes(table: np.ndarray) -> int:
    """Bytes that the sums of a table [L, K] travel in; lanes do not count."""
    return int(table.shape[1]) * (LIMBS + 1) * 8


def local_sum(table: np.ndarray) -> list[float]:
    """The sums of a table's columns, [L, K], each rounded once."""
    sums = []
    for column in table.T:
        try:
            sums.append(math.fsum(column) if np.isfinite(column).all() else math.nan)
        except OverflowError:
            sums.append(math.nan)  # beyond what a double can hold
    return sums


def to_limbs(table: np.ndarray) -> np.ndarray:
    """The sums of a table's columns [L, K] as integers [K, LIMBS + 1]; the last one counts what is not finite."""
    limbs = np.zeros((table.shape[1], LIMBS + 1), np.int64)
    finite = np.isfinite(table)
    limbs[:, -1] = (~finite).sum(0)
    fraction, exponent = np.frexp(np.where(finite, table, 0.0))
    mantissa = np.ldexp(fraction, 53).astype(np.int64)
    place = exponent.astype(np.int64) - 53 + _LOWEST
    limb, shift = place // _BITS, place % _BITS
    low, high = (mantissa & _MASK) << shift, (mantissa >> _BITS) << shift
    columns = np.broadcast_to(np.arange(table.shape[1]), table.shape)
    for above, part in enumerate((low & _MASK, (low >> _BITS) + (high & _MASK), high >> _BITS)):
        np.add.at(limbs, (columns, limb + above), part)
    return limbs


def from_limbs(limbs: np.ndarray) -> list[float]:
    """The sums that limbs stand for, each rounded once; not a number where one of the summands was none."""
    sums = []
    for row in limbs.tolist():
        whole = sum(limb << (_BITS * place) for place, limb in enumerate(row[:-1]))
        try:
            sums.append(math.nan if row[-1] else whole / (1 << _LOWEST))  # of two integers, rounded as it should be
        except OverflowError:
            sums.append(math.nan)
    return sums
