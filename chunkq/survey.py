"""Takes a statistic over whole tensors: NumPy in slabs, Dask as a tree, zarr unit by unit within a memory limit.

Whatever is measured where, the parts are merged into one state. Imports statistics, planning, job and, for Dask arrays,
dask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import Any

import numpy as np

from chunkq.cluster import active_client
from chunkq.dtypes import ELEMENT_TYPES
from chunkq.errors import RunError, SpecError
from chunkq.execute import Counter
from chunkq.groups import within
from chunkq.interrupts import held_interrupts
from chunkq.job import compute_units, look_at_inputs
from chunkq.listing import list_objects
from chunkq.memory import available, format_size, resident
from chunkq.planning import arranged
from chunkq.report import Progress
from chunkq.run import Array, refuse_masked
from chunkq.spec import QuantSpec, Region, Shape
from chunkq.statistics import State, Statistic, view
from chunkq.store import Handle, ZarrArray, location, object_shape
from chunkq.threads import available_cpus
from chunkq.units import Job, Measured, Outcome, held_params, measure_unit, unit_arrays
from chunkq.workers import SCHEDULERS, Arrangement

#: Elements of an array in memory that are taken at once, where what has to be converted or moved together for it is to
#: stay small, and where nothing has to; the sums of statistics.h allow for 2**31.
SLAB, LONG_SLAB = 1 << 24, 1 << 30

#: Parts that one task of a Dask tree merges.
FAN_IN = 8

#: What a unit holds besides the tensor: elements moved together, of both where two are compared, in results.
MOVED = 3.0


@dataclass(frozen=True)
class How:
    """How a survey is carried out; the words are those of `plan`."""

    max_mem: int | None = None
    scheduler: Any = None
    workers: int | None = None
    missing: str = "error"
    retries: int = 3
    n_threads: int | None = None
    progress: Progress | None = None


# ---- in memory


def survey_numpy(statistic: Statistic, arrays: list[Array], how: How) -> State:
    """The state of NumPy arrays of one shape."""
    state = statistic.empty(statistic.groups.grid)
    plain = all(a.flags.c_contiguous and a.dtype in (np.float32, np.float64) and a.dtype.isnative for a in arrays)
    for region in _slabs(arrays[0].shape, LONG_SLAB if plain else SLAB):
        part = statistic.measure(region, [within(array, region) for array in arrays], how.n_threads)
        statistic.merge(view(state, statistic.groups.cut(region)), part)
    return state


def _slabs(shape: Shape, most: int) -> list[Region]:
    """Regions of up to `most` elements, each a range of one axis and whole along the ones after it."""
    axis = next((a for a in range(len(shape)) if prod(shape[a + 1 :]) <= most), 0)
    if not shape or not prod(shape):
        return [tuple(slice(0, n) for n in shape)]
    rows = max(1, most // prod(shape[axis + 1 :]))
    before = product(*(range(n) for n in shape[:axis]))
    after = tuple(slice(0, n) for n in shape[axis + 1 :])
    return [
        (*(slice(i, i + 1) for i in at), slice(start, min(start + rows, shape[axis])), *after)
        for at in before
        for start in range(0, shape[axis], rows)
    ]


# ---- Dask

# Parts by the groups that they are of.
_Parts = dict[tuple[tuple[int, int], ...], State]


def survey_dask(statistic: Statistic, arrays: Sequence[Any], how: How) -> State:
    """The state of Dask arrays of one shape and the same chunks, as a tree of merges on Dask's own scheduler."""
    import dask

    blocks = [array.to_delayed().reshape(-1) for array in arrays]
    edges = [(0, *accumulate(lengths)) for lengths in arrays[0].chunks]
    regions = product(*(list(map(slice, edge, edge[1:])) for edge in edges))
    # named for people; the arrays are arguments, so that each task waits for its own blocks
    measure = dask.delayed(_measure_block, pure=False)
    merge = dask.delayed(_merge_parts, pure=False, traverse=True)
    held = dask.delayed(statistic, pure=False, traverse=False)
    nodes = [measure(held, region, list(own)) for region, own in zip(regions, zip(*blocks, strict=True), strict=True)]
    while len(nodes) > 1:
        nodes = [merge(held, nodes[i : i + FAN_IN]) for i in range(0, len(nodes), FAN_IN)]
    state = statistic.empty(statistic.groups.grid)
    if nodes:
        scheduler = {} if how.scheduler in (None, "auto") else {"scheduler": how.scheduler}
        (parts,) = dask.compute(nodes[0], **scheduler)
        for cut, part in parts.items():
            statistic.merge(view(state, tuple(slice(*ends) for ends in cut)), part)
    return state


