"""Runs a task for each of many units on a Dask cluster, a window of them at a time.

Nothing is installed on the workers but chunkq. A worker that is lost costs the units it was at. Imports units, execute
and memory; distributed when it is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from chunkq.errors import RunError, SpecError
from chunkq.execute import Counter, Task, task_key
from chunkq.memory import peak_of_tree, reset_peak
from chunkq.units import Job, describe_region

#: Units sent out ahead for each thread of the cluster, and at least in all.
AHEAD, AHEAD_AT_LEAST = 4, 16

#: Seconds between two looks at how many workers there are.
LOOK = 2.0


def active_client() -> Any | None:
    """The distributed client that this program works with, where there is one."""
    import sys

    if "distributed" not in sys.modules:
        return None
    from distributed import Client

    try:
        return Client.current(allow_global=True)
    except ValueError:
        return None


@contextmanager
def connected(scheduler: Any) -> Iterator[Any]:
    """A client for an address, or the given client itself.

    Raises
    ------
    SpecError
        Reason ``scheduler``.
    """
    if not isinstance(scheduler, str):
        yield scheduler
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise SpecError("scheduler", f"scheduler={scheduler!r} needs distributed: pip install distributed") from error
    try:
        client = Client(scheduler, timeout="5s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise SpecError("scheduler", f"scheduler={scheduler!r} cannot be reached: {error}") from error
    with client:
        yield client


def _itself(job: Job) -> Job:
    return job


class _Window:
    """The units that are out on the cluster."""

    def __init__(self, client: Any, job: Job, task: Task, indices: Sequence[int]) -> None:
        self.client, self.job, self.task = client, job, task
        self.waiting = iter(indices)
        self.out: dict[str, tuple[int, Any]] = {}
        # a task of its own and not scattered data: when every worker that holds it is lost, it is made again
        self.held = client.submit(_itself, job, key=f"{task_key(job, 0)}-job", pure=False)
        self.room = 0
        self._looked = 0.0

    def refill(self) -> list[Any]:
        """Send out as many units as there is room for; return their futures."""
        if time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            self.room = max(AHEAD_AT_LEAST, AHEAD * sum(self.client.nthreads().values()))
        new = []
        while len(self.out) < self.room:
            index = next(self.waiting, None)
            if index is None:
                break
            new.append(self.send(int(index)))
        return new

    def send(self, index: int) -> Any:
        key = task_key(self.job, index)
        future = self.client.submit(self.task, self.held, index, key=key, pure=False)
        self.out[key] = index, future
        return future

    def cancel(self) -> None:
        """Take back what is out; what a worker is at is finished there."""
        if self.client.status == "running":
            self.client.cancel([future for _, future in self.out.values()], force=True)


def run_on_cluster(job: Job, task: Task, indices: Sequence[int], client: Any, counter: Counter) -> None:
    """Run a task for each unit on a cluster.

    Raises
    ------
    RunError
        What a task raised, that a unit took down worker after worker, or that the scheduler is gone.
    """
    from distributed import as_completed

    if not len(indices):
        return
    window = _Window(client, job, task, indices)
    try:
        running = as_completed(window.refill())
        for batch in running.batches():
            finished = [future for future in batch if future.status == "finished"]
            for future, outcome in zip(finished, client.gather(finished), strict=True):
                del window.out[future.key]
                counter.count(outcome)
            again = [_failed(window, future) for future in batch if future.status != "finished"]
            for future in [*again, *window.refill()]:
                running.add(future)
    except BaseException:
        window.cancel()
        raise


def _failed(window: _Window, future: Any) -> Any:
    """Send a unit out again that was lost with its worker; any other failure ends the run."""
    index, _ = window.out.pop(future.key)
    if future.status == "error":
        raise _failure(window.job, index, future.exception())
    if window.client.status != "running":
        raise RunError("the Dask scheduler is gone; run the same again to continue")
    return window.send(index)


def _failure(job: Job, index: int, error: BaseException) -> BaseException:
    from distributed.scheduler import KilledWorker

    if isinstance(error, KilledWorker):
        region = describe_region(job.region(index))
        return RunError(f"unit {index}, region {region}: every worker that was given it died (out of memory?): {error}")
    return error


def _own_peak() -> int:
    return sum(peak_of_tree().values())


def forget_peaks(client: Any) -> None:
    """Let every worker measure its peak from now on."""
    client.run(reset_peak, on_error="ignore")


def highest_peak(client: Any) -> int:
    """The highest peak of resident bytes among the workers that are there."""
    peaks = client.run(_own_peak, on_error="ignore").values()
    return max((p for p in peaks if isinstance(p, int)), default=0)
