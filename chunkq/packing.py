"""ONNX's packed bytes: two 4-bit or four 2-bit values in one, first value in the lowest bits. Imports errors and dtypes.

Packing runs over the flattened tensor, so that a chunk that begins at an odd place would split a byte; in zarr and in Dask
blocks values are therefore kept one in a byte, and only whole tensors are packed.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from chunkq.dtypes import ELEMENT_TYPES, ElementType, element_type, from_holder
from chunkq.errors import SpecError
from chunkq.spec import as_integer

_PACKED = tuple(row.name for row in ELEMENT_TYPES.values() if row.bits in (2, 4))


def _packed_type(dtype: Any) -> ElementType:
    return ELEMENT_TYPES[element_type("dtype", dtype, _PACKED)]


def pack(x: Any, dtype: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Pack values of 2 or 4 bits as ONNX stores them.

    Parameters
    ----------
    x : numpy.ndarray
        The values, as ml_dtypes holds them, or as integers (numbers for integer types, codes for float4).
    dtype : dtype or str
        int4, uint4, float4_e2m1fn, int2 or uint2.

    Returns
    -------
    numpy.ndarray of uint8
        1-D, ``ceil(x.size * bits / 8)`` bytes, the last one filled up with zeros.

    Raises
    ------
    SpecError
        Reasons ``dtype``, ``value``, ``argument``.

    Notes
    -----
    Source: ONNX, "int4 and float4 data representation": the flattened tensor, first value in the lowest bits.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> chunkq.pack(np.int8([1, -2, 3]), "int4")
    array([225,   3], dtype=uint8)
    """
    row = _packed_type(dtype)
    if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
        raise SpecError("argument", f"x is a {type(x).__name__}; expected a numpy.ndarray (tensors are packed whole)")
    in_a_byte = 8 // row.bits
    codes = np.zeros(-(-x.size // in_a_byte) * in_a_byte, np.uint8)
    codes[: x.size] = np.ascontiguousarray(from_holder("x", x, row.name)).reshape(-1).view(np.uint8)
    codes &= np.uint8((1 << row.bits) - 1)
    packed = codes[::in_a_byte].copy()
    for place in range(1, in_a_byte):
        packed |= codes[place::in_a_byte] << np.uint8(place * row.bits)
    return packed


def unpack(packed: Any, dtype: Any, shape: int | tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    """Undo `pack`: one value in a byte, as the operators take them.

    Parameters
    ----------
    packed : numpy.ndarray of uint8
        ``ceil(elements * bits / 8)`` bytes of any shape.
    dtype : dtype or str
        int4, uint4, float4_e2m1fn, int2 or uint2.
    shape : int or tuple of int
        The tensor's; bytes alone do not tell whether the last one is full.

    Returns
    -------
    numpy.ndarray of the ml_dtypes type
        Of the given shape.

    Raises
    ------
    SpecError
        Reasons ``dtype``, ``shape``.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> chunkq.unpack(np.uint8([0xE1, 0x03]), "int4", 3)
    array([1, -2, 3], dtype=int4)
    """
    row = _packed_type(dtype)
    if isinstance(packed, np.ma.MaskedArray):
        raise SpecError("masked", "packed is a masked array and its mask would be lost; pass packed.filled(...)")
    if not isinstance(packed, np.ndarray) or packed.dtype not in (np.uint8, np.int8):
        found = packed.dtype if isinstance(packed, np.ndarray) else type(packed).__name__
        raise SpecError("dtype", f"packed is {found}; expected a numpy.ndarray of uint8")
    given = tuple(shape) if isinstance(shape, (tuple, list, np.ndarray)) and np.ndim(shape) else (shape,)
    lengths = tuple(n for n in map(as_integer, given) if n is not None and 0 <= n < 1 << 62)
    in_a_byte = 8 // row.bits
    size = prod(lengths)
    if len(lengths) != len(given):
        raise SpecError("shape", f"shape={shape!r}: expected integers from 0 on, one for each axis")
    if packed.size != -(-size // in_a_byte):
        raise SpecError(
            "shape",
            f"packed has {packed.size} bytes; {size} values of {row.name}, shape {lengths}, take {-(-size // in_a_byte)}",
        )
    flat = np.ascontiguousarray(packed).reshape(-1).view(np.uint8)
    codes = np.empty(flat.size * in_a_byte, np.uint8)
    for place in range(in_a_byte):
        codes[place::in_a_byte] = flat >> np.uint8(place * row.bits)
    codes &= np.uint8((1 << row.bits) - 1)
    return codes[:size].view(row.dtype).reshape(lengths)
