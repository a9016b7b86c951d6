"""Carries a plan out: begins, continues or replaces a target, or finds nothing to do. Planning is in planning.py.

The order is what keeps data safe: inputs are listed before anything is written, the lock comes before the target, every
unit's objects are written whole by one task, the inputs are listed again at the end, and ``complete`` is the last write.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chunkq import grid
from chunkq.admission import PARTIAL, check_replaceable, check_target, replacing
from chunkq.cluster import connected, forget_peaks, highest_peak, run_on_cluster
from chunkq.contents import keys, remove
from chunkq.dtypes import ELEMENT_TYPES, ZERO_ONLY
from chunkq.errors import RunError, SpecError
from chunkq.execute import Counter, Task, Watch, run_locally
from chunkq.interrupts import held_interrupts
from chunkq.journal import Progressed, differences, fingerprint
from chunkq.listing import Listing, list_objects, metadata_digest, refuse_damaged, refuse_missing, undecodable
from chunkq.lock import Lock
from chunkq.memory import reset_peak
from chunkq.objects import delete_objects, existing, object_keys
from chunkq.places import Place, place_of
from chunkq.report import Plan, Progress, Report
from chunkq.run import check_values
from chunkq.shards import absent_inner_chunks
from chunkq.spec import QuantSpec
from chunkq.store import COMPLETE, FINGERPRINT, UNREADABLE, Handle, ZarrArray, object_shape
from chunkq.stored import Keys, remove_strays
from chunkq.target import Layout, change_attributes, mark_complete, open_root, open_target
from chunkq.units import Job, Outcome, UnitError, held_params, write_unit
from chunkq.workers import SCHEDULERS, Arrangement, move_to_cluster

#: How often units are begun whose objects are not there in the end: somebody else may delete them.
PASSES = 3

#: Failed units and bad objects that an error names.
NAMED = 20


@dataclass(frozen=True)
class Run:
    """All that carrying a plan out needs.

    `inputs` are the source and the parameters by name; `planned` is the fingerprint as far as metadata tell; `begin` writes
    a new target's metadata, given the attributes that go beside the operator's; `lacking` names what else than objects of
    the tensor is not there.
    """

    spec: QuantSpec
    inputs: dict[str, Any]
    place: Place
    layout: Layout
    planned: dict[str, Any]
    begin: Callable[[str, dict[str, Any]], None]
    lacking: Callable[[], list[str]]
    arrangement: Arrangement
    scheduler: Any
    overwrite: bool
    missing: str
    retries: int
    fail_fast: bool
    consolidates: bool

    @property
    def source(self) -> ZarrArray:
        """The tensor."""
        array: ZarrArray = self.inputs["source"]
        return array

    @property
    def params(self) -> tuple[Any, ...]:
        """The parameters in the operator's order."""
        return tuple(self.inputs[p.name] for p in self.spec.params)


def stored_inputs(inputs: dict[str, Any]) -> dict[str, ZarrArray]:
    """Those of the inputs that are zarr arrays."""
    return {name: value for name, value in inputs.items() if not isinstance(value, np.ndarray)}


@held_interrupts()
def carry_out(run: Run, plan: Plan, progress: Progress | None, client: Any) -> Report:
    """What `Plan.run` does."""
    if client is not None:
        run, plan = _moved(run, plan, client)
    node = check_target(run.place, stored_inputs(run.inputs))
    left_out = _unreadable(node)
    listings, missing = look_at_inputs(run.inputs, run.missing, run.retries, left_out)
    for index, value in enumerate(run.params):
        _check_stored_values(run.spec, index, value)
    layout = run.layout.describe()
    ours = fingerprint(run.spec, run.inputs, layout, listings)
    moved = differences(run.planned, ours)
    if moved:
        raise SpecError("source", f"changed since the plan was made: {'; '.join(moved)}; plan again")
    # an earlier run left out of its fingerprint what it could not read and may have been mended
    comparable = fingerprint(run.spec, run.inputs, layout, listings, part=True)
    began = time.perf_counter()
    state, node = target_state(run.place, run.inputs, comparable, run.overwrite)
    if state == "finished" and _is_whole(run):
        return _report(plan, _Done(), 0.0, listings, missing)
    with Lock(run.place.store, run.place.path, run.place.shown) as lock:
        # once more: nobody else changes it from here on
        state, node = target_state(run.place, run.inputs, comparable, run.overwrite)
        target = _begin(run, state, node, ours)
        pending = left_out if state == "unfinished" else frozenset[str]()
        try:
            done = _fill(run, target, lock, progress)
        except UnitsFailed as failure:
            if failure.keys or pending:
                _note_unreadable(run, target, failure, listings, pending)
            raise
        _refuse_rewritten(run, listings, ours)
        lock.check(read=True)
        node = _still_ours(run, comparable if pending else ours)
        if pending:
            _sign(run, ours, [])
            node = open_root(run.place)
        mark_complete(node, run.consolidates)
    return _report(plan, done, time.perf_counter() - began, listings, missing)


