"""Operators in memory, against ONNX Runtime, OpenVINO's CPU plugin, PyTorch, NumPy, ml_dtypes and memcpy.

Every contender writes into an output that was allocated, and touched, before; the literal NumPy expression cannot.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import chunkq
from benchmarks import calls
from benchmarks.frame import Array, Case, Contender, Maker, aiming, exact, within_one_level
from benchmarks.inputs import (
    LEVELS,
    Parameters,
    Shape,
    blank,
    broadcast,
    fake_quantize_numpy,
    float8_values,
    integers,
    own,
    parameter_shape,
    up,
    weights,
)
from benchmarks.peers import (
    memcpy,
    ml_dtypes_cast,
    numexpr_dequantize,
    onnxruntime_contender,
    openvino_fake_quantize,
    torch_cast,
)

ELEMENTS = 1 << 26
QUICK_ELEMENTS = 1 << 24

LEGEND = """\
- chunkq, onnxruntime and OpenVINO are given all cores; "cores" is what each used (processor time over wall time), and
  onnxruntime's DequantizeLinear may use one. Compare one-core contenders with the row "chunkq, 1 thread".
- onnxruntime: DequantizeLinear-13, QuantizeLinear-13 (blocks: 21), graph optimization off, input and output bound to
  existing memory.
- OpenVINO: FakeQuantize-1 with constant ranges, f32, input and output tensors on existing memory.
- NumPy: the formula as one writes it, temporaries included. NumPy, out=: the same bits without temporaries.
- "chunkq, last axis", "chunkq, first axis", "chunkq, to float32": other work, to compare with: the same x to float32, one
  parameter for each index of that axis (the last: of the first). Checked against an answer of its own.
- "cast only": ml_dtypes (np.copyto) and torch (Tensor.copy_) convert the codes into an existing output and scale nothing,
  which is less work than chunkq's. ml_dtypes uses one core, torch is given all.
- memcpy: np.copyto of a float32 array of as many elements, one thread.
- GB/s are the bytes of x and of the result; parameters, temporaries and what is between two calls are not counted."""

#: For the axis cases of QuantizeDequantize.
AXES = ("first axis", "last axis")

# what is aimed at: least ratios, and the share of memcpy's bytes a second
OTHER_AXES = {"onnxruntime": 1.2, "NumPy": 10, "share": 0.75}
LAST_AXIS = {"onnxruntime": 7, "share": 0.65}


def cases(elements: int) -> dict[str, Maker]:
    """Name to maker; a case's arrays are allocated when it is its turn and freed after it."""
    n = elements
    layouts = {
        "per tensor": ((n,), None),
        "first axis": ((64, up(n, 64)), 0),
        "middle axis": ((16, 64, up(n, 1024)), 1),
        "last axis": ((up(n, 4096), 4096), 1),
        "channels last, 3": ((up(n, 3072), 1024, 3), 2),
        "channels last, 4": ((up(n, 4096), 1024, 4), 2),
    }
    matrix = layouts["last axis"][0]
    made: dict[str, Maker] = {}

    def add(make: Any, name: str, *arguments: Any, **options: Any) -> None:
        made[name] = partial(make, name, *arguments, **options)

    for what, layout in layouts.items():
        last = layout[1] is not None and layout[1] == len(layout[0]) - 1
        add(dequantize_case, f"DequantizeLinear uint8, {what}", *layout, aims=LAST_AXIS if last else OTHER_AXES)
    add(dequantize_case, "DequantizeLinear int8, first axis", *layouts["first axis"], dtype="i1", aims=OTHER_AXES)
    name, beside = "DequantizeLinear int8, blocks of 32 on the {} axis", {"last axis": 1, "first axis": 0}
    add(dequantize_case, name.format("last"), matrix, 1, 32, "i1", beside=beside, aims={"onnxruntime": 4})
    add(dequantize_case, name.format("first"), matrix, 0, 32, "i1", aims={"onnxruntime": 1.3})
    for to in "float16", "bfloat16":
        name = f"DequantizeLinear int8 to {to}, first axis"
        add(dequantize_case, name, *layouts["first axis"], 0, "i1", to, beside={"to float32": 0})
    for to in "float32", "bfloat16":
        add(float8_case, f"DequantizeLinear float8_e4m3fn to {to}, blocks of 128 x 128", matrix, to)
    for what in "per tensor", "first axis", "middle axis":
        aims = {"onnxruntime": 1, "share": 0.75}
        add(quantize_case, f"QuantizeLinear float32 to int8, {what}", *layouts[what], aims=aims)
    # there onnxruntime needs 17 to 60 ns an element, many times what it needs on the first axis
    aims = {"onnxruntime": 50, "share": 0.65}
    add(quantize_case, "QuantizeLinear float32 to int8, last axis", *layouts["last axis"], aims=aims, most_rounds=3)
    for what in AXES:
        add(quantize_dequantize_case, f"QuantizeDequantize float32 through int8, {what}", *layouts[what])
    for what in "first axis", "middle axis", "last axis":
        add(fake_quantize_case, f"FakeQuantize float32, {what}", *layouts[what])
    return made | calls.cases(elements)


