"""Plans a run from one zarr array to another: layout, units, workers, memory. Carrying it out is in job.py.

Planning is arithmetic and reading of metadata; nothing is written before `Plan.run`. A unit is a region of whole stored
objects of the target (shards where there are shards, else chunks), so that exactly one task writes each object.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from chunkq.cluster import active_client
from chunkq.dtypes import ELEMENT_TYPES
from chunkq.errors import SpecError
from chunkq.job import Run, carry_out, refuse_in_process, target_state
from chunkq.journal import fingerprint
from chunkq.layout import target_layout
from chunkq.memory import available, parse_size
from chunkq.metadata import OPERATORS, WRITTEN_OUT, describe
from chunkq.operands import kind
from chunkq.ops import Operator
from chunkq.places import Place, options_for, place_of
from chunkq.report import Plan
from chunkq.run import check_values
from chunkq.spec import FORMULAS, QuantSpec, Shape, as_integer
from chunkq.store import ZarrArray, codec_names, location, object_shape, open_source
from chunkq.target import (
    Layout,
    begin_array,
    begin_quantized,
    dimension_names,
    lacking_in_group,
    operator_attributes,
    resolve_compressors,
    source_attributes,
)
from chunkq.workers import SCHEDULERS, Arrangement, Work, arrange, arrange_on_cluster, decoding_copies


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
    retries: int = 3,
    fail_fast: bool = False,
    consolidate: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> Plan:
    """Plan applying an operator to a zarr array, the result going to another. Writes nothing.

    Parameters
    ----------
    op : DequantizeLinear, QuantizeLinear, QuantizeDequantize or FakeQuantize
        The operator with its parameters (numbers, lists, NumPy or zarr arrays).
    source : str, path, URL, zarr store or zarr.Array
        The tensor, zarr v2 or v3; also in a zip file or behind HTTP.
    target : str, path, URL or zarr store
        Where the result goes, as zarr v3: an array; of QuantizeLinear a group (see `open_quantized`). What an interrupted
        run of the same job left there is continued.
    max_mem : int or str, optional
        Bytes, or "2GiB": resident memory of the whole local run, interpreter and every process included; on a cluster, of
        each worker. Half of the available memory by default (a worker's own limit on a cluster).
    target_chunks, target_shards : tuple of int or str, optional
        Layout of the target in elements, or "64MiB": at most that many bytes uncompressed. The source's by default.
    compressors : str or zarr codecs
        "auto" (zstd), "none", "zstd", "blosc", "gzip", each followed by a crc32c checksum; or zarr's own objects.
    overwrite : bool
        Replace another job's target, a zarr array or group of chunkq's (or this job's, finished); nothing else is ever
        removed.
    missing : {"error", "fill"}
        What objects absent from the source mean: an error, or the source's fill value, as zarr has it.
    scheduler : str or distributed.Client, optional
        "threads" (the default, unless a `distributed.Client` is active), "processes", "sync", "auto" (processes where they
        pay; the calling script must then guard its main module as multiprocessing asks), the address of a Dask scheduler,
        or a client.
    workers : int, optional
        Units in progress at once; as many as there are CPUs and memory by default.
    retries : int
        How often a request to a store is repeated that failed for a reason that may pass, after longer and longer pauses.
    fail_fast : bool
        Stop at the first source object that cannot be read, instead of after all other units.
    consolidate : bool
        Write consolidated metadata of a quantized target's group at the end.
    storage_options : dict, optional
        What fsspec needs for a source or target given as a URL: credentials, endpoint.

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
    >>> report.bytes_written, float(zarr.open_array(f"{folder}/y.zarr")[3, 5])
    (96, 24000.0)
    """
    check_options(op, missing, workers, retries)
    limit = None if max_mem is None else parse_size(max_mem)
    array = open_source(source, storage_options=options_for(source, storage_options))
    spec, params = bind_zarr(op, array)
    place = place_of(target, options_for(target, storage_options), writing=True)
    if scheduler is None:
        scheduler = active_client() or "threads"
    inputs = {"source": array} | dict(zip((p.name for p in spec.params), params, strict=True))
    itemsize = ELEMENT_TYPES[spec.y_dtype].dtype.itemsize
    source_chunks, source_shards = _grids(array)
    chunks, shards = target_layout(spec.shape, itemsize, source_chunks, source_shards, target_chunks, target_shards)
    codecs = resolve_compressors(compressors)
    arrangement = arranged(spec, inputs, shards or chunks, compressors != "none", scheduler, workers, limit)
    refuse_in_process(arrangement.kind, place, inputs)
    layout = Layout(
        shape=spec.shape,
        element=spec.y_dtype,
        chunks=chunks,
        shards=shards,
        compressors=codecs,
        attributes=source_attributes(array, spec.op == "DequantizeLinear"),
        dimension_names=dimension_names(array),
    )
    if consolidate and spec.op != "QuantizeLinear":
        raise SpecError(
            "argument", "consolidate is for groups, such as QuantizeLinear writes; this target is one array"
        )
    planned = fingerprint(spec, inputs, layout.describe())
    state, _ = target_state(place, inputs, planned, overwrite)
    run = Run(
        spec=spec,
        inputs=inputs,
        place=place,
        layout=layout,
        planned=planned,
        begin=_begin(spec, op, params, layout, place),
        lacking=partial(lacking_in_group, place, spec.params) if spec.op == "QuantizeLinear" else list,
        arrangement=arrangement,
        scheduler=scheduler,
        overwrite=overwrite,
        missing=missing,
        retries=retries,
        fail_fast=fail_fast,
        consolidates=consolidate,
    )
    return Plan(
        spec=spec,
        source=location(array),
        target=place.shown,
        source_chunks=source_chunks,
        source_shards=source_shards,
        chunks=chunks,
        shards=shards,
        codecs=", ".join(_codec_name(c) for c in codecs) or "none",
        unit_shape=tuple(min(u, n) for u, n in zip(arrangement.unit_shape, spec.shape, strict=True)),
        units=arrangement.units,
        bytes_read=prod(spec.shape) * ELEMENT_TYPES[spec.x_dtype].dtype.itemsize,
        bytes_written=prod(spec.shape) * itemsize,
        source_reads=arrangement.source_reads,
        scheduler=arrangement.kind,
        memory=arrangement.memory,
        max_mem=arrangement.limit,
        state=state,
        notes=_notes(spec, array),
        _run=partial(carry_out, run),
    )


# ---- what the request says


def check_options(op: Any, missing: str, workers: Any, retries: Any) -> None:
    if not isinstance(op, Operator):
        raise SpecError("argument", f"op is a {type(op).__name__}; expected {', '.join(OPERATORS)}")
    check_work(missing, workers, retries)


def check_work(missing: str, workers: Any, retries: Any) -> None:
    """Refuse what is wrong with the options of any work on zarr arrays."""
    if missing not in ("error", "fill"):
        raise SpecError("argument", f"missing={missing!r}: expected 'error' or 'fill'")
    if workers is not None and (as_integer(workers) or 0) < 1:
        raise SpecError("n_threads", f"workers={workers!r}: expected a positive integer or None")
    if not 0 <= (-1 if as_integer(retries) is None else int(retries)) <= 100:
        raise SpecError("argument", f"retries={retries!r}: expected an integer from 0 to 100")


def bind_zarr(op: Operator, source: ZarrArray) -> tuple[QuantSpec, tuple[Any, ...]]:
    """Validate an operator for a tensor in zarr; its parameters are then NumPy or zarr arrays."""
    spec, params = op.bind_array(source)
    for param, value in zip(spec.params, params, strict=True):
        if kind(value) == "dask":
            raise SpecError("argument", f"{param.name} is a Dask array; compute it, or store it as a zarr array first")
    for index, value in enumerate(params):
        if isinstance(value, np.ndarray):
            check_values(spec, index, value)
    return spec, params


def _grids(array: ZarrArray) -> tuple[Shape, Shape | None]:
    chunks = tuple(int(n) for n in array.chunks)
    return chunks, tuple(int(n) for n in array.shards) if array.shards else None


def arranged(
    spec: QuantSpec,
    inputs: dict[str, Any],
    target_object: Shape,
    encodes: bool,
    scheduler: Any,
    workers: int | None,
    limit: int | None,
    extra: float = 0.0,
) -> Arrangement:
    """Unit, kind and number of workers for a tensor in zarr; `extra` is what a task holds besides, in results."""
    source = inputs["source"]
    params = [value for name, value in inputs.items() if name != "source"]
    work = Work(
        spec=spec,
        source_chunk=_grids(source)[0],
        source_object=object_shape(source),
        target_object=target_object,
        stored=tuple(prod(object_shape(p)) * p.dtype.itemsize for p in params if not isinstance(p, np.ndarray)),
        held=sum(p.nbytes for p in params if isinstance(p, np.ndarray)),
        encodes=encodes,
        copies=decoding_copies(codec_names(source)),
        extra=extra,
    )
    if isinstance(scheduler, str) and scheduler in SCHEDULERS:
        return arrange(work, scheduler, workers, limit or available() // 2)
    if isinstance(scheduler, str) and "://" not in scheduler:
        raise SpecError(
            "scheduler",
            f"scheduler={scheduler!r}: expected one of {', '.join(SCHEDULERS)}, or an address such as tcp://host:8786",
        )
    return arrange_on_cluster(work, scheduler, limit)


# ---- what the target says


def _begin(spec: QuantSpec, op: Operator, params: tuple[Any, ...], layout: Layout, place: Place) -> Any:
    """What makes the target's metadata, see `Run.begin`. The operator of a group names the parameters inside it."""
    record = _operator_record(spec, op)
    if spec.op != "QuantizeLinear":
        return partial(begin_array, place, layout, operator_attributes(record))
    pairs = zip(spec.params, params, strict=True)
    stored = {p.name: {"dtype": p.dtype, "shape": list(v.shape), "zarr": p.name} for p, v in pairs}
    attributes = operator_attributes(record | {"inputs": stored})
    return partial(begin_quantized, place, layout, attributes, spec.params, params)


def _operator_record(spec: QuantSpec, op: Operator) -> dict[str, Any]:
    """What a target's attributes say of the operator: its JSON, and what it came to on this tensor."""
    came_to = {"formula": FORMULAS[spec.op], "x_dtype": spec.x_dtype, "granularity": spec.granularity}
    return describe(op, WRITTEN_OUT) | came_to


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


def _codec_name(codec: Any) -> str:
    return str(codec.to_dict().get("name", codec)) if hasattr(codec, "to_dict") else str(codec)
