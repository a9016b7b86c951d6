"""Runs a task for each of many units on a Dask cluster, a window of them at a time.

Nothing is installed on the workers but chunkq. A worker that is lost costs the units it was at. Imports units, execute
and memory; distributed when it is used.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import dask

from chunkq.errors import ChunkqError, RunError, SpecError
from chunkq.execute import Batch, Counter, Task, Units, run_batch, task_key
from chunkq.interrupts import check_interrupts
from chunkq.memory import own_peak, reset_peak
from chunkq.units import Job, describe_region

#: Tasks sent out ahead for each thread of the cluster, and at least in all.
AHEAD, AHEAD_AT_LEAST = 4, 16

#: Seconds between two looks at the cluster, and without any worker before a run is given up.
LOOK = 2.0
PATIENCE = 600.0

#: Tasks that may be lost one after the other, none in between done, before a run is given up.
LOST_IN_A_ROW = 200

#: Seconds a scheduler has to answer.
ANSWER_WITHIN = 5.0

#: Seconds that a plan waits for a cluster's first worker: who starts both in one go need not count.
WORKERS_WITHIN = 15.0


def active_client() -> Any | None:
    """The distributed client that this program works with, where there is one.

    None inside a worker's own task: it would wait for threads of which it holds one.
    """
    if "distributed" not in sys.modules:
        return None
    from distributed import Client, get_worker

    try:
        get_worker()
    except ValueError:
        pass
    else:
        return None
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
    try:
        from distributed import Client
    except ImportError as error:
        raise SpecError("scheduler", f"scheduler={scheduler!r} needs distributed: pip install distributed") from error
    if not isinstance(scheduler, str):
        _refuse_unfit(scheduler, Client)
        yield scheduler
        return
    with ThreadPoolExecutor(1) as thread:  # the caller's own may have a running event loop
        thread.submit(asyncio.run, _knock(scheduler)).result()
    try:
        client = Client(scheduler, timeout=ANSWER_WITHIN, set_as_default=False)
    except (OSError, ValueError, ImportError) as error:  # gone this moment; or of a version that cannot talk to ours
        raise _unreachable(scheduler, error) from error
    with client:
        yield client


def _refuse_unfit(client: Any, kind: type) -> None:
    if not isinstance(client, kind):
        raise SpecError(
            "scheduler", f"scheduler is a {type(client).__name__}; expected a distributed.Client, an address or a name"
        )
    if getattr(client, "asynchronous", False):
        raise SpecError("scheduler", "the client is asynchronous, but a run waits for it; make it without asynchronous")
    if getattr(client, "status", "") != "running":
        raise SpecError("scheduler", f"the client is {getattr(client, 'status', '')}; connect a new one")


def _unreachable(scheduler: str, error: BaseException) -> SpecError:
    what = f"{str(error) or type(error).__name__}".splitlines()[0]
    return SpecError(
        "scheduler",
        f"scheduler={scheduler!r} cannot be reached ({what}); pass the address that 'dask scheduler' prints",
    )


def await_workers(client: Any) -> None:
    """Give the first worker of a cluster that is being started some time to come."""
    try:
        client.wait_for_workers(1, timeout=WORKERS_WITHIN)
    except TimeoutError:
        return  # the caller sees that there is none


async def _knock(scheduler: str) -> None:
    """Connect once and hang up: a client waits without end for an address that takes calls but is no scheduler."""
    from distributed.comm import connect
    from distributed.security import Security

    try:
        how = Security().get_connection_args("client")
        comm = await asyncio.wait_for(connect(scheduler, timeout=ANSWER_WITHIN, **how), ANSWER_WITHIN + 1)
        comm.abort()
    except Exception as error:  # what answers may be anything, and its bytes then fail in any way
        raise _unreachable(scheduler, error) from error


# ---- units on their way


def _itself(job: Job) -> Job:
    return job


def _send_job(client: Any, job: Job) -> Any:
    """Have a worker hold the job; the others fetch it from there, once each.

    A task of its own and not scattered data: when every worker that holds it is lost, it is made again.
    """
    # distributed warns of large arguments, which would go out again with every task; this goes out once
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 TiB"}):
        return client.submit(_itself, job, key=f"{task_key(job, 0)}-job", pure=False)


def _gone() -> RunError:
    return RunError("the Dask scheduler is gone; run the same again to continue")


class _Window:
    """The units that are out on the cluster."""

    def __init__(self, client: Any, job: Job, task: Task, indices: Sequence[int]) -> None:
        self.client, self.job, self.task = client, job, task
        self.units = Units(indices)
        self.out: dict[str, tuple[tuple[int, ...], Any]] = {}
        self.ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # units that may have taken their workers down: which of those on a worker did shows when each is sent alone
        self.suspects: list[int] = []
        self.alone = False
        self.room = 0
        self._sent = 0
        self._lost = 0
        self._looked = self._seen = time.monotonic()
        self._look()
        self.held = _send_job(client, job)

    def _look(self) -> None:
        """See how many workers there are, and that there is a scheduler."""
        self._looked = time.monotonic()
        try:
            threads = sum(self.client.nthreads().values())
        except (OSError, ValueError) as error:
            raise _gone() from error
        if self.client.status != "running":
            raise _gone()
        if threads:
            self._seen = self._looked
        elif self._looked - self._seen > PATIENCE:
            raise RunError(
                f"the Dask cluster has had no worker for {PATIENCE:.0f} s; start some and run the same again to continue"
            )
        self.room = max(AHEAD_AT_LEAST, AHEAD * threads)

    def refill(self) -> bool:
        """Send out as many tasks as there is room for; false when nothing is left to wait for."""
        if time.monotonic() - self._looked > LOOK:
            self._look()
        # where every unit takes its worker down, the first suspect shows it
        while not self.suspects and not self.alone and len(self.out) < self.room and (units := self.units.take()):
            self._send(units)
        if self.suspects and not self.out:
            self.alone = True
            self._send((self.suspects.pop(),))
        return bool(self.out)

    def _send(self, units: tuple[int, ...]) -> None:
        # with a number of its own: the name of a task that was lost is still known to the scheduler
        key = f"{task_key(self.job, units[0])}-{self._sent}"
        self._sent += 1
        future = self.client.submit(run_batch, self.held, self.task, units, key=key, pure=False)
        self.out[key] = units, future
        future.add_done_callback(self.ended.put)

    def collect(self) -> Iterator[Batch]:
        """Wait for tasks to end, for a while; yield what became of them."""
        ended = self._wait()
        done = {future.key: future for future in ended if future.status == "finished"}
        try:
            batches = self.client.gather(done, errors="skip")
        except OSError as error:
            raise _gone() from error
        for future in ended:
            units, _ = self.out.pop(future.key)
            alone, self.alone = self.alone, False
            batch = batches.get(future.key)
            if batch is None:
                self._failed(units, future, alone)
            else:
                self._lost = 0
                self.units.learn(units, batch)
                yield batch

    def _wait(self) -> list[Any]:
        try:
            ended = [self.ended.get(timeout=LOOK)]
        except queue.Empty:
            return []
        while not self.ended.empty():
            ended.append(self.ended.get())
        return ended

    def _failed(self, units: tuple[int, ...], future: Any, alone: bool) -> None:
        """Give units back that were lost with their worker; any other failure ends the run."""
        if future.status == "error":
            self._blame(units, future.exception(), alone)
        elif self.client.status != "running":
            raise _gone()
        else:
            self._lost += 1
            if self._lost > LOST_IN_A_ROW:
                raise RunError(
                    f"{self._lost} tasks in a row were lost on the cluster and none was done; do its workers have chunkq "
                    "installed, in this version? Their logs say more"
                )
            self.units.give_back(units)

    def _blame(self, units: tuple[int, ...], error: BaseException, alone: bool) -> None:
        from distributed.scheduler import KilledWorker

        if isinstance(error, ChunkqError):
            raise error
        where = f"unit {units[0]}, region {describe_region(self.job.region(units[0]))}"
        if not isinstance(error, KilledWorker):
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RunError(f"{where}: a worker cannot run it: {what}") from error
        if alone:
            raise RunError(
                f"{where}: every worker that was given it died (out of memory?): {error}; run the same again to continue"
            ) from error
        self.suspects += units

    def cancel(self) -> None:
        """Take back what is out; what a worker is at is finished there."""
        if self.client.status == "running":
            self.client.cancel([self.held, *(future for _, future in self.out.values())], force=True)


def run_on_cluster(job: Job, task: Task, indices: Sequence[int], client: Any, counter: Counter) -> None:
    """Run a task for each unit on a cluster.

    Raises
    ------
    RunError
        What a task raised, that a unit took down worker after worker, or that the scheduler is gone.
    """
    if not len(indices):
        return
    window = _Window(client, job, task, indices)
    try:
        while window.refill():
            check_interrupts()
            for batch in window.collect():
                for outcome in batch.outcomes:
                    counter.count(outcome)
    except BaseException:
        window.cancel()
        raise


def forget_peaks(client: Any) -> None:
    """Let every worker measure its peak from now on."""
    client.run(reset_peak, on_error="ignore")


def highest_peak(client: Any) -> int:
    """The highest peak of resident bytes among the workers that are there."""
    peaks = client.run(own_peak, on_error="ignore").values()
    return max((p for p in peaks if isinstance(p, int)), default=0)
