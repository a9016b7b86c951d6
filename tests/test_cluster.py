"""Runs on real Dask clusters that lose workers, schedulers and clients: the result is exact and nothing is done twice."""

import os
import signal
import socket
import sys
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import zarr

pytest.importorskip("distributed")

import clusters
import dask
import processes
from distributed import Client, LocalCluster

import chunkq
from chunkq import cluster as chunkq_cluster
from chunkq import execute, workers
from chunkq.journal import Progressed
from chunkq.lock import LOCK
from chunkq.memory import MIB
from chunkq.store import Handle
from chunkq.units import Job

# its functions go to other processes as they are: those cannot import the tests
cloudpickle.register_pickle_by_value(sys.modules[__name__])


UNITS = 80
X = np.random.default_rng(0).integers(-128, 128, (UNITS, 32), dtype=np.int8)
OP = chunkq.DequantizeLinear(np.float32(0.37), np.int8(3))
Y = (X.astype(np.float32) - np.float32(3)) * np.float32(0.37)


@pytest.fixture
def small_units(monkeypatch):
    """One stored object a unit, however small."""
    monkeypatch.setattr(workers, "UNIT_BYTES", 1)


@contextmanager
def local_cluster(**how):
    """Two workers under nannies, a thread each."""
    base = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**base, **how) as cluster, Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def client():
    with local_cluster() as found:
        yield found


def stores(folder):
    """A source with a chunk for each unit, and the store of a target; both count."""
    source = clusters.CountingStore(folder / "x.zarr")
    zarr.create_array(source, shape=X.shape, chunks=(1, 32), dtype=X.dtype)[...] = X
    return source, clusters.CountingStore(folder / "y.zarr")


def check(folder, lost):
    """The target is complete and exact; units were computed and written once, but for those that were lost."""
    y = zarr.open_array(folder / "y.zarr", mode="r")
    assert y.attrs["chunkq.complete"] is True
    np.testing.assert_array_equal(y[:].view(np.uint32), Y.view(np.uint32))
    assert not list(Path(folder).rglob("*.partial"))
    written = clusters.noted(folder / "y.zarr", "written")
    read = clusters.noted(folder / "x.zarr", "read")
    assert len(set(written)) == len(set(read)) == UNITS
    assert UNITS <= len(written) <= UNITS + lost
    assert UNITS <= len(read) <= UNITS + lost


def lose(client, moments):
    """A progress function that does something to a worker each time that so many units are done: {units: what}."""
    addresses = list(client.scheduler_info(n_workers=-1)["workers"])
    pids = client.run(os.getpid)
    left = dict(moments)

    def progress(done, units):
        for moment in [m for m in left if m <= done]:
            address = addresses.pop()
            left.pop(moment)(address, pids[address])

    return progress, left


def kill(_, pid):
    os.kill(pid, signal.SIGKILL)


# when so many units are done, short ones go several to a task
LOSSES = {"killed": (40,), "segfault": (40,), "both": (30, 60)}


def in_a_task(folder):
    """Wait until the workers are some units further: tasks then have units that are done, which nobody was told."""
    log = folder / "y.zarr"
    before, deadline = len(clusters.noted(log, "written")), time.monotonic() + processes.PATIENCE
    while len(clusters.noted(log, "written")) < before + 6 and time.monotonic() < deadline:
        processes.select.select([], [], [], 0.005)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("how", LOSSES)
def test_workers_are_lost(tmp_path, client, how):
    client.wait_for_workers(2, timeout=60)
    source, target = stores(tmp_path)

    def crash(address, pid):
        in_a_task(tmp_path)
        if how == "segfault":
            client.run(clusters.segfault, workers=[address], wait=False, on_error="ignore")
        else:
            kill(address, pid)

    progress, left = lose(client, dict.fromkeys(LOSSES[how], crash))
    report = chunkq.plan(OP, source, target, scheduler=client).run(progress=progress)
    assert not left
    assert report.units_done == report.units == UNITS
    check(tmp_path, lost=len(LOSSES[how]))


