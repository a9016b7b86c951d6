"""The Dask graph builder: lazy arrays whose parameters are cut exactly where the blocks of x are cut.

The only module that imports dask.array. Built from `map_blocks`, slicing, `concatenate` and `rechunk` alone, so that it
works with `array.query-planning` on and off. x is never rechunked.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
from dask.utils import parse_bytes

from chunkq import grid
from chunkq.dtypes import ELEMENT_TYPES, element_name
from chunkq.errors import SpecError
from chunkq.run import Array, check_values, refuse_masked, run_chunk
from chunkq.spec import ParamSpec, QuantSpec, Region, Shape
from chunkq.store import Handle, ZarrArray, object_shape

if TYPE_CHECKING:
    from chunkq.ops import Operator

Chunks = tuple[tuple[int, ...], ...]

TASK_NAMES = {"DequantizeLinear": "dequantize-linear", "FakeQuantize": "fake-quantize"}


def _edges(chunks: Chunks) -> Chunks:
    """Where the blocks begin and end along each axis."""
    return tuple((0, *accumulate(lengths)) for lengths in chunks)


def _region(edges: Chunks, block_id: Shape) -> Region:
    return tuple(slice(edge[i], edge[i + 1]) for edge, i in zip(edges, block_id, strict=True))


class Read:
    """Reads one block of a zarr array."""

    __name__ = "read-zarr"

    def __init__(self, handle: Handle, edges: Chunks) -> None:
        self.handle = handle
        self.edges = edges

    def __dask_tokenize__(self) -> Any:
        return "chunkq.graph.Read", self.handle.token, self.edges

    def __call__(self, block_id: Shape) -> Array:
        return self.handle.read(_region(self.edges, block_id))


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
    edges : tuple of tuple of int
        Where the blocks of x begin and end.
    """

    def __init__(self, spec: QuantSpec, source: Read | None, params: tuple[Any, ...], edges: Chunks) -> None:
        self.__name__ = TASK_NAMES[spec.op]
        self.spec = spec
        self.source = source
        self.params = params
        self.edges = edges

    def __dask_tokenize__(self) -> Any:
        held = [p.token if isinstance(p, Handle) else dask.base.tokenize(p) for p in self.params]
        source = self.source and self.source.__dask_tokenize__()
        return "chunkq.graph.Apply", repr(self.spec), source, held, self.edges

    def __call__(self, *arrived: Any, block_id: Shape) -> Array:
        region = _region(self.edges, block_id)
        blocks = iter(arrived)
        x = self.source(block_id) if self.source else next(blocks)
        refuse_masked("x", x)
        x = np.asarray(x)
        expected = tuple(part.stop - part.start for part in region)
        if x.shape != expected:
            raise SpecError("shape", f"block {block_id} of x has shape {x.shape}; its chunks promise {expected}")
        values = tuple(
            np.asarray(next(blocks)) if held is None else _cut(param, held, region)
            for param, held in zip(self.spec.params, self.params, strict=True)
        )
        start = tuple(part.start for part in region)
        return run_chunk(self.spec, x, values, start=start, n_threads=1)


def _cut(param: ParamSpec, held: Any, region: Region) -> Array:
    own = param.own_region(region)
    return held.read(own) if isinstance(held, Handle) else held[own]


def _cut_dask(param: ParamSpec, value: Any, chunks: Chunks) -> Any:
    """A Dask parameter at full rank, in one block for each block of x (one for all where it is constant)."""
    value = value[tuple(0 if axis < 0 else slice(None) for axis in param.axes)]
    kept = [axis for axis in param.axes if axis >= 0]
    value = value[tuple(slice(None) if axis in kept else None for axis in range(len(chunks)))]
    for axis, (k, edge) in enumerate(zip(param.steps, _edges(chunks), strict=True)):
        if k > 1:
            # neighbouring blocks of x may share an element: its edges are then repeated
            cuts = [(a // k, -(-b // k)) for a, b in pairwise(edge)]
            along = (slice(None),) * axis
            value = da.concatenate([value[(*along, slice(a, b))] for a, b in cuts], axis=axis)
            value = value.rechunk({axis: tuple(b - a for a, b in cuts)})
        else:
            value = value.rechunk({axis: chunks[axis] if k else -1})
    return value


def _meta(spec: QuantSpec) -> Array:
    return np.empty((0,) * len(spec.shape), ELEMENT_TYPES[spec.y_dtype].dtype)


def _held(spec: QuantSpec, params: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a task holds of each parameter; values that are at hand are checked before the graph is made."""
    held: list[Any] = []
    for index, value in enumerate(params):
        if isinstance(value, np.ndarray):
            check_values(spec, index, value)
            held.append(value)
        else:
            held.append(None if isinstance(value, da.Array) else Handle(value))
    return tuple(held)


def from_dask(op: Operator, x: Any) -> Any:
    """Apply an operator to a Dask array, lazily and block by block.

    Raises
    ------
    SpecError
        Reasons of the operator; ``shape`` for unknown chunk sizes, ``argument`` for blocks that are not NumPy's.
    """
    if any(n != n for lengths in x.chunks for n in lengths):
        raise SpecError("shape", "x has unknown chunk sizes; call x.compute_chunk_sizes() first")
    if not isinstance(x._meta, np.ndarray):
        raise SpecError("argument", f"x has blocks of {type(x._meta).__name__}; expected numpy.ndarray")
    shape = tuple(int(n) for n in x.shape)
    spec, params = op.bind(shape, element_name(x.dtype, "x", op.x_types()))
    return _apply_to_dask(spec, params, x)


def _apply_to_dask(spec: QuantSpec, params: tuple[Any, ...], x: Any) -> Any:
    chunks: Chunks = tuple(tuple(int(n) for n in lengths) for lengths in x.chunks)
    task = Apply(spec, None, _held(spec, params), _edges(chunks))
    arriving = [
        _cut_dask(param, value, chunks)
        for param, value in zip(spec.params, params, strict=True)
        if isinstance(value, da.Array)
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
    """Apply an operator to a zarr array, lazily: one task reads, cuts the parameters and computes."""
    shape = tuple(int(n) for n in array.shape)
    spec, params = op.bind(shape, element_name(array.dtype, "x", op.x_types()))
    chunks = grid.split(shape, block_shape(spec, array))
    read = Read(Handle(array), _edges(chunks))
    if any(isinstance(value, da.Array) for value in params):
        meta = np.empty((0,) * len(shape), array.dtype)
        x = da.map_blocks(read, chunks=chunks, dtype=array.dtype, meta=meta)
        return _apply_to_dask(spec, params, x)
    task = Apply(spec, read, _held(spec, params), read.edges)
    meta = _meta(spec)
    return da.map_blocks(task, chunks=chunks, dtype=meta.dtype, meta=meta)
