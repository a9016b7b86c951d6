"""What runs of 1 GB to 1 PB and more would cost besides their work: on paper, and in simulation.

Plans are real, of arrays that have metadata only, up to the first size that is refused. The seconds are computed from
what units and listings cost in the same run of the benchmarks. Naps then show what the computed costs leave out: a unit
only sleeps as long as its work would take. Imports scale.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from math import isqrt
from statistics import median
from typing import Any

import zarr

import chunkq
from benchmarks import scale
from benchmarks.frame import WrongAnswer, format_seconds
from chunkq import grid
from chunkq.execute import BATCH_SECONDS, BATCH_UNITS
from chunkq.journal import Progressed
from chunkq.layout import MOST_OBJECTS
from chunkq.memory import format_size, own_peak, reset_peak, resident
from chunkq.stored import PROBES
from chunkq.units import Job, Outcome
from chunkq.workers import bookkeeping_bytes

#: Bytes of result; after the last, ten times more each time, until a plan is refused.
SIZES = tuple(10**power for power in range(9, 16))

#: Sides of the square objects, and what their float32 results take.
OBJECTS = {side: format_size(4 * side * side) for side in (4096, 1024)}

#: The assumption: bytes of result that a worker makes in a second.
RATE = 10**9

#: Kinds of worker, and how many.
WORKERS = {"threads": 2, "processes": 2, "cluster": 64}

#: How often a run lists its source: before and after.
SOURCE_LISTINGS = 2

GB = 10**9

LEGEND = f"""\
- Assumed: a worker makes {RATE / GB:g} GB of result a second. All else is measured in this run, or computed from it.
- Planned: `chunkq.plan`, uint8 to float32, square tensors and objects, source and target cut alike, metadata only, each in
  a process of its own; its median time, or that of the refusal, and the peak of the whole process.
- Bookkeeping: the bytes that the plan reckons with (`workers.bookkeeping_bytes`); then what a target's journal and the list
  of its units really took at their peak, and how long that took, on a target with metadata only.
- Listing: {SOURCE_LISTINGS} times the source, once the target, at the costs of "listing" and "listing, of a target".
- A kind of worker: seconds of work at the assumed rate + what comes on top, and the share that this is of the sum. On top
  are planning, bookkeeping, listing, starting and handing out units. A unit costs what a no-op unit costs between the first
  and the last of a run, with as many to a task as fit in {BATCH_SECONDS:g} s of work: between "one unit a task"
  and {BATCH_UNITS} to a task. The share is an upper bound: as if nobody worked while units are handed out. And the no-op
  units' scheduler, client and workers shared this machine's cores.
- Naps: units that sleep for as long as the work of one object takes at the assumed rate. What is not asleep is what handing
  units out to so many workers costs when they work meanwhile."""


# ---- the costs of a unit and of an object


class Costs:
    """What a unit and a listed object cost, from the rows that measured them."""

    def __init__(self, rows: list[scale.Row]) -> None:
        self._rows = {row.case: row for row in rows}

    def unit(self, kind: str, together: int) -> float:
        """Seconds of a unit where so many share a task: its own, and its part of the task's."""
        shared, alone = (float(self._rows[f"no-op units, {kind}{way}"].facts["steady"]) for way in ("", scale.LONG))
        part = (1 / together - 1 / BATCH_UNITS) / (1 - 1 / BATCH_UNITS)
        return shared + (alone - shared) * part

    def start(self, kind: str) -> float:
        """Seconds of a run before its first unit is done and after its last."""
        row = self._rows[f"no-op units, {kind}"]
        return float(max(0.0, row.median - row.facts["steady"] * (row.items - 1)))

    def listing(self, objects: int) -> float:
        """Seconds of all the listings of a run, of so many objects in the source and as many in the target."""
        source, target = (self._rows[name] for name in ("listing", "listing, of a target"))
        return objects * (SOURCE_LISTINGS * source.median / source.items + target.median / target.items)


def together(seconds: float) -> int:
    """Units that share a task, each of so many seconds, as `execute.Units` has it."""
    return max(1, min(int(BATCH_SECONDS / seconds), BATCH_UNITS))


# ---- the case


def with_paper(costs: dict[str, scale.Cost], elements: int) -> dict[str, scale.Maker]:
    """The cases that measure costs, and the one that computes with them; those left out of the run it measures, on less."""
    measured: dict[str, list[scale.Row]] = {}

    def noted(name: str, rounds: int, units: int = elements) -> list[scale.Row]:
        measured[name] = costs[name](units, rounds)
        return measured[name]

    def on_paper(rounds: int) -> list[scale.Row]:
        left_out = [name for name in costs if name not in measured]
        more = [row for name in left_out for row in noted(name, 1, min(elements, scale.QUICK_ELEMENTS))]
        found = Costs([row for rows in measured.values() for row in rows])
        # in a quick run every third size
        sizes = SIZES if elements > scale.QUICK_ELEMENTS else SIZES[::3]
        return more + naps(found, elements, rounds) + plans(found, sizes, rounds)

    return {name: partial(noted, name) for name in costs} | {"paper": on_paper}


