"""`run_chunk` computes one region of one tensor; it is the only caller of the kernels.

In memory, on Dask and from zarr to zarr differ only in who calls it. Here every odd array (big-endian, strided, misaligned)
becomes what a kernel takes. Imports errors, dtypes, spec, threads and kernels; not dask, not zarr.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from chunkq.dtypes import ELEMENT_TYPES, ZERO_ONLY, element_name, to_float32
from chunkq.errors import SpecError
from chunkq.kernels import kernels
from chunkq.spec import QuantSpec, Shape
from chunkq.threads import thread_count

Array = np.ndarray[Any, np.dtype[Any]]

#: Outputs of this many bytes and more leave the tile past the caches.
STREAM_BYTES = 8 << 20

#: Rows shorter than this are taken several at a time where their parameters allow it.
SHORT_ROW = 1024

# How a parameter changes along an axis: elements a step (0 = constant), phase in the step, stride in its elements.
_Rule = tuple[int, int, int]
_Axes = list[tuple[int, list[Any]]]

_NO_ZERO_POINT = np.zeros(1, np.float32)
_NO_ZERO_POINT.flags.writeable = False

# (mantissa, bias, largest code, infinity, NaN) where there is no minifloat
_NO_MINIFLOAT = (0, 0, 0, 0, 0)


def _merge(inner_n: int, outer: _Rule, inner: _Rule) -> _Rule | None:
    """One parameter's rule over two axes taken as one; None where there is none."""
    step, phase, stride = outer
    inner_step, inner_phase, inner_stride = inner
    if inner_step == 0:
        return step * inner_n, phase * inner_n, stride
    if step == 1 and inner_phase == 0 and stride * inner_step == inner_n * inner_stride:
        return inner_step, 0, inner_stride
    return None


def _collapse(shape: Shape, steps: tuple[Shape, ...], phases: tuple[Shape, ...], lengths: tuple[Shape, ...]) -> _Axes:
    """The fewest axes along which every parameter still follows one rule, outermost first."""
    axes: _Axes = []
    for a in range(len(shape) - 1, -1, -1):
        if shape[a] == 1:
            continue
        # one parameter element on this axis: constant, whatever its step
        rules = [
            (k[a], f[a], prod(n[a + 1 :])) if n[a] > 1 else (0, 0, 0)
            for k, f, n in zip(steps, phases, lengths, strict=True)
        ]
        if axes:
            inner_n, inner = axes[0]
            merged = [_merge(inner_n, o, i) for o, i in zip(rules, inner, strict=True)]
            if None not in merged:
                axes[0] = (shape[a] * inner_n, merged)
                continue
        axes.insert(0, (shape[a], rules))
    return axes or [(1, [(0, 0, 0)] * len(steps))]