def _measure_block(statistic: Statistic, region: Region, arrays: list[Any]) -> _Parts:
    cut = statistic.groups.cut(region)
    for array in arrays:  # an array that promised none may have masked blocks
        refuse_masked("a block", array)
    part = statistic.measure(region, [np.asarray(array) for array in arrays])
    return {tuple((s.start, s.stop) for s in cut): part}


def _merge_parts(statistic: Statistic, several: list[_Parts]) -> _Parts:
    merged: _Parts = {}
    for parts in several:
        for cut, part in parts.items():
            if cut in merged:
                statistic.merge(merged[cut], part)
            else:
                # another task may hold the part as well
                merged[cut] = {name: array.copy() for name, array in part.items()}
    return merged


# ---- zarr


class Gathered(Counter):
    """Counts finished units and takes their parts into one state at once."""

    def __init__(self, statistic: Statistic, watch: Callable[[int], None] | None) -> None:
        super().__init__(watch)
        self.statistic = statistic
        self.state = statistic.empty(statistic.groups.grid)

    def count(self, outcome: Outcome | Measured | None) -> None:
        if isinstance(outcome, Measured):
            part, outcome.state = outcome.state, None  # Dask keeps the result until a whole window is done
            cut = self.statistic.groups.cut(outcome.region)
            if part is not None:
                self.statistic.merge(view(self.state, cut), part)
            outcome = None
        super().count(outcome)


@dataclass(frozen=True)
class Tensors:
    """What is surveyed in zarr: a tensor, what an operator makes of it, and another to compare that with.

    `spec` is the operator's, or `plain_spec` where the tensor is taken as it is.
    """

    spec: QuantSpec
    source: ZarrArray
    params: tuple[Any, ...] = ()
    original: ZarrArray | None = None
    original_dtype: str = ""

    @property
    def inputs(self) -> dict[str, Any]:
        """Everything that is read, by name."""
        params = dict(zip((p.name for p in self.spec.params), self.params, strict=True))
        other = {} if self.original is None else {"original": self.original}
        return {"source": self.source} | params | other


def plain_spec(name: str, shape: Shape, x_dtype: str) -> QuantSpec:
    """No operator: a tensor as it is."""
    return QuantSpec(name, shape, x_dtype, x_dtype, ELEMENT_TYPES[x_dtype].compute or "float32", (), None)


@dataclass(frozen=True)
class Survey:
    """A survey of zarr arrays, planned; each `take` is one pass over them."""

    tensors: Tensors
    arrangement: Arrangement
    how: How
    listings: dict[str, Any]
    projected: int

    def take(self, statistic: Statistic, watch: Callable[[int], None] | None = None) -> tuple[State, int]:
        """The state of all units, and the measured peak of memory."""
        counter = Gathered(statistic, watch)
        units = np.arange(self.arrangement.units)
        compute_units(self._job(statistic), measure_unit, units, self.arrangement, self.how.scheduler, counter)
        return counter.state, counter.peak

    def _job(self, statistic: Statistic | None = None) -> Job:
        tensors, original = self.tensors, self.tensors.original
        return Job(
            tensors.spec,
            Handle(tensors.source, tensors.spec.x_dtype),
            held_params(tensors.spec, tensors.params),
            None if original is None else Handle(original, tensors.original_dtype),
            self.arrangement.unit_shape,
            retries=self.how.retries,
            fail_fast=True,
            statistic=statistic,
        )

    def values_at(self, index: tuple[int, ...]) -> tuple[float, float]:
        """One element of the original, and what it is compared with."""
        region = tuple(slice(i, i + 1) for i in index)
        original, y, _ = unit_arrays(self._job(), region)
        return float(original.reshape(-1)[0]), float(y.reshape(-1)[0])

    def refuse_rewritten(self) -> None:
        """Refuse a result whose inputs were not the same from beginning to end.

        Raises
        ------
        RunError
            Naming the input.
        """
        for name, listing in self.listings.items():
            array = self.tensors.inputs[name]
            if list_objects(array, argument=name, retries=self.how.retries).digest != listing.digest:
                raise RunError(f"the stored objects of {name} {location(array)} were rewritten meanwhile; run again")


