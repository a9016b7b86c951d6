"""What is done with one unit: read and compute it, then write it, or compare it with what is stored.

Runs on whatever worker it is sent to. Imports run, store, objects, listing and retry.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore

from chunkq import direct, grid
from chunkq.buffers import result_memory
from chunkq.dtypes import ELEMENT_TYPES, to_holder
from chunkq.errors import ChunkqError, RunError
from chunkq.listing import undecodable
from chunkq.objects import delete_objects, existing, object_keys
from chunkq.retry import with_retries
from chunkq.run import Array, run_chunk
from chunkq.spec import QuantSpec, Region, Shape
from chunkq.statistics import State, Statistic
from chunkq.store import Handle, first_line, location
from chunkq.target import writable

READING, WRITING = "reading the source", "writing the target"
READING_PARAMETERS, READING_TARGET, COMPUTING = "reading the parameters", "reading the target", "computing"
READING_ORIGINAL = "reading the original"

#: Steps whose failure is a matter of one unit's data: the others go on, and all are reported in the end.
_DATA_STEPS = (READING, READING_TARGET)


class Job:
    """What a task needs to compute any unit. No dataclass: Dask would look into its fields for graphs.

    `shared` says that a unit may be sent out twice, as a cluster does when it loses a worker; `trusted` that an object
    which exists is whole; `statistic` is what `measure_unit` takes, where `target` is what is compared with.
    """

    __slots__ = (
        "fail_fast",
        "params",
        "retries",
        "shared",
        "source",
        "spec",
        "statistic",
        "target",
        "token",
        "trusted",
        "unit_shape",
    )

    def __init__(
        self,
        spec: QuantSpec,
        source: Handle,
        params: tuple[Any, ...],
        target: Handle | None,
        unit_shape: Shape,
        *,
        retries: int = 0,
        fail_fast: bool = False,
        shared: bool = False,
        trusted: bool = True,
        statistic: Statistic | None = None,
    ) -> None:
        self.spec = spec
        self.statistic = statistic
        self.source = source
        self.params = params
        self.target = target
        self.unit_shape = unit_shape
        self.retries = retries
        self.fail_fast = fail_fast
        self.shared = shared
        self.trusted = trusted
        self.token = uuid.uuid4().hex

    def region(self, index: int) -> Region:
        """The region of a unit."""
        return grid.region(self.spec.shape, self.unit_shape, index)


@dataclass(frozen=True)
class Outcome:
    """What became of a unit that was not simply done.

    Attributes
    ----------
    index : int
        The unit.
    region : str
        Its region, for people.
    state : str
        "skipped" (its objects existed), "failed", or "differs".
    message : str
        What failed and why, or how many elements differ.
    keys : tuple of (str, str)
        Stored objects that cannot be read, each with the reason.
    """

    index: int
    region: str
    state: str
    message: str = ""
    keys: tuple[tuple[str, str], ...] = ()


class UnitError(RunError):
    """A unit failed in a way that others would too, or `Job.fail_fast` was asked for."""

    def __init__(self, outcome: Outcome) -> None:
        keys = f" ({', '.join(key for key, _ in outcome.keys)})" if outcome.keys else ""
        super().__init__(f"unit {outcome.index}, region {outcome.region}: {outcome.message}{keys}")
        self.outcome = outcome

    def __reduce__(self) -> tuple[type, tuple[Outcome]]:
        return type(self), (self.outcome,)  # travels between processes


class StepError(Exception):
    """A step of a unit failed; the cause is `__cause__`."""

    def __init__(self, step: str) -> None:
        super().__init__(step)
        self.step = step


def held_params(spec: QuantSpec, params: tuple[Any, ...]) -> tuple[Any, ...]:
    """Parameters as a job holds them: NumPy arrays as they are, zarr arrays behind handles."""
    pairs = zip(spec.params, params, strict=True)
    return tuple(p if isinstance(p, np.ndarray) else Handle(p, param.dtype) for param, p in pairs)


def describe_region(region: Region) -> str:
    """A region as NumPy writes it."""
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in region) + "]"


def _attempt(
    step: str, call: Callable[[], Any], retries: int, before_retry: Callable[[], object] = lambda: None
) -> Any:
    try:
        return with_retries(call, retries, before_retry)
    except Exception as error:
        raise StepError(step) from error


def _cut(job: Job, region: Region) -> tuple[Any, ...]:
    cuts = [param.own_region(region) for param in job.spec.params]
    return tuple(
        value.read(cut) if isinstance(value, Handle) else value[cut]
        for value, cut in zip(job.params, cuts, strict=True)
    )


def compute(job: Job, region: Region, out: Array | None = None) -> Array:
    """Read what a region needs and compute it, in `out` where there is one.

    Raises
    ------
    StepError
        Naming which of the steps failed.
    """
    return _computed(job, region, _read(job, region), out)


def _read(job: Job, region: Region) -> Array:
    x: Array = _attempt(READING, lambda: job.source.read(region), job.retries)
    return x


def _computed(job: Job, region: Region, x: Array, out: Array | None = None) -> Array:
    params = _attempt(READING_PARAMETERS, lambda: _cut(job, region), job.retries)
    start = tuple(part.start for part in region)
    result: Array = _attempt(COMPUTING, lambda: run_chunk(job.spec, x, params, start, out), 0)
    return result


def _write(job: Job, region: Region, y: Array) -> None:
    target = _target(job)
    keys = object_keys(target, region)
    values = to_holder(y)

    def put() -> None:
        if not direct.write(target, region, values):
            writable(target)[region] = values

    _attempt(WRITING, put, job.retries, lambda: delete_objects(target, keys))


def _target(job: Job) -> Any:
    if job.target is None:
        raise AssertionError("this job has no target")
    return job.target.array


def _is_written(job: Job, region: Region) -> bool:
    """Whether a unit's objects are all there, whole; what is there of them otherwise is deleted."""
    target = _target(job)
    keys = object_keys(target, region)
    present = existing(target, keys)
    if len(present) == len(keys) and (job.trusted or not undecodable(target, region)):
        return True
    delete_objects(target, present)
    return False