def _is_whole(run: Run) -> bool:
    return not run.lacking() and not len(Progressed(open_target(run.place), run.arrangement.unit_shape).todo())


def _still_ours(run: Run, ours: dict[str, Any]) -> Any:
    """The target's own node, if nobody changed or removed its metadata meanwhile.

    Raises
    ------
    RunError
        They are not what this run wrote.
    """
    changed = RunError(
        f"the metadata of target {run.place.shown} were changed or removed while it was written; delete what is left of it "
        "and run again"
    )
    try:
        node = open_root(run.place)
    except Exception as error:  # of a store, of zarr, of JSON: whatever is there is not ours
        raise changed from error
    if differences(ours, node.attrs.get(FINGERPRINT)):
        raise changed
    return node


def _moved(run: Run, plan: Plan, client: Any) -> tuple[Run, Plan]:
    """The run and its plan on a cluster, where its workers see the data and have the memory."""
    held = sum(value.nbytes for value in run.inputs.values() if isinstance(value, np.ndarray))
    arrangement = move_to_cluster(run.arrangement, held, client)
    refuse_in_process(arrangement.kind, run.place, run.inputs)
    plan = replace(plan, scheduler=arrangement.kind, memory=arrangement.memory, max_mem=arrangement.limit)
    return replace(run, scheduler=client, arrangement=arrangement), plan


# ---- before anything is written


def refuse_in_process(kind: str, place: Place, inputs: dict[str, Any]) -> None:
    """Refuse what is stored in this process's memory, where workers are other processes."""
    if kind not in ("processes", "cluster"):
        return
    stored = {name: place_of(array.store_path) for name, array in stored_inputs(inputs).items()}
    for name, at in (stored | {"target": place}).items():
        if at.in_process:
            raise SpecError(
                "scheduler", f"{name} is in the memory of this process, where no {kind} see it; use 'threads'"
            )


def _unreadable(node: Any) -> frozenset[str]:
    """Objects of the source that earlier runs could not read, by what the target says."""
    found = None if node is None else node.attrs.get(UNREADABLE)
    return frozenset(map(str, found)) if isinstance(found, list) else frozenset()


def look_at_inputs(
    inputs: dict[str, Any], missing: str, retries: int, left_out: frozenset[str] = frozenset()
) -> tuple[dict[str, Listing], int]:
    """List what is stored of every input; what is missing is an error unless it may be filled. Also how much that is.

    Raises
    ------
    RunError
        Naming the objects that are missing or damaged, and the way out.
    """
    listings, lacking = {}, 0
    for name, array in stored_inputs(inputs).items():
        leave_out = left_out if name == "source" else frozenset[str]()
        listing = list_objects(array, argument=name, retries=retries, leave_out=leave_out)
        inner = absent_inner_chunks(array, name, retries=retries)
        refuse_damaged(name, array, inner)
        if missing == "error":
            refuse_missing(name, array, listing, inner)
        lacking += listing.missing + inner.absent
        listings[name] = listing
    return listings, lacking


def _check_stored_values(spec: QuantSpec, index: int, value: Any) -> None:
    """Check a zarr parameter's values, where the operator does not take all of them, before anything is written."""
    param = spec.params[index]
    any_will_do = ELEMENT_TYPES[param.dtype].bits >= 8 and param.dtype not in (*ZERO_ONLY, "int32")
    if isinstance(value, np.ndarray) or param.name != "zero_point" or any_will_do:
        return
    handle = Handle(value, param.dtype)
    for region in grid.regions(tuple(int(n) for n in value.shape), object_shape(value)):
        try:
            check_values(spec, index, handle.read(region))
        except SpecError as error:
            raise SpecError(error.reason, f"{param.name}: {error}") from error


