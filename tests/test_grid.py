"""Grid arithmetic: tables of literal answers, and brute force for what is in closed form."""

import time
from itertools import pairwise
from math import lcm, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkq import grid


@pytest.mark.parametrize(
    ("shape", "chunk_shape", "expected"),
    [
        ((), (), ()),
        ((10,), (3,), ((3, 3, 3, 1),)),
        ((9,), (3,), ((3, 3, 3),)),
        ((2,), (5,), ((2,),)),
        ((0, 4), (3, 2), ((0,), (2, 2))),
    ],
)
def test_split(shape, chunk_shape, expected):
    assert grid.split(shape, chunk_shape) == expected


@pytest.mark.parametrize(
    ("objects", "shape", "limit", "last", "expected"),
    [
        ((), (), 10, (), ()),
        ((1, 10), (8, 40), 10, (), (1, 10)),
        ((1, 10), (8, 40), 5, (), (1, 10)),  # an object is never cut
        ((1, 10), (8, 40), 39, (), (1, 30)),
        ((1, 10), (8, 40), 80, (), (2, 40)),
        ((1, 10), (8, 40), 10**9, (), (8, 40)),
        ((1, 10), (8, 45), 10**9, (), (8, 50)),  # whole objects, past the edge
        ((1, 10), (8, 40), 80, (1,), (8, 10)),
        ((1, 10), (8, 40), 170, (1,), (8, 20)),
        ((1, 10), (8, 40), 80, (0,), (2, 40)),
        ((1, 10), (8, 40), 80, (0, 1), (2, 40)),
        ((2, 2, 2), (4, 4, 4), 16, (2,), (2, 4, 2)),
        ((3, 2), (0, 4), 100, (), (3, 4)),
    ],
)
def test_grow(objects, shape, limit, last, expected):
    assert grid.grow(objects, shape, limit, last) == expected


def test_regions_in_c_order():
    assert list(grid.regions((3, 5), (2, 3))) == [
        (slice(0, 2), slice(0, 3)),
        (slice(0, 2), slice(3, 5)),
        (slice(2, 3), slice(0, 3)),
        (slice(2, 3), slice(3, 5)),
    ]
    assert list(grid.regions((), ())) == [()]
    assert list(grid.regions((0, 5), (2, 3))) == []
    assert grid.count((2**40, 3), (1, 2)) == 2**41
    assert grid.region((2**40, 3), (1, 2), 2**41 - 1) == (slice(2**40 - 1, 2**40), slice(2, 3))


def test_flat_places():
    assert [grid.unravel((2, 3), index) for index in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert grid.unravel((), 0) == ()
    assert grid.unravel((2**70, 2), 2**71 - 1) == (2**70 - 1, 1)


# ---- two grids

LENGTH = st.integers(1, 12)
AXES = st.lists(st.tuples(st.integers(0, 30), LENGTH, LENGTH, LENGTH), max_size=3)


def touched(shape, objects, region):
    """Objects that a region touches, counted."""
    return prod(
        len([at for at in range(0, n, k) if at < part.stop and at + k > part.start])
        for n, k, part in zip(shape, objects, region, strict=True)
    )


@settings(deadline=None)
@given(AXES)
def test_source_reads_and_reach_against_counting(axes):
    shape, objects, factors, _ = zip(*axes, strict=True) if axes else ((),) * 4
    for unit in (factors, tuple(k * f for k, f in zip(objects, factors, strict=True))):
        each = [touched(shape, objects, region) for region in grid.regions(shape, unit)]
        if each:
            assert grid.source_reads(shape, objects, unit) == pytest.approx(sum(each) / grid.count(shape, objects))
            assert max(each) <= prod(r // k for r, k in zip(grid.reach(shape, objects, unit), objects, strict=True))


@settings(deadline=None)
@given(AXES)
def test_alignments_go_from_one_object_to_both_grids(axes):
    shape, target, source, _ = zip(*axes, strict=True) if axes else ((),) * 4
    chain = grid.alignments(shape, target, source)
    assert chain[0] == target
    reads = [grid.source_reads(shape, source, unit) for unit in chain]
    assert all(after < before for before, after in pairwise(reads))
    if 0 not in shape:
        assert reads[-1] == 1
    for unit in chain:
        for n, t, s, u in zip(shape, target, source, unit, strict=True):
            assert u % t == 0
            assert u == t or u <= min(lcm(t, s), -(-n // t) * t)


@pytest.mark.parametrize(
    ("shape", "target", "source", "expected"),
    [
        ((), (), (), [()]),
        ((0, 5), (2, 2), (3, 5), [(2, 2), (2, 4), (2, 6)]),
        ((100, 100), (10, 100), (10, 100), [(10, 100)]),
        ((100, 100), (10, 100), (5, 50), [(10, 100)]),
        ((90,), (20,), (30,), [(20,), (40,), (60,)]),
        ((50,), (20,), (30,), [(20,), (40,), (60,)]),
        ((10**6, 64), (1, 64), (8, 64), [(1, 64), (2, 64), (4, 64), (8, 64)]),
        ((40, 40), (10, 40), (40, 10), [(10, 40), (20, 40), (40, 40)]),
        ((12, 12), (1, 6), (2, 12), [(1, 6), (2, 6), (2, 12)]),
    ],
)
def test_alignments(shape, target, source, expected):
    assert grid.alignments(shape, target, source) == expected


def test_alignments_keep_to_a_limit_and_try_the_other_axes():
    assert grid.alignments((10**9, 64), (1, 16), (997, 32), limit=100) == [(1, 16), (1, 32), (2, 32)]
    # a step that is too long on one axis leaves the other
    assert grid.alignments((10**9, 9), (64, 1), (128, 3), limit=300)[-1] == (128, 2)


@pytest.mark.parametrize(
    "axis",
    [(2**60, 1000, 1001), (2**60, 2**31 - 1, 2**59 - 1), (2**60, 1, 2**60), (2**60, 3, 7), (2**60, 999983, 999979)],
)
@pytest.mark.parametrize("rank", [1, 4, 32])
def test_alignments_take_no_time_whatever_the_lengths(axis, rank):
    began = time.perf_counter()
    chain = grid.alignments(*((n,) * rank for n in axis))
    assert time.perf_counter() - began < 0.5
    assert 1 <= len(chain) < 100
