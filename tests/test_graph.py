"""Dask and zarr input: the bits of NumPy under every scheduler and chunking, and graphs of the promised size."""

import os
import subprocess
import sys
from math import prod
from pathlib import Path

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pytest
import reference
import strategies
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import chunkq
from chunkq import graph

X = strategies.integers(np.random.default_rng(0), (37, 41), np.int8)
SCALE = strategies.scales(np.random.default_rng(1), (37,))
Y = reference.dequantize_linear(X, SCALE, None, 0)
OP = chunkq.DequantizeLinear(SCALE, axis=0)
PLANNING = hasattr(da.ones(1), "expr")
SCHEDULERS = ["sync", "threads", "processes", "cluster"]


def tasks(array):
    """Tasks left after optimisation."""
    optimised = array.optimize() if PLANNING else dask.optimize(array)[0]
    return dict(optimised.__dask_graph__())


def stored(path, x, chunks=None, **how):
    array = zarr.create_array(str(path), shape=x.shape, chunks=chunks or x.shape or (), dtype=x.dtype, **how)
    array[...] = x
    return array


STORES = {
    "v3": {},
    "v2": {"zarr_format": 2},
    "v2 F order": {"zarr_format": 2, "order": "F"},
    "sharded": {"shards": (10, 20)},
}


def computed(arrays, scheduler, client):
    """All at once: one pool of processes for all of them."""
    if scheduler == "cluster":
        return dict(zip(arrays, client.gather(client.compute(list(arrays.values()))), strict=True))
    return dict(zip(arrays, dask.compute(*arrays.values(), scheduler=scheduler), strict=True))


