"""The one table of element types. Imports only errors.

A new type is one row here, one load or store in kernels/_kernels.pyx (none for another float of 8 bits or fewer, or integer
of fewer), and its vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from chunkq.errors import SpecError


class Minifloat(NamedTuple):
    """A float type of 8 bits or fewer, as kernels/elements.h computes with it.

    Attributes
    ----------
    mantissa, bias : int
        Bits of the mantissa, and what is subtracted from the exponent.
    max : int
        The code of the largest finite value.
    inf : int
        The code of infinity, -1 where there is none.
    nan : int
        The code written for NaN; in a type without NaN that of the lowest value.
    """

    mantissa: int
    bias: int
    max: int
    inf: int
    nan: int


class ElementType(NamedTuple):
    """How one element type is held and computed with.

    Attributes
    ----------
    name : str
        NumPy's (ml_dtypes') name.
    onnx : str
        ONNX's name.
    bits : int
        Its width. Types narrower than a byte are held one in a byte.
    code : str
        Its name among the kernels' ELEMENT_CODES.
    dtype : numpy.dtype
        The native-endian NumPy type that holds it.
    holder : numpy.dtype
        The plain type it has in zarr: itself, or the integer of the same width.
    compute : str or None
        For float types, the type FakeQuantize computes in (SPEC: float16 is widened).
    limits : tuple of int or None
        Lowest and highest value of an integer type.
    mini : Minifloat or None
        For float types of 8 bits or fewer.
    """

    name: str
    onnx: str
    bits: int
    code: str
    dtype: np.dtype[Any]
    holder: np.dtype[Any]
    compute: str | None = None
    limits: tuple[int, int] | None = None
    mini: Minifloat | None = None


def _integer(name: str) -> ElementType:
    signed, bits = name.startswith("int"), int(name.removeprefix("u").removeprefix("int"))
    limits = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    if bits >= 8:
        dtype = holder = np.dtype(name)
        code = name
    else:
        dtype, holder = np.dtype(getattr(ml_dtypes, name)), np.dtype(np.int8 if signed else np.uint8)
        code = "signed bits" if signed else "unsigned bits"
    return ElementType(name, name, bits, code, dtype, holder, limits=limits)


def _minifloat(name: str, onnx: str, bits: int, *numbers: int) -> ElementType:
    dtype = np.dtype(getattr(ml_dtypes, name))
    return ElementType(name, onnx, bits, "minifloat", dtype, np.dtype(np.uint8), mini=Minifloat(*numbers))


def _float(name: str, onnx: str, dtype: Any, holder: Any, compute: str | None) -> ElementType:
    return ElementType(name, onnx, np.dtype(dtype).itemsize * 8, name, np.dtype(dtype), np.dtype(holder), compute)


ELEMENT_TYPES = {
    row.name: row
    for row in (
        *map(_integer, ("uint8", "int8", "uint16", "int16", "int32", "uint4", "int4", "uint2", "int2")),
        _float("float16", "float16", np.float16, np.float16, "float32"),
        _float("bfloat16", "bfloat16", ml_dtypes.bfloat16, np.uint16, "float32"),
        _float("float32", "float", np.float32, np.float32, "float32"),
        _float("float64", "double", np.float64, np.float64, "float64"),
        _minifloat("float8_e4m3fn", "float8e4m3fn", 8, 3, 7, 0x7E, -1, 0x7F),
        _minifloat("float8_e4m3fnuz", "float8e4m3fnuz", 8, 3, 8, 0x7F, -1, 0x80),
        _minifloat("float8_e5m2", "float8e5m2", 8, 2, 15, 0x7B, 0x7C, 0x7E),
        _minifloat("float8_e5m2fnuz", "float8e5m2fnuz", 8, 2, 16, 0x7F, -1, 0x80),
        _minifloat("float6_e2m3fn", "float6e2m3", 6, 3, 1, 0x1F, -1, 0x3F),
        _minifloat("float6_e3m2fn", "float6e3m2", 6, 2, 3, 0x1F, -1, 0x3F),
        _minifloat("float4_e2m1fn", "float4e2m1", 4, 1, 1, 0x07, -1, 0x0F),
        ElementType("float8_e8m0fnu", "float8e8m0", 8, "", np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(np.uint8)),
    )
}

#: Attribute of a zarr array whose element type zarr does not have: its name; the array holds integers of that width.
DTYPE_ATTRIBUTE = "chunkq.dtype"

# by dtype, in both byte orders where NumPy has them
_NAMES = {row.dtype: row.name for row in ELEMENT_TYPES.values()}
_NAMES |= {row.dtype.newbyteorder("S"): row.name for row in ELEMENT_TYPES.values() if row.dtype.kind != "V"}
_SPELLINGS = {row.onnx: row.name for row in ELEMENT_TYPES.values()} | {name: name for name in ELEMENT_TYPES}

#: What the ONNX operators take as quantized values, what they divide by and multiply with, and give back as floats.
QUANTIZED = tuple(row.name for row in ELEMENT_TYPES.values() if row.mini or (row.limits and row.name != "int32"))
ZERO_ONLY = tuple(name for name in QUANTIZED if name.startswith(("float8", "float4")))  # as zero points
DEQUANTIZE_LINEAR_X = (*QUANTIZED, "int32")
QUANTIZE_LINEAR_X = ("float32", "float16", "bfloat16", "int32")
FLOATS = ("float32", "float16", "bfloat16")
SCALES = (*FLOATS, "float8_e8m0fnu")
FAKE_QUANTIZE_X = ("float32", "float16", "bfloat16", "float64")


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


def element_type(argument: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Name the element type that a caller spelled out: NumPy's or ONNX's name, a NumPy or ml_dtypes type.

    Raises
    ------
    SpecError
        Reason ``dtype``.
    """
    name = _SPELLINGS.get(value.lower()) if isinstance(value, str) else None
    if name is None:
        try:
            name = _NAMES.get(np.dtype(value)) if value is not None else None
        except (TypeError, ValueError):  # NumPy has one for each kind of nonsense
            name = None
    if name not in allowed:
        raise SpecError("dtype", f"{argument}={value!r}: expected one of {', '.join(allowed)}")
    return name


