"""What surrounds the elements: small calls, tensors in cache, outputs that are new, and a second thread."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

import chunkq
from benchmarks.frame import SUBJECT, Case, Contender, Maker, aiming, exact
from benchmarks.inputs import Parameters, blank, float8_values, integers, own, up, weights
from benchmarks.peers import onnxruntime_contender, onnxruntime_fresh

SMALL = 1 << 10
IN_CACHE = 1 << 16
FOR_THREADS = (1 << 20, 1 << 22)


def cases(elements: int) -> dict[str, Maker]:
    """Only those of new outputs depend on the number of elements."""
    made: dict[str, Maker] = {
        "DequantizeLinear uint8, small call": small_case,
        "DequantizeLinear uint8, per axis, small call": small_axis_case,
    }
    for axis, what in ((None, "per tensor"), (0, "first axis"), (1, "last axis")):
        name = f"DequantizeLinear uint8, {what}, in cache"
        made[name] = partial(cached_case, name, "DequantizeLinear", axis)
        name = f"QuantizeLinear float32 to int8, {what}, in cache"
        made[name] = partial(cached_case, name, "QuantizeLinear", axis)
    for type_name, size in product(("float8_e4m3fn", "int4"), FOR_THREADS):
        name = f"DequantizeLinear {type_name}, {size >> 20} M elements, two threads over one"
        made[name] = partial(threads_case, name, type_name, size)
    name = "DequantizeLinear uint8, first axis, new output"
    made[name] = partial(fresh_case, name, (64, up(elements, 64)))
    return made


def small_case() -> Case:
    """What a call costs before its elements do: 1,024 of them, whatever the size asked for."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, SMALL, np.uint8)
    scale, zero_point = np.float32(0.02), np.uint8(128)
    zero = np.float32(zero_point)
    expected = (x.astype(np.float32) - zero) * scale
    check = exact(expected)
    op = chunkq.DequantizeLinear(scale, zero_point)
    p = Parameters(0, 0, np.asarray(scale), np.asarray(zero_point), scale, zero)
    contenders = {
        SUBJECT: Contender(partial(chunkq.dequantize_linear, x, scale, zero_point), check),
        "chunkq, op(x)": Contender(partial(op, x), check, remark="the operator object made once"),
        "onnxruntime": onnxruntime_contender("DequantizeLinear", x, p, expected, 1),
        "NumPy": Contender(lambda: (x.astype(np.float32) - zero) * scale, check),
    }
    return Case("DequantizeLinear uint8, small call", SMALL, aiming(contenders, NumPy=1), calls=2000)


def small_axis_case() -> Case:
    """The same with a scale and a zero point for each of 8 rows."""
    p = Parameters.random((8, SMALL // 8), 0, 0, np.uint8)
    x = integers(np.random.default_rng(0), (8, SMALL // 8), np.uint8)
    check = exact(p.dequantize(x))
    contenders = {
        SUBJECT: Contender(partial(chunkq.dequantize_linear, x, p.scale, p.zero_point, axis=0), check),
        "chunkq, op(x)": Contender(partial(p.bound(chunkq.DequantizeLinear), x), check),
        "NumPy": Contender(partial(p.dequantize, x), check),
    }
    return Case("DequantizeLinear uint8, per axis, small call", SMALL, contenders, calls=500)


def cached_case(name: str, operator: str, axis: int | None) -> Case:
    """One thread on 64 K elements, which stay in the second level cache."""
    shape = (64, IN_CACHE // 64) if axis is not None else (IN_CACHE,)
    dtype = "u1" if operator == "DequantizeLinear" else "i1"
    p = Parameters.random(shape, axis, 0, dtype)
    x = integers(np.random.default_rng(0), shape, dtype) if operator == "DequantizeLinear" else weights(p, shape)
    expected = p.dequantize(x) if operator == "DequantizeLinear" else p.quantize(x)
    op = p.bound(getattr(chunkq, operator))
    contenders = {
        SUBJECT: Contender(partial(op, x, out=blank(shape, expected.dtype), n_threads=1), exact(expected)),
        "onnxruntime": onnxruntime_contender(operator, x, p, expected, 1),
    }
    contenders = aiming(contenders, onnxruntime=1)
    return Case(name, x.size, contenders, calls=100, moved=x.nbytes + expected.nbytes)


def threads_case(name: str, type_name: str, size: int) -> Case:
    """Elements whose decoding is arithmetic enough for a second thread to count."""
    shape = (256, size // 256)
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.001, 0.1, shape[0]).astype(np.float32)
    if type_name == "int4":
        values = rng.integers(-8, 8, shape).astype(np.float32)
        x = values.astype(ml_dtypes.int4)
    else:
        codes = rng.integers(0, 0x7F, shape, np.uint8)
        x, values = codes.view(ml_dtypes.float8_e4m3fn), float8_values()[codes]
    contenders = own(chunkq.DequantizeLinear(scale, axis=0), x, values * scale[:, None])
    contenders = aiming(contenders, **{"chunkq, 1 thread": 1.8})
    return Case(name, x.size, contenders, calls=20, moved=5 * x.size)


def fresh_case(name: str, shape: tuple[int, ...]) -> Case:
    """A new array for every result: what the system's pages cost."""
    p = Parameters.random(shape, 0, 0, "u1")
    x = integers(np.random.default_rng(0), shape, "u1")
    expected = p.dequantize(x)
    op: Any = p.bound(chunkq.DequantizeLinear)
    y = blank(shape)
    contenders: dict[str, Contender] = {
        SUBJECT: Contender(partial(op, x), exact(expected)),
        "chunkq, out=": Contender(partial(op, x, out=y), exact(expected)),
        "onnxruntime, arena off": onnxruntime_fresh(x, p, expected, arena=False),
        "onnxruntime, arena on": onnxruntime_fresh(x, p, expected, arena=True),
        "NumPy": Contender(partial(p.dequantize, x), exact(expected)),
    }
    aims = {"onnxruntime, arena off": 1.0, "onnxruntime, arena on": 0.85}
    return Case(name, x.size, aiming(contenders, **aims), moved=x.nbytes + expected.nbytes)