@pytest.fixture(scope="module")
def client():
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def test_query_planning_is_as_it_was_asked_for():
    assert bool(dask.config.get("array.query-planning", False)) == PLANNING


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_input_of_every_kind(tmp_path, client, scheduler):
    inputs = {kind: stored(tmp_path / f"{kind}.zarr", X, (5, 10), **how) for kind, how in STORES.items()}
    inputs["dask"] = da.from_array(X, chunks=((10, 3, 0, 24), (7, 30, 4)))
    with dask.config.set({"array.chunk-size": "800B"}):
        lazy = {kind: OP(x) for kind, x in inputs.items()}
    for kind, y in computed(lazy, scheduler, client).items():
        assert reference.same_bits(y, Y), kind


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_parameters_of_every_kind(tmp_path, client, monkeypatch, scheduler):
    """R10 with blocks of both axes that chunks begin inside of, and big-endian codes."""
    rng = np.random.default_rng(3)
    x, counts = strategies.integers(rng, X.shape, np.uint16), (-(-37 // 4), -(-41 // 3))
    params = strategies.scales(rng, counts), strategies.integers(rng, counts, np.uint16)
    held = {
        "numpy": params,
        "large numpy": params,
        "dask": [da.from_array(v, chunks=(3, 5)) for v in params],
        "zarr": [stored(tmp_path / f"{i}.zarr", v, (4, 4)) for i, v in enumerate(params)],
    }
    inputs = {
        "zarr": stored(tmp_path / "x.zarr", x.astype(">u2"), (5, 10), zarr_format=2),
        "dask": da.from_array(x, chunks=9),
    }
    lazy = {}
    for kind, values in held.items():
        with monkeypatch.context() as patch, dask.config.set({"array.chunk-size": "1kiB"}):
            if kind == "large numpy":
                patch.setattr(graph, "HELD_BYTES", 0)
            for name, source in inputs.items():
                lazy[name, kind] = chunkq.dequantize_linear(source, *values, block_size=(4, 3))
    expected = reference.dequantize_linear(x, *params, 0, (4, 3))
    for kind, y in computed(lazy, scheduler, client).items():
        assert reference.same_bits(y, expected), kind


@pytest.mark.parametrize("kind", STORES)
def test_one_task_for_each_block_of_zarr(tmp_path, kind):
    x = stored(tmp_path / "x.zarr", X, (5, 10), **STORES[kind])
    with dask.config.set({"array.chunk-size": "1B"}):
        y = OP(x)
        other = chunkq.dequantize_linear(x, stored(tmp_path / "scale.zarr", SCALE, (9,)), axis=0)
    block = (10, 20) if kind == "sharded" else (5, 10)
    assert y.chunks == da.core.normalize_chunks(block, X.shape)
    assert len(tasks(y)) == len(tasks(other)) == prod(y.numblocks)
    if not PLANNING:  # there names are Dask's own, whatever it is told
        assert all(key[0].startswith("dequantize-linear-") for key in tasks(y))


@pytest.mark.skipif(PLANNING, reason="with query planning nothing fuses")
def test_one_task_for_each_block_of_dask():
    x = da.map_blocks(np.negative, da.ones((37, 41), chunks=(5, 10), dtype=np.int8))
    y = chunkq.dequantize_linear(x, SCALE, axis=0)
    assert y.chunks == x.chunks
    assert len(tasks(y)) == prod(y.numblocks) == 40
    assert all("dequantize-linear" in key[0] for key in tasks(y))
    # a Dask parameter costs tasks of its own for each of the 8 rows of blocks, not for each block
    in_dask = chunkq.dequantize_linear(x, da.from_array(SCALE, chunks=37), axis=0)
    assert len(tasks(in_dask)) <= 40 + 3 * 8
    assert reference.same_bits(y.compute(), np.broadcast_to(-SCALE[:, None], (37, 41)))


def test_tasks_stay_small(tmp_path):
    """Each travels on its own to another process: neither the whole grid nor a large parameter may be in it."""
    x = zarr.create_array(str(tmp_path / "x.zarr"), shape=(160_000,), chunks=(8,), dtype=np.int8)
    with dask.config.set({"array.chunk-size": "1B"}):
        y = chunkq.dequantize_linear(x, 0.5)
    assert y.numblocks == (20_000,)
    sizes = [len(cloudpickle.dumps(task)) for task in list(tasks(y).values())[:10]]
    assert max(sizes) < 8 << 10
    scale = np.ones((512, 1024), np.float32)
    y = chunkq.dequantize_linear(da.ones((512, 2048), chunks=128, dtype=np.int8), scale, axis=1, block_size=2)
    assert max(len(cloudpickle.dumps(task)) for task in tasks(y).values()) < (128 * 64 * 4) + (8 << 10)
    assert bool((y == 1).all().compute())


def test_blocks_grow_from_whole_objects_with_the_quantization_axis_last(tmp_path):
    x = stored(tmp_path / "x.zarr", np.zeros((64, 64), np.int8), (4, 4), shards=(8, 8))
    for axis, expected in ((0, (8, 64)), (1, (64, 8))):
        with dask.config.set({"array.chunk-size": f"{64 * 8 * 4}B"}):
            y = chunkq.dequantize_linear(x, np.ones(64, np.float32), axis=axis)
        assert tuple(max(lengths) for lengths in y.chunks) == expected
    with dask.config.set({"array.chunk-size": "1GiB"}):
        assert OP(stored(tmp_path / "y.zarr", X, (5, 10))).numblocks == (1, 1)


@pytest.mark.skipif(PLANNING, reason="names are Dask's own with query planning")
def test_keys_are_the_same_for_the_same_input():
    x = da.from_array(X, chunks=(5, 10))
    assert OP(x).name == chunkq.dequantize_linear(x, SCALE.copy(), axis=0).name
    assert OP(x).name != chunkq.dequantize_linear(x, SCALE * 2, axis=0).name
    assert OP(x).name != chunkq.dequantize_linear(x, SCALE, np.int8([1] * 37), axis=0).name
    scale = da.from_array(SCALE, chunks=7)
    assert chunkq.dequantize_linear(x, scale, axis=0).name == chunkq.dequantize_linear(x, scale, axis=0).name
    with dask.config.set({"tokenize.ensure-deterministic": True}):
        assert OP(x).name == OP(da.from_array(X.copy(), chunks=(5, 10))).name
    scale = zarr.create_array({}, data=SCALE)
    assert chunkq.dequantize_linear(x, scale, axis=0).name != chunkq.dequantize_linear(x, scale, axis=0).name


def test_a_rewritten_store_gives_new_values(tmp_path):
    x = stored(tmp_path / "x.zarr", X, (5, 10))
    first = OP(x).persist()
    x[...] = -X
    second = OP(zarr.open_array(tmp_path / "x.zarr", mode="r")).persist()
    assert first.name != second.name
    assert reference.same_bits(second.compute(), reference.dequantize_linear(-X, SCALE, None, 0))


def test_tasks_use_one_thread(monkeypatch):
    seen = []

    def spy(*arguments, n_threads, **keywords):
        seen.append(n_threads)
        return chunkq.run.run_chunk(*arguments, n_threads=n_threads, **keywords)

    monkeypatch.setattr(graph, "run_chunk", spy)
    OP(da.from_array(X, chunks=(20, 20))).compute(scheduler="sync")
    assert set(seen) == {1}


def test_the_square_tensor_of_dask_11188():
    x = np.arange(16, dtype=np.int8).reshape(4, 4)
    scale = np.float32([1, 10, 100, 1000])
    y = chunkq.dequantize_linear(da.from_array(x, chunks=(2, 2)), scale, axis=0)
    np.testing.assert_array_equal(y.compute(), x * scale[:, None])


@settings(max_examples=60)
@given(strategies.solid_shapes, strategies.seeds, st.sampled_from(["numpy", "large numpy", "dask", "zarr", "weak"]))
def test_any_chunking_of_x_and_of_the_parameters(shape, seed, held):
    """R12: phases inside blocks, ragged and empty chunks, several axes."""
    rng = np.random.default_rng(seed)
    x = strategies.integers(rng, shape, np.uint8)
    chunks = tuple(strategies.cut(rng, n) for n in shape)
    block_size = tuple(int(b) for b in rng.integers(1, 5, len(shape)))
    counts = tuple(-(-n // b) for n, b in zip(shape, block_size, strict=True))
    scale, zero_point = strategies.scales(rng, counts), strategies.integers(rng, counts, np.uint8)
    expected = reference.dequantize_linear(x, scale, zero_point, 0, block_size)
    s, z = (scale, zero_point) if held != "weak" else (scale, zero_point.tolist())
    if held == "dask":
        s, z = (da.from_array(v, chunks=tuple(strategies.cut(rng, n) for n in counts)) for v in (scale, zero_point))
    if held == "zarr":
        s, z = (zarr.create_array({}, data=v, chunks=(2,) * v.ndim) for v in (scale, zero_point))
    with pytest.MonkeyPatch.context() as patch:
        if held == "large numpy":
            patch.setattr(graph, "HELD_BYTES", 0)
        y = chunkq.dequantize_linear(da.from_array(x, chunks=chunks), s, z, block_size=block_size)
    assert y.chunks == chunks
    assert reference.same_bits(y.compute(scheduler="sync"), expected)


@settings(max_examples=60)
@given(strategies.solid_shapes, strategies.seeds)
def test_fake_quantize_with_ranges_of_every_kind(shape, seed):
    rng = np.random.default_rng(seed)
    x = strategies.floats(rng, shape, np.float32)
    shapes = [tuple(n if rng.random() < 0.5 else 1 for n in shape)[rng.integers(0, len(shape)) :] for _ in "1234"]
    ranges = [strategies.ranges(rng, s, np.float32) for s in shapes]
    expected = reference.fake_quantize(x, *ranges, 16)
    kinds = rng.integers(0, 3, 4)
    held = []
    for value, kind in zip(ranges, kinds, strict=True):
        if kind == 1:
            value = da.from_array(value, chunks=tuple(strategies.cut(rng, n) for n in value.shape))
        elif kind == 2:
            value = zarr.create_array({}, data=value, chunks=tuple(max(1, n // 2) for n in value.shape))
        held.append(value)
    if seed % 2:
        source = da.from_array(x, chunks=tuple(strategies.cut(rng, n) for n in shape))
    else:
        source = zarr.create_array({}, data=x, chunks=tuple(int(rng.integers(1, n + 2)) for n in shape))
    with dask.config.set({"array.chunk-size": f"{int(rng.integers(1, 400))}B"}):
        y = chunkq.fake_quantize(source, *held, 16)
    assert reference.same_bits(y.compute(scheduler="sync"), expected)


@settings(max_examples=60)
@given(strategies.solid_shapes, strategies.seeds)
def test_any_zarr_grid(shape, seed):
    rng = np.random.default_rng(seed)
    dtype = strategies.INTEGERS[seed % 4]
    x = strategies.integers(rng, shape, dtype)
    chunks = tuple(int(rng.integers(1, n + 2)) for n in shape)
    shards = tuple(c * int(rng.integers(1, 4)) for c in chunks) if seed % 2 else None
    source = zarr.create_array({}, shape=shape, chunks=chunks, shards=shards, dtype=dtype)
    source[...] = x
    axis = int(rng.integers(0, len(shape)))
    scale, zero_point = strategies.scales(rng, shape[axis]), strategies.integers(rng, shape[axis], dtype)
    expected = reference.dequantize_linear(x, scale, zero_point, axis)
    held = zarr.create_array({}, data=scale, chunks=(max(1, shape[axis] // 2),)) if seed % 3 == 0 else scale
    held = da.from_array(scale, chunks=2) if seed % 3 == 1 else held
    with dask.config.set({"array.chunk-size": f"{int(rng.integers(1, 400))}B"}):
        y = chunkq.dequantize_linear(source, held, zero_point, axis=axis)
    assert reference.same_bits(y.compute(scheduler="sync"), expected)


@pytest.mark.parametrize("dtype", [">i2", ">i4", "<u2"])
def test_byte_orders(tmp_path, dtype):
    x = X.astype(np.int32).astype(dtype)
    expected = reference.dequantize_linear(x.astype(x.dtype.newbyteorder("=")), SCALE, None, 0)
    assert reference.same_bits(OP(stored(tmp_path / "x", x, (5, 9), zarr_format=2)).compute(), expected)
    assert reference.same_bits(OP(da.from_array(x, chunks=9)).compute(), expected)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_0d_and_empty(tmp_path, shape):
    x = np.full(shape, 5, np.int8)
    op = chunkq.DequantizeLinear(0.5, 1)
    for source in (stored(tmp_path / "x", x, tuple(max(n, 1) for n in shape)), da.from_array(x)):
        y = op(source)
        assert y.dtype == np.float32
        assert reference.same_bits(y.compute(), np.full(shape, 2, np.float32))


def refused(reason, call):
    with pytest.raises(chunkq.SpecError) as caught:
        call()
    assert caught.value.reason == reason


def test_bad_input_is_refused_before_there_is_a_graph(tmp_path):
    x = da.from_array(X, chunks=(5, 10))
    masked = da.from_array(np.ma.masked_equal(X, 0), chunks=(5, 10), asarray=False)
    refused("masked", lambda: OP(masked))
    refused("masked", lambda: chunkq.dequantize_linear(x, masked[:, 0].astype("f4"), axis=0))
    refused("scale_shape", lambda: chunkq.dequantize_linear(x, da.ones(36, dtype="f4"), axis=0))
    refused("dtype", lambda: OP(x.astype(float)))
    refused("dtype", lambda: chunkq.dequantize_linear(x, da.ones(37), axis=0))
    refused("argument", lambda: OP(x, out=np.zeros(X.shape, np.float32)))
    refused("argument", lambda: OP(stored(tmp_path / "x.zarr", X), n_threads=2))
    refused("int32_zero_point", lambda: chunkq.dequantize_linear(x.astype("i4"), 0.5, np.int32(3)))


@pytest.mark.parametrize("held", [da.from_array, lambda v, chunks: zarr.create_array({}, data=v, chunks=chunks)])
def test_parameter_values_that_are_not_at_hand_are_checked_by_the_task(held):
    x = da.ones((4, 4), chunks=2, dtype=np.int32)
    y = chunkq.dequantize_linear(x, np.ones(4, np.float32), held(np.int32([0, 0, 0, 3]), chunks=(2,)), axis=0)
    refused("int32_zero_point", lambda: y.compute(scheduler="sync"))


def test_blocks_that_are_not_numpy_arrays_are_refused():
    class Blocks(np.lib.mixins.NDArrayOperatorsMixin):
        """As much of another library's array as Dask asks of one."""

        def __init__(self, values):
            self.values, self.shape, self.dtype, self.ndim = values, values.shape, values.dtype, values.ndim

        def __array_function__(self, function, types, arguments, keywords):
            return self

        def __array_ufunc__(self, *arguments, **keywords):
            return self

        def __getitem__(self, key):
            return Blocks(self.values[key])

        def astype(self, dtype, **keywords):
            return Blocks(self.values.astype(dtype))

    def foreign(values):
        return da.from_array(values, chunks=2).map_blocks(Blocks, meta=Blocks(values[:0]), dtype=values.dtype)

    x = np.ones(4, np.int8)
    refused("argument", lambda: chunkq.dequantize_linear(foreign(x), 0.5))
    refused("argument", lambda: chunkq.dequantize_linear(da.from_array(x), foreign(np.ones(4, "f4")), axis=0))


@pytest.mark.skipif(not hasattr(zarr.core.metadata.v3, "RectilinearChunkGridMetadata"), reason="zarr before 3.4")
def test_chunks_of_varying_size_are_refused():
    with zarr.config.set({"array.rectilinear_chunks": True}):
        x = zarr.create_array({}, shape=(6,), chunks=((1, 2, 3),), dtype="i1")
        refused("source", lambda: chunkq.dequantize_linear(x, 0.5))


@pytest.mark.skipif(PLANNING, reason="unknown sizes are another thing with query planning")
def test_unknown_chunk_sizes_are_refused():
    x = da.from_array(X[0], chunks=5)
    refused("shape", lambda: chunkq.dequantize_linear(x[x > 0], 0.5))


def test_blocks_that_are_not_what_was_promised():
    """A Dask array can promise a type or shape and deliver another; int8 codes must not be read as uint8."""
    x = da.from_array(X, chunks=(20, 20))
    meta = np.empty((0, 0), np.int8)
    for reason, function in (
        ("dtype", lambda block: block.view(np.uint8)),
        ("shape", lambda block: block[:1]),
        ("masked", lambda block: np.ma.masked_equal(block, 0)),
    ):
        liar = da.map_blocks(function, x, dtype=np.int8, meta=meta, name=f"liar-{reason}", chunks=x.chunks)
        refused(reason, lambda liar=liar: OP(liar).compute(scheduler="sync"))


def test_blocks_of_a_parameter_are_checked_too():
    x = da.zeros((4, 6), chunks=(2, 3), dtype="int8")
    masked = da.ones(4, chunks=2, dtype="float32").map_blocks(np.ma.array, mask=True, meta=np.empty(0, "f4"))
    short = da.ones(4, chunks=2, dtype="float32").map_blocks(lambda b: b[:1], dtype="f4", meta=np.empty(0, "f4"))
    for scale, reason in ((masked, "masked"), (short, "shape")):
        with pytest.raises(chunkq.SpecError) as caught:
            chunkq.dequantize_linear(x, scale, axis=0).compute(scheduler="sync")
        assert caught.value.reason == reason


def test_more_blocks_than_a_graph_can_hold():
    x = zarr.create_array(zarr.storage.MemoryStore(), shape=(2**31, 2**31, 4), chunks=(1, 1, 1), dtype="int8")
    with pytest.raises(chunkq.SpecError, match="too many for Dask"):
        chunkq.dequantize_linear(x, 1.0)


@pytest.mark.skipif(PLANNING, reason="this is that run")
def test_with_query_planning():
    """The same file once more, with array expressions switched on before dask.array is imported."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__))]
    environment = {**os.environ, "DASK_ARRAY__QUERY_PLANNING": "True"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
