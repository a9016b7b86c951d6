"""The Dask graph builder: lazy arrays whose parameters are cut exactly where the blocks of x are cut.

The only module that imports dask.array. Built from `map_blocks`, slicing, `concatenate` and `rechunk` alone, so that it
works with `array.query-planning` on and off. x is never rechunked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
from dask.utils import parse_bytes

from chunkq import grid
from chunkq.dtypes import ELEMENT_TYPES
from chunkq.errors import SpecError
from chunkq.operands import declare
from chunkq.run import Array, check_values, refuse_masked, run_chunk
from chunkq.spec import ParamSpec, QuantSpec, Region, Shape, cut
from chunkq.store import Handle, ZarrArray, object_shape, open_source
from chunkq.transport import teach_distributed

if TYPE_CHECKING:
    from chunkq.ops import Operator

Chunks = tuple[tuple[int, ...], ...]
Edges = tuple[Sequence[int], ...]

#: A lazy array has a task for each block, in memory; a run from zarr to zarr makes them as it goes.
MOST_BLOCKS = 10_000_000

#: A larger NumPy parameter is cut in the graph. A task holds a smaller one whole, and travels to its worker with it.
HELD_BYTES = 64 << 10


def _edges(chunks: Chunks) -> Edges:
    """Where the blocks begin and end along each axis.

    Every task carries them, so a regular grid is a `range`, whose last edge may lie past the tensor: tasks of a million
    blocks are then no larger than those of ten.
    """
    return tuple(
        range(0, len(lengths) * lengths[0] + 1, lengths[0])
        if 0 < lengths[-1] <= lengths[0] and all(n == lengths[0] for n in lengths[:-1])
        else (0, *accumulate(lengths))
        for lengths in chunks
    )


def _region(shape: Shape, edges: Edges, block_id: Shape) -> Region:
    return tuple(slice(edge[i], min(edge[i + 1], n)) for n, edge, i in zip(shape, edges, block_id, strict=True))


class Read:
    """Reads one block of a zarr array."""

    __name__ = "read-zarr"

    def __init__(self, handle: Handle, edges: Edges) -> None:
        self.handle = handle
        self.edges = edges

    def __dask_tokenize__(self) -> Any:
        return "chunkq.graph.Read", self.handle.token, repr(self.edges)

    def __call__(self, block_id: Shape) -> Array:
        return self.handle.read(_region(self.handle.array.shape, self.edges, block_id))


class Apply:
    """Computes one block: x is read or arrives first; a parameter is bound whole, read in part, or arrives cut.

    Parameters
    ----------
    spec : QuantSpec
        The operation on the whole tensor.
    source : Read or None
        What gives x, where it is not an argument.
    params : tuple
        A NumPy array or a Handle for each parameter, None for one that arrives as an argument.
    edges : tuple of sequence of int
        Where the blocks of x begin and end.
    """

    def __init__(self, spec: QuantSpec, source: Read | None, params: tuple[Any, ...], edges: Edges) -> None:
        self.__name__ = spec.task_name
        self.spec = spec
        self.source = source
        self.params = params
        self.edges = edges

    def __dask_tokenize__(self) -> Any:
        held = [p.token if isinstance(p, Handle) else dask.base.tokenize(p) for p in self.params]
        source = self.source and self.source.__dask_tokenize__()
        return "chunkq.graph.Apply", repr(self.spec), source, held, repr(self.edges)

    def __call__(self, *arrived: Any, block_id: Shape) -> Array:
        region = _region(self.spec.shape, self.edges, block_id)
        blocks = iter(arrived)
        x = self.source(block_id) if self.source else next(blocks)
        refuse_masked("x", x)
        x = np.asarray(x)
        expected = tuple(part.stop - part.start for part in region)
        if x.shape != expected:
            raise SpecError("shape", f"block {block_id} of x has shape {x.shape}; its chunks promise {expected}")
        values = tuple(
            _arrived(param, next(blocks), region) if held is None else _cut(param, held, region)
            for param, held in zip(self.spec.params, self.params, strict=True)
        )
        start = tuple(part.start for part in region)
        return run_chunk(self.spec, x, values, start=start, n_threads=1)


def _arrived(param: ParamSpec, block: Any, region: Region) -> Array:
    """A block of a parameter, if it is what its chunks promise."""
    refuse_masked(param.name, block)
    expected = tuple(part.stop - part.start for part in param.region(region))
    empty = any(part.start == part.stop for part in region)  # nothing is looked up in it
    if block.shape != expected and not empty:
        raise SpecError("shape", f"a block of {param.name} has shape {block.shape}; its chunks promise {expected}")
    return np.asarray(block)


def _cut(param: ParamSpec, held: Any, region: Region) -> Array:
    own = param.own_region(region)
    return held.read(own) if isinstance(held, Handle) else held[own]


def _cut_in_graph(param: ParamSpec, value: Any, chunks: Chunks) -> Any:
    """A parameter as a Dask array of full rank, in one block for each block of x (one for all where it is constant)."""
    lazy = isinstance(value, da.Array)
    value = value[tuple(0 if axis < 0 else slice(None) for axis in param.axes)]
    value = value[tuple(slice(None) if axis in param.axes else None for axis in range(len(chunks)))]
    cuts_of = [_cuts(k, lengths) for k, lengths in zip(param.steps, chunks, strict=True)]
    pieces = tuple(tuple(b - a for a, b in cuts) for cuts in cuts_of)
    # axes that are split come before axes that are joined: no task on the way holds more than it begins or ends with
    splits_first = sorted(range(len(chunks)), key=lambda a: lazy and max(pieces[a]) > max(value.chunks[a]))
    for axis in splits_first:
        k, cuts = param.steps[axis], cuts_of[axis]
        edge = (0, *accumulate(chunks[axis]))
        if k and any(a % k for a in edge[:-1]):
            # neighbouring blocks of x share an element there: it is repeated
            along = (slice(None),) * axis
            parts = [value[(*along, slice(a, b))] for a, b in cuts]
            value = (da if lazy else np).concatenate(parts, axis=axis)
        if lazy:
            # one axis at a time: fewer tasks than all at once
            value = value.rechunk({axis: pieces[axis]})
    return value if lazy else da.from_array(value, chunks=pieces)


def _cuts(k: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """What each block of x needs of a parameter along one axis."""
    return [cut(a, b, k) for a, b in pairwise((0, *accumulate(lengths)))] if k else [cut(0, 0, 0)]


def _meta(spec: QuantSpec) -> Array:
    return np.empty((0,) * len(spec.shape), ELEMENT_TYPES[spec.y_dtype].dtype)


def _held(spec: QuantSpec, params: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a task holds of each parameter, None for what arrives cut.

    Values that are at hand are checked before the graph is made.
    """
    held: list[Any] = []
    for index, value in enumerate(params):
        if isinstance(value, np.ndarray):
            check_values(spec, index, value)
            held.append(value if value.nbytes <= HELD_BYTES else None)
        elif isinstance(value, da.Array):
            _refuse_foreign(spec.params[index].name, value)
            held.append(None)
        else:
            held.append(Handle(value, spec.params[index].dtype))
    return tuple(held)


