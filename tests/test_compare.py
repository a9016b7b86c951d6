"""`compare`: every sum is what `math.fsum` gives, for any layout, chunks, order of merging and scheduler."""

import json
import math
from fractions import Fraction

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy
from test_calibrate import SHAPE, chunkings, values

import chunkq
from chunkq.comparison import Measures
from chunkq.exact import LIMBS, carry, rounded
from chunkq.groups import groups_of
from chunkq.statistics import Errors, view

FIELDS = (
    "compared",
    "nonfinite",
    "mismatched",
    "max_abs_error",
    "mean_abs_error",
    "mean_error",
    "mse",
    "sqnr_db",
    "cosine",
)


def same_measures(one, other):
    """Whether two sets of measures are the same to the bit."""
    for name in FIELDS:
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
        assert getattr(one, name).shape == getattr(other, name).shape, name
    for name, mine in one.sums.items():
        assert mine.tobytes() == other.sums[name].tobytes(), name
    assert (one.saturated is None) == (other.saturated is None)
    assert one.saturated is None or one.saturated.tobytes() == other.saturated.tobytes()


def same(one, other):
    same_measures(one.overall, other.overall)
    same_measures(one.channels, other.channels)
    assert one.minimum.tobytes() == other.minimum.tobytes()
    assert one.maximum.tobytes() == other.maximum.tobytes()
    assert one.worst_index.tolist() == other.worst_index.tolist()
    assert one.worst == other.worst
    assert one.axis == other.axis


def pairs(x):
    """Something near x, with some values equal and some others not finite."""
    y = (x.astype(np.float64) * 1.01).astype(x.dtype)
    y.reshape(-1)[::7] = x.reshape(-1)[::7]
    y.reshape(-1)[5:30:11] = np.nan
    return y


def terms(a, b):
    """What is summed, of the elements that are finite on both sides."""
    a, b = a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    d = a - b
    return {"d": d, "abs_d": abs(d), "dd": d * d, "aa": a * a, "bb": b * b, "ab": a * b}


# ---- against math.fsum


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_sums_are_fsums(axis, dtype):
    x = values((40, 30, 50), dtype, seed=1)
    y = pairs(x)
    found = chunkq.compare(x, y, axis=axis)
    channels = [(x, y)] if axis is None else [(np.take(x, i, axis), np.take(y, i, axis)) for i in range(x.shape[axis])]
    for i, (a, b) in enumerate(channels):
        for name, own in terms(a, b).items():
            assert found.channels.sums[name].reshape(-1)[i] == math.fsum(own), name
        assert found.channels.max_abs_error.reshape(-1)[i] == terms(a, b)["abs_d"].max()
        odd = ~(np.isfinite(a) & np.isfinite(b))
        assert found.channels.nonfinite.reshape(-1)[i] == odd.sum()
        with np.errstate(invalid="ignore"):
            differ = odd & ~((a == b) | (np.isnan(a) & np.isnan(b)))
        assert found.channels.mismatched.reshape(-1)[i] == differ.sum()
    whole = terms(x, y)
    for name, own in whole.items():
        assert found.overall.sums[name] == math.fsum(own), name
    n = whole["d"].size
    assert found.overall.mse == math.fsum(whole["dd"]) / n
    np.testing.assert_allclose(found.overall.sqnr_db, 10 * np.log10(whole["aa"].sum() / whole["dd"].sum()), rtol=1e-12)
    cosine = whole["ab"].sum() / np.sqrt(whole["aa"].sum() * whole["bb"].sum())
    np.testing.assert_allclose(found.overall.cosine, cosine, rtol=1e-12)


@settings(max_examples=150, deadline=None)
@given(of_numpy.arrays(np.float64, st.integers(1, 60), elements=st.floats(allow_nan=False, allow_infinity=False)))
def test_sums_of_any_floats(x):
    found = chunkq.compare(x, np.zeros_like(x))
    for name, own in (("d", x), ("abs_d", np.abs(x))):
        # math.fsum gives up where the sum overflows on the way
        exact = sum(map(Fraction, own.tolist()))
        try:
            expected = float(exact)
        except OverflowError:
            expected = math.inf if exact > 0 else -math.inf
        assert found.overall.sums[name] == expected
    with np.errstate(over="ignore"):
        squares = x * x
    if np.isinf(squares).any():
        assert found.overall.sums["aa"] == np.inf
    elif squares.sum() < 1e300:
        assert found.overall.sums["aa"] == math.fsum(squares)


