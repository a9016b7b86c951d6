"""Integer chunk mathematics: splitting, growing and counting regions. No arrays, no zarr, no dask.

A chunk or unit shape is one integer per axis; `chunks` is Dask's tuple of tuples.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm, log, prod

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


# ---- two grids


def source_reads(shape: Shape, objects: Shape, unit_shape: Shape) -> float:
    """How often a stored object is touched by units, on average; 1 where no unit cuts one.

    Along an axis, objects and units cut the tensor into one piece more than there are interior boundaries of either, and
    each piece is one unit touching one object.

    >>> source_reads((12, 12), (4, 12), (6, 3))
    5.333333333333333
    """
    reads = 1.0
    for n, k, u in zip(shape, objects, unit_shape, strict=True):
        if n:
            shared = (n - 1) // lcm(k, u)
            reads *= (-(-n // k) + -(-n // u) - 1 - shared) / -(-n // k)
    return reads


def reach(shape: Shape, objects: Shape, unit_shape: Shape) -> Shape:
    """Elements along each axis of the objects that one unit touches, at most.

    >>> reach((100, 100, 100), (10, 10, 80), (20, 15, 90))
    (20, 20, 160)
    """
    # a unit begins at any multiple of what it and the object have in common
    touched = (-(-(u + k - gcd(u, k)) // k) for k, u in zip(objects, unit_shape, strict=True))
    return tuple(k * min(c, -(-n // k)) for n, k, c in zip(shape, objects, touched, strict=True))


def _factors(number: int) -> Iterator[int]:
    """Prime factors in rising order; what has none below 1000 stays whole, so that the size of a number is no matter."""
    for prime in range(2, 1000):
        while number % prime == 0:
            yield prime
            number //= prime
    if number > 1:
        yield number


def _ladder(length: int, target: int, source: int) -> Shape:
    """Multiples of a target object along one axis, from one to the first that ends where a source object does.

    Multiplied factor by factor, since a divisor of the last one ends where source objects do more often than others, with
    doublings before a large factor; none past the axis.

    >>> _ladder(100, 2, 15), _ladder(19, 2, 15)
    ((2, 4, 6, 12, 24, 30), (2, 4, 6, 12, 20))
    """
    if not length:
        return (target,)
    whole = -(-length // target) * target
    rungs = [target]
    for factor in _factors(lcm(target, source) // target):
        start = rungs[-1]
        rungs += [start << j for j in range(1, factor.bit_length()) if 1 << j < factor]
        rungs.append(start * factor)
    below = [rung for rung in rungs if rung < whole]
    return tuple(below) if len(below) == len(rungs) else (*below, whole)


def alignments(shape: Shape, target: Shape, source: Shape, limit: int = 1 << 40) -> list[Shape]:
    """Shapes a unit may have: from one stored object of the target to whole objects of both grids.

    Each is a whole multiple of the target's object and cuts fewer source objects than the one before. The axis that saves
    the most readings for its growth is grown first. None but the first has more than `limit` elements of the tensor.

    >>> alignments((100, 100), (1, 100), (4, 50))
    [(1, 100), (2, 100), (4, 100)]
    >>> alignments((90,), (20,), (30,))
    [(20,), (40,), (60,)]
    """
    ladders = [list(_ladder(*axis)) for axis in zip(shape, target, source, strict=True)]
    chain = [tuple(ladder.pop(0) for ladder in ladders)]
    unit = chain[0]
    while any(ladders):
        axis = max(
            (a for a, ladder in enumerate(ladders) if ladder), key=lambda a: _gain(a, ladders, unit, shape, source)
        )
        grown = (*unit[:axis], ladders[axis][0], *unit[axis + 1 :])
        if prod(map(min, grown, shape)) > limit:
            ladders[axis] = []  # this axis is done; another may grow by less
            continue
        ladders[axis].pop(0)
        unit = grown
        if source_reads(shape, source, unit) < source_reads(shape, source, chain[-1]):
            chain.append(unit)
    return chain


def _gain(axis: int, ladders: list[list[int]], unit: Shape, shape: Shape, source: Shape) -> float:
    """By what power of its growth the next step along an axis lowers the readings."""
    n, now, then = shape[axis], unit[axis], ladders[axis][0]
    saved = source_reads((n,), (source[axis],), (now,)) / source_reads((n,), (source[axis],), (then,))
    return log(saved) / log(min(then, n) / now)
