"""Integer chunk mathematics: splitting, growing and counting regions. No arrays, no zarr, no dask.

A chunk or unit shape is one integer per axis; `chunks` is Dask's tuple of tuples.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

Shape = tuple[int, ...]
Region = tuple[slice, ...]


def split(shape: Shape, chunk_shape: Shape) -> tuple[Shape, ...]:
    """Cut a shape on a regular grid, the last chunk of an axis possibly shorter.

    >>> split((5, 4, 0), (2, 4, 3))
    ((2, 2, 1), (4,), (0,))
    """
    return tuple(
        (k,) * (n // k) + ((n % k,) if n % k or not n else ()) for n, k in zip(shape, chunk_shape, strict=True)
    )


def counts(shape: Shape, unit_shape: Shape) -> Shape:
    """Units along each axis."""
    return tuple(-(-n // k) for n, k in zip(shape, unit_shape, strict=True))


def count(shape: Shape, unit_shape: Shape) -> int:
    """Units in all; an empty tensor has none."""
    return prod(counts(shape, unit_shape))


def unravel(lengths: Shape, index: int) -> Shape:
    """Place of a flat index in C order, in plain integers: no shape is too large."""
    places = []
    for n in reversed(lengths):
        index, place = divmod(index, n)
        places.append(place)
    return tuple(reversed(places))


def region(shape: Shape, unit_shape: Shape, index: int) -> Region:
    """The region of one unit, counted in C order, clipped at the edges of the tensor."""
    places = unravel(counts(shape, unit_shape), index)
    return tuple(slice(i * k, min((i + 1) * k, n)) for i, k, n in zip(places, unit_shape, shape, strict=True))


def regions(shape: Shape, unit_shape: Shape) -> Iterator[Region]:
    """Every region in C order, made as they are asked for."""
    return (region(shape, unit_shape, index) for index in range(count(shape, unit_shape)))


def grow(object_shape: Shape, shape: Shape, limit: int, last_axes: Shape = ()) -> Shape:
    """Multiply a stored object's shape towards at most `limit` elements.

    Axes grow from the innermost outwards, those in `last_axes` after all others; none past the tensor. An object
    that is at the limit already stays as it is.

    >>> grow((1, 10), (8, 40), 80)
    (2, 40)
    >>> grow((1, 10), (8, 40), 80, last_axes=(1,))
    (8, 10)
    """
    grown = list(object_shape)
    order = [a for a in reversed(range(len(shape))) if a not in last_axes]
    order += [a for a in reversed(range(len(shape))) if a in last_axes]
    for axis in order:
        whole = -(-shape[axis] // object_shape[axis]) or 1
        factor = max(1, min(whole, limit // max(1, prod(grown))))
        grown[axis] *= factor
        if factor < whole:
            break
    return tuple(grown)
