"""`calibrate`: what it finds is what NumPy finds, to the bit, for any layout, chunks, order of merging and scheduler."""

import json
import math
import warnings

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import chunkq
from chunkq.calibration import SMALLEST_SCALE, ZeroIsNoLevel, grid_of
from chunkq.groups import groups_of
from chunkq.statistics import Extremes, Histogram, view

TYPES = ("float32", "float16", "bfloat16", "float64")
KINDS = [
    {},
    {"axis": 0},
    {"axis": 1},
    {"axis": -1},
    {"axis": (0, 2)},
    {"axis": (0, 1, 2)},
    {"axis": 1, "block_size": 2},
    {"axis": 2, "block_size": 3},
    {"axis": 0, "block_size": 4},
    {"block_size": (4, 2, 3)},
    {"block_size": (1, 5, 100)},
]
SHAPE = (6, 5, 8)


def values(shape, dtype="float32", seed=0, odd=True):
    """Normal values, with some of every kind that is not finite, zeros of both signs, and equal values."""
    r = np.random.default_rng(seed)
    x = r.standard_normal(shape).astype(np.float32)
    flat = x.reshape(-1)
    if odd and flat.size > 40:
        at = r.permutation(flat.size)
        flat[at[:12]] = np.repeat([np.nan, np.inf, -np.inf, -0.0], 3)
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def same(one, other):
    """Whether two calibrations are the same to the bit."""
    assert (one.shape, one.steps, one.method) == (other.shape, other.steps, other.method)
    for name in ("minimum", "maximum", "count", "nan", "positive_infinite", "negative_infinite", "histogram"):
        mine, yours = getattr(one, name), getattr(other, name)
        if mine is None or yours is None:
            assert mine is yours
            continue
        assert (mine.shape, mine.dtype) == (yours.shape, yours.dtype), name
        assert mine.tobytes() == yours.tobytes(), name


def parts(x, groups):
    """The values of each group, by its place in the grid."""
    for at in np.ndindex(groups.grid):
        yield (
            at,
            x[
                tuple(
                    slice(i * k, (i + 1) * k) if k else slice(None) for i, k in zip(at, groups.steps, strict=True)
                )
            ].astype(np.float64).reshape(-1),
        )  # fmt: skip


# ---- against NumPy


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_numpy_finds(kind, dtype):
    x = values(SHAPE, dtype)
    found = chunkq.calibrate(x, method="percentile", bins=32, **kind)
    groups = groups_of(SHAPE, **kind)
    counted = found.histogram.reshape(*groups.grid, 32)
    edges = found.edges().reshape(*groups.grid, 33)
    for at, own in parts(x, groups):
        finite = own[np.isfinite(own)]
        assert found.minimum.reshape(groups.grid)[at] == finite.min(initial=np.inf if finite.size else 0)
        assert found.maximum.reshape(groups.grid)[at] == finite.max(initial=-np.inf if finite.size else 0)
        assert found.count.reshape(groups.grid)[at] == finite.size
        assert found.nan.reshape(groups.grid)[at] == np.isnan(own).sum()
        assert found.positive_infinite.reshape(groups.grid)[at] == (own == np.inf).sum()
        assert found.negative_infinite.reshape(groups.grid)[at] == (own == -np.inf).sum()
        limit = np.abs(finite).max(initial=0)
        if limit > 0:
            expected, theirs = np.histogram(finite, 32, range=(-limit, limit))
            np.testing.assert_array_equal(counted[at], expected)
            np.testing.assert_allclose(edges[at], theirs, rtol=1e-15, atol=limit * 1e-15)
        else:
            assert counted[at].sum() == finite.size


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (70001,), (3, 300), (2500, 3), (4, 3, 5000), (9, 2100, 2)])
@pytest.mark.parametrize("n_threads", [1, 2, 7])
def test_shapes_and_threads(shape, n_threads):
    x = values(shape, odd=math.prod(shape) > 1000)
    for axis in (None, *range(len(shape))):
        found = chunkq.calibrate(x, axis=axis, method="mse", bins=64, n_threads=n_threads)
        same(found, chunkq.calibrate(x, axis=axis, method="mse", bins=64, n_threads=1))
        over = tuple(a for a in range(len(shape)) if a != axis)
        finite = np.where(np.isfinite(x), x, np.nan)
        if x.size:
            nothing = ~np.isfinite(x).any(over)
            np.testing.assert_array_equal(found.minimum, np.where(nothing, 0, np.fmin.reduce(finite, over)))
            np.testing.assert_array_equal(found.maximum, np.where(nothing, 0, np.fmax.reduce(finite, over)))
        assert found.count.sum() == np.isfinite(x).sum() == found.histogram.sum()


