"""FakeQuantize in memory: bit-equal to the literal transcription in every corner."""

import ml_dtypes
import numpy as np
import pytest
import reference
import strategies
from hypothesis import given

import chunkq
from chunkq.run import STREAM_BYTES

FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


def request(rng, shape, dtype):
    """x and four ranges of four shapes that broadcast to it."""
    shapes = [tuple(n if rng.random() < 0.5 else 1 for n in shape)[rng.integers(0, len(shape) + 1) :] for _ in "1234"]
    return strategies.floats(rng, shape, dtype), [strategies.ranges(rng, s, dtype) for s in shapes]


def levels_for(rng, dtype):
    most = 2**53 + 1 if dtype is np.float64 else 2**24 + 1
    return int(rng.choice([2, 3, 15, 16, 255, 256, 65536, most, rng.integers(2, most, endpoint=True)]))


@given(strategies.shapes, strategies.seeds)
def test_random_ranges(shape, seed):
    rng = np.random.default_rng(seed)
    dtype = FLOATS[seed % 4]
    x, ranges = request(rng, shape, dtype)
    levels = levels_for(rng, dtype)
    found = chunkq.fake_quantize(x, *ranges, levels, n_threads=seed % 2 + 1)
    assert reference.same_bits(found, reference.fake_quantize(x, *ranges, levels))


@given(strategies.solid_shapes, strategies.seeds)
def test_a_region_equals_the_slice_of_the_whole(run_region, shape, seed):
    """R12, with four ranges of four shapes."""
    rng = np.random.default_rng(seed)
    x, ranges = request(rng, shape, FLOATS[seed % 4])
    region = strategies.region(rng, shape)
    whole = reference.fake_quantize(x, *ranges, 16)
    assert reference.same_bits(run_region(chunkq.FakeQuantize(*ranges, 16), x, region), whole[region])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n_threads", [1, 2, 7])
def test_many_ranges_on_every_instruction_set(dtype, n_threads, isa):
    rng = np.random.default_rng(n_threads)
    for shape in [(), (5,), (3, 1100), (1100, 3), (40, 33), (2, 3, 5, 7), (17000,), (2, 70, 130)]:
        for _ in range(4):
            x, ranges = request(rng, shape, dtype)
            levels = levels_for(rng, dtype)
            found = chunkq.fake_quantize(x, *ranges, levels, n_threads=n_threads)
            assert reference.same_bits(found, reference.fake_quantize(x, *ranges, levels)), (shape, levels)


