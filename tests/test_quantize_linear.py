"""QuantizeLinear, and the three linear operators on every element type: reference, onnx, onnxruntime, layouts."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import reference
import strategies
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from test_dequantize_linear import LAYOUTS

import chunkq
from chunkq.run import STREAM_BYTES

INTEGERS = ("uint8", "int8", "uint16", "int16", "int4", "uint4", "int2", "uint2")
FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
FLOAT6 = ("float6_e2m3fn", "float6_e3m2fn")
FLOAT4 = ("float4_e2m1fn",)
QUANTIZED = (*INTEGERS, *FLOAT8, *FLOAT6, *FLOAT4)
REALS = ("float32", "float16", "bfloat16")
E8M0 = "float8_e8m0fnu"


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def limits_of(name):
    info = ml_dtypes.iinfo(dtype_of(name)) if "int" in name else ml_dtypes.finfo(dtype_of(name))
    return float(info.min), float(info.max)


def cast(values, name):
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(dtype_of(name))


def chance(rng, p):
    return bool(rng.random() < p)


# What is drawn


def shape_of(rng):
    return tuple(int(n) for n in rng.integers(0 if chance(rng, 0.05) else 1, 9, rng.integers(0, 5)))


def granularity(rng, shape, tuples=True):
    """The shape of scale, and axis and block_size."""
    kind = rng.choice(["tensor", "axis", "blocks", "tuple"] if tuples else ["tensor", "axis", "blocks"])
    if kind == "tensor" or not shape:
        return ((), (1,))[rng.integers(2)], {}
    axis = int(rng.integers(-len(shape), len(shape)))
    if kind == "axis":
        return (shape[axis],), {"axis": axis}
    if kind == "blocks":
        sizes = [1] * len(shape)
        sizes[axis] = block_size = int(rng.integers(1, 6))
        attributes = {"axis": axis, "block_size": block_size}
    else:
        sizes = [int(b) for b in rng.integers(1, 5, len(shape))]
        attributes = {"block_size": tuple(sizes)}
    return tuple(-(-n // b) for n, b in zip(shape, sizes, strict=True)), attributes


def scales(rng, shape, name, specials):
    """Powers of two, which make ties, and others; some negative, some of them special values."""
    powers = 2.0 ** rng.integers(-4, 5, shape)
    if name == E8M0:
        return cast(np.where(rng.random(shape) < specials, 2.0 ** rng.integers(-127, 128, shape), powers), name)
    others = rng.uniform(0.01, 3, shape) * 10.0 ** rng.integers(-2, 2, shape)
    values = np.where(rng.random(shape) < 0.5, powers, others) * rng.choice([1, 1, -1], shape)
    return cast(np.where(rng.random(shape) < specials, rng.choice(strategies.SPECIAL, shape), values), name)


def codes(rng, shape, name):
    """Any codes of a quantized type; of the sub-byte types without unused bits."""
    if name == "int32":
        return strategies.integers(rng, shape, np.int32)
    dtype = dtype_of(name)
    bits = 4 if "4" in name[:6] and "float8" not in name else 2 if name in ("int2", "uint2") else 8 * dtype.itemsize
    bits = 6 if name in FLOAT6 else bits
    return np.asarray(rng.integers(0, 2**bits, shape)).astype(f"u{dtype.itemsize}").view(dtype)


def zero_points(rng, shape, name):
    """Codes where the type has zero points; zeros, which float8, float4 and int32 take only; None now and then."""
    if chance(rng, 0.4):
        return None
    if name == "int32" or name in (*FLOAT8, *FLOAT4):
        return np.zeros(shape, dtype_of(name))
    return codes(rng, shape, name)


def tensor(rng, shape, name, scale, y_name, specials):
    """x of a QuantizeLinear: quotients in and around the range of y, half of them ties."""
    low, high = limits_of(y_name)
    if "int" in y_name:
        quotient = np.where(rng.random(shape) < 0.5, rng.integers(int(2 * low) - 9, int(2 * high) + 9, shape) / 2,
                            rng.normal(0, high / 2, shape))  # fmt: skip
    else:
        quotient = np.where(rng.random(shape) < 0.5, rng.integers(-300, 300, shape) / 2.0 ** rng.integers(-2, 8),
                            rng.choice([-1.1, 1.1], shape) * high * 2.0 ** -rng.uniform(0, 20, shape))  # fmt: skip
    with np.errstate(all="ignore"):
        x = quotient * scale.astype(np.float64)
    if name == "int32":
        x = np.where(rng.random(shape) < specials, strategies.integers(rng, shape, np.int32), np.nan_to_num(x, nan=0))
        return np.asarray(np.clip(np.rint(x), -(2**31), 2**31 - 1)).astype(np.int32)
    return cast(np.where(rng.random(shape) < specials, rng.choice(strategies.SPECIAL, shape), x), name)


def quantize_request(rng, x_names, scale_names, y_names, tuples=True, specials=0.06):
    """x, scale, zero_point and attributes of a QuantizeLinear; all but `precision`."""
    shape = shape_of(rng)
    x_name, scale_name, y_name = (str(rng.choice(names)) for names in (x_names, scale_names, y_names))
    scale_shape, attributes = granularity(rng, shape, tuples)
    scale = scales(rng, scale_shape, scale_name, specials)
    zero_point = zero_points(rng, scale_shape, y_name)
    spread = reference.full(scale, shape, attributes.get("axis", 1), attributes.get("block_size", 0))
    x = tensor(rng, shape, x_name, spread, y_name, specials)
    if zero_point is None and not (y_name == "uint8" and chance(rng, 0.5)):
        attributes["output_dtype"] = dtype_of(y_name)
    if "float8" in y_name and chance(rng, 0.5):
        attributes["saturate"] = False
    return x, scale, zero_point, attributes


def dequantize_request(rng, x_names, scale_names, tuples=True):
    shape = shape_of(rng)
    x_name, scale_name = (str(rng.choice(names)) for names in (x_names, scale_names))
    scale_shape, attributes = granularity(rng, shape, tuples)
    scale = scales(rng, scale_shape, scale_name, 0.1)
    if scale_name == E8M0 or chance(rng, 0.3):
        attributes["output_dtype"] = dtype_of(str(rng.choice(REALS)))
    return codes(rng, shape, x_name), scale, zero_points(rng, scale_shape, x_name), attributes


def described(x, scale, zero_point, attributes):
    zero = None if zero_point is None else zero_point.dtype.name
    return f"x {x.dtype.name} {x.shape}, scale {scale.dtype.name} {scale.shape}, zero_point {zero}, {attributes}"


# Against the reference

BATCHES = range(10)
IN_A_BATCH = 40


@pytest.mark.parametrize("batch", BATCHES)
def test_quantize_is_the_reference(batch, isa):
    rng = np.random.default_rng([1, batch])
    for _ in range(IN_A_BATCH):
        x, scale, zero_point, attributes = quantize_request(rng, (*REALS, "int32"), (*REALS, E8M0), QUANTIZED)
        if chance(rng, 0.4):
            attributes["precision"] = dtype_of(str(rng.choice(REALS)))
        found = chunkq.quantize_linear(x, scale, zero_point, **attributes, n_threads=int(rng.integers(1, 4)))
        expected = reference.quantize_linear(x, scale, zero_point, **attributes)
        assert reference.same_bits(found, expected), described(x, scale, zero_point, attributes)


@pytest.mark.parametrize("batch", BATCHES)
def test_dequantize_is_the_reference(batch, isa):
    rng = np.random.default_rng([2, batch])
    for _ in range(IN_A_BATCH):
        x, scale, zero_point, attributes = dequantize_request(rng, (*QUANTIZED, "int32"), (*REALS, E8M0))
        found = chunkq.dequantize_linear(x, scale, zero_point, **attributes, n_threads=int(rng.integers(1, 4)))
        expected = reference.dequantize_linear(x, scale, zero_point, **attributes)
        assert reference.same_bits(found, expected), described(x, scale, zero_point, attributes)


@pytest.mark.parametrize("batch", BATCHES)
def test_both_in_one_are_the_two(batch, isa):
    rng = np.random.default_rng([3, batch])
    for _ in range(IN_A_BATCH):
        x, scale, zero_point, attributes = quantize_request(rng, (*REALS, "int32"), (*REALS, E8M0), QUANTIZED)
        cut = {k: v for k, v in attributes.items() if k in ("axis", "block_size")}
        if chance(rng, 0.4):
            attributes["precision"] = dtype_of(str(rng.choice(REALS)))
        y_dtype = (
            {"output_dtype": dtype_of(str(rng.choice(REALS)))} if scale.dtype.itemsize == 1 or chance(rng, 0.3) else {}
        )
        about = described(x, scale, zero_point, attributes)
        quantized = reference.quantize_linear(x, scale, zero_point, **attributes)
        expected = reference.dequantize_linear(quantized, scale, zero_point, **cut, **y_dtype)
        codes_found = chunkq.quantize_linear(x, scale, zero_point, **attributes)
        two = chunkq.dequantize_linear(codes_found, scale, zero_point, **cut, **y_dtype)
        if "output_dtype" in attributes:
            attributes["quantized_dtype"] = attributes.pop("output_dtype")
        found = chunkq.quantize_dequantize(x, scale, zero_point, **attributes, **y_dtype)
        assert reference.same_bits(found, expected), about
        assert reference.same_bits(two, expected), about
        assert reference.same_bits(chunkq.QuantizeDequantize(scale, zero_point, **attributes, **y_dtype)(x), expected)


# Against onnx's reference evaluator


def evaluated(op_type, inputs, attributes, rng):
    """The answer of onnx's reference evaluator; of the opsets, one that has the element types."""
    newest = {"float4_e2m1fn": 23, "int2": 25, "uint2": 25} | dict.fromkeys(FLOAT6, 28)
    names = [v.dtype.name for v in inputs if v is not None] + [attributes.get("output_dtype", np.dtype("u1")).name]
    first = max([23 if {"precision", "output_dtype"} & set(attributes) else 21] + [newest.get(n, 0) for n in names])
    first = max(first, 24 if E8M0 in names else 0)
    as_onnx = {k: helper.np_dtype_to_tensor_dtype(v) if isinstance(v, np.dtype) else v for k, v in attributes.items()}
    feeds = {n: v for n, v in zip("xsz", inputs, strict=True) if v is not None}
    node = helper.make_node(op_type, list(feeds), ["y"], **{k: int(v) for k, v in as_onnx.items()})
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()
    ]
    result = helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)
    opset = helper.make_opsetid("", int(rng.integers(first, 29)))
    model = helper.make_model(helper.make_graph([node], "g", infos, [result]), opset_imports=[opset])
    with np.errstate(all="ignore"):
        return np.asarray(ReferenceEvaluator(model).run(None, feeds)[0])


