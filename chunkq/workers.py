"""The memory model of a zarr-to-zarr run, and the choice it leaves: which unit, how many workers of which kind.

The model is one formula, `Memory.total`, over terms that are measured or counted. All of it is arithmetic on shapes, so
that a plan of 10**7 objects takes no longer than one of ten. Imports grid, memory, cluster and threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from chunkq import grid
from chunkq.cluster import await_workers, connected
from chunkq.dtypes import ELEMENT_TYPES
from chunkq.errors import SpecError
from chunkq.memory import MIB, available, creep, format_size, resident
from chunkq.spec import QuantSpec, Shape
from chunkq.threads import available_cpus

#: Below this many bytes in and out, starting worker processes costs more than they save.
PROCESSES_PAY_FROM = 256 * MIB
#: Codecs let other threads run while they work. What is Python's own in between lets one thread at a time: with objects of
#: this many bytes (16 MiB: threads 1.2 times as quick; 129 KiB: processes 1.15) and so many threads it does not matter yet.
LONG_OBJECT, MOST_THREADS = 4 * MIB, 16
#: Resident bytes of a worker process with numpy, zarr and chunkq loaded, before it has read anything (85 measured).
WORKER_BYTES = 96 * MIB
#: What the parent grows by while it runs: pools, graph, and multiprocessing's resource tracker (12).
RUN_BYTES = 24 * MIB
TRACKER_BYTES = 14 * MIB
#: A cluster's worker as it stands: distributed on top.
CLUSTER_WORKER_BYTES = WORKER_BYTES + 64 * MIB

#: Small stored objects are taken several to a unit, up to this many output bytes; larger ones one to a unit.
UNIT_BYTES = 4 * MIB
#: What fetching an object costs besides its bytes, in bytes: the call, a shard's index.
FETCH_BYTES = 256 * 1024
#: What a unit costs besides, likewise: its task, and the calls of zarr.
CALL_BYTES = 128 * 1024
#: What zarr keeps of each object of a region while it reads or writes it (2 KB measured); most objects gathered to a unit.
OBJECT_BYTES = 3 * 1024
GATHERED_AT_MOST = 4096
#: What the journal holds of a unit at its peak (24 to 30 measured): counts, what is to do as 8-byte numbers, temporaries.
UNIT_STATE = 32
#: A gain in time below this is not worth any memory.
WORTH_IT = 1.02
#: Codecs whose decoder holds no more than encoded and decoded bytes and one copy; others join a list of pieces as well.
LEAN_CODECS = frozenset({"bytes", "crc32c", "zstd", "blosc", "sharding_indexed"})

SCHEDULERS = ("auto", "threads", "processes", "sync")


@dataclass(frozen=True)
class Memory:
    """The memory model of a run, in bytes; `total` is its formula.

    Attributes
    ----------
    base : int
        This process as it stands, with what the run adds to it and the parameters it holds.
    worker : int
        Each worker process before it reads; 0 where workers are threads.
    task : int
        One unit at its peak: see `unit_bytes`.
    workers : int
        Units in progress at once.
    """

    base: int
    worker: int
    task: int
    workers: int

    @property
    def total(self) -> int:
        """Projected peak: base + workers * (worker + task)."""
        return self.base + self.workers * (self.worker + self.task)


def params_bytes(spec: QuantSpec, unit: Shape, objects: Iterable[int]) -> int:
    """Bytes the parameters of one unit take: as cut, and in the type of the arithmetic.

    `objects` are the bytes of one stored object of each parameter read from zarr: encoded, decoded, and in the codec.
    """
    computed = ELEMENT_TYPES[spec.compute_dtype].dtype.itemsize
    total = 3 * sum(objects)
    for param in spec.params:
        # a unit may begin inside a block, and then touches one more
        elements = prod(min(n, n // k + 2) if k else 1 for n, k in zip(unit, param.steps, strict=True))
        total += elements * (ELEMENT_TYPES[param.dtype].dtype.itemsize + computed)
    return total


def decoding_copies(codecs: Iterable[str]) -> int:
    """How many times a stored object is in memory while it is decoded, at most; `codecs` are zarr's names.

    >>> decoding_copies(["bytes", "zstd"]), decoding_copies(["bytes", "gzip", "crc32c"])
    (3, 4)
    """
    return 3 if LEAN_CODECS.issuperset(codecs) else 4


def unit_bytes(
    unit_in: int, fetched: int, unit_out: int, object_out: int, params: int, copies: int = 3, converted: int = 0
) -> int:
    """Bytes one unit takes at its peak, the largest of its three steps.

    Reading: the region, of one source object what is `fetched`, `copies` times (see `decoding_copies`), and the last unit's
    output, whose memory is used again. Computing: input, a plain copy of it where its layout is odd, and the output.
    Writing: the output, `converted` bytes where zarr holds it in another type, and one object in the codecs; where the unit
    is not just that object, also its part of the output as one piece. The parameters of the unit, see `params_bytes`, are
    there all the time.
    """
    reading = unit_in + copies * fetched + unit_out
    computing = 2 * unit_in + unit_out
    writing = unit_out + converted + (2 if unit_out == object_out else 3) * object_out
    return max(reading, computing, writing) + params + MIB


def bookkeeping_bytes(units: int, objects: int) -> int:
    """Bytes the run keeps of its state: `UNIT_STATE` for a unit, a bit for each stored object of source and target."""
    return UNIT_STATE * units + -(-objects // 8)


@dataclass(frozen=True)
class Work:
    """What is to be done, as far as memory and time depend on it.

    Attributes
    ----------
    spec : QuantSpec
        The operation.
    source_chunk, source_object : tuple of int
        What the source decodes and what it stores: inner chunk and shard, or twice the chunk.
    target_object : tuple of int
        Shard or chunk of the target.
    stored : tuple of int
        Bytes of a stored object of each parameter read from zarr.
    held : int
        Bytes of the parameters held in memory.
    encodes : bool
        Whether the target has a codec that compresses.
    copies : int
        `decoding_copies` of the source.
    extra : float
        What a task holds besides, in results: where it compares, or where results wait to be taken.
    """

    spec: QuantSpec
    source_chunk: Shape
    source_object: Shape
    target_object: Shape
    stored: tuple[int, ...] = ()
    held: int = 0
    encodes: bool = True
    copies: int = 3
    extra: float = 0.0

    @property
    def itemsizes(self) -> tuple[int, int]:
        """Bytes of an element in and out."""
        return ELEMENT_TYPES[self.spec.x_dtype].dtype.itemsize, ELEMENT_TYPES[self.spec.y_dtype].dtype.itemsize

    def task(self, unit_shape: Shape) -> int:
        """`unit_bytes` of a unit of this shape."""
        size_in, size_out = self.itemsizes
        cut = tuple(min(u, n) for u, n in zip(unit_shape, self.spec.shape, strict=True))
        # of a shard, only the inner chunks that the unit touches
        touched = grid.reach(self.spec.shape, self.source_chunk, unit_shape)
        fetched = prod(map(min, touched, self.source_object))
        row = ELEMENT_TYPES[self.spec.y_dtype]
        converts = row.limits is not None and row.holder != row.dtype
        unit = unit_bytes(
            prod(cut) * size_in,
            fetched * size_in,
            prod(cut) * size_out,
            prod(self.target_object) * size_out,
            params_bytes(self.spec, cut, self.stored),
            self.copies,
            prod(cut) * size_out if converts else 0,
        )
        objects = grid.count(cut, self.target_object) + grid.count(cut, self.source_chunk)
        return unit + int(self.extra * prod(cut) * size_out) + OBJECT_BYTES * objects

    def effort(self, unit_shape: Shape, parallel: int) -> float:
        """Estimated time, in bytes that one worker moves: what is decoded, fetched again and written, shared by workers."""
        shape, (size_in, size_out) = self.spec.shape, self.itemsizes
        units = grid.count(shape, unit_shape)
        if not units:
            return 0.0
        decoded = grid.source_reads(shape, self.source_chunk, unit_shape) * prod(shape) * size_in
        # each object is fetched once anyhow
        again = (grid.source_reads(shape, self.source_object, unit_shape) - 1) * grid.count(shape, self.source_object)
        # the last round of units may leave workers idle
        rounds = -(-units // parallel)
        moved = decoded + FETCH_BYTES * again + prod(shape) * size_out
        return moved * rounds / units + CALL_BYTES * rounds

    def units(self, parallel: int) -> list[tuple[Shape, ...]]:
        """Unit shapes to choose from: for each alignment of the grids, gathered from the most objects to the fewest."""
        spec = self.spec
        chain = grid.alignments(spec.shape, self.target_object, self.source_chunk)
        chain += grid.alignments(spec.shape, chain[-1], self.source_object)[1:]
        last = spec.axes_of_parameters()
        # at least a unit for each worker is left
        limits = [
            min(size // self.itemsizes[1], prod(spec.shape) // parallel) for size in (UNIT_BYTES, UNIT_BYTES // 8, 0)
        ]
        most = GATHERED_AT_MOST * prod(self.target_object)
        return [
            tuple(dict.fromkeys(grid.grow(unit, spec.shape, min(limit, most), last) for limit in limits))
            for unit in chain
        ]


@dataclass(frozen=True)
class Arrangement:
    """How a run is carried out.

    Attributes
    ----------
    unit_shape : tuple of int
        Whole objects of the target; may reach past the tensor.
    units : int
        How many.
    kind : str
        "threads", "processes", "sync" or "cluster".
    memory : Memory
        The projected peak; its `workers` are those of the run, on a cluster the threads of a worker.
    limit : int
        What it keeps within.
    source_reads : float
        How many times each chunk of the source is decoded, on average.
    """

    unit_shape: Shape
    units: int
    kind: str
    memory: Memory
    limit: int
    source_reads: float


def _arrangement(work: Work, unit_shape: Shape, kind: str, memory: Memory, limit: int) -> Arrangement:
    shape = work.spec.shape
    reads = grid.source_reads(shape, work.source_chunk, unit_shape)
    return Arrangement(unit_shape, grid.count(shape, unit_shape), kind, memory, limit, reads)


def arrange(work: Work, scheduler: str, workers: int | None, limit: int) -> Arrangement:
    """The fastest arrangement within the limit: processes where a codec has many small objects to encode, else threads.

    Parameters
    ----------
    work : Work
        What is to be done.
    scheduler : str
        One of `SCHEDULERS`.
    workers : int, optional
        How many, no fewer; by default as many as there are CPUs and memory.
    limit : int
        Bytes, of the whole run.

    Raises
    ------
    SpecError
        Reason ``max_mem``: nothing fits.
    """
    wanted = workers or available_cpus()
    here = resident()
    tried, best = [], []
    for kind in _kinds(work, scheduler, wanted):
        units = [unit for gathered in work.units(1 if kind == "sync" else wanted) for unit in gathered]
        options = [_local(work, unit, kind, wanted, workers is not None, here, limit) for unit in units]
        tried += options
        choices = [option for option in options if option.memory.total <= limit]
        # one worker process is one interpreter too many
        choices = [c for c in choices if scheduler != "auto" or kind == "threads" or c.memory.workers > 1]
        if choices:
            best.append(_quickest(work, choices))
    if not best:
        raise _too_little(min(tried, key=lambda option: option.memory.total), limit, workers)
    efforts = [work.effort(option.unit_shape, option.memory.workers) for option in best]
    return next(option for option, effort in zip(best, efforts, strict=True) if effort <= WORTH_IT * min(efforts))


def _kinds(work: Work, scheduler: str, wanted: int) -> list[str]:
    """Kinds of worker to try, the preferred one first."""
    if scheduler != "auto":
        return [scheduler]
    moved = prod(work.spec.shape) * sum(work.itemsizes)
    most = min(wanted, grid.count(work.spec.shape, work.target_object))
    short = prod(work.target_object) * work.itemsizes[1] < LONG_OBJECT or most > MOST_THREADS
    return (
        ["processes", "threads"] if work.encodes and short and most > 1 and moved >= PROCESSES_PAY_FROM else ["threads"]
    )


def _local(work: Work, unit_shape: Shape, kind: str, wanted: int, fixed: bool, here: int, limit: int) -> Arrangement:
    """One unit shape with as many workers as are wanted, or as fit where the number is free."""
    shape = work.spec.shape
    units = grid.count(shape, unit_shape)
    objects = grid.count(shape, work.source_object) + grid.count(shape, work.target_object)
    base = here + RUN_BYTES + bookkeeping_bytes(units, objects) + (TRACKER_BYTES if kind == "processes" else 0)
    worker = WORKER_BYTES + work.held if kind == "processes" else 0
    task = int(work.task(unit_shape) * (1 if kind == "processes" else creep()))
    count = 1 if kind == "sync" else min(wanted, max(units, 1))
    if not fixed:
        count = max(1, min(count, (limit - base) // (worker + task)))
    return _arrangement(work, unit_shape, kind, Memory(base, worker, task, count), limit)


def _quickest(work: Work, choices: list[Arrangement], workers: int = 1) -> Arrangement:
    """The least memory among those that are as good as the quickest; `workers` are machines, on a cluster."""
    efforts = [work.effort(choice.unit_shape, workers * choice.memory.workers) for choice in choices]
    near = [c for c, effort in zip(choices, efforts, strict=True) if effort <= WORTH_IT * min(efforts)]
    return min(near, key=lambda choice: choice.memory.total)


def _too_little(least: Arrangement, limit: int, workers: int | None) -> SpecError:
    memory = least.memory
    way = "choose smaller chunks" + (" or fewer workers" if workers and memory.workers > 1 else "")
    return SpecError(
        "max_mem",
        f"max_mem={format_size(limit)} is too little: this run needs at least {format_size(memory.total + MIB)} "
        f"({format_size(memory.base)} that this process holds already, {format_size(memory.task)} for a unit); allow more, "
        f"or {way}",
    )


def arrange_on_cluster(work: Work, scheduler: Any, limit: int | None) -> Arrangement:
    """The fastest arrangement that keeps each worker of a cluster, with the threads it has, within its own limit.

    Raises
    ------
    SpecError
        Reasons ``scheduler`` (not there, or without workers) and ``max_mem``.
    """
    found = _cluster_workers(scheduler)
    threads, own = _threads_and_limit(found)
    most = limit or own or available() // 2
    tried, choices = [], []
    for gathered in work.units(sum(w["nthreads"] for w in found)):
        options = [
            _arrangement(
                work, unit, "cluster", Memory(CLUSTER_WORKER_BYTES + work.held, 0, work.task(unit), threads), most
            )
            for unit in gathered
        ]
        tried += options
        choices += [option for option in options if option.memory.total <= most][:1]
    if not choices:
        least = min(option.memory.total for option in tried)
        raise SpecError(
            "max_mem",
            f"max_mem={format_size(most)} a worker is too little: {threads} threads need "
            f"{format_size(least)}; allow more, or start workers with fewer threads",
        )
    return _quickest(work, choices, len(found))


def move_to_cluster(arrangement: Arrangement, held: int, client: Any) -> Arrangement:
    """The same units on a cluster, for a plan that was made without it; `held` are the bytes of parameters in memory.

    Raises
    ------
    SpecError
        Reason ``max_mem`` where a worker, with the threads it has, has no memory for such units.
    """
    threads, own = _threads_and_limit(_cluster_workers(client))
    limit = min(own or arrangement.limit, arrangement.limit)
    memory = Memory(CLUSTER_WORKER_BYTES + held, 0, arrangement.memory.task, threads)
    if memory.total > limit:
        raise SpecError(
            "max_mem",
            f"the plan's units need {format_size(memory.total)} on a worker of this cluster with {threads} threads, "
            f"which may use {format_size(limit)}; plan with scheduler=client, so that the units suit the cluster, or "
            "start workers with more memory or fewer threads",
        )
    return replace(arrangement, kind="cluster", memory=memory, limit=limit)


def _threads_and_limit(found: list[dict[str, Any]]) -> tuple[int, int]:
    """The most threads of a worker, and the least memory that one may use; 0 where none has a limit."""
    own = [w["memory_limit"] for w in found if w["memory_limit"]]
    return max(w["nthreads"] for w in found), min(own, default=0)


def _cluster_workers(scheduler: Any) -> list[dict[str, Any]]:
    """What the scheduler says of each of its workers."""
    with connected(scheduler) as client:
        await_workers(client)
        found = list(client.scheduler_info(n_workers=-1)["workers"].values())
    if not found:
        raise SpecError("scheduler", f"scheduler={scheduler!r} has no workers; start some with 'dask worker ADDRESS'")
    return found