def test_cancellation_and_subnormals():
    tiny, big = 5e-324, 2.0**1000
    x = np.array([big, tiny, -big, tiny, 1.0, -1.0])
    assert chunkq.compare(x, np.zeros(6)).overall.sums["d"] == 2 * tiny
    assert chunkq.compare(np.full(1001, 0.1), np.zeros(1001)).overall.sums["d"] == math.fsum([0.1] * 1001)


def test_terms_that_are_too_large_are_told():
    x = np.array([1.7e308, -1.7e308])
    found = chunkq.compare(x, -x)
    assert (found.overall.max_abs_error, found.overall.mse) == (np.inf, np.inf)
    assert np.isnan(found.overall.mean_error)
    assert "Infinity" not in found.to_json()


@given(st.lists(st.lists(st.integers(-(2**62), 2**62), min_size=LIMBS - 1, max_size=LIMBS - 1), min_size=1, max_size=3))
def test_carrying_changes_no_sum(rows):
    limbs = np.array([[*row, 0] for row in rows], np.int64)
    value = [sum(limb << 32 * i for i, limb in enumerate(row)) for row in limbs.tolist()]
    carry(limbs)
    assert ((limbs[:, :-1] >= 0) & (limbs[:, :-1] < 2**32)).all()
    assert [sum(limb << 32 * i for i, limb in enumerate(row)) for row in limbs.tolist()] == value
    for number, got in zip(value, rounded(limbs), strict=True):
        try:
            assert got == number / (1 << 1074)
        except OverflowError:
            assert np.isinf(got)


# ---- any chunks, order and scheduler


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_dask_of_any_chunks(data):
    x = values(
        SHAPE, data.draw(st.sampled_from(("float32", "bfloat16", "float64"))), seed=data.draw(st.integers(0, 99))
    )
    y = pairs(x)
    axis = data.draw(st.sampled_from((None, 0, 1, 2)))
    a, b = (da.from_array(z, chunks=data.draw(chunkings(SHAPE))) for z in (x, y))
    same(chunkq.compare(a, b, axis=axis, scheduler="sync"), chunkq.compare(x, y, axis=axis))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_of_merging(data):
    groups = groups_of(SHAPE, data.draw(st.sampled_from((None, 0, 1, 2, (0, 2)))))
    x = values(SHAPE, seed=data.draw(st.integers(0, 99)))
    y = pairs(x)
    y.reshape(-1)[40:60] = x.reshape(-1)[40:60] + np.float32(0.5)  # equal errors: the first place counts
    ends = [np.cumsum((0, *lengths)) for lengths in data.draw(chunkings(SHAPE))]
    regions = [
        tuple(slice(int(e[i]), int(e[i + 1])) for e, i in zip(ends, at, strict=True))
        for at in np.ndindex(*(len(e) - 1 for e in ends))
    ]
    statistic = Errors(groups)
    state = statistic.empty(groups.grid)
    for region in data.draw(st.permutations(regions)):
        statistic.merge(view(state, groups.cut(region)), statistic.measure(region, [x[region], y[region]]))
    everything = tuple(slice(0, n) for n in SHAPE)
    whole = statistic.empty(groups.grid)
    statistic.merge(whole, statistic.measure(everything, [x, y], n_threads=3))
    for name in whole:
        np.testing.assert_array_equal(state[name], whole[name])


@pytest.mark.parametrize("n_threads", [1, 2, 7])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (70001,), (3, 5000), (2500, 3), (4, 3, 500)])
def test_shapes_and_threads(shape, n_threads):
    x = values(shape, odd=math.prod(shape) > 1000)
    y = x + np.float32(0.125) * (x > 0)
    for axis in (None, *(a for a, n in enumerate(shape) if n < 3000)):
        found = chunkq.compare(x, y, axis=axis, n_threads=n_threads)
        same(found, chunkq.compare(np.array(x, order="F"), y[...], axis=axis, n_threads=1))
        for place in found.worst:
            assert place.error == abs(place.a - place.b)
            assert (place.a, place.b) == (x[place.index], y[place.index])


# ---- with operators


def quantized(tmp_path, x, scale, axis, dtype="int8", chunks=(8, 10)):
    zarr.create_array(str(tmp_path / "x.zarr"), data=x, chunks=chunks)
    op = chunkq.QuantizeLinear(scale, np.zeros(len(scale), np.int8).astype(dtype), axis=axis)
    chunkq.plan(op, tmp_path / "x.zarr", tmp_path / "q.zarr").run()
    return op