# ---- plans


def plans(costs: Costs, sizes: tuple[int, ...], rounds: int) -> list[scale.Row]:
    """A row for each size and object, and on to the first that is refused."""
    found: list[scale.Row] = []
    for side, name in OBJECTS.items():
        todo, planned = list(sizes), list[scale.Row]()
        while todo:
            size = todo.pop(0)
            row = _row(size, side, name, costs, rounds)
            if "refused" in row.facts:
                row.facts["limits"] = _limits(side, name, costs, planned[-1].facts)
                found += [*planned, row]
                break
            planned.append(row)
            todo = todo or [10 * size]
    return found


def _row(size: int, side: int, name: str, costs: Costs, rounds: int) -> scale.Row:
    length = isqrt(size // 4)
    objects = grid.count((length, length), (side, side))
    with scale.folder_for() as folder:
        zarr.create_array(f"{folder}/x.zarr", shape=(length, length), chunks=(side, side), dtype="uint8")
        seen = [scale.elsewhere("benchmarks.paper", folder) for _ in range(rounds)]
    times = tuple(one["seconds"] for one in seen)
    case = f"{_size(size)} in {name}"
    refused = seen[0].get("refused")
    if (refused is not None) != (objects > MOST_OBJECTS):
        raise WrongAnswer(f"{case}: {objects} objects were {'refused' if refused else 'planned'}")
    facts: dict[str, Any] = {"result": size, "peak_memory": max(one["peak"] for one in seen)}
    if refused:
        facts["refused"] = refused
        return scale.Row(case, objects, times, remark=f"refused: {refused}", facts=facts)
    if seen[0]["objects"] != objects:
        raise WrongAnswer(f"{case}: {seen[0]['objects']} objects planned, not {objects}")
    facts |= {"units": seen[0]["units"], "bookkeeping": seen[0]["bookkeeping"]}
    facts |= {"journal": max(one["journal"] for one in seen), "listing": costs.listing(objects)}
    facts["journal_seconds"] = median(one["journal_seconds"] for one in seen)
    before = median(times) + facts["journal_seconds"] + facts["listing"]
    for kind, workers in WORKERS.items():
        unit = costs.unit(kind, together(size / facts["units"] / RATE))
        top = before + costs.start(kind) + facts["units"] * unit
        work = size / RATE / min(workers, facts["units"])
        facts[kind] = {"workers": workers, "work": work, "on_top": top, "share": top / (work + top)}
    remark = f"not from plain HTTP: over {PROBES:,} objects" if objects > PROBES else ""
    return scale.Row(case, objects, times, remark=remark, facts=facts)


def _limits(side: int, name: str, costs: Costs, largest: dict[str, Any]) -> list[str]:
    """Where it stops with objects of this size, and why; what a unit takes is that of the largest plan."""
    size = 4 * side * side
    journal = MOST_OBJECTS * largest["journal"] / largest["units"]
    fed = ", ".join(f"{kind} {1 / costs.unit(kind, together(size / RATE)) * size / RATE:.1f}" for kind in WORKERS)
    return [
        f"{name} objects: no more than {MOST_OBJECTS:,}, {_size(MOST_OBJECTS * size)} of result. So many take "
        f"{_time(costs.listing(MOST_OBJECTS))} of listing, and bookkeeping of "
        f"{_size(bookkeeping_bytes(MOST_OBJECTS, 2 * MOST_OBJECTS))} as the plan reckons, {_size(journal)} at what a unit "
        "took in the largest plan.",
        f"{name} objects: a source behind plain HTTP is asked for each object, for at most {PROBES:,}, "
        f"{_size(PROBES * size)} of result.",
        f"{name} objects: at the assumed rate, units are handed out fast enough for so many workers: {fed}.",
    ]


def _plan_here(folder: str) -> dict[str, Any]:
    """Plan; then make the bookkeeping that a run of the plan would make."""
    op = chunkq.DequantizeLinear(0.5)
    began = time.perf_counter()
    try:
        plan = chunkq.plan(op, f"{folder}/x.zarr", f"{folder}/y.zarr", scheduler="threads", workers=2, max_mem="8GiB")
    except chunkq.SpecError as error:
        # what is wrong; what to do about it is the same in every row
        what = "; ".join(str(error).split("; ")[:2])
        return {"refused": what, "seconds": time.perf_counter() - began, "peak": own_peak()}
    found = {"units": plan.units, "seconds": time.perf_counter() - began, "peak": own_peak()}
    objects = grid.count(plan.spec.shape, plan.chunks)
    target = zarr.create_array(
        f"{folder}/journal.zarr", shape=plan.spec.shape, chunks=plan.chunks, dtype="float32", overwrite=True
    )
    reset_peak()
    before, began = resident(), time.perf_counter()
    progressed = Progressed(target, plan.unit_shape)
    todo = progressed.todo()
    if len(todo) != plan.units or len(progressed.begun()) or progressed.elements(todo) != target.size:
        raise WrongAnswer(f"{len(todo)} units to do of {plan.units}")
    found |= {"journal_seconds": time.perf_counter() - began, "journal": max(0, own_peak() - before)}
    return found | {"objects": objects, "bookkeeping": bookkeeping_bytes(plan.units, 2 * objects)}


# ---- naps


def nap(seconds: float, job: Job, index: int) -> Outcome | None:
    time.sleep(seconds)
    return None


def naps(costs: Costs, elements: int, rounds: int) -> list[scale.Row]:
    """Runs whose units sleep, on as many workers as a cluster is taken to have; the sleepers need no cores."""
    workers = WORKERS["cluster"]
    run = scale.local_runner("threads", workers)
    with scale.folder_for() as folder:
        found = _naps("threads", run, folder, costs, elements, rounds)
        with scale.cluster(folder, workers // 2) as (client, _):
            return found + _naps("cluster", scale.cluster_runner(client), folder, costs, elements, rounds)


def _naps(kind: str, run: scale.Runner, folder: str, costs: Costs, elements: int, rounds: int) -> list[scale.Row]:
    found, workers = [], WORKERS["cluster"]
    for side, name in OBJECTS.items():
        seconds = 4 * side * side / RATE
        # as much sleep for each size of object
        units = max(2 * workers, elements // 40) * max(OBJECTS) ** 2 // side**2
        job = scale.bare_job(folder, units)
        scale.check_units(run, job, units)
        times = tuple(scale.time_units(run, job, units, task=partial(nap, seconds))[0] for _ in range(rounds))
        asleep = units * seconds / workers
        if min(times) < asleep:
            raise WrongAnswer(f"{units} naps ended after {min(times):.2f} s, before all were slept")
        out = units * costs.unit(kind, together(seconds))
        remark = (
            f"{asleep / median(times):.0%} of the time asleep; all naps {format_seconds(asleep)}, handing out by the costs "
            f"above {format_seconds(out)}"
        )
        facts = {"asleep": asleep, "handing_out": out}
        found.append(scale.Row(f"naps for {name}, {workers} on {kind}", units, times, remark=remark, facts=facts))
    return found


# ---- the table


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    step, unit = next((s for s in steps if value >= s[0]), steps[-1])
    return f"{value / step:.3g} {unit}"


def _size(number: float) -> str:
    return _scaled(number, ((10**15, "PB"), (10**12, "TB"), (GB, "GB"), (10**6, "MB"), (10**3, "KB"), (1, "B")))


def _time(seconds: float) -> str:
    if seconds < 100:
        return format_seconds(seconds)
    return _scaled(seconds, ((86400, "days"), (3600, "h"), (60, "min")))


def markdown(rows: list[scale.Row]) -> list[str]:
    """The lines of the second table and of what is to be said of it; none without rows."""
    if not rows:
        return []
    head = ("result", "objects", "units", "planned", "peak", "bookkeeping", "listing")
    kinds = [f"{workers} on {kind}" if kind == "cluster" else f"{workers} {kind}" for kind, workers in WORKERS.items()]
    limits = [f"- {line}" for row in rows for line in row.facts.get("limits", ())]
    lines = scale.aligned((*head, *kinds, "remark"), [_cells(row) for row in rows])
    return ["", "## On paper", "", *lines, "", "Where it stops:", "", *limits, "", LEGEND]


def _cells(row: scale.Row) -> tuple[str, ...]:
    facts = row.facts
    planned = format_seconds(row.median), _size(facts["peak_memory"])
    if "refused" in facts:
        return row.case, f"{row.items:,}", "-", *planned, *["-"] * (2 + len(WORKERS)), row.remark
    journal = f"{_size(facts['bookkeeping'])}; {_size(facts['journal'])}, {_time(facts['journal_seconds'])}"
    kinds = [
        f"{_time(one['work'])} + {_time(one['on_top'])}: {one['share']:.2%}"
        for one in (facts[kind] for kind in WORKERS)
    ]
    units = f"{facts['units']:,}"
    return row.case, f"{row.items:,}", units, *planned, journal, _time(facts["listing"]), *kinds, row.remark


if __name__ == "__main__":
    print(json.dumps(_plan_here(sys.argv[1])))
