"""Plans a run from one zarr array to another: layout, units, workers, memory. Execution is in execute.py.

A unit is a region of whole stored objects of the target (shards where there are shards, else chunks), so that exactly one
task writes each object. Planning is arithmetic and reading of metadata; nothing is written before `Plan.run`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from chunkq import grid
from chunkq.dtypes import ELEMENT_TYPES, ZERO_ONLY
from chunkq.errors import RunError, SpecError
from chunkq.execute import Job, Progress, Report, cut_params, execute
from chunkq.memory import MIB, available, format_size, parse_size
from chunkq.metadata import OPERATORS, WRITTEN_OUT, describe
from chunkq.operands import kind
from chunkq.ops import Operator
from chunkq.run import check_values
from chunkq.spec import FORMULAS, QuantSpec, Shape, as_integer
from chunkq.store import (
    Handle,
    ZarrArray,
    local_path,
    location,
    missing_objects,
    object_shape,
    open_source,
    refuse_missing,
)
from chunkq.target import (
    check_target,
    create_quantized,
    create_target,
    dimension_names,
    mark_complete,
    operator_attributes,
    resolve_compressors,
    source_attributes,
)
from chunkq.workers import SCHEDULERS, Memory, choose_workers, cluster_memory, params_bytes, task_bytes

#: Small stored objects are taken several to a unit, up to this many output bytes; larger ones one to a unit.
UNIT_BYTES = 4 * MIB


@dataclass(frozen=True)
class Plan:
    """A run that has not begun: what `print` shows is what `run` will do.

    Attributes
    ----------
    spec : QuantSpec
        The operation.
    source, target : str
        Where from and where to.
    source_chunks, source_shards, chunks, shards : tuple of int or None
        Layouts of source and target.
    codecs : str
        The target's.
    unit_shape : tuple of int
        Elements one task computes, at most.
    units : int
        How many tasks.
    bytes_read, bytes_written : int
        Uncompressed.
    source_reads : float
        How many times each source byte is decoded, where the grids do not match.
    scheduler : str
        "threads", "processes", "sync" or "cluster".
    memory : Memory
        The projected peak and its terms.
    max_mem : int
        The limit, in bytes.
    notes : tuple of str
        What the user should know before running.
    """

    spec: QuantSpec
    source: str
    target: str
    source_chunks: Shape
    source_shards: Shape | None
    chunks: Shape
    shards: Shape | None
    codecs: str
    unit_shape: Shape
    units: int
    bytes_read: int
    bytes_written: int
    source_reads: float
    scheduler: str
    memory: Memory
    max_mem: int
    notes: tuple[str, ...]
    _run: Any

    def __str__(self) -> str:
        spec, size = self.spec, format_size
        what = "each worker" if self.scheduler == "cluster" else "whole run"
        workers = self.memory.workers
        lines = [
            ("operator", spec.op),
            (
                "formula",
                FORMULAS[spec.op] + (f"; levels = {spec.levels}" if spec.op == "FakeQuantize" else ""),
            ),
            ("granularity", spec.granularity),
            (
                "source",
                f"{self.source}: {spec.x_dtype} {spec.shape}, {_layout(self.source_chunks, self.source_shards)}",
            ),
            ("target", f"{self.target}: {spec.y_dtype} {spec.shape}, {_layout(self.chunks, self.shards)}"),
            ("codecs", self.codecs),
            ("units", f"{self.units} of {self.unit_shape}"),
            ("bytes", f"{size(self.bytes_read)} read, {size(self.bytes_written)} written (uncompressed)"),
            ("workers", f"{workers} ({self.scheduler}), 1 thread each"),
            ("memory", f"{size(self.memory.total)} projected peak, {size(self.max_mem)} allowed ({what})"),
        ]
        if self.source_reads > 1:
            lines.append(("re-reading", f"each source object is decoded {self.source_reads:.2f} times on average"))
        lines += [("note", note) for note in self.notes]
        return "\n".join(f"{name:<12} {text}" for name, text in lines)

    def to_json(self) -> str:
        """Give the plan as one JSON document; the sizes are bytes."""
        spec = self.spec
        fields = {
            "operator": spec.op,
            "formula": FORMULAS[spec.op],
            "axis": spec.axis,
            "granularity": spec.granularity,
            "levels": spec.levels if spec.op == "FakeQuantize" else None,
            "source": self.source,
            "target": self.target,
            "shape": spec.shape,
            "source_dtype": spec.x_dtype,
            "target_dtype": spec.y_dtype,
            "source_chunks": self.source_chunks,
            "source_shards": self.source_shards,
            "chunks": self.chunks,
            "shards": self.shards,
            "codecs": self.codecs,
            "unit_shape": self.unit_shape,
            "units": self.units,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "source_reads": self.source_reads,
            "scheduler": self.scheduler,
            "workers": self.memory.workers,
            "threads_per_worker": 1,
            "projected_memory": self.memory.total,
            "max_mem": self.max_mem,
            "notes": self.notes,
        }
        return json.dumps(fields)

    def run(self, *, progress: Progress | None = None) -> Report:
        """Carry the plan out.

        Parameters
        ----------
        progress : callable, optional
            Called with the number of finished units after each one.

        Raises
        ------
        RunError
            A unit failed or the source has missing objects; the message says which.
        """
        seconds, peak = self._run(progress)
        return Report(self.units, self.bytes_read, self.bytes_written, seconds, peak, self.memory.total, self.max_mem)


def _layout(chunks: Shape, shards: Shape | None) -> str:
    return f"chunks {chunks}" + (f", shards {shards}" if shards else "")


# ---- the parts of a plan


def _target_layout(source: ZarrArray, chunks: Any, shards: Any) -> tuple[Shape, Shape | None]:
    """Chunk and shard shape of the target: the source's unless given."""
    rank = source.ndim
    chosen = _shape_argument("target_chunks", chunks, rank) or tuple(int(n) for n in source.chunks)
    if shards is None and chunks is None and source.shards:
        shards = source.shards
    chosen_shards = _shape_argument("target_shards", shards, rank)
    if chosen_shards and any(s % c for s, c in zip(chosen_shards, chosen, strict=True)):
        raise SpecError(
            "chunks",
            f"target_shards={chosen_shards}: expected multiples of the chunks {chosen} on every axis",
        )
    return chosen, chosen_shards


