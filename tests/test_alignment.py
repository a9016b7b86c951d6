"""Any source grid into any target grid (R12): one writer for each stored object, equal bits, as many reads as planned."""

import math
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import zarr
from counting import counted, counting
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import chunkq
from chunkq import grid, lock, workers
from chunkq.store import object_shape


@contextmanager
def set_to(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def source_in(folder, shape, chunks, shards):
    """A source of values none of which is the fill value, so that every object is stored."""
    x = np.random.default_rng(math.prod(shape)).integers(1, 127, shape, np.int8)
    array = zarr.create_array(str(folder), shape=shape, chunks=chunks, shards=shards, dtype="int8")
    array[...] = x
    return x


def check(shape, source_grid, target_grid, unit_bytes, scheduler):
    """Run from one grid to another and look at what was asked of the two stores."""
    with (
        TemporaryDirectory() as folder,
        set_to(workers, "UNIT_BYTES", unit_bytes),
        set_to(lock, "CONFIRM_AFTER", 0.001),
    ):
        x = source_in(f"{folder}/x", shape, *source_grid)
        source, target = counting(f"{folder}/x"), counting(f"{folder}/y")
        scale = np.linspace(0.25, 3, shape[0], dtype=np.float32)
        plan = chunkq.plan(
            chunkq.DequantizeLinear(scale, axis=0),
            zarr.open_array(source, mode="r"),
            target,
            target_chunks=target_grid[0],
            target_shards=target_grid[1],
            scheduler=scheduler,
            workers=2,
        )
        Path(source.log).unlink(missing_ok=True)
        report = plan.run()
        assert report.units == plan.units == grid.count(shape, plan.unit_shape)
        y = zarr.open_array(f"{folder}/y", mode="r")
        assert (y.chunks, y.shards) == target_grid
        expected = x.astype(np.float32) * scale.reshape(-1, *[1] * (len(shape) - 1))
        np.testing.assert_array_equal(y[...].view(np.uint32), expected.view(np.uint32))

        written = counted(target)
        objects = {y.metadata.encode_chunk_key(place) for place in np.ndindex(grid.counts(shape, object_shape(y)))}
        stored = {key: n for key, n in written["set"].items() if not key.endswith("chunkq.lock")}
        assert stored == dict.fromkeys(objects, 1)
        assert not [key for key in written["delete"] if not key.endswith("chunkq.lock")]
        for region in grid.regions(shape, plan.unit_shape):
            for part, n, k in zip(region, shape, object_shape(y), strict=True):
                assert part.start % k == 0
                assert part.stop % k == 0 or part.stop == n
        if source_grid[1] is None:
            chunks = math.prod(grid.counts(shape, source_grid[0]))
            assert sum(counted(source)["get"].values()) == pytest.approx(plan.source_reads * chunks)


def grids(shape):
    """Chunks, and shards of them or none."""

    def of(chunks):
        some = st.tuples(*(st.integers(1, -(-n // c) + 1).map(c.__mul__) for n, c in zip(shape, chunks, strict=True)))
        return st.tuples(st.just(chunks), st.none() | some)

    return st.tuples(*(st.integers(1, n + 2) for n in shape)).flatmap(of)


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 14), min_size=1, max_size=3)))
    return shape, draw(grids(shape)), draw(grids(shape)), draw(st.sampled_from([1, 200, 4 << 20]))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
@example(((12, 10), ((5, 3), None), ((4, 4), (8, 8)), 1))
@example(((12, 10), ((2, 5), (6, 10)), ((5, 5), None), 1))
@example(((14,), ((3,), None), ((4,), None), 1))
def test_any_grid_into_any_grid(case):
    check(*case, "threads")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ((12, 10), ((5, 3), None), ((4, 4), (8, 8)), 1),
        ((13, 11), ((2, 5), (6, 10)), ((5, 5), None), 200),
        ((5, 7, 9), ((2, 3, 4), None), ((1, 2, 3), (3, 4, 3)), 1),
    ],
    ids=["to shards", "from shards", "three axes"],
)
def test_any_grid_into_any_grid_in_processes(case):
    check(*case, "processes")