@pytest.mark.parametrize("layout", ["C", "F", "reversed", "strided", "big-endian", "read-only"])
def test_layouts(layout):
    x = values((12, 10, 16))
    made = {
        "C": x,
        "F": np.asfortranarray(x),
        "reversed": x[::-1, :, ::-1][::-1, :, ::-1],
        "strided": np.repeat(x, 2, axis=1)[:, ::2],
        "big-endian": x.astype(">f4"),
        "read-only": x.copy(),
    }[layout]
    made.flags.writeable = layout != "read-only"
    for axis in (None, 0, 1, 2):
        same(chunkq.calibrate(made, axis=axis, method="mse"), chunkq.calibrate(x, axis=axis, method="mse"))


# ---- any chunks, order and scheduler


@st.composite
def chunkings(draw, shape):
    """For each axis, lengths of blocks that add up to it."""
    chunks = []
    for n in shape:
        cuts = sorted(draw(st.lists(st.integers(0, n), max_size=3)))
        chunks.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)))
    return tuple(chunks)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_dask_of_any_chunks(data):
    kind = data.draw(st.sampled_from(KINDS))
    chunks = data.draw(chunkings(SHAPE))
    x = values(SHAPE, data.draw(st.sampled_from(TYPES)), seed=data.draw(st.integers(0, 99)))
    method = data.draw(st.sampled_from(("minmax", "percentile")))
    lazy = da.from_array(x, chunks=chunks)
    found = chunkq.calibrate(lazy, method=method, scheduler=data.draw(st.sampled_from(("sync", "threads"))), **kind)
    same(found, chunkq.calibrate(x, method=method, **kind))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_of_merging(data):
    kind = data.draw(st.sampled_from(KINDS))
    groups = groups_of(SHAPE, **kind)
    x = values(SHAPE, seed=data.draw(st.integers(0, 99)))
    limits = np.full(groups.grid, 2.5)
    chunks = data.draw(chunkings(SHAPE))
    ends = [np.cumsum((0, *lengths)) for lengths in chunks]
    regions = [
        tuple(slice(int(e[i]), int(e[i + 1])) for e, i in zip(ends, at, strict=True))
        for at in np.ndindex(*map(len, chunks))
    ]
    for statistic in (Extremes(groups), Histogram(groups, 32, limits)):
        state, whole = (statistic.empty(groups.grid) for _ in range(2))
        for region in data.draw(st.permutations(regions)):
            statistic.merge(view(state, groups.cut(region)), statistic.measure(region, [x[region]]))
        everything = tuple(slice(0, n) for n in SHAPE)
        statistic.merge(whole, statistic.measure(everything, [x], n_threads=3))
        for name in whole:
            np.testing.assert_array_equal(state[name], whole[name])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_zarr_of_any_chunks(tmp_path_factory, data):
    kind = data.draw(st.sampled_from(KINDS))
    x = values(SHAPE, data.draw(st.sampled_from(("float32", "float16", "float64"))), seed=data.draw(st.integers(0, 99)))
    chunks = tuple(data.draw(st.integers(1, n + 2)) for n in SHAPE)
    at = tmp_path_factory.mktemp("calibrate") / "x.zarr"
    zarr.create_array(str(at), data=x, chunks=chunks, config={"write_empty_chunks": True})
    scheduler = data.draw(st.sampled_from(("sync", "threads")))
    found = chunkq.calibrate(str(at), method="mse", scheduler=scheduler, workers=2, **kind)
    same(found, chunkq.calibrate(x, method="mse", **kind))