def _shape_argument(name: str, value: Any, rank: int) -> Shape | None:
    if value is None:
        return None
    entries = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    plain = tuple(as_integer(n) or 0 for n in entries)
    if len(plain) != rank or any(n < 1 for n in plain):
        raise SpecError("chunks", f"{name}={value!r}: expected {rank} positive integers, one for each axis")
    return plain


def _source_reads(shape: Shape, objects: Shape, units: Shape) -> float:
    """How often a source object is decoded, on average: along each axis, objects touched by units over objects."""
    reads = 1.0
    for n, source, unit in zip(shape, objects, units, strict=True):
        if n == 0 or unit % source == 0 or unit >= n:
            continue
        if n // unit > 1_000_000:  # an estimate, not an enumeration
            reads *= max(1.0, source / unit) + (0.0 if source % unit == 0 else 1.0)
            continue
        touched = sum(-(-min(at + unit, n) // source) - at // source for at in range(0, n, unit))
        reads *= touched / -(-n // source)
    return reads


def _operator_record(spec: QuantSpec, op: Operator) -> dict[str, Any]:
    """What a target's attributes say of the operator: its JSON, and what it came to on this tensor."""
    came_to = {"formula": FORMULAS[spec.op], "x_dtype": spec.x_dtype, "granularity": spec.granularity}
    return describe(op, WRITTEN_OUT) | came_to


def _create_in_group(place: Any, spec: QuantSpec, op: Operator, params: tuple[Any, ...], layout: dict[str, Any]) -> Any:
    """What makes the group of a quantized tensor; its operator names the parameters inside it."""
    pairs = zip(spec.params, params, strict=True)
    stored = {p.name: {"dtype": p.dtype, "shape": list(v.shape), "zarr": p.name} for p, v in pairs}
    record = _operator_record(spec, op) | {"inputs": stored}
    return partial(create_quantized, place, spec.params, params, operator_attributes(record), **layout)


def _notes(spec: QuantSpec, source: ZarrArray) -> tuple[str, ...]:
    if spec.op != "DequantizeLinear":
        return ()
    found = [name for name in ("_FillValue", "missing_value") if name in source.attrs]
    marks = tuple(
        f"the source marks missing data with {name} = {source.attrs[name]!r}; such codes are dequantized like any other"
        for name in found
    )
    scaled = [name for name in ("scale_factor", "add_offset") if name in source.attrs]
    moved = f"not applied, but moved to the attribute chunkq.source_attributes: {', '.join(scaled)} of the source"
    return (*marks, *((moved,) if scaled else ()))


def _bind_zarr(op: Operator, source: ZarrArray) -> tuple[QuantSpec, tuple[Any, ...]]:
    spec, params = op.bind_array(source)
    for param, value in zip(spec.params, params, strict=True):
        if kind(value) == "dask":
            raise SpecError("argument", f"{param.name} is a Dask array; compute it, or store it as a zarr array first")
    for index, value in enumerate(params):
        if isinstance(value, np.ndarray):
            check_values(spec, index, value)
    return spec, params


def plan(
    op: Operator,
    source: Any,
    target: Any,
    *,
    max_mem: int | str | None = None,
    target_chunks: Any = None,
    target_shards: Any = None,
    compressors: Any = "auto",
    overwrite: bool = False,
    missing: str = "error",
    scheduler: Any = None,
    workers: int | None = None,
) -> Plan:
    """Plan applying an operator to a zarr array, the result going to another. Writes nothing.

    Parameters
    ----------
    op : DequantizeLinear, QuantizeLinear, QuantizeDequantize or FakeQuantize
        The operator with its parameters (numbers, lists, NumPy or zarr arrays).
    source : str, path, zarr store or zarr.Array
        The tensor, zarr v2 or v3.
    target : str, path or zarr store
        Where the result goes, as zarr v3: an array; of QuantizeLinear a group (see `open_quantized`).
    max_mem : int or str, optional
        Bytes, or "2GiB": resident memory of the whole local run, interpreter and every process included; on a cluster, of
        each worker. Half of the available memory by default (a worker's own limit on a cluster).
    target_chunks, target_shards : tuple of int, optional
        Layout of the target in elements; the source's by default.
    compressors : str or zarr codecs
        "auto" (zstd), "none", "zstd", "blosc", "gzip", each followed by a crc32c checksum; or zarr's own objects.
    overwrite : bool
        Replace an existing zarr array or group of chunkq's; nothing else is ever removed.
    missing : {"error", "fill"}
        What objects absent from the source mean: an error, or the source's fill value, as zarr has it.
    scheduler : str or distributed.Client, optional
        "threads" (the default), "processes", "sync", "auto" (processes where they pay; the calling script must then guard
        its main module as multiprocessing asks), the address of a Dask scheduler, or a client.
    workers : int, optional
        Units in progress at once; as many as there are CPUs and memory by default.

    Returns
    -------
    Plan
        Print it, then call its `run`.

    Raises
    ------
    SpecError
        Reasons of the operator, and ``source``, ``target``, ``target_exists``, ``same_array``, ``chunks``,
        ``compressors``, ``max_mem``, ``scheduler``.

    Examples
    --------
    >>> import tempfile, numpy as np, zarr, chunkq
    >>> folder = tempfile.mkdtemp()
    >>> x = zarr.create_array(f"{folder}/x.zarr", shape=(4, 6), chunks=(2, 6), dtype="int8")
    >>> x[:] = np.arange(1, 25).reshape(4, 6)
    >>> op = chunkq.DequantizeLinear([1.0, 10.0, 100.0, 1000.0], axis=0)
    >>> report = chunkq.plan(op, f"{folder}/x.zarr", f"{folder}/y.zarr").run()
    >>> report.units, float(zarr.open_array(f"{folder}/y.zarr")[3, 5])
    (1, 24000.0)
    """
    if not isinstance(op, Operator):
        raise SpecError("argument", f"op is a {type(op).__name__}; expected {', '.join(OPERATORS)}")
    if missing not in ("error", "fill"):
        raise SpecError("argument", f"missing={missing!r}: expected 'error' or 'fill'")
    if workers is not None and (as_integer(workers) or 0) < 1:
        raise SpecError("n_threads", f"workers={workers!r}: expected a positive integer or None")
    limit = None if max_mem is None else parse_size(max_mem)
    array = open_source(source)
    spec, params = _bind_zarr(op, array)
    place = check_target(target, [("source", array), *_zarr_params(spec, params)], overwrite)
    chunks, shards = _target_layout(array, target_chunks, target_shards)
    codecs = resolve_compressors(compressors)
    sizes = ELEMENT_TYPES[spec.x_dtype].dtype.itemsize, ELEMENT_TYPES[spec.y_dtype].dtype.itemsize
    unit = grid.grow(shards or chunks, spec.shape, UNIT_BYTES // sizes[1], spec.axes_of_parameters())
    units = grid.count(spec.shape, unit)
    cut = tuple(min(u, n) for u, n in zip(unit, spec.shape, strict=True))
    stored = [prod(object_shape(p)) * p.dtype.itemsize for p in params if not isinstance(p, np.ndarray)]
    task = task_bytes(
        prod(cut) * sizes[0],
        prod(object_shape(array)) * sizes[0],
        max(prod(cut), prod(shards or chunks)) * sizes[1],
        params_bytes(spec, cut, stored),
    )
    held = sum(p.nbytes for p in params if isinstance(p, np.ndarray))
    moved = prod(spec.shape) * sum(sizes)
    if scheduler is None:
        scheduler = "threads"
    if isinstance(scheduler, str) and scheduler in SCHEDULERS:
        limit = limit or available() // 2
        encodes = compressors != "none"
        name, memory = choose_workers(scheduler, workers, units, task, held, moved, encodes, limit)
        if name == "processes" and local_path(array) is None:
            raise SpecError("scheduler", "worker processes need a source on disk; use scheduler='threads'")
    elif isinstance(scheduler, str) and "://" not in scheduler:
        raise SpecError(
            "scheduler",
            f"scheduler={scheduler!r}: expected one of {', '.join(SCHEDULERS)}, or an address such as tcp://host:8786",
        )
    else:
        name = "cluster"
        memory, limit = cluster_memory(scheduler, task, held, limit)
    layout: dict[str, Any] = {
        "shape": spec.shape,
        "element": spec.y_dtype,
        "chunks": chunks,
        "shards": shards,
        "compressors": codecs,
        "attributes": source_attributes(array, spec.op == "DequantizeLinear"),
        "dimension_names": dimension_names(array),
    }
    if spec.op == "QuantizeLinear":
        create = _create_in_group(place, spec, op, params, layout)
    else:
        layout["attributes"] |= operator_attributes(_operator_record(spec, op))
        create = partial(create_target, place, **layout)
    return Plan(
        spec=spec,
        source=location(array),
        target=str(place),
        source_chunks=tuple(int(n) for n in array.chunks),
        source_shards=tuple(int(n) for n in array.shards) if array.shards else None,
        chunks=chunks,
        shards=shards,
        codecs=", ".join(_codec_name(c) for c in codecs) or "none",
        unit_shape=cut,
        units=units,
        bytes_read=prod(spec.shape) * sizes[0],
        bytes_written=prod(spec.shape) * sizes[1],
        source_reads=_source_reads(spec.shape, object_shape(array), unit),
        scheduler=name,
        memory=memory,
        max_mem=limit,
        notes=_notes(spec, array),
        _run=partial(_carry_out, spec, array, params, create, unit, units, name, memory.workers, scheduler, missing),
    )


def _codec_name(codec: Any) -> str:
    return str(codec.to_dict().get("name", codec)) if hasattr(codec, "to_dict") else str(codec)


def _carry_out(
    spec: QuantSpec,
    source: ZarrArray,
    params: tuple[Any, ...],
    create: Any,
    unit: Shape,
    units: int,
    name: str,
    workers: int,
    scheduler: Any,
    missing: str,
    progress: Progress | None,
) -> tuple[float, int]:
    if missing == "error":
        for argument, array in [("source", source), *_zarr_params(spec, params)]:
            refuse_missing(argument, array)
    for index, value in enumerate(params):
        _check_stored_values(spec, index, value)
    target, marked = create()
    job = Job(spec, Handle(source, spec.x_dtype), cut_params(spec, params), Handle(target, spec.y_dtype), unit)
    result = execute(job, units, name, workers, scheduler, progress)
    count, keys = missing_objects(target)
    if count:
        raise RunError(f"{count} objects of the target were not written, among them {', '.join(keys)}")
    mark_complete(marked)
    return result


def _check_stored_values(spec: QuantSpec, index: int, value: Any) -> None:
    """Check a zarr parameter's values, where the operator does not take all of them, before anything is written."""
    param = spec.params[index]
    any_will_do = ELEMENT_TYPES[param.dtype].bits >= 8 and param.dtype not in (*ZERO_ONLY, "int32")
    if isinstance(value, np.ndarray) or param.name != "zero_point" or any_will_do:
        return
    handle = Handle(value, param.dtype)
    for region in grid.regions(tuple(int(n) for n in value.shape), object_shape(value)):
        try:
            check_values(spec, index, handle.read(region))
        except SpecError as error:
            raise SpecError(error.reason, f"{param.name}: {error}") from error


def _zarr_params(spec: QuantSpec, params: tuple[Any, ...]) -> list[tuple[str, ZarrArray]]:
    named = zip((p.name for p in spec.params), params, strict=True)
    return [(n, p) for n, p in named if not isinstance(p, np.ndarray)]
