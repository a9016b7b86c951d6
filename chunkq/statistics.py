"""Statistics of groups whose parts merge: extremes, histograms, sums of errors. The same bits whatever the parts were.

A state is a dict of arrays that begin with the axes of the groups' grid. Imports groups, exact and the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from chunkq.exact import LIMBS, carry
from chunkq.groups import Groups, within
from chunkq.kernels import kernels
from chunkq.run import Array
from chunkq.spec import Region, Shape
from chunkq.threads import thread_count

State = dict[str, Array]

#: Above this no limit can be doubled; the kernel then halves limit and values.
LARGEST_LIMIT = 2.0**1022

#: Elements from which sums are carried before they are merged.
SPARE = 1 << 24

#: Items for each thread where the groups are too few to share out.
ITEMS = 4


@dataclass(frozen=True)
class Statistic:
    """What is asked of each group. Subclasses say what a state holds, how a piece is measured, how states merge."""

    groups: Groups

    def fields(self) -> dict[str, tuple[Shape, Any, float]]:
        """The arrays of a state: what follows the grid's axes, dtype, and the value of no elements at all."""
        raise AssertionError("each statistic has its own")

    def measure_piece(self, arrays: list[Array], cut: Region, start: Shape, n_threads: int) -> State:
        """The state of a piece; the arrays have as many sections, in front, as were worth it."""
        raise AssertionError("each statistic has its own")

    def merge(self, into: State, part: State) -> None:
        """Take a part into a state of the same groups, in place."""
        raise AssertionError("each statistic has its own")

    def empty(self, grid: Shape) -> State:
        """The state of no elements."""
        # zeros are had from the system without writing them: histograms of many groups are large
        return {
            name: np.full((*grid, *shape), value, dtype) if value else np.zeros((*grid, *shape), dtype)
            for name, (shape, dtype, value) in self.fields().items()
        }

    def state_bytes(self, grid: Shape) -> int:
        """Bytes of a state."""
        each = sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype, _ in self.fields().values())
        return int(prod(grid) * each)

    def measure(self, region: Region, arrays: list[Array], n_threads: int | None = 1) -> State:
        """The state of a region, of the groups that it touches; the arrays hold the region."""
        cut = self.groups.cut(region)
        grid = tuple(s.stop - s.start for s in cut)
        if not arrays[0].size:
            return self.empty(grid)
        threads = thread_count(n_threads, arrays[0].size)
        whole, state = tuple(slice(0, n) for n in grid), None
        for inside, touched in self.groups.pieces(region):
            own = tuple(slice(c.start + t.start, c.start + t.stop) for c, t in zip(cut, touched, strict=True))
            start = tuple(r.start + i.start for r, i in zip(region, inside, strict=True))
            part = self.measure_piece([within(array, inside) for array in arrays], own, start, threads)
            if state is None and touched == whole:
                state = part
                continue
            state = self.empty(grid) if state is None else state
            self.merge(view(state, touched), part)
        assert state is not None  # a region with elements has pieces
        return state

    def measure_sections(self, shape: Shape, cut: Region, sections: int, call: Callable[[State], None]) -> State:
        """Have a kernel fill a state for each section, and merge them."""
        flat = self.empty((sections, shape[0] * shape[2]))
        call(flat)
        grid = tuple(s.stop - s.start for s in cut)
        parts = [{n: a[s].reshape((*grid, *a.shape[2:])) for n, a in flat.items()} for s in range(sections)]
        for part in parts[1:]:
            self.merge(parts[0], part)
        return parts[0]


def view(state: State, cut: Region) -> State:
    """A part of a state, which changes with it."""
    return {name: within(array, cut) for name, array in state.items()}


