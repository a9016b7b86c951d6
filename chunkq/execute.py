"""Carries out a plan: one Dask task per unit, which reads, computes and writes one region. Imports run, store, grid.

Not dask.array: it would cost every worker 50 MiB.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dask
import dask.multiprocessing
import dask.threaded
import numpy as np
import zarr
from dask.callbacks import Callback

from chunkq import grid
from chunkq.dtypes import to_holder
from chunkq.errors import ChunkqError, RunError
from chunkq.memory import keep_memory_flat, peak_of_tree, reset_peak
from chunkq.run import run_chunk
from chunkq.spec import QuantSpec, Region, Shape
from chunkq.store import Handle
from chunkq.target import writable

#: Units handed to a local scheduler at once; bounds the graph, not the run.
WINDOW = 4096

#: Called with the number of units done so far.
Progress = Callable[[int], None]

# One zarr object at a time in each thread or process: many encoded at once thrash the caches and multiply the memory.
_ZARR_CONFIG = {"async.concurrency": 1, "threading.max_workers": 1}


class Job:
    """What a task needs to compute any unit. No dataclass: Dask would look into its fields for graphs."""

    __slots__ = ("params", "source", "spec", "target", "token", "unit_shape")

    def __init__(
        self, spec: QuantSpec, source: Handle, params: tuple[Any, ...], target: Handle, unit_shape: Shape
    ) -> None:
        self.spec = spec
        self.source = source
        self.params = params
        self.target = target
        self.unit_shape = unit_shape
        self.token = uuid.uuid4().hex


def _describe(region: Region) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in region) + "]"


def _cut(job: Job, region: Region) -> tuple[Any, ...]:
    cuts = [param.own_region(region) for param in job.spec.params]
    return tuple(
        value.read(cut) if isinstance(value, Handle) else value[cut]
        for value, cut in zip(job.params, cuts, strict=True)
    )


def run_unit(job: Job, index: int) -> None:
    """Read, compute and write one unit.

    Raises
    ------
    RunError
        Naming the region and which of the three steps failed.
    """
    region = grid.region(job.spec.shape, job.unit_shape, index)
    step = "reading the source"
    try:
        x = job.source.read(region)
        step = "reading the parameters"
        params = _cut(job, region)
        step = "computing"
        y = run_chunk(job.spec, x, params, start=tuple(part.start for part in region))
        del x
        step = "writing the target"
        writable(job.target.array)[region] = to_holder(y)
    except RunError:
        raise
    except Exception as error:
        name = "" if isinstance(error, ChunkqError) else f"{type(error).__name__}: "
        what = f"{name}{error}".splitlines()[0]
        raise RunError(f"unit {index}, region {_describe(region)}: {step} failed: {what}") from error


# ---- worker processes

_jobs: dict[str, Job] = {}


def _enter_worker(job: Job) -> None:
    """Set up a worker process, once: the job comes here and not with every task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    keep_memory_flat()
    zarr.config.set(_ZARR_CONFIG)
    _jobs[job.token] = job
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_unit_of(token: str, index: int) -> None:
    run_unit(_jobs[token], index)


# ---- schedulers


class _Counter(Callback):  # type: ignore[misc]
    """Counts finished tasks and keeps the highest memory seen."""

    def __init__(self, progress: Progress | None) -> None:
        super().__init__(posttask=self._posttask)
        self.done = 0
        self.progress = progress
        self.peaks: dict[int, int] = {}

    def _posttask(self, *_: Any) -> None:
        self.count()

    def count(self) -> None:
        self.done += 1
        self.measure()
        if self.progress is not None:
            self.progress(self.done)

    def measure(self) -> None:
        for pid, peak in peak_of_tree().items():
            self.peaks[pid] = max(peak, self.peaks.get(pid, 0))


def _compute_locally(job: Job, units: int, function: Callable[..., None], argument: Any, **how: Any) -> None:
    for start in range(0, units, WINDOW):
        tasks = [
            dask.delayed(function, pure=False)(argument, i, dask_key_name=f"{job.spec.task_name}-{job.token[:8]}-{i}")
            for i in range(start, min(units, start + WINDOW))
        ]
        dask.compute(*tasks, optimize_graph=False, traverse=False, **how)


def _run_in_processes(job: Job, units: int, workers: int) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_enter_worker, initargs=(job,)) as pool:
        try:
            _compute_locally(
                job,
                units,
                _run_unit_of,
                job.token,
                scheduler="processes",
                pool=pool,
                chunksize=1,
                num_workers=workers,
            )
        except BrokenProcessPool as error:
            raise RunError("a worker process died (out of memory, or killed); the target is unfinished") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _run_in_threads(job: Job, units: int, workers: int) -> None:
    with zarr.config.set(_ZARR_CONFIG):
        if workers == 1:
            _compute_locally(job, units, run_unit, job, scheduler="sync")
        else:
            _compute_locally(job, units, run_unit, job, scheduler="threads", num_workers=workers)


@contextmanager
def cluster(scheduler: Any) -> Iterator[Any]:
    """A distributed client for an address, or the given client itself."""
    if not isinstance(scheduler, str):
        yield scheduler
        return
    from distributed import Client

    with Client(scheduler, timeout="10s", set_as_default=False) as client:
        yield client


def _run_on_cluster(job: Job, units: int, scheduler: Any, counter: _Counter) -> None:
    from distributed import as_completed

    with cluster(scheduler) as client:
        held = client.scatter(job, broadcast=True, hash=False)
        in_flight = 4 * max(1, sum(client.nthreads().values()))

        def submit(index: int) -> Any:
            key = f"{job.spec.task_name}-{job.token[:8]}-{index}"
            return client.submit(run_unit, held, index, key=key, pure=False)

        waiting = iter(range(units))
        running = as_completed([submit(i) for _, i in zip(range(in_flight), waiting, strict=False)])
        for future in running:
            future.result()
            counter.count()
            for index in waiting:
                running.add(submit(index))
                break


@dataclass(frozen=True)
class Report:
    """What a run did.

    Attributes
    ----------
    units : int
        Tasks done.
    bytes_read, bytes_written : int
        Uncompressed.
    seconds : float
        Wall time of the run, start-up of workers included.
    peak_memory, projected_memory, max_mem : int
        Measured peak resident bytes of the process tree, what the plan foretold, and the limit.
    """

    units: int
    bytes_read: int
    bytes_written: int
    seconds: float
    peak_memory: int
    projected_memory: int
    max_mem: int

    @property
    def gb_per_second(self) -> float:
        """Rate of bytes read and written, in 10**9 bytes a second."""
        return (self.bytes_read + self.bytes_written) / max(self.seconds, 1e-9) / 1e9


def execute(
    job: Job, units: int, kind: str, workers: int, scheduler: Any, progress: Progress | None
) -> tuple[float, int]:
    """Run every unit; return the seconds taken and the peak resident bytes of the local process tree."""
    reset_peak()
    began = time.perf_counter()
    counter = _Counter(progress)
    if kind == "cluster":
        _run_on_cluster(job, units, scheduler, counter)
    else:
        with counter:
            if kind == "processes":
                _run_in_processes(job, units, workers)
            else:
                _run_in_threads(job, units, workers)
    counter.measure()
    return time.perf_counter() - began, sum(counter.peaks.values())


def cut_params(spec: QuantSpec, params: tuple[Any, ...]) -> tuple[Any, ...]:
    """Parameters as a job holds them: NumPy arrays as they are, zarr arrays behind handles."""
    pairs = zip(spec.params, params, strict=True)
    return tuple(p if isinstance(p, np.ndarray) else Handle(p, param.dtype) for param, p in pairs)
