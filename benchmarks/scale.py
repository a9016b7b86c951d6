"""What chunkq costs besides its work, by the number of objects: planning, units, a cluster's memory, listing.

The units do nothing here, so that what is left is the cost of having them. Answers are checked first: every unit
once, every object found. Imports what it measures, and no peer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zarr

import chunkq
from benchmarks.frame import WrongAnswer, format_seconds
from benchmarks.pipeline import roomy
from chunkq import execute
from chunkq.cluster import connected, run_on_cluster
from chunkq.execute import Counter, run_locally
from chunkq.journal import Progressed
from chunkq.listing import list_objects
from chunkq.store import Handle
from chunkq.units import Job, Outcome

#: Units, and files of a listing.
ELEMENTS = 100_000
QUICK_ELEMENTS = 10_000

ROUNDS = 3

#: Stored objects of a plan.
PLANNED = (10**3, 10**4, 10**5, 10**6, 10**7)

#: Seconds for what takes a moment unless it hangs.
PATIENCE = 120

MB = 10**6

LEGEND = """\
- Planning: `chunkq.plan` of a source that has metadata only, one 4 MiB result a unit, each time in a process of its own;
  its peak is that of the whole process, interpreter and imports (the growth: of the planning alone).
- No-op units: a task that returns at once, through the very functions that a run calls; short units go several to a task.
  "One unit a task" is what long units cost, on a tenth as many. Starting worker processes counts, connecting does not.
- The cluster: `dask scheduler` and two `dask worker` with a thread each. Resident memory of the scheduler and of the client
  when a tenth of the units is done and at the end, in the round with the largest growth. distributed keeps the names of the
  last 100,000 tasks (half a KB each), so that it grows up to there where a unit is a task.
