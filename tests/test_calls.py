"""A second call with the same shape takes a shorter way; nothing but its time may differ from the first."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import chunkq

X = np.random.default_rng(0).integers(0, 256, (6, 40), np.uint8)
SCALE = np.linspace(0.1, 1, 6, dtype=np.float32)
ZERO_POINT = np.arange(6, dtype=np.uint8)


def formula(x, scale=SCALE, zero_point=ZERO_POINT):
    return (x.astype(np.float32) - zero_point[:, None].astype(np.float32)) * scale[:, None]


def kept(op):
    return len(op._calls)


@pytest.fixture
def op():
    """An operator that has a call ready for arrays like X."""
    op = chunkq.DequantizeLinear(SCALE.copy(), axis=0)
    op(X)
    assert kept(op) == 1
    return op


def test_the_second_call_gives_the_first_ones_bits(op, isa):
    expected = formula(X, zero_point=np.zeros(6, np.uint8))
    fresh = chunkq.DequantizeLinear(SCALE, axis=0)
    for _ in range(3):
        assert np.array_equal(fresh(X), expected)
    assert kept(fresh) == 1
    out = np.empty_like(expected)
    assert op(X, out=out) is out
    assert np.array_equal(out, expected)


def test_a_parameter_that_changes_in_place_counts():
    scale, zero_point = SCALE.copy(), ZERO_POINT.copy()
    for op in (
        chunkq.DequantizeLinear(scale, axis=0),
        chunkq.DequantizeLinear(scale, zero_point, axis=0),
        chunkq.DequantizeLinear(scale.astype(np.float16), axis=0, output_dtype="float32"),
    ):
        for _ in range(2):
            op(X)
            op.scale[...] *= 2
            if op.zero_point is not None:
                op.zero_point[...] += 1
            assert kept(op) == 1
            now = np.zeros(6, np.uint8) if op.zero_point is None else op.zero_point
            assert np.array_equal(op(X), formula(X, op.scale.astype(np.float32), now))


def test_a_parameter_that_is_replaced_counts(op):
    op.scale = SCALE * 3
    assert np.array_equal(op(X), formula(X, SCALE * 3, np.zeros(6, np.uint8)))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_operators_are_copied_and_pickled_without_their_calls(op, again):
    other = again(op)
    assert kept(other) == 0
    assert np.array_equal(other(X), op(X))


def test_arrays_that_are_not_plain_take_the_long_way(op):
    expected = op(X)
    wide = np.zeros((6, 80), np.uint8)
    wide[:, ::2] = X
    backwards = X[:, ::-1].copy()[:, ::-1]
    for x in (wide[:, ::2], np.asfortranarray(X), backwards):
        assert np.array_equal(op(x), expected)
    loose, shifted = (
        np.zeros((6, 80), np.float32),
        np.zeros(4 * X.size + 2, np.uint8)[2:].view(np.float32).reshape(X.shape),
    )
    for out in (loose[:, ::2], np.asfortranarray(np.zeros(X.shape, np.float32)), np.zeros(X.shape, ">f4"), shifted):
        assert op(X, out=out) is out
        assert np.array_equal(out, expected)


def test_misaligned_input_takes_the_long_way():
    op = chunkq.FakeQuantize(-1.0, 1.0, -1.0, 1.0, 16)
    x = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    shifted = np.zeros(4 * 64 + 1, np.uint8)[1:].view(np.float32)
    shifted[...] = x
    assert np.array_equal(op(x), op(shifted))
    assert np.array_equal(op(x), op(x.astype(">f4")))


def test_wrong_requests_are_refused_by_a_ready_call_too(op):
    for out in (np.zeros(X.shape, np.float64), np.zeros(X.size, np.float32), [0.0], np.zeros(X.shape, np.float32)[:0]):
        with pytest.raises(chunkq.SpecError, match="out is"):
            op(X, out=out)
    frozen = np.zeros(X.shape, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(chunkq.SpecError, match="read-only"):
        op(X, out=frozen)
    with pytest.raises(chunkq.SpecError, match="n_threads"):
        op(X, n_threads=0)
    with pytest.raises(chunkq.SpecError, match="masked"):
        op(np.ma.masked_array(X))
    with pytest.raises(chunkq.SpecError, match="scale has 6"):
        op(X[:5])


def test_an_output_over_an_input_is_refused_or_right():
    memory = np.zeros(4 * X.size, np.uint8)
    x, out = memory[: X.size].reshape(X.shape), memory.view(np.float32).reshape(X.shape)
    op = chunkq.DequantizeLinear(0.5)
    op(x)
    with pytest.raises(chunkq.SpecError, match="overlaps x"):
        op(x, out=out)
    values = np.linspace(-2, 2, 240, dtype=np.float32)
    fake = chunkq.FakeQuantize(-1.0, 1.0, -1.0, 1.0, 16)
    expected = fake(values)
    assert np.array_equal(fake(values, out=values), expected)
    scale = np.ones(240, np.float32)
    over = chunkq.DequantizeLinear(scale, axis=0)
    over(X.reshape(-1))
    with pytest.raises(chunkq.SpecError, match="overlaps scale"):
        over(X.reshape(-1), out=scale)


def test_calls_in_one_line_tell_numbers_apart_that_compare_equal():
    x = np.uint8([1, 2])
    assert np.signbit(chunkq.dequantize_linear(x, -0.0)).all()
    assert not np.signbit(chunkq.dequantize_linear(x, 0.0)).any()
    assert np.signbit(chunkq.dequantize_linear(x, -0.0)).all()
    types = [chunkq.dequantize_linear(x, one).dtype.name for one in (1, 1.0, np.float32(1), np.float16(1))]
    assert types == ["float32", "float32", "float32", "float16"]
    for zero_point in (True, 1.0):
        chunkq.dequantize_linear(x, 1.0, 1)
        with pytest.raises(chunkq.SpecError):
            chunkq.dequantize_linear(x, 1.0, zero_point)
    for block_size in ([1], {}, np.zeros(3)):
        with pytest.raises(chunkq.SpecError, match=r"block_size|rank"):
            chunkq.dequantize_linear(x, 1.0, block_size=block_size)


def test_no_more_calls_are_kept_than_needed():
    op = chunkq.DequantizeLinear(0.5)
    for n in range(1, 200):
        assert op(np.ones(n, np.uint8)).sum() == n / 2
    assert 0 < kept(op) <= 64


def test_one_call_serves_many_threads(op):
    xs = [np.full(X.shape, k, np.uint8) for k in range(16)]
    with ThreadPoolExecutor(8) as pool:
        for x, y in zip(xs * 50, pool.map(op, xs * 50), strict=True):
            assert np.array_equal(y, formula(x, zero_point=np.zeros(6, np.uint8)))


def test_calls_on_narrow_floats_run_wherever_their_objects_lie(isa):
    """Vectors must not be kept in an object: its memory is aligned for 16 bytes only."""
    kept_alive = []
    for n in range(1, 65):
        codes = np.arange(16 * n, dtype=np.uint8) % 0x7F
        op = chunkq.DequantizeLinear(np.float32(0.5))
        x = codes.view(ml_dtypes.float8_e4m3fn)
        for _ in range(2):
            assert np.array_equal(op(x), x.astype(np.float32) * np.float32(0.5))
        kept_alive += [op, bytearray(n)]


def test_codes_of_a_zero_point_are_no_numbers():
    """int4 held as uint8: 15 stands for -1, and a plain cast would say 15."""
    x = np.int8([[1, 2], [3, 4]]).astype(ml_dtypes.int4)
    op = chunkq.DequantizeLinear([1.0, 1.0], np.uint8([15, 1]), axis=0, x_dtype="int4")
    with pytest.raises(chunkq.SpecError, match="zero_point holds 15"):
        op(x)
    op = chunkq.DequantizeLinear([1.0, 1.0], np.int8([-1, 1]), axis=0, x_dtype="int4")
    for _ in range(2):
        assert op(x).tolist() == [[2, 3], [2, 3]]


def test_calls_in_one_line_are_the_operators_with_the_same_arguments():
    x, codes = np.linspace(-3, 3, 64, dtype=np.float32).reshape(8, 8), np.arange(64, dtype=np.uint8).reshape(8, 8)
    parameters = ((0.5, 3), (np.float32(0.5), np.uint8(3)), (np.full(8, 0.5, np.float32), np.full(8, 3, np.uint8)))
    for scale, zero_point in parameters:
        made = {"axis": 0, "output_dtype": "float16"}
        op = chunkq.DequantizeLinear(scale, zero_point, **made)
        assert np.array_equal(chunkq.dequantize_linear(codes, scale, zero_point, **made), op(codes))
        made = {"axis": 0, "output_dtype": "uint8", "precision": "float16", "saturate": False}
        op = chunkq.QuantizeLinear(scale, zero_point, **made)
        assert np.array_equal(chunkq.quantize_linear(x, scale, zero_point, **made), op(x))
        made = {"axis": 0, "quantized_dtype": "uint8", "precision": "float16", "output_dtype": "float16"}
        op = chunkq.QuantizeDequantize(scale, zero_point, **made)
        assert np.array_equal(chunkq.quantize_dequantize(x, scale, zero_point, **made), op(x))
    for ranges in ((-1.0, 1.0, 0.0, 2.0), (-1, 1, 0, 2), (np.float32(-1), 1.0, -0.0, 2.0)):
        op = chunkq.FakeQuantize(*ranges, 16, auto_broadcast="pdpd", broadcast_axis=0)
        for _ in range(2):
            assert np.array_equal(chunkq.fake_quantize(x, *ranges, 16, auto_broadcast="pdpd", broadcast_axis=0), op(x))
