"""One writer of a target: real processes, killed and alive, on every kind of store."""

import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict, replace

import pytest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, LoggingStore, MemoryStore, ObjectStore, WrapperStore

from chunkq import lock as lock_module
from chunkq.errors import RunError
from chunkq.lock import LOCK, STALE_AFTER, Lock

HOLDER = """
import sys
from zarr.storage import LocalStore
from chunkq.lock import Lock
with Lock(LocalStore(sys.argv[1]), "a", "a"):
    print("held", flush=True)
    sys.stdin.read()
"""


def obstore_memory(tmp_path):
    return ObjectStore(pytest.importorskip("obstore").store.MemoryStore())


STORES = {
    "local": lambda tmp_path: LocalStore(tmp_path),
    "memory": lambda tmp_path: MemoryStore(),
    "fsspec": lambda tmp_path: FsspecStore.from_url(f"memory://{uuid.uuid4().hex}"),
    "obstore": obstore_memory,
    "wrapped": lambda tmp_path: LoggingStore(MemoryStore(), log_level="ERROR"),
}


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return STORES[request.param](tmp_path)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock_module, "RENEW_EVERY", 0.05)


@pytest.fixture
def holder(tmp_path):
    """Start a process that holds the lock of a target below tmp_path."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def content(store):
    found = sync(store.get(f"a/{LOCK}", default_buffer_prototype()))
    return found.to_bytes() if found is not None else None


def put(store, data):
    sync(store.set(f"a/{LOCK}", default_buffer_prototype().buffer.from_bytes(data)))


def elsewhere(age, **changes):
    """What a process on another host has written, so many seconds ago."""
    owner = replace(lock_module._me(), host="elsewhere", pid=7, start=None, heartbeat=time.time() - age)
    return json.dumps(asdict(owner) | changes).encode()


def until(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        threading.Event().wait(0.01)


def test_held_and_given_back(store):
    with Lock(store, "a", "a") as lock:
        document = json.loads(content(store))
        assert document["pid"] == os.getpid()
        assert time.time() - document["heartbeat"] < 5
        lock.check()
        lock.check(read=True)
    assert content(store) is None
    with pytest.raises(RunError, match="not held"):
        lock.check()
    with lock:  # and again
        lock.check(read=True)
    assert content(store) is None


def test_given_back_after_an_error(store):
    with pytest.raises(KeyError), Lock(store, "a", "a"):
        raise KeyError
    assert content(store) is None


def test_the_root_of_a_store(tmp_path):
    with Lock(LocalStore(tmp_path), "", "a"):
        assert (tmp_path / LOCK).exists()
    assert list(tmp_path.iterdir()) == []


def test_a_second_lock_of_this_process_is_refused(store):
    with Lock(store, "a", "target.zarr"):
        with pytest.raises(RunError, match=rf"target target\.zarr is being written by process {os.getpid()} on host"):
            Lock(store, "a", "target.zarr").__enter__()
        assert content(store) is not None


def test_only_one_of_many_threads_gets_it(store):
    start, held, done, outcomes = threading.Barrier(8), [], threading.Event(), []

    def run():
        start.wait()
        try:
            with Lock(store, "a", "a"):
                held.append(1)
                done.wait(20)
            outcomes.append("held")
        except RunError:
            outcomes.append("refused")
            if outcomes.count("refused") == 7:
                done.set()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held"] + ["refused"] * 7
    assert content(store) is None


class Gap(WrapperStore):
    """Asks first and writes then, as zarr does where a store has no such step of its own; each waits longer in between."""

    def __init__(self, store):
        super().__init__(store)
        self.waiting = itertools.count(1)

    async def set_if_not_exists(self, key, value):
        if not await self.exists(key):
            await asyncio.sleep(0.2 * next(self.waiting))
            await self.set(key, value)


def test_only_one_gets_it_where_two_find_the_place_empty():
    store, done = Gap(MemoryStore()), threading.Event()

    def run():
        try:
            with Lock(store, "a", "a"):
                outcomes.append("held")
                done.wait(20)
        except RunError:
            outcomes.append("refused")

    outcomes = []
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(outcomes) == 2)
    done.set()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", "refused"]


def test_a_living_process_keeps_it_and_a_killed_one_loses_it(tmp_path, holder):
    process = holder()
    with pytest.raises(RunError, match=f"being written by process {process.pid} on host .*Wait for it or stop it"):
        Lock(LocalStore(tmp_path), "a", "a").__enter__()
    os.kill(process.pid, signal.SIGSTOP)  # standing still is not dead
    with pytest.raises(RunError, match=f"process {process.pid}"):
        Lock(LocalStore(tmp_path), "a", "a").__enter__()
    os.kill(process.pid, signal.SIGKILL)
    # not waited for: a zombie is dead too
    until(lambda: lock_module._start_of(process.pid)[0] is False)
    with Lock(LocalStore(tmp_path), "a", "a") as lock:
        lock.check(read=True)
    assert os.listdir(tmp_path / "a") == []


def test_an_ended_process_leaves_nothing(tmp_path, holder):
    process = holder()
    process.communicate("")
    assert os.listdir(tmp_path / "a") == []


def test_only_one_of_many_processes_takes_a_dead_one_over(tmp_path, holder):
    first = holder()
    first.kill()
    first.communicate()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(4)
    ]
    first_lines = [process.stdout.readline() for process in processes]
    for process in processes:
        process.communicate("")
    assert sorted(first_lines) == ["", "", "", "held\n"]


def test_a_reused_process_number_is_another_process(tmp_path):
    store = LocalStore(tmp_path)
    mine = lock_module._me()
    if mine.start is None:
        pytest.skip("this system does not tell when a process started")
    put(store, replace(mine, start=mine.start - 1).encode())
    with Lock(store, "a", "a"):
        assert json.loads(content(store))["start"] == mine.start


def test_elsewhere_the_heartbeat_decides(store):
    put(store, elsewhere(STALE_AFTER - 20))
    with pytest.raises(RunError, match=r"process 7 on host elsewhere \(last sign of life 100 s ago\).*120 s after"):
        Lock(store, "a", "a").__enter__()
    put(store, elsewhere(-3600))  # its clock is ahead
    with pytest.raises(RunError, match=r"last sign of life 0 s ago"):
        Lock(store, "a", "a").__enter__()
    put(store, elsewhere(STALE_AFTER + 5))
    with Lock(store, "a", "a") as lock:
        lock.check(read=True)
    assert content(store) is None


@pytest.mark.parametrize("change", [{"boot": "another"}, {"namespace": "pid:[1]"}])
def test_a_process_number_of_another_boot_or_container_says_nothing(tmp_path, change):
    store = LocalStore(tmp_path)
    here = dict(zip(("host", "boot", "namespace"), lock_module._here(), strict=True))
    put(store, elsewhere(10, **(here | change), pid=2**22 + 1))
    with pytest.raises(RunError, match="last sign of life 10 s ago"):
        Lock(store, "a", "a").__enter__()
    put(store, elsewhere(10, **here, pid=2**22 + 1))  # here there is no such process
    with Lock(store, "a", "a"):
        pass


DAMAGED = [b"", b"{", b"null", b"[1]", b'{"pid": 1}', elsewhere(0, pid=-1), elsewhere(0, pid="7"), elsewhere(0, more=1)]


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_lock_counts_by_its_age(tmp_path, data):
    store = LocalStore(tmp_path)
    put(store, data)
    with pytest.raises(RunError, match=r"by whom cannot be read.*written \d s ago.*delete that object"):
        Lock(store, "a", "a").__enter__()
    old = time.time() - STALE_AFTER - 5
    os.utime(tmp_path / "a" / LOCK, (old, old))
    with Lock(store, "a", "a") as lock:
        lock.check(read=True)


@pytest.mark.parametrize(
    ("name", "told"),
    [("memory", "does not tell"), ("wrapped", "does not tell"), ("fsspec", "s ago"), ("obstore", "s ago")],
)
def test_a_damaged_lock_without_an_age_is_refused(name, told, tmp_path):
    store = STORES[name](tmp_path)
    put(store, b"?")
    with pytest.raises(RunError, match=rf"{told}.*a/chunkq\.lock|a/chunkq\.lock.*{told}"):
        Lock(store, "a", "a").__enter__()
    assert content(store) == b"?"


@pytest.mark.usefixtures("quick")
def test_the_heartbeat_is_renewed(store):
    with Lock(store, "a", "a"):
        first = json.loads(content(store))["heartbeat"]
        until(lambda: json.loads(content(store))["heartbeat"] > first)


@pytest.mark.usefixtures("quick")
def test_a_lost_lock_is_noticed_and_left_alone(store):
    with Lock(store, "a", "target.zarr") as lock:
        until(lambda: lock._renewed)
        put(store, elsewhere(0))
        until(lambda: lock._lost)
        with pytest.raises(RunError, match=r"target target\.zarr is no longer ours: process 7 on host elsewhere took"):
            lock.check()
    assert json.loads(content(store))["host"] == "elsewhere"


@pytest.mark.parametrize(
    ("data", "how"), [(None, "was deleted"), (b"?", "was overwritten"), (elsewhere(0), "took its")]
)
def test_reading_notices_at_once(tmp_path, data, how):
    store = LocalStore(tmp_path)
    with Lock(store, "a", "a") as lock:
        (tmp_path / "a" / LOCK).unlink()
        if data is not None:
            put(store, data)
        lock.check()
        with pytest.raises(RunError, match=how):
            lock.check(read=True)
    assert content(store) == data


@pytest.mark.usefixtures("quick")
def test_a_store_that_fails_for_long_counts_as_lost(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    with Lock(store, "a", "a") as lock:
        (tmp_path / "a" / LOCK).rename(tmp_path / "aside")
        (tmp_path / "a").rmdir()
        (tmp_path / "a").symlink_to("a")  # a loop: every request fails
        until(lambda: lock._failure)
        lock.check()
        monkeypatch.setattr(lock_module, "STALE_AFTER", 0.2)
        until(lambda: time.monotonic() - lock._renewed > 0.2)
        with pytest.raises(RunError, match=r"was not renewed for 0 s \(.*symbolic links"):
            lock.check()
        (tmp_path / "a").unlink()
        (tmp_path / "a").mkdir()
        (tmp_path / "aside").rename(tmp_path / "a" / LOCK)
    assert content(store) is None


def _leave(lock, answers):
    lock.check(read=True)
    lock.__exit__(None, None, None)
    answers.put(content(lock._store) is not None)


def test_a_fork_does_not_release_it(tmp_path):
    store = LocalStore(tmp_path)
    context = multiprocessing.get_context("fork")
    with Lock(store, "a", "a") as lock:
        answers = context.Queue()
        child = context.Process(target=_leave, args=(lock, answers))
        child.start()
        assert answers.get(timeout=20) is True
        child.join()
        lock.check(read=True)
    assert content(store) is None


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(RunError, match=r"lock 'a/chunkq\.lock' of target a cannot be written"):
        Lock(LocalStore(tmp_path, read_only=True), "a", "a").__enter__()