def test_worker_processes_and_a_cluster(tmp_path):
    from distributed import Client, LocalCluster

    x = values((64, 40), seed=3)
    zarr.create_array(str(tmp_path / "x.zarr"), data=x, chunks=(8, 40))
    expected = chunkq.calibrate(x, axis=1, method="percentile")
    same(chunkq.calibrate(tmp_path / "x.zarr", axis=1, method="percentile", scheduler="processes", workers=2), expected)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        same(chunkq.calibrate(tmp_path / "x.zarr", axis=1, method="percentile", scheduler=client), expected)
        lazy = da.from_zarr(str(tmp_path / "x.zarr"))
        same(chunkq.calibrate(lazy, axis=1, method="percentile", scheduler=client), expected)


def test_signed_zeros_do_not_depend_on_the_order():
    for x in ([0.0, -0.0], [-0.0, 0.0], [-0.0], [0.0]):
        found = chunkq.calibrate(np.float32(x))
        assert not np.signbit(found.minimum)
        assert not np.signbit(found.maximum)


def test_more_equal_values_than_float32_counts():
    n = 2**24 + 1
    found = chunkq.calibrate(np.full(n, 1.5, np.float32), method="percentile", bins=8)
    assert found.count == n == found.histogram[-1]


def test_float16_next_to_zero_fills_its_bins():
    x = (np.linspace(-1e-5, 1e-5, 100_001)).astype(np.float16)
    found = chunkq.calibrate(x, method="percentile", bins=128)
    # the float16 in between are subnormals 6e-8 apart: about 336, in 128 bins
    assert (found.histogram > 0).all()
    assert len(np.unique(found.edges())) == 129


def test_extreme_limits():
    big = np.finfo(np.float64).max
    x = np.array([-big, -big / 4, 0.0, big / 4, big, 5e-324])
    found = chunkq.calibrate(x, method="percentile", bins=4)
    np.testing.assert_array_equal(found.histogram, [1, 1, 3, 1])
    assert np.isfinite(found.edges()).all()
    tiny = chunkq.calibrate(np.array([5e-324, -5e-324, 0.0]), method="percentile", bins=4)
    assert tiny.histogram.sum() == 3


# ---- parameters


def as_onnxruntime(low, high, dtype, symmetric):
    from onnxruntime.quantization.quant_utils import compute_scale_zp

    grid = grid_of(dtype, symmetric, False)
    ends = (np.array(end, dtype) for end in (grid.low, grid.high))
    return compute_scale_zp(np.float32(low), np.float32(high), *ends, symmetric)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_parameters_are_onnxruntimes(dtype, symmetric):
    pytest.importorskip("onnxruntime.quantization")
    x = values((200, 50), seed=5) + np.float32(0.3) * np.arange(-100, 100, dtype=np.float32)[:, None]
    x[::4] = np.clip(x[::4], -0.7, 0.7)  # the zero point lies halfway between two codes
    found = chunkq.calibrate(x, axis=0)
    scale, zero_point = found.parameters(dtype, symmetric=symmetric)
    for i, (low, high) in enumerate(zip(found.minimum, found.maximum, strict=True)):
        zero, step = as_onnxruntime(low, high, dtype, symmetric)
        assert scale[i] == np.float32(step)
        assert zero_point[i] == zero
    expected_zero = {"int8": 0, "uint8": 128, "int16": 0, "uint16": 32768}[dtype]
    assert not symmetric or set(zero_point.tolist()) == {expected_zero}


