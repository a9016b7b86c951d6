"""Operators in memory, against ONNX Runtime, OpenVINO's CPU plugin, PyTorch, NumPy, ml_dtypes and memcpy.

Every contender writes into an output that was allocated, and touched, before; the literal NumPy expression cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import chunkq
from benchmarks.frame import SUBJECT, Array, Case, Contender, Maker, absent, exact, within_one_level
from chunkq.threads import DEFAULT_THREADS

ELEMENTS = 1 << 26
QUICK_ELEMENTS = 1 << 24
SMALL = 1024
LEVELS = 256

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

Shape = tuple[int, ...]
Block = int | Shape

#: For the axis cases of the operators that read float32.
AXES = ("first axis", "last axis")


def blank(shape: Shape, dtype: Any = np.float32) -> Array:
    """An output whose pages are there already, and whose content (NaN, -1) no contender can be credited with."""
    y = np.empty(shape, dtype)
    y.view(np.uint8).fill(0xFF)
    return y


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
        add(dequantize_case, f"DequantizeLinear uint8, {what}", *layout)
    name, beside = "DequantizeLinear int8, blocks of 32 on the last axis", {"last axis": 1, "first axis": 0}
    add(dequantize_case, name, matrix, 1, 32, "i1", beside=beside)
    for to in "float16", "bfloat16":
        name = f"DequantizeLinear int8 to {to}, first axis"
        add(dequantize_case, name, *layouts["first axis"], 0, "i1", to, beside={"to float32": 0})
    for to in "float32", "bfloat16":
        add(float8_case, f"DequantizeLinear float8_e4m3fn to {to}, blocks of 128 x 128", matrix, to)
    for what in AXES:
        # on the last axis onnxruntime needs 17 to 60 ns an element, many times what it needs on the first
        most = 3 if what == "last axis" else None
        add(quantize_case, f"QuantizeLinear float32 to int8, {what}", *layouts[what], most_rounds=most)
    add(quantize_case, "QuantizeLinear float32 to int8, per tensor", *layouts["per tensor"])
    for what in AXES:
        add(quantize_dequantize_case, f"QuantizeDequantize float32 through int8, {what}", *layouts[what])
    for what in AXES:
        add(fake_quantize_case, f"FakeQuantize float32, {what}", *layouts[what])
    made["DequantizeLinear uint8, small call"] = small_case
    return made


def up(elements: int, row: int) -> int:
    """How many rows of that many elements make up the tensor; at least one."""
    return max(1, elements // row)


def memcpy(like: Array) -> Contender:
    target = blank(like.shape)

    def run() -> Array:
        np.copyto(target, like)
        return target

    return Contender(run, exact(like), moved=2 * like.nbytes)


def own(op: Any, x: Array, expected: Array) -> dict[str, Contender]:
    """chunkq on all cores, and on one."""

    def contender(**options: int) -> Contender:
        return Contender(partial(op, x, out=blank(x.shape, expected.dtype), **options), exact(expected))

    return {SUBJECT: contender(), "chunkq, 1 thread": contender(n_threads=1)}


# ---- DequantizeLinear, QuantizeLinear


def blocks(shape: Shape, axis: int | None, block: Block) -> Shape:
    """The elements of x for one of a blocked parameter, along each axis."""
    return block if isinstance(block, tuple) else tuple(block if a == axis else 1 for a in range(len(shape)))


def parameter_shape(shape: Shape, axis: int | None, block: Block) -> Shape:
    if block:
        return tuple(-(-n // b) for n, b in zip(shape, blocks(shape, axis, block), strict=True))
    return () if axis is None else (shape[axis],)


def broadcast(p: Array, shape: Shape, axis: int | None, block: Block) -> Array:
    """The parameter in a shape that NumPy broadcasts to x's."""
    if block:
        for a, b in enumerate(blocks(shape, axis, block)):
            p = np.repeat(p, b, a)
        return p[tuple(slice(n) for n in shape)]
    return p if axis is None else p.reshape(tuple(n if a == axis else 1 for a, n in enumerate(shape)))


