"""What an operation is: `QuantSpec`, built and validated by one factory per operator, and how parameters are cut.

No arrays, no files, no kernels in here. Imports errors and dtypes.

Every parameter (scale, zero point, each FakeQuantize range) is described at the tensor's rank by `steps`: for each tensor
axis, how many tensor elements one parameter element covers. 0 = all of them, 1 = one each, b = a block of b, the
last one possibly shorter. Per-tensor, per-axis, blocked and every broadcast are values of `steps`, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral

from chunkq.dtypes import (
    DEQUANTIZE_LINEAR_X,
    ELEMENT_TYPES,
    FAKE_QUANTIZE_X,
    FLOATS,
    QUANTIZE_LINEAR_X,
    QUANTIZED,
    SCALES,
)
from chunkq.errors import SpecError

Shape = tuple[int, ...]
Region = tuple[slice, ...]

FORMULAS = {
    "DequantizeLinear": "y = (x - zero_point) * scale",
    "QuantizeLinear": "y = saturate(round(x / scale) + zero_point)",
    "QuantizeDequantize": "y = (saturate(round(x / scale) + zero_point) - zero_point) * scale",
    "FakeQuantize": (
        "y = output_low where x <= min(input_low, input_high), output_high where x > max(input_low, input_high), else "
        "round((x - input_low) / (input_high - input_low) * (levels - 1)) / (levels - 1)"
        " * (output_high - output_low) + output_low"
    ),
}


def cut(start: int, stop: int, step: int) -> tuple[int, int]:
    """What start : stop of a tensor's axis needs of a parameter with this step; the one slicing rule."""
    return (start // step, -(-stop // step)) if step else (0, 1)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of an operation.

    Attributes
    ----------
    name : str
        The standard's word for it.
    dtype : str
        Its element type.
    axes : tuple of int
        For each dimension of the array as given, the tensor axis it lies on; -1 for a dimension of length 1 on none.
    steps : tuple of int
        For each tensor axis, the tensor elements one parameter element covers; 0 for all of them.
    """

    name: str
    dtype: str
    axes: Shape
    steps: Shape

    def region(self, region: Region) -> Region:
        """Cut out of the full-rank parameter what a region of the tensor needs.

        Neighbouring regions may share an element: these cuts are no partition.
        """
        return tuple(slice(*cut(part.start, part.stop, k)) for part, k in zip(region, self.steps, strict=True))

    def phases(self, start: Shape) -> Shape:
        """Say for each axis how far inside a step a region starts."""
        return tuple(s % k if k else 0 for s, k in zip(start, self.steps, strict=True))

    def own_region(self, region: Region) -> Region:
        """The same cut as `region`, in the dimensions of the array as it was given."""
        cut = self.region(region)
        return tuple(slice(0, 1) if axis < 0 else cut[axis] for axis in self.axes)


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """One operator on one tensor: shapes, element types, granularity. Made by the factories below only.

    Attributes
    ----------
    op : str
        A key of `FORMULAS`.
    shape : tuple of int
        The tensor's.
    x_dtype, y_dtype, compute_dtype : str
        Element types of input and output, and the one the arithmetic is done in.
    params : tuple of ParamSpec
        In the operator's order; an absent zero point is not in it.
    axis : int or None
        The quantization axis, where there is exactly one.
    levels : int
        FakeQuantize's; 2 elsewhere.
    q_dtype : str
        Element type of the quantized values; "" for FakeQuantize.
    division : str
        Element type QuantizeLinear divides in.
    saturate : bool
        Whether QuantizeLinear turns what is too large for a float8 into its largest value.
    """

    op: str
    shape: Shape
    x_dtype: str
    y_dtype: str
    compute_dtype: str
    params: tuple[ParamSpec, ...]
    axis: int | None
    levels: int = 2
    q_dtype: str = ""
    division: str = "float32"
    saturate: bool = True

    @property
    def task_name(self) -> str:
        """What Dask shows: dequantize-linear, fake-quantize and so on."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", self.op).lower()

    @property
    def granularity(self) -> str:
        """Describe the finest parameter in words."""
        finest = max((p.steps for p in self.params), key=lambda steps: sum(k > 0 for k in steps))
        used = [axis for axis, k in enumerate(finest) if k]
        if not used:
            return "per-tensor"
        if any(k > 1 for k in finest):
            return "blocks of " + " x ".join(str(k or n) for k, n in zip(finest, self.shape, strict=True))
        if len(used) == 1:
            return f"per-axis, axis {used[0]}"
        return "per-axis, axes " + ", ".join(map(str, used))

    def axes_of_parameters(self) -> tuple[int, ...]:
        """List the tensor axes along which any parameter changes."""
        return tuple(a for a in range(len(self.shape)) if any(p.steps[a] for p in self.params))