def test_percentile_is_onnxruntimes():
    calibrate = pytest.importorskip("onnxruntime.quantization.calibrate")
    x = values((300, 200), seed=6, odd=False).astype(np.float64)
    collector = calibrate.HistogramCollector(
        method="percentile", symmetric=False, num_bins=2048, num_quantized_bins=128, percentile=99.9, scenario="same"
    )
    collector.collect_value({"x": x})
    low, high = collector.compute_percentile()["x"][:2]
    found = chunkq.calibrate(x, method="percentile", percentile=99.9)
    mine = found.range(grid_of("uint8", False, False))
    # it cuts at the left edge of the bin in which a share is reached, also above, and so a bin more than was asked for
    edges = found.edges()
    np.testing.assert_array_equal(mine, [low, edges[np.searchsorted(edges, high) + 1]])


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("percentile", [99, 99.9, 99.99, 100])
@pytest.mark.parametrize("bins", [2, 4, 2048])
def test_a_percentile_keeps_its_share(symmetric, percentile, bins):
    r = np.random.default_rng(1)
    normal = np.abs(r.standard_normal(100_000))
    some = [normal, -normal, r.standard_normal(999), np.append(normal, 1e4), np.append(-normal, [1e4, -3e3])]
    for wide in (*some, np.full(9, 3.0), np.full(9, -3.0), np.arange(10.0)):
        x = wide.astype(np.float32)
        found = chunkq.calibrate(x, method="percentile", percentile=percentile, bins=bins)
        low, high = found.range(grid_of("uint8", symmetric, False))
        assert low <= high
        assert np.mean((x >= low) & (x <= high)) >= percentile / 100 - 1e-12
        if percentile == 100 and not symmetric:
            assert (low, high) == (found.minimum, found.maximum)


def test_an_outlier_does_not_take_all_others_along():
    x = np.append(np.abs(np.random.default_rng(0).standard_normal(10**5)), 1e4).astype(np.float32)
    scale, zero_point = chunkq.calibrate(x, method="percentile").parameters("uint8", symmetric=False)
    assert zero_point == 0
    back = chunkq.quantize_dequantize(x[:-1], scale, zero_point)
    assert np.abs(back - x[:-1]).max() <= scale  # coarse, as its one bin is, but not lost


def test_limits_of_many_sizes_do_not_depend_on_chunks():
    x = np.array([[1.7e308, 1e308], [5e-324, -5e-324], [1e-323, 3e-323]])
    for method in ("percentile", "mse"):
        expected = chunkq.calibrate(x, axis=0, method=method, bins=16)
        for chunks in ((1, 2), (3, 1), (1, 1)):
            same(chunkq.calibrate(da.from_array(x, chunks=chunks), axis=0, method=method, bins=16), expected)


def test_mse_of_float64_does_not_depend_on_its_size():
    x = np.random.default_rng(3).standard_t(2, 4000)
    sizes = (1.0, 2.0**-200, 2.0**900)
    assert len({float(chunkq.calibrate(x * size, method="mse").ranges(16)[1][0]) / size for size in sizes}) == 1


def test_masked_blocks_of_a_lazy_array_are_refused():
    lazy = da.from_array(np.arange(4, dtype="f4"), chunks=2).map_blocks(
        lambda block: np.ma.masked_greater(block, 1), dtype="f4", meta=np.empty(0, "f4")
    )
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.calibrate(lazy, scheduler="sync")
    assert caught.value.reason == "masked"


def test_no_groups_at_all():
    for shape, kind in (((3, 0), {"axis": 1}), ((0, 3), {"axis": 1}), ((0,), {})):
        x = np.zeros(shape, np.float32)
        for method in ("minmax", "mse", "percentile"):
            arguments = chunkq.calibrate(x, method=method, **kind).arguments("int8")
            assert chunkq.quantize_linear(x, **arguments).shape == shape


