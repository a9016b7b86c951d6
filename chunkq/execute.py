"""Runs a task for each of many units on this machine: Dask's schedulers, worker processes, progress, peak memory.

Units that are short go to a scheduler several at a time, which it takes for one task; each is counted on its own. Not
dask.array: it would cost every worker 50 MiB. Clusters are in cluster.py. Imports units, memory and
interrupts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import dask
import dask.multiprocessing
import dask.threaded

from chunkq.buffers import keep_results, keeping_results
from chunkq.errors import RunError
from chunkq.interrupts import check_interrupts
from chunkq.memory import children, keep_memory_flat, peak_of_tree
from chunkq.units import Job, Measured, Outcome, one_object_at_a_time

#: Tasks handed to a scheduler at once, and the first time, when nobody knows how long a unit takes; bounds the graph.
WINDOW, FIRST_WINDOW = 2048, 64

#: Seconds of short units that make one task, and how many at most: what a task costs is then shared.
BATCH_SECONDS, BATCH_UNITS = 0.1, 256

#: Seconds between two looks at the memory of the process tree.
LOOK = 0.25

#: What is called for each unit.
Task = Callable[[Job, int], Outcome | Measured | None]

#: Called with the number of units done so far; an exception it raises stops the run.
Watch = Callable[[int], None]


# ---- several units as one task


@dataclass(frozen=True)
class Batch:
    """What became of the units of one task: of the first ones, as many as there was time for."""

    outcomes: list[Outcome | Measured | None]
    seconds: float


def run_batch(job: Job, task: Task, indices: Sequence[int]) -> Batch:
    """Do units one after the other, at least one, until the time of a batch is over."""
    began = time.perf_counter()
    outcomes: list[Outcome | Measured | None] = []
    seconds = 0.0
    for index in indices:
        outcomes.append(task(job, index))
        seconds = time.perf_counter() - began
        if seconds > BATCH_SECONDS:
            break
    return Batch(outcomes, seconds)


class Units:
    """The units that wait for a worker; how many make a task follows from how long the last ones took."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = indices
        self._next = 0
        self._again: list[int] = []
        self.size = 1

    def take(self) -> tuple[int, ...]:
        """The units of one more task; none when all are handed out."""
        again, self._again = self._again[: self.size], self._again[self.size :]
        start = self._next
        self._next = min(start + self.size - len(again), len(self._indices))
        return (*again, *(int(i) for i in self._indices[start : self._next]))

    def give_back(self, units: Sequence[int]) -> None:
        """These units were not done; they are handed out before any other."""
        self._again += units

    def learn(self, units: Sequence[int], batch: Batch) -> None:
        """Take note of how far a task came, and in what time."""
        self.give_back(units[len(batch.outcomes) :])
        fitting = int(BATCH_SECONDS * len(batch.outcomes) / max(batch.seconds, 1e-9))
        self.size = max(1, min(fitting, 2 * self.size, BATCH_UNITS))


# ---- what is noted of them


class Counter:
    """Counts finished units, keeps what they had to say, and the highest memory seen: no less than the true peak."""

    def __init__(self, watch: Watch | None = None) -> None:
        self.done = 0
        self.watch = watch
        self.outcomes: list[Outcome] = []
        self.peak = 0
        self._peaks: dict[int, int] = {}
        #: what the caller runs beside is no part of this
        self._others = frozenset(children(os.getpid()))
        self._looked = 0.0

    def posttask(self, key: Any, batch: Batch, *_: Any) -> None:
        """Take note of a finished task, as Dask's schedulers call it."""
        for outcome in batch.outcomes:
            self.count(outcome)

    def count(self, outcome: Outcome | Measured | None) -> None:
        """Take note of one more finished unit."""
        self.done += 1
        if isinstance(outcome, Outcome):
            self.outcomes.append(outcome)
        if time.monotonic() - self._looked > LOOK:
            self.measure()
        if self.watch is not None:
            self.watch(self.done)
        check_interrupts()

    def measure(self) -> None:
        """Look at the memory of the process tree."""
        self._looked = time.monotonic()
        for pid, peak in peak_of_tree(self._others).items():
            self._peaks[pid] = max(peak, self._peaks.get(pid, 0))
        self.peak = sum(self._peaks.values())


# ---- worker processes

_jobs: dict[str, Job] = {}


def _enter_worker(job: Job) -> None:
    """Set up a worker process, once: the job comes here and not with every task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    keep_memory_flat()
    keep_results()
    _jobs[job.token] = job
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_batch_of(token: str, task: Task, indices: Sequence[int]) -> Batch:
    return run_batch(_jobs[token], task, indices)


def _is_up() -> None:
    """A worker that answers this has started."""


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Keep Ctrl-C from reaching the processes that are started inside, for good: they inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_in_processes(job: Job, task: Task, indices: Sequence[int], workers: int, counter: Counter) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_enter_worker, initargs=(job,)) as pool:
        try:
            with _deaf_children():
                started = [pool.submit(_is_up) for _ in range(workers)]
            wait(started)
            check_interrupts()
            how = {"scheduler": "processes", "pool": pool, "chunksize": 1, "num_workers": workers}
            _compute(job, indices, _run_batch_of, (job.token, task), counter, **how)
        except BrokenProcessPool as error:
            raise RunError(
                "a worker process died (out of memory, or killed; or the main module of the calling script has no "
                "'if __name__ == \"__main__\":'); run the same again to continue"
            ) from error
        finally:
            counter.measure()
            pool.shutdown(wait=True, cancel_futures=True)


# ---- schedulers


def task_key(job: Job, index: int) -> str:
    """Name of a task, as a dashboard shows it, by its first unit."""
    return f"{job.spec.task_name}-{job.token[:8]}-{index}"


def _compute(
    job: Job,
    indices: Sequence[int],
    function: Callable[..., Batch],
    first: tuple[Any, ...],
    counter: Counter,
    **how: Any,
) -> None:
    call = dask.delayed(function, pure=False, traverse=False)
    units = Units(indices)
    room = FIRST_WINDOW
    while window := list(islice(iter(units.take, ()), room)):
        tasks = [call(*first, batch, dask_key_name=task_key(job, batch[0])) for batch in window]
        # named here: those in force by a context Dask gives to whichever computation begins next, in any thread
        callbacks = [(None, None, None, counter.posttask, None)]
        done = dask.compute(*tasks, optimize_graph=False, traverse=False, callbacks=callbacks, **how)
        for batch, result in zip(window, done, strict=True):
            units.learn(batch, result)
        room = WINDOW


@contextmanager
def _own_threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that have ended when the run has, however it ends: Dask's own go on with what they began."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="chunkq", initializer=keep_results)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_locally(job: Job, task: Task, indices: Sequence[int], kind: str, workers: int, counter: Counter) -> None:
    """Run a task for each unit on threads, in worker processes, or ("sync") here and now.

    Raises
    ------
    RunError
        What a task raised, or that a worker died.
    """
    with one_object_at_a_time():
        if kind == "processes":
            _run_in_processes(job, task, indices, workers, counter)
        elif workers == 1:
            with keeping_results():
                _compute(job, indices, run_batch, (job, task), counter, scheduler="sync")
        else:
            with _own_threads(workers) as pool:
                _compute(job, indices, run_batch, (job, task), counter, scheduler="threads", pool=pool)
    counter.measure()