CORNERS = [0.0, -0.0, 0.5, 1.0, 1.5, 2.5, -1.0, 3.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("levels", [2, 3, 5, 256])
def test_every_pair_of_corner_limits(dtype, levels, isa):
    """Equal, reversed, infinite and NaN limits, each against every corner of x."""
    with np.errstate(over="ignore"):
        v = np.array(CORNERS).astype(dtype)
    n = len(v)
    x = v.reshape(1, 1, n)
    il, ih = v.reshape(n, 1, 1), v.reshape(1, n, 1)
    for ol, oh in ((dtype(-2), dtype(3)), (dtype(3), dtype(-2)), (dtype(1), dtype(1)), (dtype(np.nan), dtype(0))):
        tensor = np.ascontiguousarray(np.broadcast_to(x, (n, n, n)))
        found = chunkq.fake_quantize(tensor, il, ih, ol, oh, levels)
        assert reference.same_bits(found, reference.fake_quantize(tensor, il, ih, ol, oh, levels))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_code_of_16_bits(dtype, isa):
    """All 65,536 codes through load, an identity-like range, and store."""
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    for low, high, levels in ((-65504, 65504, 2**24 + 1), (-1, 1, 256), (0, 6e-8, 2), (3, 3, 4)):
        ranges = [dtype(v) for v in (low, high, low, high)]
        assert reference.same_bits(
            chunkq.fake_quantize(x, *ranges, levels), reference.fake_quantize(x, *ranges, levels)
        )


def test_float16_results_round_to_nearest_even(isa):
    """Products of two float16 fractions, exact in float32: ties of every kind, denormal ones among them."""
    x = np.arange(2049).astype(np.float16)
    for code in range(1, 0x7C00, 67):
        for high in np.uint16([code, code | 0x8000]).view(np.float16):
            ranges = [np.float16(0), np.float16(2048), np.float16(0), high]
            assert reference.same_bits(
                chunkq.fake_quantize(x, *ranges, 2049), reference.fake_quantize(x, *ranges, 2049)
            )


def test_nan_results_are_one_nan(isa):
    x = np.uint32([0x7FC00001, 0xFFC12345, 0x7F800001]).view(np.float32)
    found = chunkq.fake_quantize(x, 0.0, 1.0, 0.0, 1.0, 4)
    assert set(found.view(np.uint32).tolist()) == {0x7FC00000}


@pytest.mark.parametrize(
    ("shape", "found", "start", "axes"),
    [
        ((2, 3, 4, 5), (3, 4), 1, (1, 2)),
        ((2, 3, 4, 5), (3, 1, 1), -1, (1,)),
        ((2, 3, 4, 5), (3, 1, 1, 1, 1), 1, (1,)),
        ((2, 3, 4, 5), (2, 3, 4, 5), -1, (0, 1, 2, 3)),
        ((2, 3, 4, 5), (5,), -1, (3,)),
        ((2, 3, 4, 5), (2,), 0, (0,)),
        ((3, 3), (3,), 0, (0,)),  # a square tensor: the axis decides
        ((2, 3), (1, 1, 1), 0, ()),
    ],
)
def test_pdpd(shape, found, start, axes):
    rng = np.random.default_rng(0)
    x = strategies.floats(rng, shape, np.float32)
    low = rng.random(found).astype(np.float32)
    y = chunkq.fake_quantize(x, low, 2.0, 0.0, 1.0, 16, auto_broadcast="pdpd", broadcast_axis=start)
    full = low.reshape([n if a in axes else 1 for a, n in enumerate(shape)])
    assert reference.same_bits(y, reference.fake_quantize(x, full, np.float32(2), np.float32(0), np.float32(1), 16))


def test_none_wants_equal_shapes():
    x = np.zeros((2, 3), np.float32)
    low, high = np.full_like(x, -1), np.full_like(x, 1)
    assert chunkq.fake_quantize(x, low, high, low, high, 3, auto_broadcast="none").shape == (2, 3)
    with pytest.raises(chunkq.SpecError, match="equal"):
        chunkq.fake_quantize(x, low, 1.0, low, high, 3, auto_broadcast="none")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [300, STREAM_BYTES // 8 // 3 + 25])
def test_in_place(rows, dtype, isa):
    """The rows past STREAM_BYTES, and rows of three taken several at a time."""
    x = strategies.floats(np.random.default_rng(0), (rows, 3), dtype)
    low = np.array([-1, -2, 1], dtype)
    expected = reference.fake_quantize(x, low, *np.array([1, -2, 2], dtype), 16)
    assert chunkq.fake_quantize(x, low, 1.0, -2.0, 2.0, 16, out=x, n_threads=2) is x
    assert reference.same_bits(x, expected)


@pytest.mark.parametrize("order", ["F", ">", "strided"])
def test_in_place_in_odd_layouts(order, isa):
    x = strategies.floats(np.random.default_rng(0), (6, 8), np.float32)
    expected = reference.fake_quantize(x, *np.float32([-1, 1, -2, 2]), 16)
    odd = {"F": np.asfortranarray, ">": lambda v: v.astype(">f4"), "strided": lambda v: np.repeat(v, 2, 1)[:, ::2]}
    view = odd[order](x)
    chunkq.fake_quantize(view, -1.0, 1.0, -2.0, 2.0, 16, out=view)
    assert reference.same_bits(np.ascontiguousarray(view, np.float32), expected)


@pytest.mark.parametrize("dtype", FLOATS[:3])
def test_layouts(dtype, isa):
    rng = np.random.default_rng(3)
    x, ranges = request(rng, (5, 6, 7), dtype)
    expected = reference.fake_quantize(x, *ranges, 16)
    swapped = [r.astype(r.dtype.newbyteorder(">")) for r in ranges]
    for view in (
        np.asfortranarray(x),
        x[::-1].copy()[::-1],
        x.astype(x.dtype.newbyteorder(">")),
        np.repeat(x, 2, 1)[:, ::2],
    ):
        assert reference.same_bits(chunkq.fake_quantize(view, *swapped, 16), expected)
