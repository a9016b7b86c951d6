"""Which elements of a tensor share a statistic, and how a kernel finds them: per tensor, axes, blocks.

A group is to a statistic what an element of a scale is to an operator, and is cut by the same rule. Imports spec, dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from chunkq.dtypes import to_float32
from chunkq.errors import SpecError
from chunkq.run import Array
from chunkq.spec import ParamSpec, Region, Shape, integer_argument, normalize_axis

# A size, and whether the groups change along it.
_Axis = tuple[int, bool]


@dataclass(frozen=True)
class Groups:
    """The groups of a tensor.

    Attributes
    ----------
    shape : tuple of int
        The tensor's.
    steps : tuple of int
        For each axis, the elements that one group covers; 0 for all of them.
    """

    shape: Shape
    steps: Shape

    @property
    def grid(self) -> Shape:
        """How many groups there are along each axis."""
        return tuple(-(-n // k) if k else 1 for n, k in zip(self.shape, self.steps, strict=True))

    @property
    def axis(self) -> int | None:
        """The axis, where each group is an index of exactly one."""
        one = [a for a, k in enumerate(self.steps) if k]
        return one[0] if len(one) == 1 and self.steps[one[0]] == 1 else None

    @property
    def result_shape(self) -> Shape:
        """Of a statistic as people get it: () per tensor, (n,) along one axis, else the grid."""
        if self.axis is not None:
            return (self.shape[self.axis],)
        return self.grid if any(self.steps) else ()

    def cut(self, region: Region) -> Region:
        """The groups that a region of the tensor touches."""
        return ParamSpec("group", "", (), self.steps).region(region)

    def pieces(self, region: Region) -> Iterator[tuple[Region, Region]]:
        """Parts of a region that hold whole blocks or lie in one, and their groups; both counted from the region's own.

        A region may begin and end inside a block: along each axis there is a head, a body and a tail.
        """
        along = [list(_parts(part.start, part.stop, k)) for part, k in zip(region, self.steps, strict=True)]
        origins = [part.start for part in region]
        first = [part.start for part in self.cut(region)]
        for parts in product(*along):
            inside = tuple(slice(a, b) for a, b in parts)
            groups = self.cut(inside)
            yield (
                tuple(slice(s.start - o, s.stop - o) for s, o in zip(inside, origins, strict=True)),
                tuple(slice(s.start - o, s.stop - o) for s, o in zip(groups, first, strict=True)),
            )

    def layout(self, shape: Shape) -> tuple[Shape, Shape | None]:
        """A piece of this shape as the kernels take it, (A, B, C, D), and the order of axes it needs, None for its own."""
        axes = self._axes(shape)
        merged: list[_Axis] = []
        for size, grouped in axes:
            if merged and merged[-1][1] == grouped:
                merged[-1] = merged[-1][0] * size, grouped
            elif size != 1:
                merged.append((size, grouped))
        sizes = [size for size, _ in merged]
        if merged and not merged[0][1]:
            sizes.insert(0, 1)
        if len(sizes) <= 4:
            a, b, c, d = (*sizes, 1, 1, 1, 1)[:4]
            if c * d == 1:
                a, c, b, d = 1, a, 1, b
            return (a, b, c, d), None
        order = sorted(range(len(axes)), key=lambda i: not axes[i][1])
        groups = prod(size for size, grouped in axes if grouped)
        return (1, 1, groups, prod(shape) // max(groups, 1)), tuple(order)

    def _axes(self, shape: Shape) -> list[_Axis]:
        """The axes of a piece, those with blocks split into blocks and what is in one."""
        axes: list[_Axis] = []
        for n, k in zip(shape, self.steps, strict=True):
            if k < 2:
                axes.append((n, k == 1))
            elif n % k:
                axes.append((n, False))
            else:
                axes += [(n // k, True), (k, False)]
        return axes

    def prepared(self, piece: Array) -> tuple[Array, Shape]:
        """A piece as the kernels take it: float32 or float64, contiguous, flat; and its (A, B, C, D)."""
        shape, order = self.layout(piece.shape)
        plain = piece if piece.dtype.newbyteorder("=") == np.float64 else to_float32(piece)
        if order is not None:
            plain = plain.reshape([size for size, _ in self._axes(piece.shape)]).transpose(order)
        return np.ascontiguousarray(plain, plain.dtype.newbyteorder("=")).reshape(-1), shape

    def place(self, piece: Shape, flat: Array) -> tuple[Array, ...]:
        """Where elements that a kernel numbered lie in a piece of this shape."""
        _, order = self.layout(piece)
        if not piece:
            return ()
        if order is None:
            return tuple(np.unravel_index(flat, piece))
        split = [size for size, _ in self._axes(piece)]
        at = np.unravel_index(flat, [split[i] for i in order])
        inside = [at[order.index(i)] for i in range(len(split))]
        return tuple(np.unravel_index(np.ravel_multi_index(inside, split), piece))


def within(array: Array, region: Region) -> Array:
    """A part of an array as a view; indexed by its slices alone, an array without axes would give a number."""
    index: Any = (*region, ...)
    part: Array = array[index]
    return part


def _parts(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Head, body and tail of start : stop between the multiples of a step."""
    if step < 2:
        yield start, stop
        return
    body = min(-(-start // step) * step, stop)
    tail = max(stop // step * step, body)
    for first, last in ((start, body), (body, tail), (tail, stop)):
        if first < last:
            yield first, last


def groups_of(shape: Shape, axis: Any = None, block_size: Any = 0) -> Groups:
    """The groups that axis and block_size name.

    Parameters
    ----------
    shape : tuple of int
        The tensor's.
    axis : int or tuple of int, optional
        A group for each index along it; for the whole tensor by default.
    block_size : int or tuple of int
        As the ONNX operators': blocks along the one axis, and each index of all others; or a size for each axis.

    Raises
    ------
    SpecError
        Reasons ``axis``, ``block_size``.
    """
    rank = len(shape)
    if isinstance(block_size, (tuple, list)):
        steps = tuple(integer_argument("block_size", b, "block_size") for b in block_size)
        if len(steps) != rank or any(b < 1 for b in steps):
            raise SpecError(
                "block_size", f"block_size={block_size}: expected {rank} positive integers, one for each axis"
            )
        if axis is not None:
            raise SpecError("axis", f"axis={axis} and a block size for each axis: leave axis out")
        return Groups(shape, steps)
    size = integer_argument("block_size", block_size, "block_size")
    if size < 0:
        raise SpecError("block_size", f"block_size={block_size}: expected 0 or more")
    given = () if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = [normalize_axis(integer_argument("axis", a, "axis"), rank) for a in given]
    if len(set(axes)) != len(axes):
        raise SpecError("axis", f"axis={axis} names an axis twice")
    if not size:
        return Groups(shape, tuple(int(a in axes) for a in range(rank)))
    if len(axes) != 1:
        raise SpecError("axis", f"axis={axis}: block_size={size} needs the one axis that the blocks lie along")
    return Groups(shape, tuple(size if a in axes else 1 for a in range(rank)))