# ---- DequantizeLinear, QuantizeLinear


def dequantize_case(
    name: str,
    shape: Shape,
    axis: int | None,
    block: int = 0,
    dtype: str = "u1",
    to: str = "float32",
    beside: dict[str, int] | None = None,
    aims: dict[str, float] | None = None,
) -> Case:
    """`beside`: axes along which chunkq takes the same x to float32, for comparison."""
    x = integers(np.random.default_rng(0), shape, dtype)
    p = Parameters.random(shape, axis, block, dtype)

    def as_written() -> Array:
        return p.dequantize(x).astype(to, copy=False)

    unrounded = p.dequantize(x)
    expected = unrounded.astype(to, copy=False)
    y = blank(shape, to)
    wide = y if to == "float32" else blank(shape)
    contenders = own(p.bound(chunkq.DequantizeLinear, output_dtype=to), x, expected)
    for what, other in (beside or {}).items():
        contenders[f"chunkq, {what}"] = beside_contender(x, other)
    if to == "float32":  # onnxruntime has the result in the type of scale
        contenders["onnxruntime"] = onnxruntime_contender("DequantizeLinear", x, p, expected)
        contenders["numexpr"] = numexpr_dequantize(x, p, expected)
    contenders |= {
        "NumPy": Contender(as_written, exact(expected)),
        "NumPy, out=": Contender(partial(p.dequantize_into, x, wide, y), exact(expected)),
        "memcpy": memcpy(unrounded),
    }
    return Case(name, x.size, aiming(contenders, **(aims or {})), moved=x.nbytes + expected.nbytes)


def beside_contender(x: Array, axis: int) -> Contender:
    """chunkq to float32, one parameter for each index of the axis."""
    p = Parameters.random(x.shape, axis, 0, x.dtype)
    expected = p.dequantize(x)
    run = partial(p.bound(chunkq.DequantizeLinear), x, out=blank(x.shape))
    return Contender(run, exact(expected), moved=x.nbytes + expected.nbytes)


def quantize_case(
    name: str, shape: Shape, axis: int | None, aims: dict[str, float], most_rounds: int | None = None
) -> Case:
    p = Parameters.random(shape, axis, 0, np.int8)
    x = weights(p, shape)
    expected = p.quantize(x)
    wide, y = blank(shape), blank(shape, np.int8)
    contenders = own(p.bound(chunkq.QuantizeLinear), x, expected) | {
        "onnxruntime": onnxruntime_contender("QuantizeLinear", x, p, expected),
        "NumPy": Contender(partial(p.quantize, x), exact(expected)),
        "NumPy, out=": Contender(partial(p.quantize_into, x, wide, y), exact(expected)),
        "memcpy": memcpy(x),
    }
    return Case(name, x.size, aiming(contenders, **aims), moved=x.nbytes + expected.nbytes, most_rounds=most_rounds)