@pytest.mark.usefixtures("small_units")
def test_no_worker_for_a_while(tmp_path):
    source, target = stores(tmp_path)
    with (
        clusters.shell_cluster(tmp_path) as cluster,
        Client(cluster.address, timeout=60, set_as_default=False) as client,
    ):
        lost, left = lose(client, {10: kill, 11: kill})

        def progress(done, units):
            before = len(left)
            lost(done, units)
            if before and not left:
                cluster.start_worker()

        chunkq.plan(OP, source, target, scheduler=client).run(progress=progress)
        assert not left
    check(tmp_path, lost=2)


def test_a_cluster_without_workers_is_given_up(monkeypatch, client, tmp_path):
    monkeypatch.setattr(chunkq_cluster, "PATIENCE", 1.0)
    monkeypatch.setattr(chunkq_cluster, "LOOK", 0.2)
    with (
        LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as empty,
        pytest.raises(chunkq.RunError, match="no worker for 1 s"),
    ):
        chunkq_cluster.run_on_cluster(bare_job(tmp_path), clusters.nothing, range(9), empty, execute.Counter())


def bare_job(folder, units=40, **how):
    """A job for tasks that are no work."""
    array = zarr.create_array(str(folder / "bare.zarr"), shape=(units,), chunks=(1,), dtype="int8")
    spec, params = OP.bind_array(array)
    return Job(spec, Handle(array, "int8"), how.pop("params", params), None, (1,), **how)


def test_a_unit_that_takes_every_worker_down(tmp_path):
    counter = execute.Counter()
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        local_cluster() as client,
        pytest.raises(chunkq.RunError, match=r"unit 7, region \[7:8\]: every worker that was given it died"),
    ):
        chunkq_cluster.run_on_cluster(bare_job(tmp_path), clusters.deadly_seventh, range(40), client, counter)
    assert counter.done < 40


def test_a_task_that_no_worker_can_run(tmp_path, client):
    with pytest.raises(
        chunkq.RunError, match=r"unit \d, region \[\d:\d\]: a worker cannot run it: ZeroDivisionError: seven"
    ):
        chunkq_cluster.run_on_cluster(
            bare_job(tmp_path), clusters.impossible_seventh, range(40), client, execute.Counter()
        )


@pytest.mark.usefixtures("small_units")
def test_a_worker_that_cannot_read_the_source(tmp_path, client):
    client.wait_for_workers(2, timeout=60)
    source, target = stores(tmp_path)
    worker = next(iter(client.scheduler_info(n_workers=-1)["workers"]))
    plan = partial(chunkq.plan, OP, source, target, scheduler=client, retries=0)
    client.run(clusters.set_blind, "1", workers=[worker])
    try:
        with pytest.raises(chunkq.RunError, match=rf"of {UNITS} units failed; the first.*nothing to see here"):
            plan().run()
    finally:
        client.run(clusters.set_blind, "", workers=[worker])
    y = zarr.open_array(target, mode="r")
    done = len(Progressed(y, (1, 32)).done())
    assert done < UNITS  # perhaps none: a worker that fails at once takes one after the other
    report = plan().run()
    assert report.units_done == UNITS - done
    check(tmp_path, lost=UNITS)
    assert max(Counter(clusters.noted(tmp_path / "y.zarr", "written")).values()) == 1


# ---- the client ends, or the scheduler


@pytest.fixture
def tensor(tmp_path):
    """A source whose result takes seconds to encode: 24 objects of 4 MiB."""
    rng = np.random.default_rng(0)
    source = zarr.create_array(
        str(tmp_path / "x.zarr"), shape=(24, 1 << 20), chunks=(1, 1 << 20), dtype="int8", compressors=None
    )
    source[...] = rng.integers(-128, 128, source.shape, dtype=np.int8)
    return str(tmp_path / "x.zarr")


def command(source, target, address):
    return ("dequantize", source, target, "--scale", "0.37", "--compressor", "gzip", "--scheduler", address)


def in_the_middle(process, target):
    """Wait until some units are done."""
    deadline = time.monotonic() + processes.PATIENCE
    while len(list(Path(target).glob("c/*/0"))) < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        processes.select.select([], [], [], 0.01)


def exact(source, target):
    x, y = zarr.open_array(source, mode="r"), zarr.open_array(target, mode="r")
    for row in range(x.shape[0]):
        np.testing.assert_array_equal(y[row], x[row].astype(np.float32) * np.float32(0.37))


def tasks_left(dask_scheduler):
    return list(dask_scheduler.tasks)


