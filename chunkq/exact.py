"""Sums of float64 numbers without rounding: what statistics.h adds up, carried, merged and rounded once.

A sum is an integer times 2**-1074 in limbs of 32 bits, held in 64 so that 2**31 numbers may be added before the carries
are made. Carried limbs are one and the same for one sum, in whatever order it was made. Imports the kernels.
"""

from __future__ import annotations

import numpy as np

from chunkq.kernels import kernels
from chunkq.run import Array

LIMBS: int = kernels.LIMBS


def carry(limbs: Array) -> None:
    """Bring all limbs but the last, which has the sign, into 0 .. 2**32 - 1, in place; they lie along the last axis."""
    rows = np.ascontiguousarray(limbs)
    kernels.carry_limbs(rows.reshape(-1, LIMBS))
    if rows is not limbs:
        limbs[...] = rows


def rounded(limbs: Array) -> Array:
    """The float64 nearest to each sum, as `math.fsum` gives it; infinite where it is too large."""
    carried = limbs.reshape(-1, LIMBS).copy()
    carry(carried)
    sums = np.empty(len(carried), np.float64)
    kernels.round_limbs(carried, sums)
    return sums.reshape(limbs.shape[:-1])
