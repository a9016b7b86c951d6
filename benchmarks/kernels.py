"""Operators in memory, against ONNX Runtime, OpenVINO's CPU plugin, NumPy and memcpy.

Every contender writes into an output that was allocated, and touched, before; the literal NumPy expression cannot.
"""

from __future__ import annotations

from functools import partial
from typing import Any

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
- onnxruntime: DequantizeLinear-13 (blocks: 21), graph optimization off, input and output bound to existing memory.
- OpenVINO: FakeQuantize-1 with constant ranges, f32, input and output tensors on existing memory.
- NumPy: the formula as one writes it, temporaries included. NumPy, out=: the same bits without temporaries.
- memcpy: np.copyto of a float32 array of as many elements, one thread."""

Shape = tuple[int, ...]


def blank(shape: Shape) -> Array:
    """An output whose pages are there already, and whose content no contender can be credited with."""
    return np.full(shape, np.nan, np.float32)


def cases(elements: int) -> dict[str, Maker]:
    """Name to maker; a case's arrays are allocated when it is its turn and freed after it."""
    n = elements
    dequantize = {
        "per tensor": ((n,), None),
        "first axis": ((64, up(n, 64)), 0),
        "middle axis": ((16, 64, up(n, 1024)), 1),
        "last axis": ((up(n, 4096), 4096), 1),
        "channels last, 3": ((up(n, 3072), 1024, 3), 2),
        "channels last, 4": ((up(n, 4096), 1024, 4), 2),
    }
    fake = {
        "first axis": ((64, up(n, 64)), 0),
        "last axis": ((up(n, 4096), 4096), 1),
    }
    made: dict[str, Maker] = {}
    for what, (shape, axis) in dequantize.items():
        name = f"DequantizeLinear uint8, {what}"
        made[name] = partial(dequantize_case, name, shape, axis)
    name = "DequantizeLinear int8, blocks of 32 on the last axis"
    made[name] = partial(dequantize_case, name, (up(n, 4096), 4096), 1, 32, "i1")
    for what, (shape, axis) in fake.items():
        name = f"FakeQuantize float32, {what}"
        made[name] = partial(fake_quantize_case, name, shape, axis)
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

    return Contender(run, exact(like))


# ---- DequantizeLinear


def parameter_shape(shape: Shape, axis: int | None, block: int) -> Shape:
    if axis is None:
        return ()
    if block:
        return tuple(-(-n // block) if a == axis else n for a, n in enumerate(shape))
    return (shape[axis],)


def broadcast(p: Array, shape: Shape, axis: int | None, block: int) -> Array:
    """The parameter in a shape that NumPy broadcasts to x's."""
    if axis is None:
        return p
    if block:
        return np.repeat(p, block, axis)[tuple(slice(n) for n in shape)]
    return p.reshape(tuple(n if a == axis else 1 for a, n in enumerate(shape)))


def dequantize_case(name: str, shape: Shape, axis: int | None, block: int = 0, dtype: str = "u1") -> Case:
    rng = np.random.default_rng(0)
    limits = np.iinfo(dtype)
    x = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    of = parameter_shape(shape, axis, block)
    scale = rng.uniform(0.001, 0.1, of).astype(np.float32)
    zero_point = np.asarray(rng.integers(limits.min, limits.max, of, dtype, endpoint=True))
    wide_scale, wide_zero = (broadcast(p, shape, axis, block) for p in (scale, zero_point.astype(np.float32)))

    def as_written() -> Array:
        return (x.astype(np.float32) - wide_zero) * wide_scale

    def in_place() -> Array:
        np.subtract(x, wide_zero, out=y, dtype=np.float32)
        return np.multiply(y, wide_scale, out=y)

    y, expected = blank(shape), as_written()
    check = exact(expected)
    op = chunkq.DequantizeLinear(scale, zero_point, axis=axis or 0, block_size=block)
    return Case(
        name,
        x.size,
        {
            SUBJECT: Contender(partial(op, x, out=blank(shape)), check),
            "chunkq, 1 thread": Contender(partial(op, x, out=blank(shape), n_threads=1), check),
            "onnxruntime": onnxruntime_dequantize(x, scale, zero_point, axis or 0, block, expected),
            "NumPy": Contender(as_written, check),
            "NumPy, out=": Contender(in_place, check),
            "memcpy": memcpy(expected),
        },
    )


def onnxruntime_dequantize(
    x: Array, scale: Array, zero_point: Array, axis: int, block: int, expected: Array
) -> Contender:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        return absent("onnx onnxruntime", error)
    y = blank(x.shape)
    session = onnxruntime.InferenceSession(
        dequantize_model(onnx, x, scale, zero_point, axis, block).SerializeToString(),
        session_options(onnxruntime),
        providers=["CPUExecutionProvider"],
    )
    source = onnxruntime.OrtValue.ortvalue_from_numpy(x)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", source)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)

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


def dequantize_model(onnx: Any, x: Array, scale: Array, zero_point: Array, axis: int, block: int) -> Any:
    attributes = {"axis": axis} | ({"block_size": block} if block else {})
    code = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("DequantizeLinear", ["x", "scale", "zero_point"], ["y"], **attributes)],
        "dequantize",
        [onnx.helper.make_tensor_value_info("x", code, x.shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, x.shape)],
        [onnx.numpy_helper.from_array(scale, "scale"), onnx.numpy_helper.from_array(zero_point, "zero_point")],
    )
    opset = onnx.helper.make_opsetid("", 21 if block else 13)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10 if block else 8)


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
    op = chunkq.FakeQuantize(*ranges, LEVELS)
    check = exact(expected)
    return Case(
        name,
        x.size,
        {
            SUBJECT: Contender(partial(op, x, out=blank(shape)), check),
            "chunkq, 1 thread": Contender(partial(op, x, out=blank(shape), n_threads=1), check),
            "OpenVINO": openvino_fake_quantize(x, ranges, within_one_level(expected, level)),
            "NumPy": Contender(partial(fake_quantize_numpy, x, *ranges), check),
            "memcpy": memcpy(expected),
        },
    )


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