@held_interrupts()
def survey_zarr(tensors: Tensors, statistics: Sequence[Statistic], how: How) -> Survey:
    """Plan a survey that holds the states of such statistics, and look whether all stored objects are there.

    Raises
    ------
    SpecError
        Reason ``max_mem``: nothing fits.
    RunError
        Objects are missing or damaged.
    """
    state = max(s.state_bytes(s.groups.grid) for s in statistics)
    scheduler = how.scheduler or active_client() or "threads"
    inputs = tensors.inputs
    original = inputs.pop("original", None)
    objects = object_shape(tensors.source if original is None else original)
    plan = partial(arranged, tensors.spec, inputs, objects, False, scheduler, extra=MOVED)
    if isinstance(scheduler, str) and scheduler in SCHEDULERS:
        arrangement = _arranged_locally(plan, how, state)
    else:
        arrangement = plan(workers=how.workers, limit=how.max_mem)
        _refuse_states(state, arrangement)
    needed = arrangement.memory.total + held_states(state, arrangement.memory.workers)
    listings, _ = look_at_inputs(tensors.inputs, how.missing, how.retries)
    return Survey(tensors, arrangement, replace(how, scheduler=scheduler), listings, needed)


def held_states(state: int, workers: int) -> int:
    """Bytes of states at most: one in all, for each worker the one it makes and one on its way."""
    return state * (1 + 2 * workers)


def _arranged_locally(plan: Callable[..., Arrangement], how: How, state: int) -> Arrangement:
    """As many workers as there is memory for, with what each of them keeps of the groups."""
    limit = how.max_mem or available() // 2
    choices = [how.workers] if how.workers else [available_cpus(), 1]
    for workers in choices:
        kept = held_states(state, workers)
        if resident() + kept <= limit:
            try:
                return plan(workers=how.workers or (1 if workers == 1 else None), limit=limit - kept)
            except SpecError:
                if workers == choices[-1]:
                    raise
    raise SpecError(
        "max_mem",
        f"max_mem={format_size(limit)} is too little: what is kept of the groups takes {format_size(state)}, once here and "
        f"twice for each of {choices[-1]} workers; allow more, or use fewer groups or bins",
    )


def _refuse_states(state: int, arrangement: Arrangement) -> None:
    """Refuse states that the workers of a cluster have no memory for: they would be restarted again and again."""
    memory = arrangement.memory
    needed = memory.total + 2 * memory.workers * state
    if needed > arrangement.limit:
        raise SpecError(
            "max_mem",
            f"a worker of the cluster may use {format_size(arrangement.limit)} and would need {format_size(needed)}, among "
            f"them {format_size(state)} twice for each of its {memory.workers} threads for what is kept of the groups; "
            "start workers with more memory or fewer threads, or use fewer groups or bins",
        )


def refuse_scheduler(scheduler: Any) -> None:
    """Refuse a name that is no scheduler's, for arrays in memory and Dask arrays; reason ``scheduler``."""
    if isinstance(scheduler, str) and scheduler not in SCHEDULERS:
        raise SpecError("scheduler", f"scheduler={scheduler!r}: expected one of {', '.join(SCHEDULERS)}, or a client")