def forgotten(client):
    """The scheduler lets go of every task within two seconds."""
    deadline = time.monotonic() + 2
    while client.run_on_scheduler(tasks_left):
        assert time.monotonic() < deadline, client.run_on_scheduler(tasks_left)


def test_ctrl_c_takes_the_queued_tasks_back(tmp_path, tensor):
    target = str(tmp_path / "y.zarr")
    with (
        clusters.shell_cluster(tmp_path) as cluster,
        Client(cluster.address, timeout=60, set_as_default=False) as client,
    ):
        process = processes.start(*command(tensor, target, cluster.address))
        in_the_middle(process, target)
        assert client.run_on_scheduler(tasks_left)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=processes.PATIENCE)
        forgotten(client)
        assert (process.returncode, err.splitlines()[-1][:19]) == (130, "chunkq: interrupted"), err
        assert "Traceback" not in err
        assert not (Path(target) / LOCK).exists()
        done = set(processes.versions(target).items())
        assert 4 <= len(done) < 24
        processes.finished(*command(tensor, target, cluster.address))
        # what was there stays as it was, but for what a worker was still at
        assert len(done - set(processes.versions(target).items())) <= 2
    exact(tensor, target)


def test_a_scheduler_dies(tmp_path, tensor):
    target = str(tmp_path / "y.zarr")
    with clusters.shell_cluster(tmp_path) as cluster:
        process = processes.start(*command(tensor, target, cluster.address))
        in_the_middle(process, target)
        cluster.scheduler.kill()
        killed = time.monotonic()
        _, err = process.communicate(timeout=processes.PATIENCE)
        assert time.monotonic() - killed < 15
        assert process.returncode == 1, err
        assert err.splitlines()[-1] == "chunkq: the Dask scheduler is gone; run the same again to continue"
        assert "Traceback" not in err
        assert not (Path(target) / LOCK).exists()
    with clusters.shell_cluster(tmp_path) as cluster:
        processes.finished(*command(tensor, target, cluster.address))
    exact(tensor, target)


@pytest.mark.parametrize("answers", [False, True], ids=["nobody there", "not a scheduler"])
def test_a_wrong_address(tmp_path, answers):
    source = zarr.create_array(str(tmp_path / "x.zarr"), data=X)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        code, out, err = processes.run(*command(source.store.root, tmp_path / "y.zarr", address))
    assert time.monotonic() - began < 20  # 5 s for the scheduler; imports on a busy machine
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert f"scheduler='{address}' cannot be reached" in err
    assert not (tmp_path / "y.zarr").exists()


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (5, "is a int; expected a distributed.Client"),
        ("thread", "expected one of auto"),
        ("foo://x", "unknown address"),
    ],
)
def test_what_is_no_scheduler(tmp_path, scheduler, message):
    source = zarr.create_array(str(tmp_path / "x.zarr"), data=X)
    with pytest.raises(chunkq.SpecError, match=message) as caught:
        chunkq.plan(OP, source, tmp_path / "y.zarr", scheduler=scheduler)
    assert caught.value.reason == "scheduler"


def test_a_closed_client(tmp_path, client):
    source = zarr.create_array(str(tmp_path / "x.zarr"), data=X)
    with Client(client.scheduler.address, set_as_default=False) as closed:
        plan = chunkq.plan(OP, source, tmp_path / "y.zarr", scheduler=closed)
    with pytest.raises(chunkq.SpecError, match="the client is closed"):
        chunkq.plan(OP, source, tmp_path / "z.zarr", scheduler=closed)
    with pytest.raises(chunkq.SpecError, match="the client is closed"):
        plan.run()


# ---- plans and clients


@pytest.mark.usefixtures("small_units")
def test_a_plan_for_threads_moves_to_a_cluster(tmp_path, client):
    source, target = stores(tmp_path)
    plan = chunkq.plan(OP, source, target, scheduler="threads")
    report = plan.run(client=client)
    check(tmp_path, lost=0)
    limit = min(w["memory_limit"] for w in client.scheduler_info(n_workers=-1)["workers"].values())
    assert report.max_mem <= limit
    assert 32 * MIB < report.peak_memory <= report.projected_memory <= report.max_mem
    assert report.projected_memory != plan.memory.total


