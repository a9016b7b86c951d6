"""Runs a task for each of many units on this machine: Dask's schedulers, worker processes, progress, peak memory.

Not dask.array: it would cost every worker 50 MiB. Clusters are in cluster.py. Imports units and memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import dask
import dask.multiprocessing
import dask.threaded
from dask.callbacks import Callback

from chunkq.errors import RunError
from chunkq.memory import keep_memory_flat, peak_of_tree
from chunkq.units import Job, Outcome, one_object_at_a_time

#: Units handed to a scheduler at once; bounds the graph, not the run.
WINDOW = 4096

#: Seconds between two looks at the memory of the process tree.
LOOK = 0.25

#: What a scheduler calls for each unit.
Task = Callable[[Job, int], Outcome | None]

#: Called with the number of tasks done so far; an exception it raises stops the run.
Watch = Callable[[int], None]


class Counter(Callback):  # type: ignore[misc]
    """Counts finished tasks, keeps what they had to say, and the highest memory seen: no less than the true peak."""

    def __init__(self, watch: Watch | None = None) -> None:
        super().__init__(posttask=self._posttask)
        self.done = 0
        self.watch = watch
        self.outcomes: list[Outcome] = []
        self.peak = 0
        self._peaks: dict[int, int] = {}
        self._looked = 0.0

    def _posttask(self, key: Any, outcome: Any, *_: Any) -> None:
        self.count(outcome)

    def count(self, outcome: Outcome | None) -> None:
        """Take note of one more finished unit."""
        self.done += 1
        if outcome is not None:
            self.outcomes.append(outcome)
        if time.monotonic() - self._looked > LOOK:
            self.measure()
        if self.watch is not None:
            self.watch(self.done)

    def measure(self) -> None:
        """Look at the memory of the process tree."""
        self._looked = time.monotonic()
        for pid, peak in peak_of_tree().items():
            self._peaks[pid] = max(peak, self._peaks.get(pid, 0))
        self.peak = sum(self._peaks.values())


# ---- worker processes

_jobs: dict[str, Job] = {}


def _enter_worker(job: Job) -> None:
    """Set up a worker process, once: the job comes here and not with every task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    keep_memory_flat()
    _jobs[job.token] = job
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_unit_of(token: str, task: Task, index: int) -> Outcome | None:
    return task(_jobs[token], index)


def _is_up() -> None:
    """A worker that answers this has started."""


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep Ctrl-C from reaching the processes that are started inside, for good; here it arrives afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_in_processes(job: Job, task: Task, indices: Sequence[int], workers: int, counter: Counter) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_enter_worker, initargs=(job,)) as pool:
        try:
            with _uninterrupted():
                started = [pool.submit(_is_up) for _ in range(workers)]
            wait(started)
            how = {"scheduler": "processes", "pool": pool, "chunksize": 1, "num_workers": workers}
            _compute(job, indices, _run_unit_of, (job.token, task), **how)
        except BrokenProcessPool as error:
            raise RunError(
                "a worker process died (out of memory, or killed); run the same again to continue"
            ) from error
        finally:
            counter.measure()
            pool.shutdown(wait=True, cancel_futures=True)


# ---- schedulers


def task_key(job: Job, index: int) -> str:
    """Name of a task, as a dashboard shows it."""
    return f"{job.spec.task_name}-{job.token[:8]}-{index}"


def _compute(
    job: Job, indices: Sequence[int], function: Callable[..., Any], first: tuple[Any, ...], **how: Any
) -> None:
    call = dask.delayed(function, pure=False, traverse=False)
    for start in range(0, len(indices), WINDOW):
        window = indices[start : start + WINDOW]
        tasks = [call(*first, int(i), dask_key_name=task_key(job, int(i))) for i in window]
        dask.compute(*tasks, optimize_graph=False, traverse=False, **how)


def run_locally(job: Job, task: Task, indices: Sequence[int], kind: str, workers: int, counter: Counter) -> None:
    """Run a task for each unit on threads, in worker processes, or ("sync") here and now.

    Raises
    ------
    RunError
        What a task raised, or that a worker died.
    """
    with counter, one_object_at_a_time():
        if kind == "processes":
            _run_in_processes(job, task, indices, workers, counter)
        elif workers == 1:
            _compute(job, indices, task, (job,), scheduler="sync")
        else:
            _compute(job, indices, task, (job,), scheduler="threads", num_workers=workers)
    counter.measure()