def as_integer(value: object) -> int | None:
    """The plain int of an integer, None for all else: True and 1.0 compare equal to 1 and would be taken for it."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


def integer_argument(name: str, value: object, reason: str) -> int:
    """The plain int of an argument, or an error with the given reason."""
    plain = as_integer(value)
    if plain is None:
        raise SpecError(reason, f"{name}={value!r}: expected an integer")
    return plain


def normalize_axis(axis: int, rank: int, hint: str = "") -> int:
    """Turn a possibly negative axis into 0 .. rank - 1, or refuse it with reason ``axis``."""
    if not -rank <= axis < rank:
        raise SpecError("axis", f"axis={axis} is outside [{-rank}, {rank - 1}] of x of rank {rank}{hint}")
    return axis % rank


def _linear_steps(
    shape: Shape, scale_shape: Shape, axis: int, block_size: int | Shape
) -> tuple[Shape, Shape, int | None]:
    """Axes and steps of scale, and the quantization axis; ONNX QuantizeLinear, "three granularities"."""
    rank = len(shape)
    if block_size:
        return _blocked_steps(shape, scale_shape, axis, block_size)
    if scale_shape in ((), (1,)):
        return (-1,) * len(scale_shape), (0,) * rank, None
    if len(scale_shape) != 1:
        long = [a for a, n in enumerate(scale_shape) if n != 1]
        one = len(scale_shape) == rank and len(long) == 1
        way = f"pass scale.reshape(-1) with axis={long[0]}" if one else "blocked scales need block_size"
        raise SpecError("scale_shape", f"scale has shape {scale_shape}; expected a scalar, or 1-D along axis ({way})")
    hint = "; pass axis=0" if rank == 1 and scale_shape == shape else ""
    axis = normalize_axis(axis, rank, hint)
    if scale_shape[0] != shape[axis]:
        fits = [a for a, n in enumerate(shape) if n == scale_shape[0]]
        hint = f"; axis={fits[0]} has that length" if len(fits) == 1 else ""
        raise SpecError(
            "scale_shape",
            f"scale has {scale_shape[0]} elements but x of shape {shape} has {shape[axis]} along axis {axis}{hint}",
        )
    return (axis,), tuple(int(a == axis) for a in range(rank)), axis


def _blocked_steps(
    shape: Shape, scale_shape: Shape, axis: int, block_size: int | Shape
) -> tuple[Shape, Shape, int | None]:
    rank = len(shape)
    blocked: int | None = None
    if isinstance(block_size, tuple):
        if len(block_size) != rank or any(b < 1 for b in block_size):
            raise SpecError(
                "block_size",
                f"block_size={block_size}: expected {rank} positive integers, one for each axis of x",
            )
        steps = block_size
    else:
        if block_size < 0:
            raise SpecError("block_size", f"block_size={block_size}: expected 0 or more")
        blocked = normalize_axis(axis, rank)
        steps = tuple(block_size if a == blocked else 1 for a in range(rank))
    if len(scale_shape) != rank:
        raise SpecError("scale_shape", f"scale has shape {scale_shape}; with block_size it needs x's rank, {rank}")
    for a, (n, k, found) in enumerate(zip(shape, steps, scale_shape, strict=True)):
        if found != -(-n // k):
            raise SpecError(
                "scale_shape",
                f"scale has length {found} on axis {a}; x has {n} there, in blocks of {k}: expected {-(-n // k)}",
            )
    return tuple(range(rank)), steps, blocked


ZeroPoint = tuple[Shape, str] | None


def _one_of(argument: str, found: str, allowed: Sequence[str]) -> None:
    if found not in allowed:
        way = ""
        if argument == "scale":
            codes = found == "uint8"
            way = ": pass scale_dtype='float8_e8m0fnu' for codes" if codes else ": pass scale.astype('float32')"
        raise SpecError("dtype", f"{argument} is {found}; expected one of {', '.join(allowed)}{way}")


def _linear_params(
    shape: Shape,
    scale: tuple[Shape, str],
    zero_point: ZeroPoint,
    axis: int,
    block_size: int | Shape,
    q_dtype: tuple[str, str],
) -> tuple[tuple[ParamSpec, ...], int | None]:
    """Scale and zero point of the ONNX operators, and the axis; `q_dtype` is the quantized type and whose type it is."""
    scale_shape, scale_dtype = scale
    _one_of("scale", scale_dtype, SCALES)
    axes, steps, quantization_axis = _linear_steps(shape, scale_shape, axis, block_size)
    params = [ParamSpec("scale", scale_dtype, axes, steps)]
    if zero_point is not None:
        zero_shape, zero_dtype = zero_point
        # ONNX's own test cases pass a scalar scale with a zero point of shape (1,)
        one_each = not any(steps) and zero_shape in ((), (1,))
        if zero_shape != scale_shape and not one_each:
            raise SpecError(
                "zero_point_shape",
                f"zero_point has shape {zero_shape}; expected that of scale, {scale_shape}",
            )
        if zero_dtype != q_dtype[0]:
            raise SpecError("dtype", f"zero_point is {zero_dtype}; expected {q_dtype[0]}, {q_dtype[1]}")
        axes = (-1,) * len(zero_shape) if one_each else axes
        params.append(ParamSpec("zero_point", zero_dtype, axes, steps))
    return tuple(params), quantization_axis


def _dequantized_dtype(scale_dtype: str, output_dtype: str | None) -> str:
    """ONNX: output_dtype, else the type of scale."""
    if output_dtype is None and scale_dtype not in FLOATS:
        raise SpecError("dtype", f"scale is {scale_dtype}: pass output_dtype, one of {', '.join(FLOATS)}")
    y_dtype = output_dtype or scale_dtype
    _one_of("output_dtype", y_dtype, FLOATS)
    return y_dtype


@lru_cache(maxsize=1024)
def dequantize_linear_spec(
    shape: Shape,
    x_dtype: str,
    scale: tuple[Shape, str],
    zero_point: ZeroPoint,
    axis: int,
    block_size: int | Shape,
    output_dtype: str | None,
) -> QuantSpec:
    """Validate a DequantizeLinear and describe it; scale and `zero_point` are shape and element type."""
    _one_of("x", x_dtype, DEQUANTIZE_LINEAR_X)
    params, along = _linear_params(shape, scale, zero_point, axis, block_size, (x_dtype, "the type of x"))
    y_dtype = _dequantized_dtype(scale[1], output_dtype)
    return QuantSpec("DequantizeLinear", shape, x_dtype, y_dtype, "float32", params, along, q_dtype=x_dtype)


def _quantized_dtype(zero_point: ZeroPoint, asked: str | None, argument: str) -> str:
    """ONNX: the type of zero_point, else output_dtype, else uint8; both given and different is an error."""
    if zero_point is not None:
        _one_of("zero_point", zero_point[1], QUANTIZED)
        if asked not in (None, zero_point[1]):
            raise SpecError("dtype", f"{argument}={asked!r} but zero_point is {zero_point[1]}; leave one of them out")
        return zero_point[1]
    q_dtype = asked or "uint8"
    _one_of(argument, q_dtype, QUANTIZED)
    return q_dtype


@lru_cache(maxsize=1024)
def quantize_linear_spec(
    shape: Shape,
    x_dtype: str,
    scale: tuple[Shape, str],
    zero_point: ZeroPoint,
    axis: int,
    block_size: int | Shape,
    output_dtype: str | None,
    saturate: bool,
    precision: str | None,
) -> QuantSpec:
    """Validate a QuantizeLinear and describe it."""
    _one_of("x", x_dtype, QUANTIZE_LINEAR_X)
    q_dtype = _quantized_dtype(zero_point, output_dtype, "output_dtype")
    params, along = _linear_params(shape, scale, zero_point, axis, block_size, (q_dtype, "the quantized type"))
    division = precision or (scale[1] if scale[1] in FLOATS and x_dtype != "int32" else "float32")
    _one_of("precision", division, FLOATS)
    return QuantSpec(
        "QuantizeLinear",
        shape,
        x_dtype,
        q_dtype,
        "float32",
        params,
        along,
        q_dtype=q_dtype,
        division=division,
        saturate=saturate,
    )


@lru_cache(maxsize=1024)
def quantize_dequantize_spec(quantize: QuantSpec, output_dtype: str | None) -> QuantSpec:
    """Describe a QuantizeLinear followed by the DequantizeLinear with the same parameters."""
    y_dtype = _dequantized_dtype(quantize.params[0].dtype, output_dtype)
    return replace(quantize, op="QuantizeDequantize", y_dtype=y_dtype)


def _range_axes(name: str, shape: Shape, found: Shape, auto_broadcast: str, broadcast_axis: int) -> Shape:
    """Say on which tensor axis each dimension of a FakeQuantize range lies; OpenVINO "broadcast rules"."""
    rank, own = len(shape), len(found)
    where = f"{name} has shape {found} and x {shape}"
    if auto_broadcast == "none":
        if found != shape:
            raise SpecError("broadcast", f"{where}; auto_broadcast='none' wants them equal")
        return tuple(range(rank))
    start = rank - own
    kept = own
    if auto_broadcast == "pdpd":
        while kept and found[kept - 1] == 1:
            kept -= 1
        if broadcast_axis != -1:
            start = broadcast_axis
            if not 0 <= start <= rank:
                raise SpecError("axis", f"broadcast_axis={start!r}: expected -1 or 0 .. {rank}")
    if start < 0 or start + kept > rank:
        raise SpecError("broadcast", f"{where}: the range reaches past x (axes from {start} on)")
    axes = tuple(start + d if d < kept else -1 for d in range(own))
    for axis, n in zip(axes, found, strict=True):
        if axis >= 0 and n not in (1, shape[axis]):
            raise SpecError("broadcast", f"{where}: length {n} on axis {axis}, expected 1 or {shape[axis]}")
    return axes


def _range_spec(
    name: str, shape: Shape, found: Shape, dtype: str, auto_broadcast: str, broadcast_axis: int
) -> ParamSpec:
    axes = _range_axes(name, shape, found, auto_broadcast, broadcast_axis)
    lengths = {a: n for a, n in zip(axes, found, strict=True) if a >= 0}
    steps = tuple(int(lengths.get(a, 1) == n and n != 1) for a, n in enumerate(shape))
    return ParamSpec(name, dtype, axes, steps)


def check_levels(levels: int, compute_dtype: str) -> int:
    """Refuse levels below 2 or above what the arithmetic counts exactly; reason ``levels``."""
    most = (1 << (24 if compute_dtype == "float32" else 53)) + 1
    if not 2 <= levels <= most:
        raise SpecError("levels", f"levels={levels}: expected an integer from 2 to {most} in {compute_dtype}")
    return levels


@lru_cache(maxsize=1024)
def fake_quantize_spec(
    shape: Shape,
    x_dtype: str,
    ranges: tuple[tuple[str, Shape, str], ...],
    levels: int,
    auto_broadcast: str,
    broadcast_axis: int,
) -> QuantSpec:
    """Validate a FakeQuantize and describe it; `ranges` are name, shape and element type of each range."""
    if x_dtype not in FAKE_QUANTIZE_X:
        raise SpecError("dtype", f"x is {x_dtype}; expected one of {', '.join(FAKE_QUANTIZE_X)}")
    if auto_broadcast not in ("none", "numpy", "pdpd"):
        raise SpecError("broadcast", f"auto_broadcast={auto_broadcast!r}: expected 'none', 'numpy' or 'pdpd'")
    compute = ELEMENT_TYPES[x_dtype].compute
    assert compute is not None
    levels = check_levels(levels, compute)
    for name, _, dtype in ranges:
        if dtype != x_dtype:
            raise SpecError(
                "dtype",
                f"{name} is {dtype}; expected {x_dtype}, the type of x: pass {name}.astype('{x_dtype}')",
            )
    params = tuple(
        _range_spec(name, shape, found, dtype, auto_broadcast, broadcast_axis) for name, found, dtype in ranges
    )
    used = sorted({a for p in params for a, k in enumerate(p.steps) if k})
    axis = used[0] if len(used) == 1 else None
    return QuantSpec("FakeQuantize", shape, x_dtype, x_dtype, compute, params, axis, levels)