def target_state(place: Place, inputs: dict[str, Any], ours: dict[str, Any], overwrite: bool) -> tuple[str, Any]:
    """What is at the place of the target, one of `report.STATES`, and the zarr node itself.

    Raises
    ------
    SpecError
        Reason ``target_exists`` where it is another job's and may not be replaced, and those of `check_target`.
    """
    node = check_target(place, stored_inputs(inputs))
    if node is None:
        return "new", None
    differing = differences(ours, node.attrs.get(FINGERPRINT))
    if not differing and replacing(node):
        return "other", node  # its former content is being removed
    finished = node.attrs.get(COMPLETE) is True
    if not differing and not (finished and overwrite):
        return ("finished" if finished else "unfinished"), node
    if not overwrite:
        raise SpecError(
            "target_exists",
            f"target {place.shown} is there already and not of this job ({'; '.join(differing)}); pass overwrite "
            "(--overwrite) to replace it, or choose another place",
        )
    check_replaceable(place, node)
    return "other", node


# ---- the target


def _begin(run: Run, state: str, node: Any, ours: dict[str, Any]) -> ZarrArray:
    """Make the target as this run wants to find it, and open it."""
    if state == "finished":
        change_attributes(open_root(run.place), {COMPLETE: False})  # objects of it are gone
    run.begin(state, {FINGERPRINT: ours})
    target = open_target(run.place)
    remove_strays(target)
    if run.place.local is not None and target.store_path.path != run.place.path:
        # of a group's own documents and parameters, beside the array
        remove(run.place, [key for key, _ in keys(run.place) if PARTIAL.search(key)])
    if state in ("finished", "unfinished"):
        for key in _unreadable(node):
            # it may be another by now; which one was read, nobody has noted
            delete_objects(target, _made_of(run, target, key))
    return target


@dataclass(frozen=True)
class _Done:
    """What was computed: units, elements, and the peak of memory meanwhile."""

    units: int = 0
    elements: int = 0
    peak: int = 0


def _fill(run: Run, target: ZarrArray, lock: Lock, progress: Progress | None) -> _Done:
    """Do every unit that lacks objects, until there is none."""
    job = _job(run, target)
    units = elements = peak = 0
    for attempt in range(PASSES):
        progressed = Progressed(target, run.arrangement.unit_shape)
        todo = progressed.todo() if job.trusted or attempt else _distrusted(job, progressed)
        if progressed.listing.strays:
            remove_strays(target)
        if not len(todo):
            return _Done(units, elements, peak)
        for index in progressed.begun():
            delete_objects(target, object_keys(target, job.region(int(index))))
        all_units = run.arrangement.units
        counter = Counter(_watched(lock, all_units - len(todo), all_units, progress))
        try:
            compute_units(job, write_unit, todo, run.arrangement, run.scheduler, counter)
        except UnitError as error:
            raise UnitsFailed([error.outcome], all_units) from error
        failed = [outcome for outcome in counter.outcomes if outcome.state == "failed"]
        if failed:
            raise UnitsFailed(failed, all_units)
        units += len(todo)  # one that was skipped is this run's too, done by a worker that was lost before it said so
        elements += progressed.elements(todo)
        peak = max(peak, counter.peak)
    raise RunError(
        f"objects of the target {run.place.shown} vanish as they are written; does another program delete them?"
    )


def _job(run: Run, target: ZarrArray) -> Job:
    return Job(
        run.spec,
        Handle(run.source, run.spec.x_dtype),
        held_params(run.spec, run.params),
        Handle(target, run.spec.y_dtype),
        run.arrangement.unit_shape,
        retries=run.retries,
        fail_fast=run.fail_fast,
        shared=run.arrangement.kind == "cluster",
        trusted=run.place.atomic,
    )


def _distrusted(job: Job, progressed: Progressed) -> Any:
    """On a store whose writes may be torn: what exists is decoded, and deleted where it does not decode."""
    torn = []
    for index in progressed.done():
        bad = [key for key, _ in undecodable(progressed.target, job.region(int(index)))]
        if bad:
            delete_objects(progressed.target, bad)
            torn.append(int(index))
    return np.union1d(progressed.todo(), np.array(torn, np.int64))