@dataclass(frozen=True)
class Parameters:
    """Scale and zero point, as the operators take them and (`wide_`) as NumPy broadcasts them; NumPy's formulas.

    Those that end in `_into` give the same bits without temporaries: `wide` is float32 to compute in, `y` the answer.
    """

    axis: int
    block: Block
    scale: Array
    zero_point: Array
    wide_scale: Array
    wide_zero: Array

    @classmethod
    def random(cls, shape: Shape, axis: int | None, block: Block, dtype: Any) -> Parameters:
        rng = np.random.default_rng(1)
        of = parameter_shape(shape, axis, block)
        scale = rng.uniform(0.001, 0.1, of).astype(np.float32)
        zero_point = np.asarray(integers(rng, of, dtype))
        wide = (broadcast(p, shape, axis, block) for p in (scale, zero_point.astype(np.float32)))
        return cls(axis or 0, block, scale, zero_point, *wide)

    @property
    def limits(self) -> np.iinfo:
        return np.iinfo(self.zero_point.dtype)

    def bound(self, operator: Any, **options: Any) -> Any:
        return operator(self.scale, self.zero_point, axis=self.axis, block_size=self.block, **options)

    def dequantize(self, x: Array) -> Array:
        return (x.astype(np.float32) - self.wide_zero) * self.wide_scale

    def dequantize_into(self, x: Array, wide: Array, y: Array) -> Array:
        np.subtract(x, self.wide_zero, out=wide, dtype=np.float32)
        return np.multiply(wide, self.wide_scale, out=y, dtype=np.float32, casting="unsafe")

    def quantize(self, x: Array) -> Array:
        codes = np.rint(x / self.wide_scale) + self.wide_zero
        return np.clip(codes, self.limits.min, self.limits.max).astype(self.zero_point.dtype)

    def quantize_into(self, x: Array, wide: Array, y: Array) -> Array:
        np.divide(x, self.wide_scale, out=wide)
        np.rint(wide, out=wide)
        np.add(wide, self.wide_zero, out=wide)
        np.clip(wide, self.limits.min, self.limits.max, out=wide)
        np.copyto(y, wide, casting="unsafe")
        return y


def integers(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    """All values of the type, equally often."""
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def dequantize_case(
    name: str,
    shape: Shape,
    axis: int | None,
    block: int = 0,
    dtype: str = "u1",
    to: str = "float32",
    beside: dict[str, int] | None = None,
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
    contenders |= {
        "NumPy": Contender(as_written, exact(expected)),
        "NumPy, out=": Contender(partial(p.dequantize_into, x, wide, y), exact(expected)),
        "memcpy": memcpy(unrounded),
    }
    return Case(name, x.size, contenders, moved=x.nbytes + expected.nbytes)


def beside_contender(x: Array, axis: int) -> Contender:
    """chunkq to float32, one parameter for each index of the axis."""
    p = Parameters.random(x.shape, axis, 0, x.dtype)
    expected = p.dequantize(x)
    run = partial(p.bound(chunkq.DequantizeLinear), x, out=blank(x.shape))
    return Contender(run, exact(expected), moved=x.nbytes + expected.nbytes)


def quantize_case(name: str, shape: Shape, axis: int | None, most_rounds: int | None = None) -> Case:
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
    return Case(name, x.size, contenders, moved=x.nbytes + expected.nbytes, most_rounds=most_rounds)


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


def weights(p: Parameters, shape: Shape) -> Array:
    """float32 that fills int8 as calibrated scales let it: about one value in a thousand is beyond the ends."""
    codes = np.random.default_rng(0).standard_normal(shape, np.float32) * 40
    return (codes - p.wide_zero) * p.wide_scale


def onnxruntime_contender(operator: str, x: Array, p: Parameters, expected: Array) -> Contender:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        return absent("onnx onnxruntime", error)
    y = blank(x.shape, expected.dtype)
    session = onnxruntime.InferenceSession(
        linear_model(onnx, operator, x, p, expected).SerializeToString(),
        session_options(onnxruntime),
        providers=["CPUExecutionProvider"],
    )
    source = onnxruntime.OrtValue.ortvalue_from_numpy(x)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", source)
    binding.bind_output("y", "cpu", 0, y.dtype.type, y.shape, y.ctypes.data)

    def run() -> Array:
        session.run_with_iobinding(binding)
        return y

    return Contender(run, exact(expected))


def session_options(onnxruntime: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = DEFAULT_THREADS
    # idle threads that spin would slow whoever is timed next
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def linear_model(onnx: Any, operator: str, x: Array, p: Parameters, y: Array) -> Any:
    attributes = {"axis": p.axis} | ({"block_size": p.block} if p.block else {})
    code = onnx.helper.np_dtype_to_tensor_dtype
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(operator, ["x", "scale", "zero_point"], ["y"], **attributes)],
        "linear",
        [onnx.helper.make_tensor_value_info("x", code(x.dtype), x.shape)],
        [onnx.helper.make_tensor_value_info("y", code(y.dtype), y.shape)],
        [onnx.numpy_helper.from_array(p.scale, "scale"), onnx.numpy_helper.from_array(p.zero_point, "zero_point")],
    )
    opset = onnx.helper.make_opsetid("", 21 if p.block else 13)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10 if p.block else 8)


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
    return Case(name, x.size, contenders, moved=x.nbytes + expected.nbytes)