def _memory(job: Job, region: Region) -> Array | None:
    """Memory for a unit's result that earlier units had, where the store has written it out when it says so.

    One that lives in memory may hold on to what it was given.
    """
    if not isinstance(_target(job).store, LocalStore):
        return None
    return result_memory(tuple(part.stop - part.start for part in region), ELEMENT_TYPES[job.spec.y_dtype].dtype)


def write_unit(job: Job, index: int) -> Outcome | None:
    """Read, compute and write one unit; None when it is done.

    Raises
    ------
    UnitError
        Where the failure is not of this unit's source data alone, or `job.fail_fast`.
    """
    region = job.region(index)
    with one_object_at_a_time(), _failures(job, index, region) as outcomes:
        if job.shared and _attempt(WRITING, lambda: _is_written(job, region), job.retries):
            return Outcome(index, describe_region(region), "skipped")
        _write(job, region, compute(job, region, _memory(job, region)))
    return outcomes[0] if outcomes else None


def check_unit(job: Job, index: int) -> Outcome | None:
    """Compute one unit and compare it with what the target holds; None where every bit is the same."""
    region = job.region(index)
    with one_object_at_a_time(), _failures(job, index, region) as outcomes:
        expected = np.ascontiguousarray(to_holder(compute(job, region)))
        found = _attempt(READING_TARGET, lambda: np.asarray(_target(job)[region]), job.retries)
        bits = f"u{expected.dtype.itemsize}"
        wrong = int(np.count_nonzero(expected.view(bits) != np.ascontiguousarray(found, expected.dtype).view(bits)))
        if wrong:
            outcomes.append(Outcome(index, describe_region(region), "differs", f"{wrong} of {expected.size} elements"))
    return outcomes[0] if outcomes else None


