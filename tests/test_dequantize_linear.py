"""DequantizeLinear in memory: against onnxruntime and the reference, in every layout, for every instruction set."""

import numpy as np
import onnx
import onnxruntime
import pytest
import reference
import strategies
from hypothesis import given
from onnx import TensorProto, helper

import chunkq
from chunkq.run import STREAM_BYTES, _is_plain

ONNX_TYPES = {
    np.uint8: (TensorProto.UINT8, 13),
    np.int8: (TensorProto.INT8, 13),
    np.int32: (TensorProto.INT32, 13),
    np.uint16: (TensorProto.UINT16, 21),
    np.int16: (TensorProto.INT16, 21),
}


def onnxruntime_answer(x, scale, zero_point, opset, **attributes):
    inputs = {"x": x, "scale": scale} | ({} if zero_point is None else {"zero_point": zero_point})
    code = ONNX_TYPES[x.dtype.type][0]
    types = {"x": code, "scale": TensorProto.FLOAT, "zero_point": code}
    infos = [helper.make_tensor_value_info(n, types[n], list(v.shape)) for n, v in inputs.items()]
    node = helper.make_node("DequantizeLinear", list(inputs), ["y"], **attributes)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, list(x.shape))
    model = helper.make_model(
        helper.make_graph([node], "g", infos, [result]),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=min(onnx.IR_VERSION, 10),
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def request(rng, shape, dtype, axis):
    """x, scale and zero point along an axis, or for the tensor where axis is None."""
    n = () if axis is None else (shape[axis],)
    zero_point = None if dtype is np.int32 or rng.random() < 0.3 else strategies.integers(rng, n, dtype)
    return strategies.integers(rng, shape, dtype), strategies.scales(rng, n), zero_point


@pytest.mark.parametrize("dtype", ONNX_TYPES)
@pytest.mark.parametrize("rank", range(6))
def test_bits_of_onnxruntime(dtype, rank, isa):
    rng = np.random.default_rng([rank, np.dtype(dtype).num])
    opset = ONNX_TYPES[dtype][1]
    for _ in range(3):
        shape = tuple(int(n) for n in rng.integers(1, 7, rank))
        for axis in [None, *range(-rank, rank)]:
            x, scale, zero_point = request(rng, shape, dtype, axis)
            for version in {opset, 10} if axis is None and opset == 13 else {opset}:
                attributes = {} if version == 10 else {"axis": 1 if axis is None else axis}
                expected = onnxruntime_answer(x, scale, zero_point, version, **attributes)
                found = chunkq.dequantize_linear(x, scale, zero_point, axis=1 if axis is None else axis)
                assert reference.same_bits(found, expected), (shape, axis, version)
                assert reference.same_bits(
                    found, reference.dequantize_linear(x, scale, zero_point, 1 if axis is None else axis)
                )


def counts(shape, block_size):
    return tuple(-(-n // b) for n, b in zip(shape, block_size, strict=True))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
@pytest.mark.parametrize("shape", [(8,), (7,), (4, 7), (5, 3, 4), (2, 3, 9, 2)])
def test_blocks_of_onnxruntime(dtype, shape):
    """The one outside oracle for blocks: every axis, the last block whole or shorter."""
    rng = np.random.default_rng(len(shape))
    for axis in range(-len(shape), len(shape)):
        for block_size in (1, 2, 3, 4, 16):
            n = counts(shape, [block_size if a == axis % len(shape) else 1 for a in range(len(shape))])
            if n == (1,):
                continue  # onnxruntime takes it for per-tensor and refuses the block size
            x, scale, zero_point = (
                strategies.integers(rng, shape, dtype),
                strategies.scales(rng, n),
                strategies.integers(rng, n, dtype),
            )
            expected = onnxruntime_answer(x, scale, zero_point, 21, axis=axis, block_size=block_size)
            found = chunkq.dequantize_linear(x, scale, zero_point, axis=axis, block_size=block_size)
            assert reference.same_bits(found, expected), (axis, block_size)
            assert reference.same_bits(reference.dequantize_linear(x, scale, zero_point, axis, block_size), expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
def test_every_code_with_every_kind_of_zero_point(dtype, isa):
    limits = np.iinfo(dtype)
    x = np.arange(limits.min, limits.max + 1).astype(dtype)
    for zero_point in (limits.min, 0, limits.max, 7):
        found = chunkq.dequantize_linear(x, 0.1, int(zero_point))
        assert reference.same_bits(found, reference.dequantize_linear(x, np.float32(0.1), dtype(zero_point)))


def test_int32_beyond_float32(isa):
    x = np.int32([2**31 - 1, -(2**31), 2**24 + 1, 2**24 + 3, -(2**24) - 1, 0])
    assert reference.same_bits(chunkq.dequantize_linear(x, 0.3), x.astype(np.float32) * np.float32(0.3))


# around the kernels' constants: tile 1024, short run 32, item 16384, and rows taken several at a time
SIZES = [1, 7, 31, 32, 33, 1023, 1024, 1025, 16383, 16385]


@pytest.mark.parametrize("columns", [1, 2, 3, 31, 33, 341, 1023, 1024, 1025, 2049])
@pytest.mark.parametrize("n_threads", [1, 2, 7])
def test_last_axis_and_first_axis(columns, n_threads, isa):
    rng = np.random.default_rng(columns)
    rows = 40_000 // columns + 3
    x, scale, zero_point = request(rng, (rows, columns), np.int8, 1)
    for axis, s, z in ((1, scale, zero_point), (0, *request(rng, (rows, columns), np.int8, 0)[1:])):
        found = chunkq.dequantize_linear(x, s, z, axis=axis, n_threads=n_threads)
        assert reference.same_bits(found, reference.dequantize_linear(x, s, z, axis))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block_size", [1, 2, 5, 31, 32, 33, 100, 1024, 5000])
def test_blocks(size, block_size, isa):
    rng = np.random.default_rng([size, block_size])
    for shape, axis in (((3, size), 1), ((size, 3), 0), ((2, size, 2), 1)):
        x = strategies.integers(rng, shape, np.uint8)
        n = counts(shape, [block_size if a == axis else 1 for a in range(len(shape))])
        scale, zero_point = strategies.scales(rng, n), strategies.integers(rng, n, np.uint8)
        found = chunkq.dequantize_linear(x, scale, zero_point, axis=axis, block_size=block_size)
        assert reference.same_bits(found, reference.dequantize_linear(x, scale, zero_point, axis, block_size))


def blocked(rng, shape, block_size):
    """x, its operator and the whole answer."""
    n = counts(shape, block_size)
    x, scale, zero_point = (
        strategies.integers(rng, shape, np.int16),
        strategies.scales(rng, n),
        strategies.integers(rng, n, np.int16),
    )
    whole = reference.dequantize_linear(x, scale, zero_point, 0, block_size)
    return x, chunkq.DequantizeLinear(scale, zero_point, block_size=block_size), whole


@given(strategies.solid_shapes, strategies.seeds)
def test_a_region_equals_the_slice_of_the_whole(run_region, shape, seed):
    """R12: any region, beginning inside blocks, gives the bits of the whole."""
    rng = np.random.default_rng(seed)
    x, op, whole = blocked(rng, shape, tuple(int(b) for b in rng.integers(1, 5, len(shape))))
    region = strategies.region(rng, shape)
    assert reference.same_bits(run_region(op, x, region), whole[region])


@pytest.mark.parametrize("shape", [(40_000,), (3, 9000), (300, 90), (40, 3, 250)])
@pytest.mark.parametrize("n_threads", [1, 2, 7])
def test_regions_that_begin_inside_large_blocks(shape, n_threads, isa, run_region):
    """Blocks below, at and above the kernels' short run (32) and tile (1024), on every axis."""
    rng = np.random.default_rng([n_threads, *shape])
    for _ in range(12):
        block_size = tuple(int(b) for b in rng.choice([1, 2, 31, 32, 33, 100, 1500], len(shape)))
        x, op, whole = blocked(rng, shape, block_size)
        for region in (strategies.region(rng, shape), tuple(slice(n // 3, n) for n in shape)):
            assert reference.same_bits(run_region(op, x, region, n_threads), whole[region]), (block_size, region)


@given(strategies.shapes, strategies.seeds)
def test_any_shape_axis_and_type(shape, seed):
    rng = np.random.default_rng(seed)
    dtype = strategies.INTEGERS[seed % 5]
    axis = None if not shape or seed % 3 == 0 else int(rng.integers(-len(shape), len(shape)))
    x, scale, zero_point = request(rng, shape, dtype, axis)
    found = chunkq.dequantize_linear(x, scale, zero_point, axis=1 if axis is None else axis, n_threads=seed % 3 + 1)
    assert reference.same_bits(found, reference.dequantize_linear(x, scale, zero_point, 1 if axis is None else axis))


def misaligned(x):
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:]
    view = memory.view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def read_only(x):
    view = x.copy()
    view.flags.writeable = False
    return view


LAYOUTS = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "negative strides": lambda x: x[::-1, :, ::-1].copy()[::-1, :, ::-1],
    "read-only": read_only,
    "misaligned": misaligned,
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "big-endian, F, strided": lambda x: np.asfortranarray(np.repeat(x, 3, 0).astype(x.dtype.newbyteorder(">")))[::3],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
}


def test_a_kernel_never_sees_misaligned_memory():
    """x86 forgives it, so wrong bits would not tell."""
    assert not _is_plain(misaligned(np.zeros(4, np.int32)))
    assert _is_plain(np.zeros(4, np.int32))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", strategies.INTEGERS)
def test_layouts_of_every_input(layout, dtype, isa):
    rng = np.random.default_rng(0)
    x, scale, zero_point = request(rng, (5, 6, 7), dtype, 1)
    view = layout(x)
    expected = reference.dequantize_linear(np.ascontiguousarray(view), scale, zero_point, 1)
    odd_scale = scale.astype(">f4")[::-1].copy()[::-1]
    odd_zero = None if zero_point is None else np.repeat(zero_point, 2)[::2]
    for n_threads in (1, 2, 7):
        assert reference.same_bits(chunkq.dequantize_linear(view, odd_scale, odd_zero, n_threads=n_threads), expected)


@pytest.mark.parametrize("layout", [LAYOUTS[k] for k in ("C", "F", "strided", "negative strides", "misaligned",
                                                         "big-endian")])  # fmt: skip
def test_layouts_of_out(layout, isa):
    rng = np.random.default_rng(0)
    x, scale, zero_point = request(rng, (5, 6, 7), np.uint8, 2)
    out = layout(np.zeros(x.shape, np.float32))
    assert chunkq.dequantize_linear(x, scale, zero_point, axis=2, out=out) is out
    expected = reference.dequantize_linear(x, scale, zero_point, 2)
    assert reference.same_bits(np.ascontiguousarray(out, np.float32), expected)


@pytest.mark.parametrize("n_threads", [1, 2, None])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_large_outputs_leave_past_the_caches(n_threads, offset, isa):
    size = STREAM_BYTES // 4 + 4321
    rng = np.random.default_rng(1)
    x = strategies.integers(rng, (3, size // 3), np.uint8)
    memory = np.full(x.size + 64, -7.0, np.float32)
    out = memory[offset : offset + x.size].reshape(x.shape)
    for axis in (0, 1):
        scale = strategies.scales(rng, (x.shape[axis],))
        chunkq.dequantize_linear(x, scale, axis=axis, out=out, n_threads=n_threads)
        assert reference.same_bits(out, reference.dequantize_linear(x, scale, None, axis))
    assert (memory[:offset] == -7).all()
    assert (memory[offset + x.size :] == -7).all()


@pytest.mark.parametrize("block_size", [(3, 5), (1, 33), (2, 5000)])
def test_large_blocked_outputs(block_size, isa):
    rng = np.random.default_rng(2)
    x, op, whole = blocked(rng, (3, STREAM_BYTES // 12 + 99), block_size)
    assert reference.same_bits(op(x, n_threads=2), whole)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (0, 0, 4)])
def test_an_empty_out_is_taken(shape):
    out = np.zeros(shape, np.float32)  # NumPy gives it strides of 0, but no two elements share memory
    assert chunkq.dequantize_linear(np.zeros(shape, np.int8), 0.5, out=out) is out


def test_scalars_lists_and_empty_tensors():
    assert chunkq.dequantize_linear(np.int8(3), 2.0).shape == ()
    assert chunkq.dequantize_linear(np.int8(3), [2.0], axis=99) == 6.0  # one scale: axis is ignored
    assert chunkq.dequantize_linear(np.zeros((0, 3), np.int8), [1, 2, 3]).shape == (0, 3)
    assert chunkq.dequantize_linear(np.zeros((2, 0), np.int8), [], axis=1).shape == (2, 0)
    op = chunkq.DequantizeLinear(0.5, 3)
    assert op(np.uint8([5])) == op(np.int16([5])) == 1.0  # a weak zero point takes x's type each time


def test_memory_maps_are_read_as_they_are(tmp_path):
    x = np.arange(-128, 128, dtype=np.int8).reshape(16, 16)
    x.tofile(tmp_path / "x.bin")
    mapped = np.memmap(tmp_path / "x.bin", np.int8, "r", shape=(16, 16))
    y = chunkq.dequantize_linear(mapped, 0.5)
    assert type(y) is np.ndarray
    assert reference.same_bits(y, x.astype(np.float32) * np.float32(0.5))