def without_what_wraps(x, scale, attributes, y_name):
    """x and scale without NaN, or quotients beyond int32 that the evaluator casts without a look."""
    precision = attributes.get("precision", scale.dtype)
    with np.errstate(all="ignore"):
        divisor = scale.astype(precision).astype(np.float32)
        scale = np.where(np.isnan(divisor) | (divisor == 0), np.ones((), scale.dtype), scale).astype(scale.dtype)
        spread = reference.full(scale, x.shape, attributes.get("axis", 1), attributes.get("block_size", 0))
        quotient = np.abs((x.astype(precision) / spread.astype(precision)).astype(np.float64))
    wraps = ~(quotient < 2**31 - 2**17) if "int" in y_name else np.isnan(quotient)
    return np.where(wraps, np.zeros((), x.dtype), x).astype(x.dtype), scale


@pytest.mark.parametrize("batch", BATCHES)
def test_quantize_is_onnx_reference(batch, isa):
    """Without mixed types, which NumPy's promotion decides there, and int32, which it divides in float64."""
    rng = np.random.default_rng([4, batch])
    for _ in range(IN_A_BATCH):
        mixed = chance(rng, 0.4)
        real = str(rng.choice(REALS))
        names = ((*REALS, "int32"), (*REALS, E8M0)) if mixed else ((real,), (real,))
        x, scale, zero_point, attributes = quantize_request(rng, *names, QUANTIZED, tuples=False)
        if mixed:
            attributes["precision"] = dtype_of(str(rng.choice(REALS)))
        y_name = (attributes.get("output_dtype") or (np.dtype("u1") if zero_point is None else zero_point.dtype)).name
        if "float8" not in y_name:
            x, scale = without_what_wraps(x, scale, attributes, y_name)
        if zero_point is not None and y_name in FLOAT6 and attributes.get("precision", scale.dtype).name == "bfloat16":
            continue  # it adds a float6 zero point to a bfloat16 quotient in float32
        expected = evaluated("QuantizeLinear", (x, scale, zero_point), attributes, rng)
        about = described(x, scale, zero_point, attributes)
        assert reference.same_bits(chunkq.quantize_linear(x, scale, zero_point, **attributes), expected), about
        assert reference.same_bits(reference.quantize_linear(x, scale, zero_point, **attributes), expected), about