- Listing: real files of one byte, 100 to a folder; of a target, each object is counted for its unit as well; the peer is a
  bare `os.scandir` with a `stat` for each file."""

#: What rows are called, after the kind of scheduler, where every unit is a task.
LONG = ", one unit a task"


@dataclass(frozen=True)
class Row:
    """A line of the table: seconds of each round for so many items, what was seen of memory, and what was asked for.

    `most` are seconds, each item's where `per_item`; `most_memory` bytes of the peak.
    """

    case: str
    items: int
    times: tuple[float, ...]
    memory: str = ""
    most: float | None = None
    per_item: bool = False
    most_memory: int | None = None
    remark: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return median(self.times)

    @property
    def met(self) -> bool | None:
        """Whether the targets are met; None where there is none."""
        if self.most is None:
            return None
        quick = self.median / (self.items if self.per_item else 1) < self.most
        return quick and (self.most_memory is None or self.facts["peak_memory"] < self.most_memory)

    @property
    def target(self) -> str:
        if self.most is None:
            return "-"
        memory = f", {self.most_memory / MB:.0f} MB" if self.most_memory else ""
        each = " each" if self.per_item else ""
        return f"< {format_seconds(self.most)}{each}{memory}: {'met' if self.met else 'MISSED'}"

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self) | self.facts | {"median": self.median, "each": self.median / self.items, "met": self.met}
        del row["facts"]
        return row


Maker = Callable[[int], list[Row]]

#: Makes rows of so many units or objects, in so many rounds.
Cost = Callable[[int, int], list[Row]]


def cases(elements: int) -> dict[str, Maker]:
    """Each is called with the number of rounds."""
    from benchmarks import paper  # late: it takes costs and helpers from here

    found: dict[str, Maker] = {f"planning {n:,} objects": partial(planning, n) for n in PLANNED}
    costs: dict[str, Cost] = {"no-op units": local_units, "no-op units, cluster": cluster_units, "listing": listing}
    return found | paper.with_paper(costs, elements)


# ---- planning


def planning(objects: int, rounds: int) -> list[Row]:
    with folder_for() as folder:
        zarr.create_array(f"{folder}/x.zarr", shape=(objects << 20,), chunks=(1 << 20,), dtype="int8")
        seen = [_plan_elsewhere(folder, objects) for _ in range(rounds)]
    peak, grown = (max(one[name] for one in seen) for name in ("peak", "grown"))
    times = tuple(one["seconds"] for one in seen)
    memory = f"{peak / MB:.0f} MB peak, grown by {grown / MB:.0f}"
    bound = {"most": 2.0, "most_memory": 200 * MB} if objects == max(PLANNED) else {}
    return [Row(f"planning {objects:,} objects", objects, times, memory, facts={"peak_memory": peak}, **bound)]


def _plan_elsewhere(folder: str, objects: int) -> dict[str, Any]:
    found = elsewhere("benchmarks.scale", folder)
    if found["units"] != objects:
        raise WrongAnswer(f"planned {found['units']} units for {objects} objects")
    return found


def _plan_here(folder: str) -> dict[str, Any]:
    op = chunkq.DequantizeLinear(0.5)
    before, began = _memory("self", "VmHWM"), time.perf_counter()
    plan = chunkq.plan(op, f"{folder}/x.zarr", f"{folder}/y.zarr", scheduler="threads", max_mem="8GiB")
    seconds = time.perf_counter() - began
    peak = _memory("self", "VmHWM")
    return {"units": plan.units, "seconds": seconds, "peak": peak, "grown": peak - before}


# ---- units that do nothing


def no_op(job: Job, index: int) -> Outcome | None:
    return None


def present(job: Job, index: int) -> Outcome | None:
    return Outcome(index, "", "present")


#: Starts a task for each unit, with a counter.
Runner = Callable[[Job, execute.Task, Any, Counter], None]

#: Kinds of worker on this machine, and how many.
LOCAL = {"sync": 1, "threads": 2, "processes": 2}


def bare_job(folder: str, units: int) -> Job:
    array = zarr.create_array(f"{folder}/units.zarr", shape=(units,), chunks=(1,), dtype="int8", overwrite=True)
    spec, params = chunkq.DequantizeLinear(0.5).bind_array(array)
    return Job(spec, Handle(array, "int8"), params, None, (1,))


def check_units(run: Runner, job: Job, units: int) -> None:
    """Every unit once, before anything is timed; workers have then imported what they need."""
    counter = Counter()
    few = min(units, 2000)
    run(job, present, np.arange(few), counter)
    if sorted(outcome.index for outcome in counter.outcomes) != list(range(few)) or counter.done != few:
        raise WrongAnswer(f"{counter.done} of {few} units, or not each of them once")


def time_units(
    run: Runner, job: Job, units: int, watch: execute.Watch | None = None, task: execute.Task = no_op
) -> tuple[float, float]:
    """Seconds of a run, and of each unit from the first to the last: without what starts and ends a run."""
    noted: dict[int, float] = {}

    def look(done: int) -> None:
        if done in (1, units):
            noted[done] = time.perf_counter()
        if watch is not None:
            watch(done)

    counter = Counter(look)
    began = time.perf_counter()
    run(job, task, np.arange(units), counter)
    seconds = time.perf_counter() - began
    if counter.done != units or counter.outcomes:
        raise WrongAnswer(f"{counter.done} of {units} units, {len(counter.outcomes)} with something to say")
    return seconds, (noted[units] - noted[1]) / max(1, units - 1)


def local_runner(kind: str, workers: int) -> Runner:
    return lambda job, task, indices, counter: run_locally(job, task, indices, kind, workers, counter)


def local_units(units: int, rounds: int) -> list[Row]:
    runners = {kind: local_runner(kind, workers) for kind, workers in LOCAL.items()}
    # each with its units, and how many of them go to a task at most
    ways = {kind: (kind, units, execute.BATCH_UNITS) for kind in LOCAL}
    ways |= {f"{kind}{LONG}": (kind, max(1, units // 10), 1) for kind in LOCAL if kind != "sync"}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with folder_for() as folder:
        job = bare_job(folder, units)
        for run in runners.values():
            check_units(run, job, units)
        for _ in range(rounds):
            for way, (kind, count, together) in ways.items():
                with _units_in_a_task(together):
                    times[way].append(time_units(runners[kind], job, count))
    most = {"threads": 0.2e-3}
    return [
        Row(
            f"no-op units, {way}",
            count,
            tuple(seconds for seconds, _ in times[way]),
            most=most.get(way),
            per_item=True,
            facts={"steady": median(each for _, each in times[way])},
        )
        for way, (_, count, _) in ways.items()
    ]


def cluster_runner(client: Any) -> Runner:
    return lambda job, task, indices, counter: run_on_cluster(job, task, indices, client, counter)


def cluster_units(units: int, rounds: int) -> list[Row]:
    rows = []
    with folder_for() as folder, cluster(folder) as (client, scheduler):
        run = cluster_runner(client)
        job = bare_job(folder, units)
        check_units(run, job, units)
        for name, count, together in (
            ("no-op units, cluster", units, execute.BATCH_UNITS),
            (f"no-op units, cluster{LONG}", max(1, units // 10), 1),
        ):
            with _units_in_a_task(together):
                times, memory, facts = _watched_rounds(run, job, count, rounds, scheduler)
            rows.append(Row(name, count, times, memory, 2.5e-3 if together > 1 else None, True, facts=facts))
    return rows


def _watched_rounds(
    run: Runner, job: Job, units: int, rounds: int, scheduler: int
) -> tuple[tuple[float, ...], str, dict[str, Any]]:
    times: list[tuple[float, float]] = []
    seen = []
    for _ in range(rounds):
        watched: list[tuple[int, int]] = []

        def watch(done: int, watched: list[tuple[int, int]] = watched) -> None:
            if done in (max(1, units // 10), units):
                watched.append((_memory(scheduler, "VmRSS"), _memory("self", "VmRSS")))

        times.append(time_units(run, job, units, watch))
        seen.append((watched[0], watched[-1]))
    early, late = max(seen, key=lambda pair: pair[1][0] - pair[0][0])
    memory = ", ".join(
        f"{who} {a / MB:.1f} -> {b / MB:.1f} MB" for who, a, b in zip(("scheduler", "client"), early, late, strict=True)
    )
    facts = {"memory_at_a_tenth": early, "memory_at_the_end": late, "steady": median(each for _, each in times)}
    return tuple(seconds for seconds, _ in times), memory, facts


@contextmanager
def _units_in_a_task(most: int) -> Iterator[None]:
    before, execute.BATCH_UNITS = execute.BATCH_UNITS, most
    try:
        yield
    finally:
        execute.BATCH_UNITS = before


@contextmanager
def cluster(folder: str, threads: int = 1) -> Iterator[tuple[Any, int]]:
    """A scheduler and two workers, processes of their own; a client, and the scheduler's process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    worker = ["worker", address, "--nthreads", str(threads), "--no-nanny", "--local-directory", folder]
    worker += ["--host", "127.0.0.1"]
    commands = [["scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"], worker, worker]
    processes = []
    try:
        with open(f"{folder}/cluster.log", "wb") as log:
            for words in commands:
                command = [sys.executable, "-m", "dask", *words]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment()))
        _answers(port)
        with connected(address) as client:
            client.wait_for_workers(2, timeout=PATIENCE)
            yield client, processes[0].pid
    finally:
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(port: int) -> None:
    """Wait until somebody listens."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)  # nobody tells when another process listens


# ---- listing


def listing(objects: int, rounds: int) -> list[Row]:
    wide = 100 if objects >= 100 else 1
    rows = objects // wide
    with folder_for(objects * 4096) as folder:
        array = zarr.create_array(
            f"{folder}/x.zarr", shape=(rows, wide), chunks=(1, 1), dtype="uint8", compressors=None, filters=None
        )
        for row in range(rows):
            below = Path(folder, "x.zarr", "c", str(row))
            below.mkdir(parents=True)
            for column in range(wide):
                (below / str(column)).write_bytes(b"\x07")
        if list_objects(array).missing or _walk(f"{folder}/x.zarr/c") != rows * wide:
            raise WrongAnswer("not every object was found")
        if len(Progressed(array, (1, 1)).todo()):
            raise WrongAnswer("not every unit was found done")
        ours, counted, bare = list[float](), list[float](), list[float]()
        calls = (
            (ours, lambda: list_objects(array)),
            (counted, lambda: Progressed(array, (1, 1))),
            (bare, lambda: _walk(f"{folder}/x.zarr/c")),
        )
        for _ in range(rounds):
            for times, call in calls:
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
    ratio = median(a / b for a, b in zip(ours, bare, strict=True))
    told = f"{ratio:.1f} times a bare walk; keys, sizes, times hashed"
    return [
        Row("listing", rows * wide, tuple(ours), remark=told),
        Row("listing, of a target", rows * wide, tuple(counted)),
        Row("bare walk", rows * wide, tuple(bare)),
    ]


def _walk(folder: str) -> int:
    found = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            found += _walk(entry.path) if entry.is_dir() else bool(entry.stat())
    return found


# ---- what they share


def elsewhere(module: str, folder: str) -> dict[str, Any]:
    """What a module, run in a process of its own, finds in a folder."""
    command = [sys.executable, "-m", module, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment(), check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def folder_for(size: int = 0) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="chunkq-bench-", dir=roomy(size))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment() -> dict[str, str]:
    """Other processes import what this one does."""
    # a safe path: `-m` would put the current folder, a source tree perhaps not built, before the installed package
    paths = os.pathsep.join(path for path in (*sys.path, os.getcwd()) if path)
    return os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}


def _memory(pid: int | str, name: str) -> int:
    try:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0  # no Linux: the table then has no memory
    return int(found[1]) * 1024 if found else 0


def markdown(rows: list[Row], about: dict[str, Any]) -> str:
    """The table, with what the figures depend on above it."""
    from benchmarks import paper

    head = ("case", "items", "median", "min", "each", "memory", "target", "remark")
    lines = aligned(head, [_cells(row) for row in rows if "result" not in row.facts])
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    facts = (
        f"{about['cpu']}, {about['cores']} cores, commit {about['commit']}, Python {about['python']}, {versions}; medians "
        f"of {about['rounds']} rounds; the load was {about['load']:.1f} at first and {about['load_after']:.1f} at the end."
    )
    on_paper = paper.markdown([row for row in rows if "result" in row.facts])
    return "\n".join(["# Scale: what units and objects cost", "", facts, "", *lines, "", LEGEND, *on_paper])


def aligned(head: tuple[str, ...], cells: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table."""
    table = [head, tuple("-" * len(h) for h in head), *cells]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    return ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in table]


def _cells(row: Row) -> tuple[str, ...]:
    each = format_seconds(row.median / row.items)
    times = format_seconds(row.median), format_seconds(min(row.times))
    return row.case, f"{row.items:,}", *times, each, row.memory or "-", row.target, row.remark


if __name__ == "__main__":
    print(json.dumps(_plan_here(sys.argv[1])))
