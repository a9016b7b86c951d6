"""The public operators: what the user calls, and which way the input goes.

Imports spec and run; graph (dask) is imported when a Dask or zarr array arrives, never before.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from chunkq.dtypes import DEQUANTIZE_LINEAR_X, ELEMENT_TYPES, FAKE_QUANTIZE_X, element_name
from chunkq.errors import SpecError
from chunkq.run import Array, check_out, refuse_masked, run_chunk
from chunkq.spec import QuantSpec, Shape, dequantize_linear_spec, fake_quantize_spec, integer_argument

_NUMBERS = (bool, int, float)


def kind(x: Any) -> str:
    """Say how x is held: "numpy", "dask", "zarr", "number" for a Python number or list, or "other"."""
    if isinstance(x, (np.ndarray, np.generic)):
        return "numpy"
    for name, module, class_name in (("dask", "dask.array", "Array"), ("zarr", "zarr", "Array")):
        # an array of a library that was never imported cannot be here
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(x, getattr(loaded, class_name)):
            return name
    if isinstance(x, (*_NUMBERS, list, tuple)):
        return "number"
    return "other"


def _weak(name: str, value: Any, dtype: str) -> Array:
    """A Python number or list in the type the operator wants, without wrapping or overflow."""
    target = ELEMENT_TYPES[dtype].dtype
    try:
        wide = np.array(value)
    except ValueError as error:
        raise SpecError("value", f"{name} is a ragged list: {error}") from error
    if wide.size == 0:
        wide = wide.astype(target)
    if wide.dtype.kind not in "iuf" or (target.kind in "iu" and wide.dtype.kind == "f"):
        wanted = "integers" if target.kind in "iu" else "numbers"
        raise SpecError("value", f"{name}={value!r}: expected {wanted}")
    if target.kind in "iu":
        limits = np.iinfo(target)
        if wide.size and (int(wide.min()) < limits.min or int(wide.max()) > limits.max):
            raise SpecError("value", f"{name}={value!r} is outside {dtype}, {limits.min} .. {limits.max}")
    with np.errstate(over="ignore"):
        result = wide.astype(target)
    if target.kind == "f" and bool(np.any(np.isinf(result) & ~np.isinf(wide))):
        raise SpecError("value", f"{name}={value!r} is too large for {dtype}")
    return result


def _parameter(name: str, value: Any, weak_dtype: str) -> Any:
    """A parameter as an array of some kind; Python numbers and lists take the type the operator wants."""
    found = kind(value)
    if found == "number":
        return _weak(name, value, weak_dtype)
    if found == "other":
        raise SpecError(
            "argument",
            f"{name} is a {type(value).__name__}; expected a number, list, NumPy, Dask or zarr array",
        )
    refuse_masked(name, value)
    return np.asarray(value) if found == "numpy" else value


def _described(name: str, value: Any) -> tuple[Shape, str]:
    """Shape and element type of a parameter."""
    shape = tuple(value.shape)
    if any(n != n for n in shape):
        raise SpecError("shape", f"{name} has unknown chunk sizes; call compute_chunk_sizes() on it first")
    return tuple(int(n) for n in shape), element_name(value.dtype, name, tuple(ELEMENT_TYPES))


def _weak_x(x: Any) -> Array:
    try:
        return np.asarray(x)
    except ValueError as error:
        raise SpecError("value", f"x is a ragged list: {error}") from error


class Operator:
    """What the operators share: calling one takes the way that fits the input."""

    __slots__ = ()

    def bind(self, shape: Shape, x_dtype: str) -> tuple[QuantSpec, tuple[Any, ...]]:
        """Validate the operator for a tensor.

        Parameters
        ----------
        shape : tuple of int
            The tensor's.
        x_dtype : str
            Its element type.

        Returns
        -------
        QuantSpec, tuple
            The operation, and its parameters as arrays of any kind, of the rank they were given in.

        Raises
        ------
        SpecError
            With the reason why the two do not fit.
        """
        raise AssertionError("each operator has its own")

    def x_types(self) -> tuple[str, ...]:
        """Name the element types this operator takes."""
        raise AssertionError("each operator has its own")

    def __call__(self, x: Any, *, out: Array | None = None, n_threads: int | None = None) -> Any:
        """Apply the operator: NumPy gives NumPy, a Dask or zarr array gives a lazy Dask array.

        Parameters
        ----------
        x : numpy.ndarray, dask.array.Array, zarr.Array, or a NumPy scalar
            The tensor.
        out : numpy.ndarray, optional
            Where the result goes; NumPy input only.
        n_threads : int, optional
            Threads for NumPy input; all available CPUs by default, one for small arrays.
        """
        found = kind(x)
        if found == "number" and not isinstance(x, bool):
            x, found = _weak_x(x), "numpy"
        if found not in ("numpy", "dask", "zarr"):
            raise SpecError(
                "argument",
                f"x is a {type(x).__name__}; expected a NumPy, Dask or zarr array (of an xarray.DataArray its .data, "
                "of anything else numpy.asarray(x))",
            )
        refuse_masked("x", x)
        if found == "numpy":
            return self._in_memory(np.asarray(x), out, n_threads)
        if out is not None or n_threads is not None:
            raise SpecError("argument", f"out and n_threads are for NumPy input; x is a {found} array, the result lazy")
        from chunkq import graph

        return graph.from_dask(self, x) if found == "dask" else graph.from_zarr(self, x)

    def _in_memory(self, x: Array, out: Array | None, n_threads: int | None) -> Array:
        spec, params = self.bind(x.shape, element_name(x.dtype, "x", self.x_types()))
        values = tuple(p if isinstance(p, np.ndarray) else np.asarray(p[...]) for p in params)
        if out is not None:
            check_out(spec, x.shape, out, x, values)
        return run_chunk(spec, x, values, out=out, n_threads=n_threads)


class DequantizeLinear(Operator):
    """ONNX DequantizeLinear with its parameters.

    ``y = (x - zero_point) * scale``, the difference exact, one float32 multiplication.

    Parameters
    ----------
    scale : float, list, or float32 array (NumPy, Dask, zarr)
        Scalar or shape (1,): one for the tensor. 1-D: one for each index of `axis`. With `block_size`: of x's rank.
    zero_point : int, list or array of x's type, optional
        Same shape as scale; 0 by default. For int32 x it must be 0.
    axis : int
        The axis a 1-D scale lies on, or along which the blocks run; negative counts from the end.
    block_size : int or tuple of int
        0 for none; b for blocks of b elements along `axis`; a tuple with one entry for each axis for N-D blocks
        (`axis` is ignored then). The last block may be shorter.

    Raises
    ------
    SpecError
        Reasons ``dtype``, ``scale_shape``, ``zero_point_shape``, ``axis``, ``block_size``, ``value``,
        ``int32_zero_point``, ``masked``, ``out``.

    Notes
    -----
    x is uint8, int8, uint16, int16 or int32; y is float32. Source: ONNX operator DequantizeLinear, opsets 10, 13, 21.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> op = chunkq.DequantizeLinear([0.5, 2.0], [0, 10], axis=0)
    >>> op(np.array([[1, 2], [10, 20]], np.int8))
    array([[ 0.5,  1. ],
           [ 0. , 20. ]], dtype=float32)
    """

    __slots__ = ("axis", "block_size", "scale", "zero_point")

    def __init__(
        self, scale: Any, zero_point: Any = None, *, axis: int = 1, block_size: int | tuple[int, ...] = 0
    ) -> None:
        self.scale = _parameter("scale", scale, "float32")
        self.zero_point = zero_point
        self.axis = integer_argument("axis", axis, "axis")
        self.block_size = _block_size(block_size)
        if zero_point is not None and kind(zero_point) != "number":
            self.zero_point = _parameter("zero_point", zero_point, "int32")

    def __repr__(self) -> str:
        return f"DequantizeLinear(axis={self.axis}, block_size={self.block_size})"

    def x_types(self) -> tuple[str, ...]:
        return DEQUANTIZE_LINEAR_X

    def bind(self, shape: Shape, x_dtype: str) -> tuple[QuantSpec, tuple[Any, ...]]:
        scale_shape, scale_dtype = _described("scale", self.scale)
        params = [self.scale]
        zero_point = None
        if self.zero_point is not None:
            params.append(_parameter("zero_point", self.zero_point, x_dtype))
            zero_point = _described("zero_point", params[1])
        spec = dequantize_linear_spec(shape, x_dtype, scale_shape, scale_dtype, zero_point, self.axis, self.block_size)
        return spec, tuple(params)


def _block_size(block_size: Any) -> int | tuple[int, ...]:
    if isinstance(block_size, (tuple, list)):
        return tuple(integer_argument("block_size", b, "block_size") for b in block_size)
    return integer_argument("block_size", block_size, "block_size")


class FakeQuantize(Operator):
    """OpenVINO FakeQuantize-1 with its ranges.

    ``y = output_low`` where ``x <= min(input_low, input_high)``, ``output_high`` where
    ``x > max(input_low, input_high)``, else ``round((x - input_low) / (input_high - input_low) * (levels - 1)) /
    (levels - 1) * (output_high - output_low) + output_low``, left to right, ties to even, nothing fused.

    Parameters
    ----------
    input_low, input_high, output_low, output_high : float, list, or array of x's type (NumPy, Dask, zarr)
        Four ranges of possibly four shapes; each broadcasts to x, never beyond it.
    levels : int
        From 2 to 2**24 + 1 (2**53 + 1 for float64).
    auto_broadcast : {"numpy", "none", "pdpd"}
        "numpy" aligns a range's dimensions with x's last ones; "none" wants x's shape; "pdpd" drops trailing
        dimensions of 1 and puts the rest on x's from `broadcast_axis` on.
    broadcast_axis : int
        For "pdpd": the first axis, or -1 for rank(x) - rank(range). No meaning otherwise.

    Raises
    ------
    SpecError
        Reasons ``dtype``, ``levels``, ``broadcast``, ``axis``, ``value``, ``masked``, ``out``.

    Notes
    -----
    x is float32, float64 or float16, and y is of x's type. float16 is computed in float32 and rounded once. A NaN in x
    gives NaN; every NaN result is the canonical one. Source: OpenVINO operation FakeQuantize-1.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> op = chunkq.FakeQuantize(0.0, 4.0, 0.0, 4.0, levels=5)
    >>> op(np.array([0.5, 1.5, 2.5, 9.0], np.float32))
    array([0., 2., 2., 4.], dtype=float32)
    """

    __slots__ = ("auto_broadcast", "broadcast_axis", "levels", "ranges")

    NAMES = ("input_low", "input_high", "output_low", "output_high")

    def __init__(
        self,
        input_low: Any,
        input_high: Any,
        output_low: Any,
        output_high: Any,
        levels: int,
        *,
        auto_broadcast: str = "numpy",
        broadcast_axis: int = -1,
    ) -> None:
        self.ranges = (input_low, input_high, output_low, output_high)
        self.levels = integer_argument("levels", levels, "levels")
        if not isinstance(auto_broadcast, str):
            raise SpecError("broadcast", f"auto_broadcast={auto_broadcast!r}: expected 'none', 'numpy' or 'pdpd'")
        self.auto_broadcast = auto_broadcast
        self.broadcast_axis = integer_argument("broadcast_axis", broadcast_axis, "axis")

    def __repr__(self) -> str:
        return f"FakeQuantize(levels={self.levels}, auto_broadcast={self.auto_broadcast!r})"

    def x_types(self) -> tuple[str, ...]:
        return FAKE_QUANTIZE_X

    def bind(self, shape: Shape, x_dtype: str) -> tuple[QuantSpec, tuple[Any, ...]]:
        params = tuple(_parameter(n, v, x_dtype) for n, v in zip(self.NAMES, self.ranges, strict=True))
        described = tuple((n, *_described(n, p)) for n, p in zip(self.NAMES, params, strict=True))
        spec = fake_quantize_spec(shape, x_dtype, described, self.levels, self.auto_broadcast, self.broadcast_axis)
        return spec, params


def dequantize_linear(
    x: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int = 1,
    block_size: int | tuple[int, ...] = 0,
    out: Array | None = None,
    n_threads: int | None = None,
) -> Any:
    """Apply ONNX DequantizeLinear, ``y = (x - zero_point) * scale``: `DequantizeLinear` in one call.

    Parameters
    ----------
    x : array of uint8, int8, uint16, int16 or int32 (NumPy, Dask or zarr)
        The quantized tensor.
    scale, zero_point, axis, block_size
        See `DequantizeLinear`.
    out, n_threads
        See `Operator.__call__`.

    Returns
    -------
    numpy.ndarray or dask.array.Array of float32
        Of x's shape; lazy where x is.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> chunkq.dequantize_linear(np.array([0, 10, 128, 255], np.uint8), 1.0, 128)
    array([-128., -118.,    0.,  127.], dtype=float32)
    """
    return DequantizeLinear(scale, zero_point, axis=axis, block_size=block_size)(x, out=out, n_threads=n_threads)


def fake_quantize(
    x: Any,
    input_low: Any,
    input_high: Any,
    output_low: Any,
    output_high: Any,
    levels: int,
    *,
    auto_broadcast: str = "numpy",
    broadcast_axis: int = -1,
    out: Array | None = None,
    n_threads: int | None = None,
) -> Any:
    """Apply OpenVINO FakeQuantize-1: `FakeQuantize` in one call.

    Parameters
    ----------
    x : array of float32, float64 or float16 (NumPy, Dask or zarr)
        The tensor.
    input_low, input_high, output_low, output_high, levels, auto_broadcast, broadcast_axis
        See `FakeQuantize`.
    out, n_threads
        See `Operator.__call__`; `out` may be x itself.

    Returns
    -------
    numpy.ndarray or dask.array.Array
        Of x's shape and type; lazy where x is.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> x = np.array([[-6, -5, -4], [3, 4, 5]], np.float32)
    >>> chunkq.fake_quantize(x, [-6, -3, -1], [6, 3, 1], [-6, -3, -1], [6, 3, 1], levels=5)
    array([[-6., -3., -1.],
           [ 3.,  3.,  1.]], dtype=float32)
    """
    op = FakeQuantize(
        input_low,
        input_high,
        output_low,
        output_high,
        levels,
        auto_broadcast=auto_broadcast,
        broadcast_axis=broadcast_axis,
    )
    return op(x, out=out, n_threads=n_threads)