@pytest.mark.parametrize("method", ["minmax", "absmax", "percentile", "mse"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4", "int2", "int16"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_zero_stays_zero_and_scales_are_positive(method, dtype, symmetric):
    x = np.float32([[0, 0, 0, 0], [5, 5, 5, 5], [-5, -5, -5, -5], [1e-42, 0, 0, 0], [-1, 2, 3, 4], [3e38, -3e38, 0, 1]])
    found = chunkq.calibrate(x, axis=0, method=method)
    arguments = found.arguments(dtype, symmetric=symmetric)
    assert (arguments["scale"] >= SMALLEST_SCALE).all()
    codes = chunkq.quantize_linear(np.zeros_like(x), **arguments)
    back = chunkq.dequantize_linear(codes, arguments["scale"], arguments["zero_point"], axis=0)
    np.testing.assert_array_equal(back, np.zeros_like(x))


def test_narrow_range_and_floats():
    x = np.float32([-4, 8])
    found = chunkq.calibrate(x)
    assert found.parameters("int8", symmetric=False)[0] == np.float32(12 / 255)
    assert found.parameters("int8", symmetric=False, narrow_range=True)[0] == np.float32(12 / 254)
    scale, zero_point = found.parameters("float8_e4m3fn")
    assert (scale, zero_point) == (np.float32(8 / 448), None)
    assert found.parameters("float4_e2m1fn")[0] == np.float32(8 / 6)
    for wrong in ({"symmetric": False}, {"narrow_range": True}):
        with pytest.raises(chunkq.SpecError, match="no zero point"):
            found.parameters("float8_e4m3fn", **wrong)


def test_mse_finds_no_worse_range_than_any_ratio():
    x = np.concatenate([values((5000,), odd=False), np.float32([30.0])])
    found = chunkq.calibrate(x, method="mse", bins=4096)

    def error(scale, zero_point):
        return np.mean(
            (chunkq.quantize_dequantize(x, scale, zero_point, output_dtype="float32") - x) ** 2, dtype=np.float64
        )

    best = error(*found.parameters("int4"))
    whole = error(*chunkq.calibrate(x).parameters("int4"))
    others = [error(np.float32(30 * r / 7), np.int8(0).astype(ml_dtypes.int4)) for r in np.arange(10, 101) / 100]
    assert best < whole / 2
    assert best <= min(others) * 1.01


@pytest.mark.parametrize("levels", [2, 3, 16, 255, 256])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_ranges_keep_zero(levels, symmetric, dtype):
    if levels < 3:
        with pytest.raises(chunkq.SpecError, match="need 3"):
            chunkq.calibrate(values(SHAPE)).ranges(levels, symmetric=symmetric)
        return
    x = np.nan_to_num(values(SHAPE), posinf=3, neginf=-2).astype(values((1,), dtype).dtype)
    for axis in (None, 0, (0, 2)):
        found = chunkq.calibrate(x, axis=axis)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            ranges = found.ranges(levels, symmetric=symmetric)
        zeros = chunkq.fake_quantize(np.zeros_like(x), *ranges, levels=levels)
        off = np.count_nonzero(zeros.astype(np.float64))
        # what 16 bits cannot hold is said
        assert bool(off) == any(w.category is ZeroIsNoLevel for w in heard)
        assert not off or dtype in ("float16", "bfloat16")
        width = (ranges[1] - ranges[0]).astype(np.float64)
        assert (np.abs(zeros.astype(np.float64)) <= width * 2**-7).all()
        if dtype in ("float32", "float64"):
            assert (ranges[0].astype(np.float64).reshape(found.minimum.shape) <= found.minimum + 1e-6).all()
            assert (ranges[1].astype(np.float64).reshape(found.minimum.shape) >= found.maximum - 1e-6).all()


def test_a_warning_where_zero_is_no_level():
    found = chunkq.calibrate(np.float32([-1, 2.2]))
    with pytest.warns(ZeroIsNoLevel, match="1 of 1 groups"):
        ranges = found.ranges(4, keep_zero=False)
    assert [float(r[0]) for r in ranges[:2]] == [-1, float(np.float32(2.2))]


# ---- what was reported of others


def test_early_extrema_are_kept():
    x = np.float32([[3, 1, -2], [0, 0, 5], [-9, 7, 1], [4, 4, 4]])
    for chunks in ((4,), (1, 1, 1, 1), (3, 1), (2, 2)):
        found = chunkq.calibrate(da.from_array(x, chunks=(chunks, 3)), axis=1)
        np.testing.assert_array_equal(found.minimum, [-9, 0, -2])
        np.testing.assert_array_equal(found.maximum, [4, 7, 5])


def test_a_constant_dimension_survives_the_round_trip():
    x = np.float32([[0.25, -3.0, 0.0]])
    for symmetric in (False, True):
        arguments = chunkq.calibrate(x, axis=1).arguments("int8", symmetric=symmetric)
        codes = chunkq.quantize_linear(x, **arguments)
        back = chunkq.dequantize_linear(codes, arguments["scale"], arguments["zero_point"], axis=1)
        np.testing.assert_allclose(back, x, rtol=0, atol=0.02)
        assert back[0, 2] == 0


# ---- wrong requests

WRONG = [
    ({"method": "entropy"}, "argument"),
    ({"percentile": 50}, "argument"),
    ({"percentile": float("nan")}, "argument"),
    ({"percentile": "99"}, "argument"),
    ({"bins": 3, "method": "mse"}, "argument"),
    ({"bins": 1 << 30}, "argument"),
    ({"axis": 3}, "axis"),
    ({"axis": (0, -3)}, "axis"),
    ({"axis": 1.0}, "axis"),
    ({"block_size": 2}, "axis"),
    ({"axis": 0, "block_size": -1}, "block_size"),
    ({"axis": 0, "block_size": (1, 1, 1)}, "axis"),
    ({"block_size": (1, 1)}, "block_size"),
    ({"n_threads": 0}, "n_threads"),
    ({"missing": "zero"}, "argument"),
    ({"workers": 0}, "n_threads"),
]


@pytest.mark.parametrize(("options", "reason"), WRONG, ids=str)
def test_wrong_requests(options, reason):
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.calibrate(values(SHAPE), **options)
    assert caught.value.reason == reason


@pytest.mark.parametrize("x", [[1.0], 1.0, np.int8([1]), np.ma.masked_array([1.0], [True]), np.array(["a"])])
def test_wrong_tensors(x):
    with pytest.raises(chunkq.SpecError):
        chunkq.calibrate(x)


def test_what_cannot_be_had_of_a_calibration():
    found = chunkq.calibrate(values(SHAPE), axis=0, block_size=2)
    for call, reason in (
        (lambda: found.ranges(), "block_size"),
        (lambda: found.edges(), "argument"),
        (lambda: found.parameters("int32"), "dtype"),
        (lambda: chunkq.calibrate(values(SHAPE), method="mse").parameters("float8_e5m2"), "argument"),
        (lambda: chunkq.calibrate(np.array([1e300])).parameters(), "value"),
        (lambda: chunkq.calibrate(np.array([1e300])).parameters("float8_e4m3fn"), "value"),
        (lambda: chunkq.calibrate(values(SHAPE), scheduler="bogus"), "scheduler"),
    ):
        with pytest.raises(chunkq.SpecError) as caught:
            call()
        assert caught.value.reason == reason


def test_json_is_json():
    x = np.full((2, 3), np.nan, np.float32)
    text = chunkq.calibrate(x, axis=0).to_json()
    assert json.loads(text)["nan"] == [3, 3]
    assert json.loads(text)["minimum"] == [0, 0]