def sections_of(shape: Shape, threads: int, shared: int) -> int:
    """How many sections to take the elements of each group in: one where the groups themselves are enough to share."""
    if threads == 1 or shared >= ITEMS * threads:
        return 1
    return max(1, min(ITEMS * threads, shape[3] // 1024 if shape[3] >= 256 else shape[1]))


@dataclass(frozen=True)
class Extremes(Statistic):
    """Lowest and highest finite value, and how many are finite, NaN, infinite, negative infinite."""

    def fields(self) -> dict[str, tuple[Shape, Any, float]]:
        return {
            "minimum": ((), np.float64, np.inf),
            "maximum": ((), np.float64, -np.inf),
            "odd": ((3,), np.int64, 0),
            "elements": ((), np.int64, 0),
        }

    def measure_piece(self, arrays: list[Array], cut: Region, start: Shape, n_threads: int) -> State:
        x, shape = self.groups.prepared(arrays[0])
        tiles = shape[0] * (shape[2] if shape[3] >= 256 else -(-shape[2] * shape[3] // 2048))
        state = self.measure_sections(
            shape,
            cut,
            sections_of(shape, n_threads, tiles),
            lambda s: kernels.scan(x, shape, s["minimum"], s["maximum"], s["odd"], n_threads),
        )
        state["elements"] += shape[1] * shape[3]
        return state

    def merge(self, into: State, part: State) -> None:
        np.minimum(into["minimum"], part["minimum"], out=into["minimum"])
        np.maximum(into["maximum"], part["maximum"], out=into["maximum"])
        into["odd"] += part["odd"]
        into["elements"] += part["elements"]


@dataclass(frozen=True, eq=False)
class Histogram(Statistic):
    """Counts in bins of one width from -limit to limit; of what is not finite in one place more."""

    bins: int
    limits: Array

    def fields(self) -> dict[str, tuple[Shape, Any, float]]:
        return {"counts": ((self.bins + 1,), np.int64, 0)}

    def measure_piece(self, arrays: list[Array], cut: Region, start: Shape, n_threads: int) -> State:
        x, shape = self.groups.prepared(arrays[0])
        limits = np.ascontiguousarray(self.limits[cut]).reshape(-1)
        return self.measure_sections(
            shape,
            cut,
            sections_of(shape, n_threads, shape[0] * shape[2]),
            lambda s: kernels.count_bins(x, shape, limits, s["counts"], n_threads),
        )

    def merge(self, into: State, part: State) -> None:
        into["counts"] += part["counts"]


#: The sums of `Errors`, in the kernel's order, of a, b and d = a - b in float64.
SUMS = ("d", "abs_d", "dd", "aa", "bb", "ab")

#: The counts of `Errors`: compared, not finite on either side, of these different; which sums overflowed, as bits.
COUNTS = ("compared", "nonfinite", "mismatched", "overflows")


@dataclass(frozen=True)
class Errors(Statistic):
    """Exact sums over two tensors, the largest error and the first place of it, by its index in C order."""

    def fields(self) -> dict[str, tuple[Shape, Any, float]]:
        return {
            "limbs": ((kernels.SUMS, LIMBS), np.int64, 0),
            "worst": ((), np.float64, -1.0),
            "where": ((), np.int64, -1),
            "counts": ((len(COUNTS),), np.int64, 0),
        }

    def measure_piece(self, arrays: list[Array], cut: Region, start: Shape, n_threads: int) -> State:
        a, shape = self.groups.prepared(arrays[0])
        b, _ = self.groups.prepared(arrays[1])
        both = np.result_type(a, b)
        a, b = a.astype(both, copy=False), b.astype(both, copy=False)
        state = self.measure_sections(
            shape,
            cut,
            sections_of(shape, n_threads, shape[0] * shape[2]),
            lambda s: kernels.sum_errors(a, b, shape, s["limbs"], s["worst"], s["where"], s["counts"], n_threads),
        )
        if arrays[0].size > SPARE:
            carry(state["limbs"])
        found = state["where"] >= 0
        at = self.groups.place(arrays[0].shape, state["where"][found])
        inside = [i + s for i, s in zip(at, start, strict=True)]
        state["where"][found] = np.ravel_multi_index(inside, self.groups.shape) if inside else 0
        return state

    def merge(self, into: State, part: State) -> None:
        into["limbs"] += part["limbs"]
        carry(into["limbs"])
        larger = part["worst"] > into["worst"]
        earlier = (part["worst"] == into["worst"]) & (part["where"] < into["where"])
        for name in ("worst", "where"):
            np.copyto(into[name], part[name], where=larger | earlier)
        overflows = into["counts"][..., 3] | part["counts"][..., 3]
        into["counts"] += part["counts"]
        into["counts"][..., 3] = overflows


@dataclass(frozen=True)
class Saturated(Statistic):
    """How many codes are the lowest or the highest of their type; the codes are the first array."""

    lowest: float
    highest: float

    def fields(self) -> dict[str, tuple[Shape, Any, float]]:
        return {"saturated": ((), np.int64, 0)}

    def measure_piece(self, arrays: list[Array], cut: Region, start: Shape, n_threads: int) -> State:
        flat, (a, b, c, d) = self.groups.prepared(arrays[0])
        at_the_end = ((flat == self.lowest) | (flat == self.highest)).reshape(a, b, c, d)
        grid = tuple(s.stop - s.start for s in cut)
        return {"saturated": at_the_end.sum(axis=(1, 3), dtype=np.int64).reshape(grid)}

    def merge(self, into: State, part: State) -> None:
        into["saturated"] += part["saturated"]


@dataclass(frozen=True)
class Several(Statistic):
    """Several statistics in one pass, each with the arrays that it takes; no two may have a field of the same name."""

    parts: tuple[tuple[Statistic, tuple[int, ...]], ...]

    def fields(self) -> dict[str, tuple[Shape, Any, float]]:
        return {name: field for statistic, _ in self.parts for name, field in statistic.fields().items()}

    def measure(self, region: Region, arrays: list[Array], n_threads: int | None = 1) -> State:
        state: State = {}
        for statistic, taken in self.parts:
            state |= statistic.measure(region, [arrays[i] for i in taken], n_threads)
        return state

    def merge(self, into: State, part: State) -> None:
        for statistic, _ in self.parts:
            names = statistic.fields()
            statistic.merge({name: into[name] for name in names}, {name: part[name] for name in names})