def test_a_plan_for_threads_that_the_workers_have_no_memory_for(tmp_path):
    size = 1 << 27
    zarr.create_array(str(tmp_path / "x.zarr"), shape=(size,), chunks=(size,), dtype="int8")
    plan = chunkq.plan(
        OP, tmp_path / "x.zarr", tmp_path / "y.zarr", max_mem="64GiB", scheduler="threads", missing="fill"
    )
    with (
        local_cluster(memory_limit=500 * MIB) as client,
        pytest.raises(
            chunkq.SpecError, match="on a worker of this cluster with 1 threads, which may use 500 MiB"
        ) as caught,
    ):
        plan.run(client=client)
    assert caught.value.reason == "max_mem"
    assert not (tmp_path / "y.zarr").exists()


def test_what_is_in_this_process_is_refused(tmp_path, client):
    source = zarr.create_array(zarr.storage.MemoryStore(), data=X)
    with pytest.raises(chunkq.SpecError, match="source is in the memory of this process, where no cluster see it"):
        chunkq.plan(OP, source, tmp_path / "y.zarr", scheduler=client)
    with pytest.raises(chunkq.SpecError, match="source is in the memory of this process"):
        chunkq.plan(OP, source, tmp_path / "y.zarr", scheduler="threads").run(client=client)
    assert not (tmp_path / "y.zarr").exists()


def test_an_active_client_is_used(tmp_path, client):
    source = zarr.create_array(str(tmp_path / "x.zarr"), data=X)
    assert chunkq.plan(OP, source, tmp_path / "y.zarr").scheduler == "threads"
    with client.as_current():
        plan = chunkq.plan(OP, source, tmp_path / "y.zarr")
        plan.run()
    assert plan.scheduler == "cluster"
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "y.zarr")[:], Y)


def test_lazy_arrays_of_zarr(tmp_path, client):
    source = zarr.create_array(str(tmp_path / "x.zarr"), data=X, chunks=(9, 32))
    with client.as_current():
        y = chunkq.dequantize_linear(source, np.float32(0.37), np.int8(3)).compute()
    np.testing.assert_array_equal(y.view(np.uint32), Y.view(np.uint32))


def test_large_parameters_go_out_once(tmp_path, client):
    client.wait_for_workers(2, timeout=60)
    scale = np.linspace(-1, 1, 3 << 20, dtype=np.float32)  # 12 MiB
    x = np.arange(scale.size, dtype=np.int64).astype(np.int8)
    source = zarr.create_array(str(tmp_path / "x.zarr"), data=x, chunks=(scale.size // 24,))
    op = chunkq.DequantizeLinear(scale, axis=0)
    received = Counter(client.run(bytes_in))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunkq.plan(op, source, tmp_path / "y.zarr", scheduler=client).run()
    received.subtract(client.run(bytes_in))
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "y.zarr")[:], x.astype(np.float32) * scale)
    assert all(-n < 2.5 * scale.nbytes for n in received.values()), received


def bytes_in(dask_worker):
    return sum(transfer["total"] for transfer in dask_worker.transfer_incoming_log)


# ---- short units


def test_short_units_share_a_task(tmp_path, client):
    job, counter = bare_job(tmp_path, 5000), execute.Counter()
    seen = []
    counter.watch = seen.append
    chunkq_cluster.run_on_cluster(job, clusters.nothing, range(5000), client, counter)
    assert seen == list(range(1, 5001))  # one by one all the same
    forgotten(client)


def test_units_are_given_out_once_each():
    units, handed = execute.Units(range(1000)), []
    while batch := units.take():
        # the time of a batch is over after a third of it, now and then
        done = max(1, len(batch) // 3) if len(handed) % 2 else len(batch)
        handed += batch[:done]
        units.learn(batch, execute.Batch([None] * done, 0.001))
    assert sorted(handed) == list(range(1000))
    assert units.size == execute.BATCH_UNITS


def test_long_units_go_alone():
    units = execute.Units(range(10))
    for _ in range(2):
        batch = units.take()
        assert len(batch) == 1
        units.learn(batch, execute.Batch([None], 0.09))


def test_a_batch_ends_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(execute, "BATCH_SECONDS", 0.0)
    batch = execute.run_batch(None, clusters.nothing, (1, 2, 3))
    assert len(batch.outcomes) == 1