@pytest.mark.parametrize("batch", BATCHES)
def test_dequantize_is_onnx_reference(batch, isa):
    rng = np.random.default_rng([5, batch])
    for _ in range(IN_A_BATCH):
        x, scale, zero_point, attributes = dequantize_request(rng, (*QUANTIZED, "int32"), (*REALS, E8M0), tuples=False)
        if x.size == 0:
            continue  # it looks for the least float8 zero point
        expected = evaluated("DequantizeLinear", (x, scale, zero_point), attributes, rng)
        about = described(x, scale, zero_point, attributes)
        assert reference.same_bits(chunkq.dequantize_linear(x, scale, zero_point, **attributes), expected), about
        assert reference.same_bits(reference.dequantize_linear(x, scale, zero_point, **attributes), expected), about


# Against onnxruntime

ORT_TYPES = ("uint8", "int8", "uint16", "int16", "int4", "uint4", *FLOAT8)


def onnxruntime_answer(op_type, inputs, attributes):
    """Inputs are constants of the model, and a Cast gives 4-bit and float8 results a type that Python can take."""
    constants = {n: v for n, v in zip("xsz", inputs, strict=True) if v is not None}
    attributes = dict(attributes)
    y_dtype = attributes.pop("output_dtype", None)
    if op_type == "QuantizeLinear":
        y_dtype = y_dtype or (np.dtype("u1") if len(constants) < 3 else constants["z"].dtype)
        if len(constants) < 3:
            attributes["output_dtype"] = helper.np_dtype_to_tensor_dtype(y_dtype)
        to = TensorProto.INT32 if reference.is_integer(y_dtype) else TensorProto.FLOAT
    else:
        to = helper.np_dtype_to_tensor_dtype(constants["s"].dtype)
    nodes = [
        helper.make_node(op_type, list(constants), ["q"], **{k: int(v) for k, v in attributes.items()}),
        helper.make_node("Cast", ["q"], ["y"], to=to),
    ]
    result = helper.make_tensor_value_info("y", to, None)
    initializers = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [], [result], initializers),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=min(onnx.IR_VERSION, 10),
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {})[0]


