"""The peers of the kernels: ONNX Runtime, OpenVINO's CPU plugin, PyTorch, numexpr, ml_dtypes, memcpy.

Each writes into an output that was allocated, and touched, before. What is not installed has a row that says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.frame import Array, Contender, absent, exact
from benchmarks.inputs import LEVELS, Parameters, blank
from chunkq.threads import DEFAULT_THREADS


def memcpy(like: Array) -> Contender:
    target = blank(like.shape)

    def run() -> Array:
        np.copyto(target, like)
        return target

    return Contender(run, exact(like), moved=2 * like.nbytes)


def onnxruntime_contender(
    operator: str, x: Array, p: Parameters, expected: Array, n_threads: int = DEFAULT_THREADS
) -> Contender:
    """Bound to memory that is there."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        return absent("onnx onnxruntime", error)
    y = blank(x.shape, expected.dtype)
    model = linear_model(onnx, operator, x, p, expected).SerializeToString()
    options = session_options(onnxruntime, n_threads)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    source = onnxruntime.OrtValue.ortvalue_from_numpy(x)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", source)
    binding.bind_output("y", "cpu", 0, y.dtype.type, y.shape, y.ctypes.data)

    def run() -> Array:
        session.run_with_iobinding(binding)
        return y

    return Contender(run, exact(expected))


def onnxruntime_fresh(x: Array, p: Parameters, expected: Array, arena: bool) -> Contender:
    """DequantizeLinear by `run`, whose result is a new array every time."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        return absent("onnx onnxruntime", error)
    model = linear_model(onnx, "DequantizeLinear", x, p, expected).SerializeToString()
    options = session_options(onnxruntime, DEFAULT_THREADS)
    options.enable_cpu_mem_arena = arena
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run() -> Array:
        return session.run(None, {"x": x})[0]

    return Contender(run, exact(expected))


def session_options(onnxruntime: Any, n_threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = n_threads
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


def numexpr_dequantize(x: Array, p: Parameters, expected: Array) -> Contender:
    """The formula in one pass over blocks, on all cores; parameters broadcast as NumPy does it."""
    try:
        import numexpr
    except ImportError as error:
        return absent("numexpr", error)
    numexpr.set_num_threads(DEFAULT_THREADS)
    y = blank(x.shape)
    # numexpr knows no int8, uint8 and float32 alone: float32 with int8 stays float32, with more it is float64
    values = {"x": x, "scale": p.wide_scale, "zero_point": p.wide_zero}

    def run() -> Array:
        return numexpr.evaluate("(x - zero_point) * scale", values, out=y, casting="same_kind")

    return Contender(run, exact(expected))


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