def _refuse_foreign(name: str, value: Any) -> None:
    if not isinstance(value._meta, np.ndarray):
        raise SpecError("argument", f"{name} has blocks of {type(value._meta).__name__}; expected numpy.ndarray")


def from_dask(op: Operator, x: Any) -> Any:
    """Apply an operator to a Dask array, lazily and block by block.

    Raises
    ------
    SpecError
        Reasons of the operator; ``shape`` for unknown chunk sizes, ``argument`` for blocks that are not NumPy's.
    """
    if any(n != n for lengths in x.chunks for n in lengths):
        raise SpecError("shape", "x has unknown chunk sizes; call x.compute_chunk_sizes() first")
    _refuse_foreign("x", x)
    teach_distributed()
    spec, params = op.bind_array(x)
    return _apply_to_dask(spec, params, _held(spec, params), declare("x", x, spec.x_dtype))


def _apply_to_dask(spec: QuantSpec, params: tuple[Any, ...], held: tuple[Any, ...], x: Any) -> Any:
    chunks: Chunks = tuple(tuple(int(n) for n in lengths) for lengths in x.chunks)
    task = Apply(spec, None, held, _edges(chunks))
    arriving = [
        _cut_in_graph(param, value, chunks)
        for param, value, kept in zip(spec.params, params, held, strict=True)
        if kept is None
    ]
    meta = _meta(spec)
    # x first: map_blocks takes the output's blocks from it
    return da.map_blocks(task, x, *arriving, dtype=meta.dtype, meta=meta)


def block_shape(spec: QuantSpec, array: ZarrArray) -> Shape:
    """Whole stored objects, grown towards Dask's `array.chunk-size` with the quantization axis last."""
    size = max(ELEMENT_TYPES[spec.x_dtype].dtype.itemsize, ELEMENT_TYPES[spec.y_dtype].dtype.itemsize)
    limit = parse_bytes(dask.config.get("array.chunk-size")) // size
    return grid.grow(object_shape(array), spec.shape, limit, spec.axes_of_parameters())


def from_zarr(op: Operator, array: ZarrArray) -> Any:
    """Apply an operator to a zarr array, lazily: one task reads, cuts the parameters and computes.

    Raises
    ------
    SpecError
        Reasons of the operator; ``source`` for chunks of varying size.
    """
    open_source(array, "x")
    teach_distributed()
    spec, params = op.bind_array(array)
    blocks = grid.count(spec.shape, block_shape(spec, array))
    if blocks > MOST_BLOCKS:
        raise SpecError("chunks", f"x would have {blocks} blocks, too many for Dask; use chunkq.plan, or larger chunks")
    chunks = grid.split(spec.shape, block_shape(spec, array))
    read = Read(Handle(array, spec.x_dtype), _edges(chunks))
    held = _held(spec, params)
    if any(h is None for h in held):
        dtype = ELEMENT_TYPES[spec.x_dtype].dtype
        x = da.map_blocks(read, chunks=chunks, dtype=dtype, meta=np.empty((0,) * len(spec.shape), dtype))
        return _apply_to_dask(spec, params, held, x)
    meta = _meta(spec)
    return da.map_blocks(Apply(spec, read, held, read.edges), chunks=chunks, dtype=meta.dtype, meta=meta)


teach_distributed()  # workers come here with the first task