def _watched(lock: Lock, before: int, units: int, progress: Progress | None) -> Watch:
    def watch(done: int) -> None:
        lock.check()
        if progress is not None:
            progress(before + done, units)

    return watch


def compute_units(
    job: Job, task: Task, indices: Any, arrangement: Arrangement, scheduler: Any, counter: Counter
) -> None:
    """Run a task for each of the units: on this machine, or on a cluster where `scheduler` is one.

    Raises
    ------
    RunError
        What a task raised, that a worker died, or that a scheduler is gone.
    """
    if isinstance(scheduler, str) and scheduler in SCHEDULERS:
        reset_peak()
        run_locally(job, task, indices, arrangement.kind, arrangement.memory.workers, counter)
    else:
        with connected(scheduler) as client:
            forget_peaks(client)
            run_on_cluster(job, task, indices, client, counter)
            counter.peak = highest_peak(client)
    if counter.done != len(indices):
        raise RunError(
            f"{len(indices)} units were to be done, but {counter.done} reported; nothing is known of the others"
        )


# ---- what went wrong


class UnitsFailed(RunError):
    """Some units could not be computed; the others are done, and a later run does what is left."""

    def __init__(self, failed: list[Outcome], units: int) -> None:
        self.keys = {key: why for outcome in failed for key, why in outcome.keys}
        first = failed[0]
        text = (
            f"{len(failed)} of {units} units failed; the first, {first.index}, region {first.region}: {first.message}"
        )
        if self.keys:
            named = [f"{key} ({why})" for key, why in list(self.keys.items())[:NAMED]]
            more = f", and {len(self.keys) - NAMED} more" if len(self.keys) > NAMED else ""
            text += f". Objects that cannot be read: {', '.join(named)}{more}. Mend or replace them"
        super().__init__(f"{text}; running the same again does what is left")


def _note_unreadable(
    run: Run, target: ZarrArray, failure: UnitsFailed, listings: dict[str, Listing], earlier: frozenset[str]
) -> None:
    """Let the source's unreadable objects be replaced: nothing in the target was made of them.

    The fingerprint leaves them out until a run has come to its end. Those of earlier runs that this one read are no longer
    among them.
    """
    unread = {key for key in earlier if (made := _made_of(run, target, key)) and not existing(target, made)}
    keys = frozenset(failure.keys) | unread
    now = list_objects(run.source, leave_out=keys, retries=run.retries)
    if now.digest != listings["source"].digest:
        return
    record: Any = open_root(run.place).attrs[FINGERPRINT]
    _sign(run, record | {"source": record["source"] | {"objects": now.rest}}, sorted(keys))


def _made_of(run: Run, target: ZarrArray, key: str) -> list[str]:
    """Keys of the target's objects that depend on an object of the source; none where it is no such object."""
    index = Keys(run.source).index(key)
    if index is None:
        return []
    return object_keys(target, grid.region(run.spec.shape, object_shape(run.source), index))


def _sign(run: Run, record: dict[str, Any], unreadable: list[str]) -> None:
    """Say which job the target is of, and which of the source's objects that leaves out."""
    changes = {FINGERPRINT: record} | ({UNREADABLE: unreadable} if unreadable else {})
    change_attributes(open_root(run.place), changes, without=(UNREADABLE,))


def _refuse_rewritten(run: Run, listings: dict[str, Listing], ours: dict[str, Any]) -> None:
    """Refuse to call a target complete whose inputs were not the same from beginning to end."""
    for name, array in stored_inputs(run.inputs).items():
        same = metadata_digest(array) == ours[name]["metadata"]
        if not same or list_objects(array, argument=name, retries=run.retries).digest != listings[name].digest:
            raise RunError(
                f"the stored objects of {name} were rewritten during the run, so that the target {run.place.shown} may be "
                "a mixture; run again with overwrite (--overwrite)"
            )


def _report(plan: Plan, done: _Done, seconds: float, listings: dict[str, Listing], missing: int) -> Report:
    sizes = (ELEMENT_TYPES[name].dtype.itemsize for name in (plan.spec.x_dtype, plan.spec.y_dtype))
    read, written = (done.elements * size for size in sizes)
    told = sorted(set.intersection(*(set(listing.told) for listing in listings.values())))
    return Report(
        plan.units, done.units, read, written, seconds, done.peak, plan.memory.total, plan.max_mem, missing, tuple(told)
    )