def declared_dtype(argument: str, held: np.dtype[Any], name: str) -> np.dtype[Any]:
    """The NumPy type of data that a caller declares to be of an element type: held so, or as integers of its width.

    Raises
    ------
    SpecError
        Reason ``dtype``.
    """
    row = ELEMENT_TYPES[name]
    if held.newbyteorder("=") == row.dtype if held.kind != "V" else held == row.dtype:
        return row.dtype
    if held.kind not in "iu" or held.itemsize != row.dtype.itemsize or row.dtype.kind in "iu":
        raise SpecError(
            "dtype",
            f"{argument} is {_NAMES.get(held) or held}, not {name} as declared, nor its codes as {row.holder}",
        )
    return row.dtype


def check_codes(argument: str, held: np.ndarray[Any, Any], name: str) -> None:
    """Refuse integers that are no codes of a type narrower than a byte: packed bytes, or another type altogether.

    Raises
    ------
    SpecError
        Reason ``value``.
    """
    row = ELEMENT_TYPES[name]
    if row.bits >= 8 or held.dtype.kind not in "iu" or held.size == 0:
        return
    low, high = row.limits or (0, (1 << row.bits) - 1)
    least, most = int(held.min()), int(held.max())
    if least < low or most > high:
        raise SpecError(
            "value",
            f"{argument} holds {least if least < low else most}; {name} stored one in a byte is {low} .. {high}. "
            "Packed bytes go through chunkq.unpack first",
        )


def from_holder(argument: str, held: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Array of an element type from its codes as plain integers, without copying where the bytes are the same."""
    dtype = declared_dtype(argument, held.dtype, name)
    if held.dtype == dtype:
        return held
    check_codes(argument, held, name)
    if not held.dtype.isnative:
        held = held.astype(held.dtype.newbyteorder("="))
    return held.view(dtype)


def to_holder(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What zarr stores for an array: itself, or plain integers; float codes as they are, int4 and int2 as numbers."""
    row = ELEMENT_TYPES[_NAMES[values.dtype]]
    if row.holder == row.dtype:
        return values
    if row.limits is not None:
        return values.astype(row.holder)
    return values.view(row.holder)


def fill_value(name: str) -> float | int:
    """What an unwritten element reads as, in the plain type zarr has: NaN, or an integer's lowest value."""
    row = ELEMENT_TYPES[name]
    if row.mini is not None:
        return row.mini.nan
    if row.limits is not None:
        return row.limits[0]
    return {"bfloat16": 0x7FC0, "float8_e8m0fnu": 0xFF}.get(name, float("nan"))


def to_float32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """An array of any element type as float32, exactly (float64 and large int32 rounded)."""
    if _NAMES.get(values.dtype) in ELEMENT_TYPES and values.dtype.itemsize == 1 and values.dtype.kind not in "iu":
        # ml_dtypes takes 5 to 10 ns an element, this 1 to 4
        codes: np.ndarray[Any, np.dtype[np.float32]]
        unused = 8 - ELEMENT_TYPES[_NAMES[values.dtype]].bits  # above a narrow code, not to be looked at
        codes = (np.arange(256, dtype=np.uint8) & (0xFF >> unused)).view(values.dtype).astype(np.float32)
        return codes.take(np.ascontiguousarray(values).view(np.uint8))
    plain: np.ndarray[Any, np.dtype[np.float32]] = values.astype(np.float32, copy=False)
    return plain