def float8_values() -> Array:
    """What the codes of float8_e4m3fn stand for, by its definition and not by a peer's conversion; NaN as 480."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, (code & 7) / 8
    magnitude = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - 7)
    return np.copysign(magnitude, np.where(code < 128, 1, -1)).astype(np.float32)


def ml_dtypes_cast(x: Array, expected: Array) -> Contender:
    y = blank(x.shape, expected.dtype)

    def run() -> Array:
        np.copyto(y, x, casting="unsafe")
        return y

    return Contender(run, exact(expected), moved=x.nbytes + y.nbytes)


def torch_cast(x: Array, expected: Array) -> Contender:
    try:
        import torch
    except ImportError as error:
        return absent("torch", error)
    torch.set_num_threads(DEFAULT_THREADS)
    y = blank(x.shape, expected.dtype)

    def tensor(array: Array) -> Any:
        """On the same memory; NumPy's types beyond its own are unknown to torch, so through integers."""
        return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))

    source, target = tensor(x), tensor(y)

    def run() -> Array:
        target.copy_(source)  # Tensor.to into memory that is there already
        return y

    return Contender(run, exact(expected), moved=x.nbytes + y.nbytes)


# ---- FakeQuantize


def fake_quantize_numpy(x: Array, il: Array, ih: Array, ol: Array, oh: Array) -> Array:
    """OpenVINO FakeQuantize-1 as its specification writes it."""
    top = np.float32(LEVELS - 1)
    y = np.round((x - il) / (ih - il) * top) / top * (oh - ol) + ol
    return np.where(x <= np.minimum(il, ih), ol, np.where(x > np.maximum(il, ih), oh, y))


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
    return Case(name, x.size, contenders, moved=x.nbytes + expected.nbytes)


def openvino_fake_quantize(x: Array, ranges: tuple[Array, ...], check: Any) -> Contender:
    try:
        import openvino
        from openvino import opset1
    except ImportError as error:
        return absent("openvino", error)
    y = blank(x.shape)
    parameter = opset1.parameter(list(x.shape), np.float32)
    node = opset1.fake_quantize(parameter, *map(opset1.constant, ranges), LEVELS)
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": DEFAULT_THREADS,
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = openvino.Model([node], [parameter], "fake_quantize")
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    request.set_input_tensor(openvino.Tensor(x, shared_memory=True))
    request.set_output_tensor(openvino.Tensor(y, shared_memory=True))

    def run() -> Array:
        request.infer()
        return y

    return Contender(run, check)


# ---- a small call


def small_case() -> Case:
    """What a call costs before its elements do: 1,024 of them, whatever the size asked for."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, SMALL, np.uint8)
    scale, zero_point = np.float32(0.02), np.uint8(128)
    zero = np.float32(zero_point)
    expected = (x.astype(np.float32) - zero) * scale
    check = exact(expected)
    op = chunkq.DequantizeLinear(scale, zero_point)
    return Case(
        "DequantizeLinear uint8, small call",
        SMALL,
        {
            SUBJECT: Contender(partial(chunkq.dequantize_linear, x, scale, zero_point), check),
            "chunkq, op(x)": Contender(partial(op, x), check, remark="the operator object made once"),
            "NumPy": Contender(lambda: (x.astype(np.float32) - zero) * scale, check),
        },
        calls=2000,
    )