class Measured:
    """The part of a statistic that one unit is: the region, and its state until somebody takes it."""

    def __init__(self, region: Region, state: State) -> None:
        self.region = region
        self.state: State | None = state


def measure_unit(job: Job, index: int) -> Measured:
    """Read one unit and take the job's statistic of it.

    Raises
    ------
    UnitError
        Where a step fails; `job.fail_fast` is set.
    """
    region, statistic = job.region(index), job.statistic
    assert statistic is not None
    with one_object_at_a_time(), _failures(job, index, region):
        arrays = unit_arrays(job, region)
        return Measured(region, _attempt(COMPUTING, lambda: statistic.measure(region, arrays), 0))
    raise AssertionError("a job that yields its results fails fast")


def unit_arrays(job: Job, region: Region) -> list[Array]:
    """What a statistic may look at: the original or the tensor itself, what the operator makes of that, and it."""
    x = _read(job, region)
    y = _computed(job, region, x) if job.spec.params else x
    target = job.target
    original = x if target is None else _attempt(READING_ORIGINAL, lambda: target.read(region), job.retries)
    return [original, y, x]


def compute_unit(job: Job, index: int) -> tuple[Region, Array]:
    """Read and compute one unit; its region and the result.

    Raises
    ------
    UnitError
        Where a step fails; `job.fail_fast` is set.
    """
    region = job.region(index)
    with one_object_at_a_time(), _failures(job, index, region):
        return region, compute(job, region)
    raise AssertionError("a job that yields its results fails fast")


@contextmanager
def _failures(job: Job, index: int, region: Region) -> Iterator[list[Outcome]]:
    """Turn what fails into an outcome where other units may go on, else into a RunError."""
    outcomes: list[Outcome] = []
    try:
        yield outcomes
    except StepError as failure:
        cause = failure.__cause__
        name = "" if isinstance(cause, ChunkqError) else f"{type(cause).__name__}: "
        what = f"{name}{first_line(cause)}" if cause else failure.step
        message = f"{failure.step}{_where(job, failure.step)} failed: {what}"
        outcome = Outcome(index, describe_region(region), "failed", message, _bad_keys(job, failure.step, region))
        if failure.step not in _DATA_STEPS or job.fail_fast:
            raise UnitError(outcome) from cause
        outcomes.append(outcome)


def _where(job: Job, step: str) -> str:
    if step == READING:
        return f" {location(job.source.array)}"
    if step == READING_PARAMETERS:
        return "".join(f" {location(value.array)}" for value in job.params if isinstance(value, Handle))
    return f" {location(_target(job))}" if step in (WRITING, READING_TARGET, READING_ORIGINAL) else ""


def _bad_keys(job: Job, step: str, region: Region) -> tuple[tuple[str, str], ...]:
    if step == READING:
        return tuple(undecodable(job.source.array, region))
    return tuple(undecodable(_target(job), region)) if step in (READING_TARGET, READING_ORIGINAL) else ()


# ---- zarr's own concurrency

# One object at a time in each thread or process: many encoded at once thrash the caches and multiply the memory.
# Not zarr's number of threads as well: it is for good, for the whole process, and one thread would encode for all workers.
_ZARR_CONFIG = {"async.concurrency": 1}
_inside = threading.Lock()
_users = 0
_setting: Any = None


@contextmanager
def one_object_at_a_time() -> Iterator[None]:
    """Keep zarr from working on several objects of one unit at once.

    zarr's configuration is one for the whole process: the first thread to come sets it, the last to leave restores it.
    """
    global _users, _setting
    with _inside:
        _users += 1
        if _users == 1:
            _setting = zarr.config.set(_ZARR_CONFIG)
    try:
        yield
    finally:
        with _inside:
            _users -= 1
            if _users == 0:
                _setting.__exit__(None, None, None)