@pytest.mark.parametrize("scheduler", ["sync", "threads", "processes"])
def test_a_quantized_group_against_its_original(tmp_path, scheduler):
    x = values((30, 40), odd=False)
    scale = np.linspace(0.005, 0.03, 40, dtype=np.float32)
    op = quantized(tmp_path, x, scale, 1)
    found = chunkq.compare(tmp_path / "x.zarr", tmp_path / "q.zarr", scheduler=scheduler, workers=2)
    q = op(x)
    back = chunkq.DequantizeLinear(scale, op.zero_point, axis=1)
    same(found, chunkq.compare(x, q, op=back))
    same_measures(found.overall, chunkq.compare(x, q, op=back, axis=0).overall)
    same_measures(
        chunkq.compare(x, op=chunkq.QuantizeDequantize(scale, op.zero_point, axis=1)).overall,
        Measures(**(vars(found.overall) | {"saturated": None})),
    )
    assert found.axis == 1
    np.testing.assert_array_equal(found.scale, scale)
    ends = (q == -128) | (q == 127)
    assert ends.any()
    np.testing.assert_array_equal(found.channels.saturated, ends.mean(0))
    assert found.overall.saturated == ends.mean()
    lazy = chunkq.compare(da.from_array(x, chunks=7), da.from_array(q, chunks=9), op=back)
    same(found, lazy)
    assert found.peak_memory > 0


def test_a_cluster(tmp_path):
    from distributed import Client, LocalCluster

    x = values((40, 30), odd=False)
    scale = np.linspace(0.005, 0.03, 40, dtype=np.float32)
    quantized(tmp_path, x, scale, 0)
    expected = chunkq.compare(tmp_path / "x.zarr", tmp_path / "q.zarr", scheduler="sync")
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster),
    ):
        same(chunkq.compare(tmp_path / "x.zarr", tmp_path / "q.zarr"), expected)


def test_fake_quantize_in_zarr(tmp_path):
    x = values((16, 20))
    zarr.create_array(str(tmp_path / "x.zarr"), data=x, chunks=(5, 20))
    op = chunkq.FakeQuantize(-2.0, 2.0, -2.0, 2.0, 16)
    found = chunkq.compare(tmp_path / "x.zarr", op=op)
    same(found, chunkq.compare(x, op=op))
    same(found, chunkq.compare(x, op(x)))
    assert found.channels.saturated is None


def test_grids_of_two_kinds(tmp_path):
    x = values((60, 50), odd=False)
    y = x + np.float32(0.25)
    zarr.create_array(str(tmp_path / "x.zarr"), data=x, chunks=(7, 50))
    zarr.create_array(str(tmp_path / "y.zarr"), data=y, chunks=(4, 6), shards=(32, 30))
    for axis in (None, 0, 1):
        same(chunkq.compare(tmp_path / "x.zarr", tmp_path / "y.zarr", axis=axis), chunkq.compare(x, y, axis=axis))


def test_missing_and_damaged_objects(tmp_path):
    x = values((20, 10), odd=False)
    for name in ("x", "y"):
        zarr.create_array(str(tmp_path / f"{name}.zarr"), data=x, chunks=(5, 10))
    both = (tmp_path / "x.zarr", tmp_path / "y.zarr")
    assert chunkq.compare(*both).overall.sqnr_db == np.inf
    lost = tmp_path / "x.zarr" / "c" / "2" / "0"
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(chunkq.RunError, match="lacks 1 stored object"):
        chunkq.compare(*both)
    assert chunkq.compare(*both, missing="fill").overall.compared == 200
    lost.write_bytes(content[:-3])
    with pytest.raises(chunkq.RunError, match=r"reading the original .*c/2/0"):
        chunkq.compare(*both)
    with pytest.raises(chunkq.RunError, match=r"reading the source .*c/2/0"):
        chunkq.calibrate(both[0])


# ---- wrong requests


