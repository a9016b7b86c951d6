"""The memory model of a zarr-to-zarr run, and how many workers of which kind it leaves room for.

The model is one formula, `Memory.total`, over terms that are measured or counted. Imports memory, execute and threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from chunkq.dtypes import ELEMENT_TYPES
from chunkq.errors import SpecError
from chunkq.execute import cluster
from chunkq.memory import MIB, available, format_size, resident
from chunkq.spec import QuantSpec, Shape
from chunkq.threads import available_cpus

#: Below this many bytes in and out, starting worker processes costs more than they save.
PROCESSES_PAY_FROM = 256 * MIB
#: Resident bytes of a worker process with numpy, zarr and chunkq loaded, before it has read anything (85 measured).
WORKER_BYTES = 96 * MIB
#: What the parent grows by while it runs: pools, graph, and multiprocessing's resource tracker (12).
RUN_BYTES = 24 * MIB
TRACKER_BYTES = 14 * MIB

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
        One unit at its peak: see `task_bytes`.
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


def task_bytes(unit_in: int, object_in: int, unit_out: int, params: int) -> int:
    """Bytes one unit takes at its peak, the largest of its three steps.

    Reading: the region, and one source object encoded, decoded and once more in the codec. Computing: input, a plain copy
    of it where its layout is odd, and the output. Writing: the output, and twice its size in the codecs. The parameters
    of the unit, see `params_bytes`, are there all the time.
    """
    return max(unit_in + 3 * object_in, 2 * unit_in + unit_out, 3 * unit_out) + params + MIB


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


def _local_memory(kind: str, workers: int, task: int, held: int) -> Memory:
    base = resident() + RUN_BYTES + (TRACKER_BYTES if kind == "processes" else 0)
    return Memory(base, WORKER_BYTES + held if kind == "processes" else 0, task, workers)


def choose_workers(
    scheduler: str,
    workers: int | None,
    units: int,
    task: int,
    held: int,
    moved: int,
    encodes: bool,
    limit: int,
) -> tuple[str, Memory]:
    """The fastest arrangement that fits: with a codec a process for each CPU, else threads, as few as needed."""
    most = min(workers or available_cpus(), max(units, 1))
    kinds = [scheduler]
    if scheduler == "auto":
        kinds = ["threads"] if not encodes or most == 1 or moved < PROCESSES_PAY_FROM else ["processes", "threads"]
    counts = [most] if workers else range(most, 0, -1)
    tried = [_local_memory(k, 1 if k == "sync" else n, task, held) for k in kinds for n in counts]
    names = [k for k in kinds for _ in counts]
    # fewer processes than threads would fit is the worse choice
    fitting = [(m.workers, -i) for i, m in enumerate(tried) if m.total <= limit]
    if not fitting:
        least = min(tried, key=lambda m: m.total)
        raise SpecError(
            "max_mem",
            f"max_mem={format_size(limit)} is too little: this run needs at least {format_size(least.total + MIB)} "
            f"({format_size(least.base)} for the interpreter, {format_size(least.task)} for a unit); allow more, or "
            "choose smaller chunks",
        )
    best = -max(fitting)[1]
    return names[best], tried[best]


def cluster_memory(scheduler: Any, task: int, held: int, limit: int | None) -> tuple[Memory, int]:
    """Memory of one cluster worker, and its limit."""
    try:
        with cluster(scheduler) as client:
            found = client.scheduler_info(n_workers=-1)["workers"].values()
    except ImportError as error:
        raise SpecError("scheduler", f"scheduler={scheduler!r} needs distributed: pip install distributed") from error
    except (OSError, ValueError) as error:
        raise SpecError("scheduler", f"scheduler={scheduler!r} cannot be reached: {error}") from error
    if not found:
        raise SpecError("scheduler", f"scheduler={scheduler!r} has no workers; start some with 'dask worker ADDRESS'")
    threads = max(w["nthreads"] for w in found)
    own = [w["memory_limit"] for w in found if w["memory_limit"]]
    most = limit or (min(own) if own else available() // 2)
    memory = Memory(WORKER_BYTES + 64 * MIB + held, 0, task, threads)
    if memory.total > most:
        raise SpecError(
            "max_mem",
            f"max_mem={format_size(most)} a worker is too little: {threads} threads need "
            f"{format_size(memory.total)}; allow more, or start workers with fewer threads",
        )
    return memory, most