def one_block(scale, attributes):
    """Onnxruntime takes a scale of shape (1,) for per-tensor and refuses the block size."""
    return scale.shape == (1,) and "block_size" in attributes


@pytest.mark.parametrize("batch", BATCHES)
def test_quantize_is_onnxruntime(batch, isa):
    """It divides float16 in float32, which is precision=FLOAT here; NaN (the standard is silent) is left out."""
    rng = np.random.default_rng([6, batch])
    for _ in range(IN_A_BATCH):
        real = str(rng.choice(["float32", "float16"]))
        x, scale, zero_point, attributes = quantize_request(rng, (real,), (real,), ORT_TYPES, tuples=False)
        if one_block(scale, attributes):
            continue
        spread = reference.full(scale, x.shape, attributes.get("axis", 1), attributes.get("block_size", 0))
        with np.errstate(all="ignore"):
            quotient = np.abs(x.astype(np.float32) / spread.astype(np.float32))
        faulty = np.isnan(quotient)
        if attributes.get("saturate") is False:  # 1.32 errs without saturation: e4m3fn and e5m2 over the maximum
            faulty |= ((quotient > 464) & (quotient < 512)) | ((quotient >= 61440) & (quotient < 65537))
        x = np.where(faulty, np.ones((), x.dtype), x).astype(x.dtype)
        with np.errstate(all="ignore"):
            still = np.isnan(x.astype(np.float32) / spread.astype(np.float32))
        if still.any():  # a scale that is NaN
            scale = np.where(np.isnan(scale), np.ones((), scale.dtype), scale).astype(scale.dtype)
        expected = onnxruntime_answer("QuantizeLinear", (x, scale, zero_point), attributes)
        about = described(x, scale, zero_point, attributes)
        for quantize in (chunkq.quantize_linear, reference.quantize_linear):
            found = quantize(x, scale, zero_point, **attributes, precision=np.dtype(np.float32))
            assert reference.same_bits(found.astype(expected.dtype), expected), (quantize.__module__, about)


@pytest.mark.parametrize("batch", BATCHES)
def test_dequantize_is_onnxruntime(batch, isa):
    rng = np.random.default_rng([7, batch])
    for _ in range(IN_A_BATCH):
        names = ((*ORT_TYPES, "int32"), ("float32", "float16"))
        x, scale, zero_point, attributes = dequantize_request(rng, *names, tuples=False)
        attributes.pop("output_dtype", None)
        if one_block(scale, attributes) or (x.dtype == np.int32 and "block_size" in attributes):
            continue
        expected = onnxruntime_answer("DequantizeLinear", (x, scale, zero_point), attributes)
        about = described(x, scale, zero_point, attributes)
        assert reference.same_bits(chunkq.dequantize_linear(x, scale, zero_point, **attributes), expected), about
        assert reference.same_bits(reference.dequantize_linear(x, scale, zero_point, **attributes), expected), about


# Layouts, sizes, threads, regions

OPERATORS = ("quantize_linear", "dequantize_linear", "quantize_dequantize")


def request_of(rng, operator, shape, x_name, y_name, scale_shape, attributes):
    """x, scale, zero_point, attributes and the expected result of an operator; scale is float32."""
    y_dtype = dtype_of(y_name)
    axis, block_size = attributes.get("axis", 1), attributes.get("block_size", 0)
    scale = scales(rng, scale_shape, "float32", 0.05)
    quantized = x_name if operator == "dequantize_linear" else y_name
    zero_point = zero_points(rng, scale_shape, quantized)
    attributes = dict(attributes)
    if operator == "dequantize_linear":
        x, attributes["output_dtype"] = codes(rng, shape, x_name), y_dtype
        return x, scale, zero_point, attributes, reference.dequantize_linear(x, scale, zero_point, **attributes)
    x = tensor(rng, shape, x_name, reference.full(scale, shape, axis, block_size), y_name, 0.05)
    expected = reference.quantize_linear(x, scale, zero_point, axis, block_size, y_dtype)
    if operator == "quantize_dequantize":
        attributes["quantized_dtype"] = y_dtype
        expected = reference.dequantize_linear(expected, scale, zero_point, axis, block_size)
    else:
        attributes["output_dtype"] = y_dtype
    return x, scale, zero_point, attributes, expected


# every load and every store at least once
PAIRS = [
    *(("dequantize_linear", name, REALS[i % 3]) for i, name in enumerate((*QUANTIZED, "int32"))),
    *(("dequantize_linear", name, REALS[(i + 1) % 3]) for i, name in enumerate((*QUANTIZED, "int32"))),
    *(("quantize_linear", (*REALS, "int32")[i % 4], name) for i, name in enumerate(QUANTIZED)),
    *(("quantize_linear", (*REALS, "int32")[(i + 2) % 4], name) for i, name in enumerate(QUANTIZED)),
    *(("quantize_dequantize", (*REALS, "int32")[(i + 1) % 4], name) for i, name in enumerate(QUANTIZED)),
]
pairs = pytest.mark.parametrize(("operator", "x_name", "y_name"), PAIRS)