def test_wrong_requests(tmp_path):
    x = values((4, 6), odd=False)
    zarr.create_array(str(tmp_path / "x.zarr"), data=x, chunks=(2, 6))
    group = quantized(tmp_path / "more", x, np.full(4, 0.1, np.float32), 0)
    q = group(x)
    for arguments, options, reason in (
        ((x,), {}, "argument"),
        ((x, x[:2]), {}, "shape"),
        ((x, q), {}, "dtype"),
        ((q, x), {}, "dtype"),
        ((x, x), {"op": "DequantizeLinear"}, "argument"),
        ((x, q), {"op": chunkq.DequantizeLinear(np.ones(5, np.float32), axis=0)}, "scale_shape"),
        ((x, x), {"axis": 2}, "axis"),
        ((x, da.from_array(x)), {}, "argument"),
        ((x, tmp_path / "x.zarr"), {}, "argument"),
        ((tmp_path / "x.zarr", x), {}, "argument"),
        ((tmp_path / "x.zarr", tmp_path / "none.zarr"), {}, "source"),
        ((tmp_path / "x.zarr", tmp_path / "more" / "q.zarr"), {"op": group}, "argument"),
        ((np.ma.masked_array(x), x), {}, "masked"),
        (([1.0], [1.0]), {}, "argument"),
    ):
        with pytest.raises(chunkq.SpecError) as caught:
            chunkq.compare(*arguments, **options)
        assert caught.value.reason == reason, arguments


def test_a_limit_that_is_too_small(tmp_path):
    zarr.create_array(str(tmp_path / "x.zarr"), data=values((64, 64), odd=False), chunks=(8, 64))
    for options in ({"max_mem": "10MiB"}, {"axis": (0, 1), "method": "mse", "bins": 1 << 16, "max_mem": "1GiB"}):
        with pytest.raises(chunkq.SpecError) as caught:
            chunkq.calibrate(tmp_path / "x.zarr", **options)
        assert caught.value.reason == "max_mem"


def test_text_and_json():
    x = np.float32([[1, 2], [np.nan, 4]])
    found = chunkq.compare(x, x, axis=0)
    document = json.loads(found.to_json())
    assert document["channels"]["sqnr_db"] == ["inf", "inf"]
    assert document["channels"]["worst_index"] == [[0, 0], [1, 1]]
    assert document["worst"] == []
    assert "3 compared, 1 not finite (0 of them differ)" in str(found)
    nothing = json.loads(chunkq.compare(x[1:, :1], x[1:, :1]).to_json())
    assert nothing["overall"]["mse"] is None
    assert nothing["channels"]["worst_index"] == [[-1, -1]]


def test_float8_codes_saturate_at_the_largest_finite_value():
    x = np.float32([1000, -1000, 1, 0])
    codes = chunkq.quantize_linear(x, np.float32(1), output_dtype="float8_e4m3fn")
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    assert chunkq.compare(x, codes, op=chunkq.DequantizeLinear(np.float32(1))).overall.saturated == 0.5


def test_codes_that_are_held_as_bytes_saturate_as_what_they_are():
    x, codes = np.float32([448, 1, 2, -448]), np.uint8([0x7E, 0x38, 0x40, 0xFE])
    op = chunkq.DequantizeLinear(1.0, x_dtype="float8_e4m3fn")
    assert chunkq.compare(x, codes, op=op).overall.saturated == 0.5
    assert chunkq.compare(da.from_array(x), da.from_array(codes), op=op).overall.saturated == 0.5


def test_blocks_of_one_element():
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    arguments = chunkq.calibrate(x, axis=(0, 1)).arguments("int8")
    back = chunkq.DequantizeLinear(arguments["scale"], arguments["zero_point"], block_size=arguments["block_size"])
    found = chunkq.compare(x, chunkq.QuantizeLinear(**arguments)(x), op=back)
    assert found.overall.max_abs_error < 1e-5
    assert found.scale is None
    assert chunkq.compare(x, chunkq.QuantizeLinear(**arguments)(x), op=back, axis=(0, 1)).scale.shape == (4, 6)


def test_errors_whose_squares_are_too_small():
    found = chunkq.compare(np.array([1e-170, 1]), np.array([2e-170, 1]))
    assert np.isnan(found.overall.sqnr_db)
    found = chunkq.compare(np.array([1e150, 1]), np.array([1e150, 1 + 1e-12]))
    assert 3000 < found.overall.sqnr_db < 3300
    same_again = np.random.default_rng(0).standard_normal(1000)
    assert chunkq.compare(same_again, same_again).overall.cosine == 1


def test_no_axes_and_no_elements():
    found = json.loads(chunkq.compare(np.array(1.0), np.array(1.5)).to_json())
    assert found["channels"]["worst_index"] == [[]]
    empty = np.zeros((0, 5), np.float32)
    lazy = (da.from_array(empty, chunks=((0, 0), (5,))), da.from_array(empty, chunks=((0,), (5,))))
    for pair in ((empty, empty), lazy):
        assert chunkq.compare(*pair, axis=0).overall.compared == 0
