"""What tests of clusters send to the workers, which import it there, and clusters as a shell starts them."""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from zarr.storage import LocalStore

#: Seconds that a chunk takes to write, so that a run has a middle.
LATENCY = 0.02

#: Name of the environment variable that makes a worker unable to read chunks.
BLIND = "CHUNKQ_TEST_BLIND"


class CountingStore(LocalStore):
    """A slow folder that notes, beside it, every chunk that any process reads or begins to write."""

    def note(self, what, key):
        if "/c/" not in f"/{key}":
            return
        log = os.open(f"{self.root}.{what}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(log, f"{key}\n".encode())
        finally:
            os.close(log)

    async def get(self, key, prototype=None, byte_range=None):
        if "/c/" in f"/{key}" and os.environ.get(BLIND):
            raise OSError("nothing to see here")
        self.note("read", key)
        return await super().get(key, prototype, byte_range)

    async def set(self, key, value):
        self.note("written", key)
        if "/c/" in f"/{key}":
            await asyncio.sleep(LATENCY)
        await super().set(key, value)


def noted(folder, what):
    """Keys in a `CountingStore`'s log."""
    log = Path(f"{folder}.{what}")
    return log.read_text().split() if log.exists() else []


def segfault():
    ctypes.string_at(0)


def set_blind(value):
    os.environ[BLIND] = value


def nothing(job, index):
    """A unit that is no work."""


def deadly_seventh(job, index):
    """A unit that takes its worker down, among others that do not."""
    if index == 7:
        os.kill(os.getpid(), signal.SIGKILL)


def impossible_seventh(job, index):
    if index == 7:
        raise ZeroDivisionError("seven")


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ShellCluster:
    """A scheduler and workers as processes of their own, each started as from a shell."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.processes = []
        self.start_scheduler()

    def start_scheduler(self):
        port = _free_port()
        self.address = f"tcp://127.0.0.1:{port}"
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")

    def start_worker(self):
        how = ("--nthreads", 1, "--no-nanny", "--no-dashboard", "--host", "127.0.0.1", "--death-timeout", 60)
        return self._start("worker", self.address, *how, "--local-directory", self.folder)

    def _start(self, *words):
        # PYTHONPATH: as this process, so that workers find the modules of the tests
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "dask", *map(str, words)]
        with open(self.folder / "cluster.log", "ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait(10)


@contextmanager
def shell_cluster(folder, workers=2):
    """A `ShellCluster` whose workers are there."""
    from distributed import Client

    cluster = ShellCluster(folder)
    try:
        for _ in range(workers):
            cluster.start_worker()
        with Client(cluster.address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(workers, timeout=60)
        yield cluster
    finally:
        cluster.close()
