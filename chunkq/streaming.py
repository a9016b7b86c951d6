"""Results of an operator on a zarr array, one unit after the other, for who feeds something else than zarr.

Imports planning and units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from chunkq.interrupts import held_interrupts
from chunkq.job import look_at_inputs
from chunkq.memory import parse_size
from chunkq.ops import Operator
from chunkq.places import options_for
from chunkq.planning import arranged, bind_zarr, check_options
from chunkq.run import Array
from chunkq.spec import Region
from chunkq.store import Handle, object_shape, open_source
from chunkq.units import Job, compute_unit, held_params

#: Results computed and not yet taken, or in the caller's hands, for each worker.
HELD_RESULTS = 2


def stream(
    op: Operator,
    source: Any,
    *,
    max_mem: int | str | None = None,
    missing: str = "error",
    workers: int | None = None,
    retries: int = 3,
    storage_options: dict[str, Any] | None = None,
) -> Generator[tuple[Region, Array], None, None]:
    """Apply an operator to a zarr array and yield the results unit by unit, reading ahead within a memory limit.

    Parameters
    ----------
    op : DequantizeLinear, QuantizeLinear, QuantizeDequantize or FakeQuantize
        The operator with its parameters (numbers, lists, NumPy or zarr arrays).
    source : str, path, URL, zarr store or zarr.Array
        The tensor.
    max_mem : int or str, optional
        Bytes, or "2GiB": resident memory of this process, one result in the caller's hands included. Half of the available
        memory by default.
    missing : {"error", "fill"}
        What objects absent from the source mean: an error, or the source's fill value.
    workers : int, optional
        Threads; as many as there are CPUs and memory by default.
    retries, storage_options
        See `plan`.

    Yields
    ------
    tuple of slice, numpy.ndarray
        A region of whole stored objects of the source, and the result there; regions come in C order and cover the
        tensor. Closing the generator ends the work.

    Raises
    ------
    SpecError
        As `plan`, before the first result.
    RunError
        Objects are missing or cannot be read; the message names them.

    Examples
    --------
    >>> import numpy as np, zarr, chunkq
    >>> x = zarr.create_array(zarr.storage.MemoryStore(), data=np.int8([[1, 2], [3, 4]]), chunks=(1, 2))
    >>> for region, y in chunkq.stream(chunkq.DequantizeLinear([0.5, 2.0], axis=0), x, workers=1):
    ...     print(region, y)
    (slice(0, 2, None), slice(0, 2, None)) [[0.5 1. ]
     [6.  8. ]]
    """
    check_options(op, missing, workers, retries)
    limit = None if max_mem is None else parse_size(max_mem)
    array = open_source(source, storage_options=options_for(source, storage_options))
    spec, params = bind_zarr(op, array)
    inputs = {"source": array} | dict(zip((p.name for p in spec.params), params, strict=True))
    arrangement = arranged(spec, inputs, object_shape(array), False, "threads", workers, limit, HELD_RESULTS)
    look_at_inputs(inputs, missing, retries)
    job = Job(
        spec,
        Handle(array, spec.x_dtype),
        held_params(spec, params),
        None,
        arrangement.unit_shape,
        retries=retries,
        fail_fast=True,
    )
    return _results(job, arrangement.units, arrangement.memory.workers)


def _results(job: Job, units: int, workers: int) -> Generator[tuple[Region, Array], None, None]:
    pool = ThreadPoolExecutor(workers, thread_name_prefix="chunkq-stream")
    waiting: deque[Future[tuple[Region, Array]]] = deque()
    todo = iter(range(units))
    try:
        while True:
            # one of the results is in the caller's hands
            with held_interrupts():
                while len(waiting) < HELD_RESULTS * workers - 1 and (index := next(todo, None)) is not None:
                    waiting.append(pool.submit(compute_unit, job, index))
                if not waiting:
                    return
                result = waiting.popleft().result()
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