@pairs
def test_layouts(operator, x_name, y_name, isa):
    rng = np.random.default_rng(0)
    shape = (5, 6, 7)
    for axis, n_threads in ((0, 1), (1, 2), (2, 7)):
        drawn = request_of(rng, operator, shape, x_name, y_name, (shape[axis],), {"axis": axis})
        x, scale, zero_point, attributes, _ = drawn
        odd_scale = scale.astype(">f4")[::-1].copy()[::-1]
        odd_zero = None if zero_point is None else np.repeat(zero_point, 2)[::2]
        call = getattr(chunkq, operator)
        for name, layout in LAYOUTS.items():
            if "big-endian" in name and x.dtype.kind == "V":
                continue  # NumPy has no other byte order of ml_dtypes' types
            view = layout(x)
            before = view.copy()
            expected = call(np.ascontiguousarray(view).astype(x.dtype), scale, zero_point, **attributes)
            found = call(view, odd_scale, odd_zero, **attributes, n_threads=n_threads)
            assert reference.same_bits(found, expected), name
            assert reference.same_bits(view, before)
        assert reference.same_bits(call(x, scale, zero_point, **attributes), drawn[-1])


@pairs
def test_layouts_of_out(operator, x_name, y_name, isa):
    rng = np.random.default_rng(1)
    drawn = request_of(rng, operator, (5, 6, 7), x_name, y_name, (6,), {"axis": 1})
    x, scale, zero_point, attributes, expected = drawn
    for name in ("C", "F", "strided", "negative strides", "misaligned", "big-endian"):
        if name == "big-endian" and expected.dtype.kind == "V":
            continue
        out = LAYOUTS[name](np.zeros(x.shape, expected.dtype))
        assert getattr(chunkq, operator)(x, scale, zero_point, **attributes, out=out) is out
        assert reference.same_bits(np.ascontiguousarray(out).astype(expected.dtype), expected), name


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_out_is_refused(operator):
    x = np.zeros((2, 3), np.int8 if operator == "dequantize_linear" else np.float32)
    for out in (np.zeros((2, 3), np.int16), np.zeros((3, 2), np.uint8), np.zeros((2, 3), ml_dtypes.float8_e5m2)):
        with pytest.raises(chunkq.SpecError) as caught:
            getattr(chunkq, operator)(x, 1.0, out=out)
        assert caught.value.reason == "out"


# around the kernels' constants: vectors of 8 to 32, short run 32, tile 1024, item 16384
SIZES = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 1023, 1024, 1025, 16383, 16384, 16385, 33001)


@pairs
def test_sizes_and_threads(operator, x_name, y_name, isa):
    rng = np.random.default_rng(2)
    for size in SIZES:
        x, scale, zero_point, attributes, expected = request_of(rng, operator, (size,), x_name, y_name, (), {})
        for n_threads in (1, 2, 7) if size > 16384 else (1,):
            found = getattr(chunkq, operator)(x, scale, zero_point, **attributes, n_threads=n_threads)
            assert reference.same_bits(found, expected), (size, n_threads)