def _geometry(spec: QuantSpec, shape: Shape, phases: tuple[Shape, ...]) -> tuple[Array, tuple[int, ...], int]:
    """The kernels' table for a region (see _kernels.pyx), the parameters' sizes, how often to repeat their values."""
    steps = tuple(p.steps for p in spec.params)
    lengths = tuple(
        tuple(-(-(f + n) // k) if k else 1 for n, k, f in zip(shape, *rule, strict=True))
        for rule in zip(steps, phases, strict=True)
    )
    axes = _collapse(shape, steps, phases, lengths)
    repeats = 1
    if (
        len(axes) == 2
        and axes[1][0] < SHORT_ROW
        and all(o[0] == 0 and i[0] < 2 for o, i in zip(axes[0][1], axes[1][1], strict=True))
    ):
        # Many short rows with the same parameters (channels last): fewer, longer rows, the last of them cut short.
        repeats = min(axes[0][0], -(-SHORT_ROW // axes[1][0]))
        axes = [(-(-axes[0][0] // repeats), axes[0][1]), (axes[1][0] * repeats, axes[1][1])]
    if len(steps) == 1:
        axes = [(n, [*rules, (0, 0, 0)]) for n, rules in axes]  # the zero point that is not there
    table = np.array([[n, *chain.from_iterable(rules)] for n, rules in axes], np.intp).T.copy()
    return table, tuple(map(prod, lengths)), repeats


def _is_plain(x: Array) -> bool:
    """Whether x is what a kernel takes: contiguous, aligned, native memory."""
    return bool(x.flags.c_contiguous and x.flags.aligned and x.dtype.isnative)


def refuse_masked(name: str, value: Any) -> None:
    """Refuse a masked array, or a Dask array of them; reason ``masked``."""
    if isinstance(value, np.ma.MaskedArray) or isinstance(getattr(value, "_meta", None), np.ma.MaskedArray):
        raise SpecError("masked", f"{name} is a masked array and its mask would be lost; pass {name}.filled(...)")


def check_values(spec: QuantSpec, index: int, value: Array) -> None:
    """Refuse parameter values that the operator does not take (ONNX: an int32, float8 or float4 zero point is 0)."""
    param = spec.params[index]
    element_name(value.dtype, param.name, (param.dtype,))
    if param.name != "zero_point" or not (param.dtype == "int32" or param.dtype in ZERO_ONLY) or not value.size:
        return
    numbers = value if param.dtype == "int32" else to_float32(value)
    if numbers.any():
        reason = "int32_zero_point" if param.dtype == "int32" else "float_zero_point"
        found = numbers[numbers != 0].flat[0]
        raise SpecError(reason, f"zero_point holds {found}; for {param.dtype} only 0 is allowed: leave it out")


def _scale(spec: QuantSpec, value: Array) -> Array:
    """The scale in float32."""
    value = to_float32(value)
    if ELEMENT_TYPES[spec.q_dtype].mini is not None:
        # NaN times NaN keeps the payload of whichever operand the compiler puts first: let both have the same
        value = np.where(np.isnan(value), np.float32(np.nan), value)
    return value


def prepare_params(spec: QuantSpec, params: tuple[Array, ...]) -> tuple[Array, ...]:
    """Check the parameters' values and give them the type that the arithmetic is done in."""
    for index, value in enumerate(params):
        check_values(spec, index, value)
    if spec.op == "FakeQuantize":
        dtype = ELEMENT_TYPES[spec.compute_dtype].dtype
        return tuple(np.ascontiguousarray(value, dtype).reshape(-1) for value in params)
    scale = np.ascontiguousarray(_scale(spec, params[0])).reshape(-1)
    if len(params) < 2:
        return scale, _NO_ZERO_POINT
    if spec.q_dtype in ZERO_ONLY:
        return scale, np.zeros(params[1].size, np.float32)  # -0 among them
    return scale, np.ascontiguousarray(to_float32(params[1])).reshape(-1)


def _settings(spec: QuantSpec) -> Array:
    """The numbers by which the kernels know an operation (see _kernels.pyx)."""
    codes = kernels.ELEMENT_CODES
    quantized = ELEMENT_TYPES[spec.q_dtype or "uint8"]
    low, high = quantized.limits or (0, 0)
    mini = quantized.mini
    over = 0
    if mini is not None:
        beyond = mini.nan if mini.inf < 0 else mini.inf
        over = mini.max if spec.saturate or quantized.bits < 8 else beyond
    row = (
        kernels.OPERATOR_CODES[spec.op],
        *(codes[ELEMENT_TYPES[name].code] for name in (spec.x_dtype, quantized.name, spec.y_dtype, spec.division)),
        low,
        high,
        over,
        quantized.bits,
        *(mini or _NO_MINIFLOAT),
        len(spec.params) > 1 and not spec.q_dtype.startswith("float8"),
    )
    return np.array(row, np.intp)


def _shares_with_itself(out: Array) -> bool:
    """Whether two elements may lie in the same memory: each axis must step over all that the finer ones cover."""
    if out.flags.c_contiguous or out.size == 0:
        return False
    covered = out.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(out.strides, out.shape, strict=True) if n > 1):
        if stride < covered:
            return True
        covered += stride * (n - 1)
    return False


def check_out(spec: QuantSpec, shape: Shape, out: Array, x: Array, params: tuple[Array, ...]) -> None:
    """Refuse an `out` that the result does not fit in, or that overlaps an input; reason ``out``."""
    dtype = ELEMENT_TYPES[spec.y_dtype].dtype
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise SpecError("out", f"out is a {type(out).__name__}; expected a numpy.ndarray")
    if out.shape != shape or out.dtype.newbyteorder("=") != dtype:
        raise SpecError("out", f"out is {out.dtype.name} {out.shape}; expected {dtype.name} {shape}")
    if not out.flags.writeable:
        raise SpecError("out", "out is read-only")
    if _shares_with_itself(out):
        raise SpecError(
            "out", "out has elements that share memory (a broadcast or windowed view); pass an array of its own"
        )
    same = (
        spec.op == "FakeQuantize"
        and x.dtype == out.dtype
        and x.__array_interface__["data"][0] == out.__array_interface__["data"][0]
        and x.strides == out.strides
    )
    if not same and np.may_share_memory(x, out) and np.shares_memory(x, out):
        raise SpecError("out", "out overlaps x; pass the very same array (FakeQuantize only) or other memory")
    for param, value in zip(spec.params, params, strict=True):
        if np.may_share_memory(value, out) and np.shares_memory(value, out):
            raise SpecError("out", f"out overlaps {param.name}; pass other memory")


def make_call(
    spec: QuantSpec, shape: Shape, params: tuple[Array, ...], start: Shape | None = None
) -> tuple[Any, tuple[Array, ...]]:
    """The kernels' call for a region of that shape, and the parameters as it reads them."""
    values = prepare_params(spec, params)
    phases = tuple(p.phases(start) for p in spec.params) if start else ((0,) * len(shape),) * len(params)
    sizes, repeats, fixed = _fixed(spec, shape, phases)
    for param, value, size in zip(spec.params, params, sizes, strict=True):
        if value.size != size:
            raise AssertionError(f"{param.name} was cut to {value.shape}; the region needs {size} elements")
    if repeats > 1:
        values = tuple(np.tile(v, repeats) if v.size > 1 else v for v in values)
    return kernels.Call(*fixed, *values), values


@lru_cache(maxsize=4096)
def _fixed(spec: QuantSpec, shape: Shape, phases: tuple[Shape, ...]) -> tuple[tuple[int, ...], int, tuple[Any, ...]]:
    """What no value changes: the parameters' sizes, how often to repeat them, what the kernels' call begins with."""
    table, sizes, repeats = _geometry(spec, shape, phases)
    dtype = ELEMENT_TYPES[spec.y_dtype].dtype
    stream = prod(shape) * dtype.itemsize >= STREAM_BYTES
    return sizes, repeats, (_settings(spec), spec.levels, table, shape, dtype, stream)


def run_chunk(
    spec: QuantSpec,
    x: Array,
    params: tuple[Array, ...],
    start: Shape | None = None,
    out: Array | None = None,
    n_threads: int | None = 1,
) -> Array:
    """Compute one region.

    Parameters
    ----------
    spec : QuantSpec
        The operation on the whole tensor.
    x : numpy.ndarray
        The region of x, in any layout and byte order.
    params : tuple of numpy.ndarray
        What `ParamSpec.region` cuts out for the region, of any rank.
    start : tuple of int, optional
        Where the region begins in the tensor; the origin by default. It tells how far inside a block it begins.
    out : numpy.ndarray, optional
        Where the result goes; checked by the caller with `check_out`.
    n_threads : int or None
        None for as many as the region is worth.
    """
    element_name(x.dtype, "x", (spec.x_dtype,))  # a lazy array may promise another type than it delivers
    if x.size == 0:
        prepare_params(spec, params)  # for its checks
        return np.empty(x.shape, ELEMENT_TYPES[spec.y_dtype].dtype) if out is None else out
    call, _ = make_call(spec, x.shape, params, start)
    in_place = out is not None and _is_plain(out)
    y = out if out is not None and in_place else np.empty(x.shape, ELEMENT_TYPES[spec.y_dtype].dtype)
    plain = x if _is_plain(x) else np.array(x, x.dtype.newbyteorder("="), order="C", subok=False)
    call.run(plain, y, thread_count(n_threads, x.size))
    if out is None or in_place:
        return y
    out[...] = y
    return out
