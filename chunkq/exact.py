"""Sums of float64 numbers without rounding: what statistics.h adds up, carried, merged and rounded once.

A sum is an integer times 2**-1074 in limbs of 32 bits, held in 64 so that 2**31 numbers may be added before the carries
are made. Carried limbs are one and the same for one sum, in whatever order it was made. Imports the kernels.
"""

from __future__ import annotations

import numpy as np

from chunkq.kernels import kernels
from chunkq.run import Array

LIMBS: int = kernels.LIMBS
_BITS, _ALL = np.int64(32), np.int64(0xFFFFFFFF)
_UNIT = 1 << 1074


def carry(limbs: Array) -> None:
    """Bring all limbs but the last, which has the sign, into 0 .. 2**32 - 1, in place; they lie along the last axis."""
    for i in range(LIMBS - 1):
        limbs[..., i + 1] += limbs[..., i] >> _BITS
        limbs[..., i] &= _ALL


def rounded(limbs: Array) -> Array:
    """The float64 nearest to each sum, as `math.fsum` gives it; infinite where it is too large."""
    carried = limbs.reshape(-1, LIMBS).copy()
    carry(carried)
    low = carried[:, :-1].astype("<u4")
    pairs = zip(low, carried[:, -1].tolist(), strict=True)
    return np.array([_rounded(row.tobytes(), top) for row, top in pairs], np.float64).reshape(limbs.shape[:-1])


def _rounded(low: bytes, top: int) -> float:
    total = int.from_bytes(low, "little") + (top << 32 * (LIMBS - 1))
    try:
        return total / _UNIT
    except OverflowError:
        return float("inf") if total > 0 else float("-inf")
