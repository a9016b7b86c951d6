"""The one table of element types. Imports only errors.

A new type is one row here, one load or store in kernels/_kernels.pyx, and its vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chunkq.errors import SpecError


class ElementType(NamedTuple):
    """How one ONNX element type is held and computed with.

    Attributes
    ----------
    name : str
        The standard's name.
    code : int
        Its number in kernels/_kernels.pyx.
    dtype : numpy.dtype
        The native-endian NumPy type that holds it.
    compute : str or None
        For float types, the type FakeQuantize computes in (SPEC: float16 is widened).
    """

    name: str
    code: int
    dtype: np.dtype[Any]
    compute: str | None = None


ELEMENT_TYPES = {
    row.name: row
    for row in (
        ElementType("uint8", 0, np.dtype(np.uint8)),
        ElementType("int8", 1, np.dtype(np.int8)),
        ElementType("uint16", 2, np.dtype(np.uint16)),
        ElementType("int16", 3, np.dtype(np.int16)),
        ElementType("int32", 4, np.dtype(np.int32)),
        ElementType("float16", 5, np.dtype(np.float16), "float32"),
        ElementType("float32", 6, np.dtype(np.float32), "float32"),
        ElementType("float64", 7, np.dtype(np.float64), "float64"),
    )
}

# by dtype, in both byte orders
_NAMES = {dtype: row.name for row in ELEMENT_TYPES.values() for dtype in (row.dtype, row.dtype.newbyteorder("S"))}

#: What each operator takes as x.
DEQUANTIZE_LINEAR_X = ("uint8", "int8", "uint16", "int16", "int32")
FAKE_QUANTIZE_X = ("float32", "float16", "float64")


def element_name(dtype: np.dtype[Any], argument: str, allowed: tuple[str, ...]) -> str:
    """Name the element type of a dtype in any byte order, or refuse it.

    Parameters
    ----------
    dtype : numpy.dtype
        What the caller's array holds.
    argument : str
        The argument it came in as, for the message.
    allowed : tuple of str
        The names the operator takes there.

    Raises
    ------
    SpecError
        Reason ``dtype``.
    """
    name = _NAMES.get(dtype)
    if name not in allowed:
        raise SpecError("dtype", f"{argument} is {name or dtype}; expected one of {', '.join(allowed)}")
    return name
