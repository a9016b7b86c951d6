"""The ONNX operators: DequantizeLinear, QuantizeLinear, and the two in one pass. Imports ops, operands, spec."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

import numpy as np

from chunkq.dtypes import DEQUANTIZE_LINEAR_X, FLOATS, QUANTIZE_LINEAR_X, QUANTIZED
from chunkq.errors import SpecError
from chunkq.operands import described, kind, optional_type, parameter
from chunkq.ops import INTEGERS, REALS, Operator, operator
from chunkq.run import Array
from chunkq.spec import (
    QuantSpec,
    Shape,
    ZeroPoint,
    dequantize_linear_spec,
    integer_argument,
    quantize_dequantize_spec,
    quantize_linear_spec,
)

BlockSize = int | tuple[int, ...]

#: Types of a scale and a zero point that are numbers, for `operator` to keep.
_NUMBERS = frozenset(product(REALS | INTEGERS, INTEGERS | {type(None)}))


def _block_size(block_size: Any) -> BlockSize:
    if isinstance(block_size, (tuple, list)):
        return tuple(integer_argument("block_size", b, "block_size") for b in block_size)
    return integer_argument("block_size", block_size, "block_size")


class _Linear(Operator):
    """Scale, zero point and where they lie: what the three operators share."""

    __slots__ = ("axis", "block_size", "output_dtype", "scale", "scale_dtype", "x_dtype", "zero_point")

    INPUTS = ("scale", "zero_point")

    #: What output_dtype may be.
    OUTPUTS: ClassVar[tuple[str, ...]] = FLOATS

    def __init__(
        self,
        scale: Any,
        zero_point: Any,
        axis: int,
        block_size: BlockSize,
        output_dtype: Any,
        x_dtype: Any,
        scale_dtype: Any,
    ) -> None:
        self.output_dtype = optional_type("output_dtype", output_dtype, self.OUTPUTS)
        self.x_dtype = optional_type("x_dtype", x_dtype, self.x_types())
        self.scale_dtype = optional_type("scale_dtype", scale_dtype)
        self.scale = parameter("scale", scale, "float32", self.scale_dtype)
        self.zero_point = zero_point
        self.axis = integer_argument("axis", axis, "axis")
        self.block_size = _block_size(block_size)
        if zero_point is not None:
            checked = parameter("zero_point", zero_point, "float64")
            # a Python number takes the quantized type, which depends on x
            number = kind(zero_point) == "number" or isinstance(zero_point, np.generic)
            self.zero_point = zero_point if number else checked

    def _params(self, weak_dtype: str, declared: str | None = None) -> tuple[tuple[Any, ...], ZeroPoint]:
        """The parameters as arrays, and what the zero point is; a weak one takes the quantized type."""
        if self.zero_point is None:
            return (self.scale,), None
        zero_point = parameter("zero_point", self.zero_point, weak_dtype, declared)
        return (self.scale, zero_point), described("zero_point", zero_point, declared)

    def _scale(self) -> tuple[Shape, str]:
        return described("scale", self.scale, self.scale_dtype)


class DequantizeLinear(_Linear):
    """ONNX DequantizeLinear with its parameters.

    ``y = (x - zero_point) * scale``, the difference exact, one float32 multiplication, one rounding to y's type.

    Parameters
    ----------
    scale : float, list, or array of float32, float16, bfloat16 or float8_e8m0fnu (NumPy, Dask, zarr)
        Scalar or shape (1,): one for the tensor. 1-D: one for each index of `axis`. With `block_size`: of x's rank.
        Python numbers become float32.
    zero_point : int, list or array of x's type, optional
        Same shape as scale; 0 by default. For int32, float8 and float4 x it must be 0.
    axis : int
        The axis a 1-D scale lies on, or along which the blocks run; negative counts from the end.
    block_size : int or tuple of int
        0 for none; b for blocks of b elements along `axis`; a tuple with one entry for each axis for N-D blocks
        (`axis` is ignored then). The last block may be shorter.
    output_dtype : dtype or str, optional
        float32, float16 or bfloat16; the type of scale by default (float8_e8m0fnu is none: then it must be given).
    x_dtype, scale_dtype : dtype or str, optional
        The element type of x, of scale, that are held as integers of the same width: ``"float8_e4m3fn"`` for FP8 codes in
        uint8. Names are NumPy's (ml_dtypes') or ONNX's.

    Raises
    ------
    SpecError
        Reasons ``dtype``, ``scale_shape``, ``zero_point_shape``, ``axis``, ``block_size``, ``value``,
        ``int32_zero_point``, ``float_zero_point``, ``metadata``, ``masked``, ``out``.

    Notes
    -----
    x is uint8, int8, uint16, int16, int32, uint4, int4, uint2, int2, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2,
    float8_e5m2fnuz, float6_e2m3fn, float6_e3m2fn or float4_e2m1fn, one value in a byte where it is narrower (`unpack`
    undoes ONNX's packing). Source: ONNX operator DequantizeLinear, opsets 10 to 28.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> op = chunkq.DequantizeLinear([0.5, 2.0], [0, 10], axis=0)
    >>> op(np.array([[1, 2], [10, 20]], np.int8))
    array([[ 0.5,  1. ],
           [ 0. , 20. ]], dtype=float32)
    """

    __slots__ = ()

    ATTRIBUTES = ("axis", "block_size", "output_dtype", "x_dtype", "scale_dtype")

    def __init__(
        self,
        scale: Any,
        zero_point: Any = None,
        *,
        axis: int = 1,
        block_size: BlockSize = 0,
        output_dtype: Any = None,
        x_dtype: Any = None,
        scale_dtype: Any = None,
    ) -> None:
        super().__init__(scale, zero_point, axis, block_size, output_dtype, x_dtype, scale_dtype)

    def x_types(self) -> tuple[str, ...]:
        return DEQUANTIZE_LINEAR_X

    def bind(self, shape: Shape, x_dtype: str) -> tuple[QuantSpec, tuple[Any, ...]]:
        params, zero_point = self._params(x_dtype, self.x_dtype)
        spec = dequantize_linear_spec(
            shape, x_dtype, self._scale(), zero_point, self.axis, self.block_size, self.output_dtype
        )
        return spec, params


class _Quantizing(_Linear):
    """What the operators that quantize share."""

    __slots__ = ("precision", "saturate")

    def __init__(self, *shared: Any, saturate: bool, precision: Any) -> None:
        super().__init__(*shared)
        if not isinstance(saturate, (bool, int)) or saturate not in (0, 1):
            raise SpecError("argument", f"saturate={saturate!r}: expected True or False")
        self.saturate = bool(saturate)
        self.precision = optional_type("precision", precision, FLOATS)

    def x_types(self) -> tuple[str, ...]:
        return QUANTIZE_LINEAR_X

    def _quantize(self, shape: Shape, x_dtype: str, q_dtype: str | None) -> tuple[QuantSpec, tuple[Any, ...]]:
        params, zero_point = self._params(q_dtype or "uint8")
        spec = quantize_linear_spec(
            shape,
            x_dtype,
            self._scale(),
            zero_point,
            self.axis,
            self.block_size,
            q_dtype,
            self.saturate,
            self.precision,
        )
        return spec, params


class QuantizeLinear(_Quantizing):
    """ONNX QuantizeLinear with its parameters.

    ``y = saturate(round(x / scale) + zero_point)``: divided (never multiplied by a reciprocal), rounded half to even, only
    then shifted, and clamped before it becomes an integer.

    Parameters
    ----------
    scale : float, list, or array of float32, float16, bfloat16 or float8_e8m0fnu (NumPy, Dask, zarr)
        As for `DequantizeLinear`.
    zero_point : int, list or array, optional
        Same shape as scale; its type is y's. For float8 and float4 it must be 0. A Python number takes `output_dtype`.
    axis, block_size
        As for `DequantizeLinear`.
    output_dtype : dtype or str, optional
        The type of y; that of zero_point by default, uint8 without one.
    saturate : bool
        For float8 results: what is too large becomes the largest value, or (False) infinity or NaN.
    precision : dtype or str, optional
        float32, float16 or bfloat16: what x / scale is computed in; the type of scale by default (float32 for int32 x and
        for float8_e8m0fnu scales). x is rounded to it first.
    x_dtype, scale_dtype : dtype or str, optional
        As for `DequantizeLinear`.

    Raises
    ------
    SpecError
        As for `DequantizeLinear`.

    Notes
    -----
    x is float32, float16, bfloat16 or int32; y any type that `DequantizeLinear` takes, int32 excepted. +inf gives the
    highest integer, -inf the lowest. NaN, which the standard leaves open, gives the lowest value of an integer, float6 or
    float4 type, and stays NaN in float8. Source: ONNX operator QuantizeLinear, opsets 10 to 28.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> chunkq.QuantizeLinear(2.0, 1, output_dtype="int8")(np.array([1, 3, 5, 1e9], np.float32))
    array([  1,   3,   3, 127], dtype=int8)
    """

    __slots__ = ()

    ATTRIBUTES = ("axis", "block_size", "output_dtype", "saturate", "precision", "x_dtype", "scale_dtype")
    OUTPUTS = QUANTIZED

    def __init__(
        self,
        scale: Any,
        zero_point: Any = None,
        *,
        axis: int = 1,
        block_size: BlockSize = 0,
        output_dtype: Any = None,
        saturate: bool = True,
        precision: Any = None,
        x_dtype: Any = None,
        scale_dtype: Any = None,
    ) -> None:
        shared = scale, zero_point, axis, block_size, output_dtype, x_dtype, scale_dtype
        super().__init__(*shared, saturate=saturate, precision=precision)

    def bind(self, shape: Shape, x_dtype: str) -> tuple[QuantSpec, tuple[Any, ...]]:
        return self._quantize(shape, x_dtype, self.output_dtype)


class QuantizeDequantize(_Quantizing):
    """`QuantizeLinear` followed by `DequantizeLinear` with the same parameters, in one pass.

    ``y = (saturate(round(x / scale) + zero_point) - zero_point) * scale``, to the bit what the two calls give.

    Parameters
    ----------
    scale, zero_point, axis, block_size, saturate, precision, x_dtype, scale_dtype
        As for `QuantizeLinear`.
    quantized_dtype : dtype or str, optional
        The type in between, QuantizeLinear's output_dtype.
    output_dtype : dtype or str, optional
        The type of y, DequantizeLinear's: float32, float16 or bfloat16; that of scale by default.

    Raises
    ------
    SpecError
        As for `DequantizeLinear`.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> op = chunkq.QuantizeDequantize(0.5, quantized_dtype="int4")
    >>> op(np.array([-9.0, -0.3, 0.2, 0.8, 9.0], np.float32))
    array([-4. , -0.5,  0. ,  1. ,  3.5], dtype=float32)
    """

    __slots__ = ("quantized_dtype",)

    ATTRIBUTES = (
        "axis",
        "block_size",
        "quantized_dtype",
        "saturate",
        "precision",
        "output_dtype",
        "x_dtype",
        "scale_dtype",
    )

    def __init__(
        self,
        scale: Any,
        zero_point: Any = None,
        *,
        axis: int = 1,
        block_size: BlockSize = 0,
        quantized_dtype: Any = None,
        saturate: bool = True,
        precision: Any = None,
        output_dtype: Any = None,
        x_dtype: Any = None,
        scale_dtype: Any = None,
    ) -> None:
        shared = scale, zero_point, axis, block_size, output_dtype, x_dtype, scale_dtype
        super().__init__(*shared, saturate=saturate, precision=precision)
        self.quantized_dtype = optional_type("quantized_dtype", quantized_dtype, QUANTIZED)

    def bind(self, shape: Shape, x_dtype: str) -> tuple[QuantSpec, tuple[Any, ...]]:
        spec, params = self._quantize(shape, x_dtype, self.quantized_dtype)
        return quantize_dequantize_spec(spec, self.output_dtype), params


def dequantize_linear(
    x: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int = 1,
    block_size: BlockSize = 0,
    output_dtype: Any = None,
    x_dtype: Any = None,
    scale_dtype: Any = None,
    out: Array | None = None,
    n_threads: int | None = None,
) -> Any:
    """Apply ONNX DequantizeLinear, ``y = (x - zero_point) * scale``: `DequantizeLinear` in one call.

    Parameters
    ----------
    x : array (NumPy, Dask or zarr)
        The quantized tensor.
    scale, zero_point, axis, block_size, output_dtype, x_dtype, scale_dtype
        See `DequantizeLinear`.
    out, n_threads
        See `Operator.__call__`.

    Returns
    -------
    numpy.ndarray or dask.array.Array of float32, float16 or bfloat16
        Of x's shape; lazy where x is.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> chunkq.dequantize_linear(np.array([0, 10, 128, 255], np.uint8), 1.0, 128)
    array([-128., -118.,    0.,  127.], dtype=float32)
    >>> codes = np.array([[0x38, 0x40, 0x7E]], np.uint8)                   # FP8, stored as bytes
    >>> chunkq.dequantize_linear(codes, 0.5, x_dtype="float8_e4m3fn")
    array([[  0.5,   1. , 224. ]], dtype=float32)
    """
    numbers = (type(scale), type(zero_point)) in _NUMBERS and bool(scale)
    attributes = axis, block_size, output_dtype, x_dtype, scale_dtype
    op = operator(DequantizeLinear, numbers, scale, zero_point, *attributes)
    return op(x, out=out, n_threads=n_threads)


def quantize_linear(
    x: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int = 1,
    block_size: BlockSize = 0,
    output_dtype: Any = None,
    saturate: bool = True,
    precision: Any = None,
    x_dtype: Any = None,
    scale_dtype: Any = None,
    out: Array | None = None,
    n_threads: int | None = None,
) -> Any:
    """Apply ONNX QuantizeLinear, ``y = saturate(round(x / scale) + zero_point)``: `QuantizeLinear` in one call.

    Parameters
    ----------
    x : array of float32, float16, bfloat16 or int32 (NumPy, Dask or zarr)
        The tensor.
    scale, zero_point, axis, block_size, output_dtype, saturate, precision, x_dtype, scale_dtype
        See `QuantizeLinear`.
    out, n_threads
        See `Operator.__call__`.

    Returns
    -------
    numpy.ndarray or dask.array.Array of the quantized type
        Of x's shape; lazy where x is. Types narrower than a byte come one in a byte, as ml_dtypes has them.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> chunkq.quantize_linear(np.array([0.5, 1.5, 2.5, -0.5], np.float32), 1.0, np.int8(1))
    array([1, 3, 3, 1], dtype=int8)
    """
    numbers = (type(scale), type(zero_point)) in _NUMBERS and bool(scale)
    attributes = axis, block_size, output_dtype, saturate, precision, x_dtype, scale_dtype
    op = operator(QuantizeLinear, numbers, scale, zero_point, *attributes)
    return op(x, out=out, n_threads=n_threads)


def quantize_dequantize(
    x: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int = 1,
    block_size: BlockSize = 0,
    quantized_dtype: Any = None,
    saturate: bool = True,
    precision: Any = None,
    output_dtype: Any = None,
    x_dtype: Any = None,
    scale_dtype: Any = None,
    out: Array | None = None,
    n_threads: int | None = None,
) -> Any:
    """Quantize and dequantize in one pass: `QuantizeDequantize` in one call, to the bit what the two calls give.

    Parameters
    ----------
    x : array of float32, float16, bfloat16 or int32 (NumPy, Dask or zarr)
        The tensor.
    scale, zero_point, axis, block_size, quantized_dtype, saturate, precision, output_dtype, x_dtype, scale_dtype
        See `QuantizeDequantize`.
    out, n_threads
        See `Operator.__call__`.

    Returns
    -------
    numpy.ndarray or dask.array.Array of float32, float16 or bfloat16
        Of x's shape; lazy where x is.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> chunkq.quantize_dequantize(np.array([0.24, 0.26, 99.0], np.float32), 0.5, np.int8(0))
    array([ 0. ,  0.5, 63.5], dtype=float32)
    """
    numbers = (type(scale), type(zero_point)) in _NUMBERS and bool(scale)
    attributes = axis, block_size, quantized_dtype, saturate, precision, output_dtype, x_dtype, scale_dtype
    op = operator(QuantizeDequantize, numbers, scale, zero_point, *attributes)
    return op(x, out=out, n_threads=n_threads)
