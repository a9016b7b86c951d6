"""Grid arithmetic: tables of literal answers."""

import pytest

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