@pairs
def test_axes_of_many_lengths(operator, x_name, y_name, isa):
    rng = np.random.default_rng(3)
    for columns in (1, 3, 31, 33, 341, 1023, 1025, 2049):
        shape = (9000 // columns + 3, columns)
        for axis in (0, -1):
            drawn = request_of(rng, operator, shape, x_name, y_name, (shape[axis],), {"axis": axis})
            x, scale, zero_point, attributes, expected = drawn
            found = getattr(chunkq, operator)(x, scale, zero_point, **attributes, n_threads=columns % 3 + 1)
            assert reference.same_bits(found, expected), (shape, axis)


@pairs
def test_blocks_of_many_lengths(operator, x_name, y_name, isa):
    rng = np.random.default_rng(4)
    for size in (7, 33, 1025, 2500):
        for block_size in (1, 2, 31, 32, 100, 1024, 6000):
            for shape, axis in (((2, size), 1), ((size, 3), 0)):
                n = tuple(-(-k // block_size) if a == axis else k for a, k in enumerate(shape))
                cut = {"axis": axis, "block_size": block_size}
                x, scale, zero_point, attributes, expected = request_of(rng, operator, shape, x_name, y_name, n, cut)
                found = getattr(chunkq, operator)(x, scale, zero_point, **attributes)
                assert reference.same_bits(found, expected), (shape, axis, block_size)


CLASSES = {
    "quantize_linear": "QuantizeLinear",
    "dequantize_linear": "DequantizeLinear",
    "quantize_dequantize": "QuantizeDequantize",
}


@pairs
def test_a_region_equals_the_slice_of_the_whole(operator, x_name, y_name, isa, run_region):
    """Any region, beginning inside blocks, gives the bits of the whole."""
    rng = np.random.default_rng(5)
    for shape in ((40,), (3, 2500), (70, 30), (4, 5, 6), (20, 3, 50)):
        for _ in range(4):
            block_size = tuple(int(b) for b in rng.choice([1, 2, 3, 5, 31, 32, 33, 1500], len(shape)))
            n = tuple(-(-k // b) for k, b in zip(shape, block_size, strict=True))
            drawn = request_of(rng, operator, shape, x_name, y_name, n, {"block_size": block_size})
            x, scale, zero_point, attributes, whole = drawn
            op = getattr(chunkq, CLASSES[operator])(scale, zero_point, **attributes)
            assert reference.same_bits(op(x, n_threads=2), whole)
            for region in (strategies.region(rng, shape), tuple(slice(n // 3, n) for n in shape)):
                assert reference.same_bits(run_region(op, x, region, 2), whole[region]), (block_size, region)


@pytest.mark.parametrize(
    ("operator", "x_name", "y_name"),
    [
        ("dequantize_linear", "int8", "bfloat16"),
        ("quantize_linear", "float32", "int8"),
        ("quantize_linear", "bfloat16", "float8_e5m2"),
        ("quantize_dequantize", "float32", "int4"),
    ],
)
def test_large_outputs_leave_past_the_caches(operator, x_name, y_name, isa):
    rng = np.random.default_rng(6)
    shape = (3, STREAM_BYTES // 3 // (4 if operator == "quantize_dequantize" else dtype_of(y_name).itemsize) + 99)
    x, scale, zero_point, attributes, expected = request_of(rng, operator, shape, x_name, y_name, (3,), {"axis": 0})
    for offset in (0, 1):
        out = np.zeros(x.size + 64, expected.dtype)[offset : offset + x.size].reshape(shape)
        getattr(chunkq, operator)(x, scale, zero_point, **attributes, out=out)
        assert reference.same_bits(out, expected)


# Numbers, scalars, empty tensors


def test_numbers_take_the_type_of_their_place():
    x = np.float32([-2, 0.6, 1e9])
    assert chunkq.quantize_linear(x, 0.5).dtype == np.uint8
    assert chunkq.quantize_linear(x, 0.5, 7).tolist() == [3, 8, 255]
    found = chunkq.quantize_linear(x, [0.5], [-1], output_dtype="int4")
    assert reference.same_bits(found, np.array([-5, 0, 7]).astype(ml_dtypes.int4))
    half = np.arange(-500, 500).astype(np.float16)
    for scale in (0.1, [0.1]):  # float32, whatever x is
        found = chunkq.quantize_linear(half, scale, output_dtype="int16")
        assert reference.same_bits(found, reference.quantize_linear(half, np.float32(0.1), output_dtype=np.int16))
    op = chunkq.QuantizeLinear(0.5, 3, output_dtype="int8")
    assert reference.same_bits(op(x), chunkq.quantize_linear(x, 0.5, np.int8(3)))
    assert reference.same_bits(chunkq.quantize_linear(np.float32(3), 2.0), np.asarray(np.uint8(2)))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (0, 0, 4), ()])
def test_empty_tensors_and_scalars(operator, shape):
    x = np.zeros(shape, np.int8 if operator == "dequantize_linear" else np.float32)
    for scale in (2.0, np.float32([2.0])):
        found = getattr(chunkq, operator)(x, scale, axis=99)  # one scale: axis is ignored
        assert found.shape == shape
        assert found.dtype == (np.uint8 if operator == "quantize_linear" else np.float32)


# What is refused

X = (4, 6)


def xs(operator):
    return np.zeros(X, np.int8 if operator == "dequantize_linear" else np.float32)


def refused(reason, call, *args, **kwargs):
    with pytest.raises(chunkq.SpecError) as caught:
        call(*args, **kwargs)
    assert caught.value.reason == reason


def ones(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("what", "scale", "attributes", "reason"),
    [
        ("(1, 1) without block_size", ones(1, 1), {}, "scale_shape"),
        ("2-D without block_size", ones(4, 6), {}, "scale_shape"),
        ("a column without block_size", ones(4, 1), {}, "scale_shape"),
        ("1-D of another length", ones(5), {"axis": 1}, "scale_shape"),
        ("1-D of the other axis", ones(4), {}, "scale_shape"),
        ("scalar with block_size", ones(), {"block_size": 2}, "scale_shape"),
        ("number with block_size", 1.0, {"block_size": 2}, "scale_shape"),
        ("1-D with block_size", ones(3), {"block_size": 2}, "scale_shape"),
        ("too many blocks", ones(4, 4), {"block_size": 2}, "scale_shape"),
        ("too few blocks", ones(4, 2), {"block_size": 2}, "scale_shape"),
        ("(1, 1) for more rows", ones(1, 1), {"block_size": 6}, "scale_shape"),
        ("blocks of the other axis", ones(4, 3), {"block_size": 2, "axis": 0}, "scale_shape"),
        ("too few blocks of a tuple", ones(2, 2), {"block_size": (2, 2)}, "scale_shape"),
        ("negative block_size", ones(4, 3), {"block_size": -2}, "block_size"),
        ("tuple of another length", ones(4, 3), {"block_size": (2,)}, "block_size"),
        ("tuple with a 0", ones(4, 3), {"block_size": (1, 0)}, "block_size"),
        ("axis beyond", ones(6), {"axis": 2}, "axis"),
        ("axis before", ones(6), {"axis": -3}, "axis"),
        ("axis of blocks beyond", ones(4, 3), {"axis": 2, "block_size": 2}, "axis"),
        ("float64 array", np.ones(6), {}, "dtype"),
        ("float64 scalar", np.float64(1), {}, "dtype"),
        ("int32 array", np.ones(6, np.int32), {}, "dtype"),
        ("float8 array", np.ones(6).astype(ml_dtypes.float8_e4m3fn), {}, "dtype"),
        ("declared as another width", np.ones(6, np.uint16), {"scale_dtype": E8M0}, "dtype"),
        ("declared as another type", ones(6), {"scale_dtype": "bfloat16"}, "dtype"),
        ("declared as no scale's type", np.ones(6, np.uint8), {"scale_dtype": "float8_e5m2"}, "dtype"),
        ("too large a number", 1e39, {}, "value"),
    ],
)
def test_refused_scales(operator, what, scale, attributes, reason):
    refused(reason, getattr(chunkq, operator), xs(operator), scale, **attributes)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("scale", "zero_point", "attributes"),
    [
        (ones(), (2,), {}),
        (ones(1), (1, 1), {}),
        (ones(6), (), {}),
        (ones(6), (1,), {}),
        (ones(6), (4,), {}),
        (ones(6), (1, 6), {}),
        (ones(4, 3), (4, 1), {"block_size": 2}),
        (ones(4, 3), (4, 6), {"block_size": 2}),
        (ones(4, 3), (), {"block_size": 2}),
    ],
)
def test_refused_shapes_of_zero_points(operator, scale, zero_point, attributes):
    zero_point = np.zeros(zero_point, np.int8)
    refused("zero_point_shape", getattr(chunkq, operator), xs(operator), scale, zero_point, **attributes)


def array(name, value=0, shape=()):
    return np.full(shape, value, np.float32).astype(dtype_of(name))


QUANTIZE_ROWS = [
    ("dtype", np.zeros(X), 1.0, None, {}),
    ("dtype", np.zeros(X, np.int8), 1.0, None, {}),
    ("dtype", np.zeros(X, np.int64), 1.0, None, {}),
    ("dtype", array("float8_e5m2", 0, X), 1.0, None, {}),
    ("dtype", array("float32", 0, X), 1.0, array("int8"), {"output_dtype": "uint8"}),
    ("dtype", array("float32", 0, X), 1.0, array("float8_e5m2"), {"output_dtype": "float8_e4m3fn"}),
    ("dtype", array("float32", 0, X), 1.0, array("float32"), {}),
    ("dtype", array("float32", 0, X), 1.0, array("int32"), {}),
    *(("dtype", array("float32", 0, X), 1.0, None, {"output_dtype": name})
      for name in ("float32", "int32", "int64", "bfloat16", E8M0, "float8_e4m3", "float7", "float8_e3m4")),
    *(("dtype", array("float32", 0, X), 1.0, None, {"precision": name}) for name in ("float64", "int8", E8M0)),
    ("dtype", array("float32", 0, X), 1.0, None, {"x_dtype": "bfloat16"}),
    ("dtype", np.zeros(X, np.uint8), 1.0, None, {"x_dtype": "bfloat16"}),
    ("float_zero_point", array("float32", 0, X), 1.0, array("float8_e4m3fn", 1), {}),
    ("float_zero_point", array("float32", 0, X), 1.0, array("float8_e5m2fnuz", np.nan), {}),
    ("float_zero_point", array("float32", 0, X), array("float32", 1, 6), array("float4_e2m1fn", 0.5, 6), {}),
    ("value", array("float32", 0, X), 1.0, -1, {}),
    ("value", array("float32", 0, X), 1.0, 256, {}),
    ("value", array("float32", 0, X), 1.0, 0.5, {}),
    ("value", array("float32", 0, X), 1.0, 8, {"output_dtype": "int4"}),
    ("value", array("float32", 0, X), 1.0, -3, {"output_dtype": "int2"}),
    ("value", array("float32", 0, X), 1.0, 4, {"output_dtype": "uint2"}),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "x", "scale", "zero_point", "attributes"), QUANTIZE_ROWS)
def test_refused_by_quantize(reason, x, scale, zero_point, attributes):
    refused(reason, chunkq.quantize_linear, x, scale, zero_point, **attributes)
    if "output_dtype" in attributes:
        attributes = {"quantized_dtype": attributes["output_dtype"]}
    refused(reason, chunkq.quantize_dequantize, x, scale, zero_point, **attributes)


@pytest.mark.parametrize(
    ("reason", "x", "scale", "zero_point", "attributes"),
    [
        ("dtype", np.zeros(X, np.float32), 1.0, None, {}),
        ("dtype", np.zeros(X, np.int64), 1.0, None, {}),
        ("dtype", np.zeros(X, np.uint32), 1.0, None, {}),
        ("dtype", array("bfloat16", 0, X), 1.0, None, {}),
        ("dtype", array("float8_e4m3", 0, X), 1.0, None, {}),  # not ONNX's type: it has infinities
        ("dtype", np.zeros(X, np.int8), 1.0, array("uint8"), {}),
        ("dtype", np.zeros(X, np.int8), 1.0, array("int16"), {}),
        ("dtype", array("int4", 0, X), 1.0, array("uint4"), {}),
        ("dtype", array("int4", 0, X), 1.0, array("int8"), {}),
        ("dtype", array("float6_e2m3fn", 0, X), 1.0, array("float6_e3m2fn"), {}),
        ("dtype", np.zeros(X, np.int8), array(E8M0, 1), None, {}),  # no type for y
        ("dtype", np.zeros(X, np.int8), 1.0, None, {"output_dtype": "float64"}),
        ("dtype", np.zeros(X, np.int8), 1.0, None, {"output_dtype": "int8"}),
        ("dtype", np.zeros(X, np.int8), 1.0, None, {"output_dtype": E8M0}),
        ("dtype", np.zeros(X, np.int8), 1.0, None, {"output_dtype": "float33"}),
        ("dtype", np.zeros(X, np.int8), 1.0, None, {"x_dtype": "int16"}),
        ("dtype", np.zeros(X, np.uint16), 1.0, None, {"x_dtype": "float8_e5m2"}),
        ("dtype", np.zeros(X, np.uint16), 1.0, None, {"x_dtype": "bfloat16"}),
        ("dtype", np.zeros(X, np.uint8), 1.0, None, {"x_dtype": "float8_e4m3"}),
        ("dtype", array("float8_e5m2", 0, X), 1.0, None, {"x_dtype": "float8_e4m3fn"}),
        ("int32_zero_point", np.zeros(X, np.int32), 1.0, array("int32", 1), {}),
        ("int32_zero_point", np.zeros(X, np.int32), 1.0, -1, {}),
        ("int32_zero_point", np.zeros(X, np.int32), array("float32", 1, 6), np.int32([0, 0, 0, 0, 0, 5]), {}),
        *(("float_zero_point", array(name, 0, X), 1.0, array(name, 1), {}) for name in (*FLOAT8, *FLOAT4)),
        ("float_zero_point", array("float8_e4m3fn", 0, X), array("float32", 1, 6),
         np.eye(6).astype(ml_dtypes.float8_e4m3fn)[5], {}),
        ("value", np.zeros(X, np.int8), 1.0, 128, {}),
        ("value", np.zeros(X, np.int8), 1.0, 0.5, {}),
        ("value", array("int4", 0, X), 1.0, -9, {}),
        ("value", array("uint2", 0, X), 1.0, 4, {}),
    ],
)  # fmt: skip
def test_refused_by_dequantize(reason, x, scale, zero_point, attributes):
    refused(reason, chunkq.dequantize_linear, x, scale, zero_point, **attributes)


def test_e8m0_scales_need_a_type_of_y():
    scale = array(E8M0, 2)
    refused("dtype", chunkq.quantize_dequantize, np.zeros(X, np.float32), scale)
    assert chunkq.quantize_linear(np.float32([6]), scale).tolist() == [3]
    assert chunkq.quantize_dequantize(np.float32([6]), scale, output_dtype="bfloat16").dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("name", ["int8", "uint8"])
@pytest.mark.parametrize("zero_point", [None, 0, 1, "low", "high"])
def test_special_values_in_whole_vectors(name, zero_point, isa):
    """Runs of 32 and more take a loop of their own: NaN, infinities, ties and saturation at every place of it."""
    limits = np.iinfo(name)
    given = {"low": limits.min, "high": limits.max}.get(zero_point, zero_point)
    zero = None if given is None else np.array(given, name)
    values = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, 1.5, -0.5, -2.5, 3e38, -3e38, 126.5, 127.5, -128.5])
    rng = np.random.default_rng(0)
    x = rng.choice(values, 32 * 40 + 7)
    for scale in np.float32([1.0, -1.0, 1e-30, 0.0, np.inf, np.nan]):
        found = chunkq.quantize_linear(x, scale, zero, output_dtype=None if zero is not None else name)
        expected = reference.quantize_linear(x, scale, zero, output_dtype=np.dtype(name))
        assert reference.same_bits(found, expected), scale


@pytest.mark.parametrize("name", ["int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
@pytest.mark.parametrize("y_name", REALS)
def test_special_scales_over_whole_vectors(name, y_name, isa):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 16 if "float4" in name else 256, 16 * 40 + 7, np.uint8).view(dtype_of(name))
    for scale in np.float32([1.0, -1e-3, 1e-30, 1e-40, 1e30, 0.0, np.inf, np.nan]):
        found = chunkq.dequantize_linear(x, scale, output_dtype=y_name)
        assert reference.same_bits(found, reference.dequantize_linear(x, scale, output_dtype=dtype_of(y_name))), scale