def quantize_dequantize_case(name: str, shape: Shape, axis: int) -> Case:
    p = Parameters.random(shape, axis, 0, np.int8)
    x = weights(p, shape)
    quantize, dequantize = p.bound(chunkq.QuantizeLinear), p.bound(chunkq.DequantizeLinear)
    codes, y = blank(shape, np.int8), blank(shape)
    numpy_codes, numpy_y = blank(shape, np.int8), blank(shape)

    def two_calls() -> Array:
        return dequantize(quantize(x, out=codes), out=y)

    def as_written() -> Array:
        return p.dequantize(p.quantize(x))

    def in_place() -> Array:
        return p.dequantize_into(p.quantize_into(x, numpy_y, numpy_codes), numpy_y, numpy_y)

    expected = as_written()
    contenders = own(p.bound(chunkq.QuantizeDequantize), x, expected) | {
        "chunkq, two calls": Contender(two_calls, exact(expected)),
        "NumPy": Contender(as_written, exact(expected)),
        "NumPy, out=": Contender(in_place, exact(expected)),
        "memcpy": memcpy(x),
    }
    return Case(name, x.size, contenders, moved=x.nbytes + expected.nbytes)


# ---- float8


def float8_case(name: str, shape: Shape, to: str) -> Case:
    """FP8 as checkpoints have it: one scale for 128 x 128 elements and no NaN."""
    rng = np.random.default_rng(0)
    block = (128, 128)
    codes = rng.integers(0, 254, shape, np.uint8)
    codes += codes >= 0x7F  # of the 256 codes, 0x7F and 0xFF are NaN
    x = codes.view(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.001, 0.1, parameter_shape(shape, None, block)).astype(np.float32)
    values = float8_values()[codes]
    expected = (values * broadcast(scale, shape, None, block)).astype(to, copy=False)
    contenders = own(chunkq.DequantizeLinear(scale, block_size=block, output_dtype=to), x, expected)
    for cast_to in dict.fromkeys(("float32", to)):
        cast = values.astype(cast_to)  # exact: bfloat16 has more bits and a wider range
        contenders[f"ml_dtypes, cast only, to {cast_to}"] = ml_dtypes_cast(x, cast)
        contenders[f"torch, cast only, to {cast_to}"] = torch_cast(x, cast)
    contenders["memcpy"] = memcpy(values)
    aims = {f"ml_dtypes, cast only, to {to}": 20.0, f"torch, cast only, to {to}": 8.0}
    contenders = aiming(contenders, share=0.6 if to == "float32" else 0.45, **aims)
    return Case(name, x.size, contenders, moved=x.nbytes + expected.nbytes)


# ---- FakeQuantize


def fake_quantize_case(name: str, shape: Shape, axis: int) -> Case:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape, np.float32)
    of = tuple(n if a == axis else 1 for a, n in enumerate(shape))
    high = rng.uniform(1, 4, of).astype(np.float32)
    ranges = (-high, high, np.float32(-1.5) * high, np.float32(1.5) * high)
    expected = fake_quantize_numpy(x, *ranges)
    level = (ranges[3] - ranges[2]) / np.float32(LEVELS - 1)
    contenders = own(chunkq.FakeQuantize(*ranges, LEVELS), x, expected) | {
        "OpenVINO": openvino_fake_quantize(x, ranges, within_one_level(expected, level)),
        "NumPy": Contender(partial(fake_quantize_numpy, x, *ranges), exact(expected)),
        "memcpy": memcpy(expected),
    }
    contenders = aiming(contenders, OpenVINO=2.5, NumPy=15, share=0.8)
    return Case(name, x.size, contenders, moved=x.nbytes + expected.nbytes)
