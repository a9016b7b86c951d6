"""Checks a target against its source: computes again what it should hold, and compares every bit.

Imports planning, job, journal and metadata.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from chunkq.cluster import active_client
from chunkq.dtypes import ELEMENT_TYPES
from chunkq.errors import RunError, SpecError
from chunkq.execute import Counter
from chunkq.interrupts import held_interrupts
from chunkq.job import compute_units
from chunkq.journal import Progressed
from chunkq.listing import list_objects, missing_keys
from chunkq.memory import parse_size
from chunkq.metadata import WRITTEN_OUT, open_quantized, recorded_operator
from chunkq.operands import element_of, kind
from chunkq.places import options_beside, options_for
from chunkq.planning import arranged, bind_zarr, check_options
from chunkq.report import Progress, counted
from chunkq.spec import QuantSpec
from chunkq.store import (
    COMPLETE,
    FINGERPRINT,
    UNREADABLE,
    Handle,
    ZarrArray,
    location,
    object_shape,
    open_source,
    open_written,
)
from chunkq.units import Job, Outcome, check_unit, held_params

#: What a comparison holds besides: what was found, and where it differs, in results.
COMPARED = 2.0

#: Regions and keys that a text names; JSON has all.
NAMED = 20


@dataclass(frozen=True)
class Verification:
    """What a check found.

    Attributes
    ----------
    units, checked : int
        Units of the target, and those that were looked at: computed and compared, if that was possible.
    lacking : int
        Units that lack objects; they cannot be compared.
    missing_objects : int
        Stored objects that the target lacks, parameters of a group included.
    missing_keys : tuple of str
        Some of them.
    complete : bool
        Whether the target says of itself that it is finished.
    differing, failed : tuple of Outcome
        Units that differ, and units that could not be read or computed.
    source_changed : bool
        Whether names, sizes or times of the source's objects are others than the run read; the same values may be in them.
    seconds : float
        How long it took.
    """

    units: int
    checked: int
    lacking: int
    missing_objects: int
    missing_keys: tuple[str, ...]
    complete: bool
    differing: tuple[Outcome, ...]
    failed: tuple[Outcome, ...]
    source_changed: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.complete and not (self.missing_objects or self.differing or self.failed)

    def __str__(self) -> str:
        compared = self.checked - len(self.failed)
        units = counted(self.units, "unit")
        lines = [f"{compared} of {units} compared in {self.seconds:.1f} s: {self._found(compared)}"]
        if self.source_changed:
            lines.append("the source's objects are not those that the run read (names, sizes or times differ)")
        if not self.complete:
            lines.append("the target is unfinished; run its job again to continue")
        if self.missing_objects:
            lines.append(
                f"missing: {counted(self.missing_objects, 'object')}, among them {', '.join(self.missing_keys)}; not "
                f"compared, since they lack some: {counted(self.lacking, 'unit')}"
            )
        for title, outcomes in (("differs", self.differing), ("cannot be checked", self.failed)):
            lines += [f"{outcome.region} {title}: {_what(outcome)}" for outcome in outcomes[:NAMED]]
            if len(outcomes) > NAMED:
                lines.append(f"... and {len(outcomes) - NAMED} more regions")
        return "\n".join(lines)

    def _found(self, compared: int) -> str:
        if not compared and self.units:
            return "nothing is known of its values"
        if self.differing:
            return f"{len(self.differing)} with differences"
        return "every bit is the same" if compared == self.units else "in these every bit is the same"

    def to_json(self) -> str:
        """Give all that was found as one JSON document."""
        return json.dumps(asdict(self) | {"ok": self.ok})


def _what(outcome: Outcome) -> str:
    keys = f" ({', '.join(key for key, _ in outcome.keys)})" if outcome.keys else ""
    return outcome.message + keys


@held_interrupts()
def verify(
    source: Any,
    target: Any,
    *,
    params: dict[str, Any] | None = None,
    sample: float | None = None,
    seed: int = 0,
    max_mem: int | str | None = None,
    scheduler: Any = None,
    workers: int | None = None,
    retries: int = 3,
    storage_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compute again what a target of chunkq should hold and compare bits; also that every object exists and decodes.

    Parameters
    ----------
    source, target : str, path, URL, zarr store, zarr.Array or zarr.Group
        What was read (an array, or a group of QuantizeLinear), and what was written.
    params : dict, optional
        Parameters by name: those that the target records by their digest only, as it does NumPy arrays of more than 1024
        elements that came from no file (the digest is compared), and zarr arrays that are no longer where they were.
    sample : float, optional
        Share of the units to compute, above 0 and up to 1, chosen by `seed`; all by default. Whether objects exist is
        looked up for all.
    max_mem, scheduler, workers, retries, storage_options
        See `plan`.
    progress : callable, optional
        Called with the number of units checked so far, and of all to be checked.

    Raises
    ------
    SpecError
        The two do not belong together, or a parameter is missing.

    Examples
    --------
    >>> import tempfile, numpy as np, zarr, chunkq
    >>> folder = tempfile.mkdtemp()
    >>> x = zarr.create_array(f"{folder}/x.zarr", data=np.int8([[1, 2], [3, 4]]))
    >>> report = chunkq.plan(chunkq.DequantizeLinear(0.5), x, f"{folder}/y.zarr").run()
    >>> chunkq.verify(x, f"{folder}/y.zarr").ok
    True
    """
    began = time.perf_counter()
    share = _share(sample)
    array, brought = _open_source(source, storage_options)
    node, written = open_written(target, options_for(target, storage_options))
    _refuse_other_shape(array, written)
    options_of = partial(options_beside, [source, target], storage_options)
    op = recorded_operator(node, brought | (params or {}), options_of)
    check_options(op, "fill", workers, retries)
    spec, values = bind_zarr(op, array)
    _refuse_strangers(spec, written)
    inputs = {"source": array} | dict(zip((p.name for p in spec.params), values, strict=True))
    limit = None if max_mem is None else parse_size(max_mem)
    scheduler = scheduler or active_client() or "threads"
    arrangement = arranged(spec, inputs, object_shape(written), True, scheduler, workers, limit, COMPARED)
    progressed = Progressed(written, arrangement.unit_shape)
    chosen = _chosen(progressed.done(), arrangement.units, share, seed)
    job = Job(
        spec,
        Handle(array, spec.x_dtype),
        held_params(spec, values),
        Handle(written, spec.y_dtype),
        arrangement.unit_shape,
        retries=retries,
    )
    missing, lost = _missing_objects(node, written, progressed, values, retries)
    counter = Counter(None if progress is None else partial(_tell, progress, len(chosen)))
    compute_units(job, check_unit, chosen, arrangement, scheduler, counter)
    return Verification(
        units=arrangement.units,
        checked=len(chosen),
        lacking=len(progressed.todo()),
        missing_objects=missing,
        missing_keys=lost,
        complete=node.attrs.get(COMPLETE) is True,
        differing=_those(counter, "differs"),
        failed=_those(counter, "failed"),
        source_changed=_changed(array, node, retries),
        seconds=time.perf_counter() - began,
    )


def _open_source(source: Any, storage_options: dict[str, Any] | None) -> tuple[ZarrArray, dict[str, Any]]:
    """The tensor; where it is a quantized group's, also what the group brings that a target records by its digest."""
    options = options_for(source, storage_options)
    opened = None if kind(source) == "zarr" else open_quantized(source, storage_options=options)
    if opened is None:
        return open_source(source, storage_options=options), {}
    array, op = opened
    found = {"scale": op.scale, "zero_point": op.zero_point}
    large = {n: v for n, v in found.items() if isinstance(v, np.ndarray) and v.size > WRITTEN_OUT}
    return open_source(array), large


def _missing_objects(
    node: Any, written: ZarrArray, progressed: Progressed, values: tuple[Any, ...], retries: int
) -> tuple[int, tuple[str, ...]]:
    """How many objects a target lacks, and some of them; a group's parameters are of the target too."""
    missing = progressed.listing.missing
    keys = missing_keys(written, progressed.listing, retries=retries)
    if hasattr(node, "members"):
        for value in values:
            if kind(value) == "zarr":
                listing = list_objects(value, argument="target", retries=retries)
                missing += listing.missing
                keys += [f"{value.basename}/{key}" for key in missing_keys(value, listing, retries=retries)]
    return missing, tuple(keys)


def _tell(progress: Progress, units: int, done: int) -> None:
    progress(done, units)


def _share(sample: Any) -> float:
    if sample is None:
        return 1.0
    if isinstance(sample, bool) or not isinstance(sample, (int, float)) or not 0 < sample <= 1:
        raise SpecError("argument", f"sample={sample!r}: expected a share above 0 and up to 1, or None for all")
    return float(sample)


def _refuse_strangers(spec: QuantSpec, written: ZarrArray) -> None:
    """Refuse a target of another shape or type than the operator gives on this source."""
    shape = tuple(int(n) for n in written.shape)
    element = element_of("target", written, None, tuple(ELEMENT_TYPES))
    if (shape, element) != (spec.shape, spec.y_dtype):
        raise SpecError(
            "target",
            f"target {location(written)} is {element} {shape}, but {spec.op} gives {spec.y_dtype} {spec.shape} on this "
            "source; pass the source that it was made of",
        )


def _refuse_other_shape(source: ZarrArray, written: ZarrArray) -> None:
    if tuple(source.shape) != tuple(written.shape):
        raise SpecError(
            "source",
            f"source {location(source)} has the shape {source.shape}, but target {location(written)} was made of one of "
            f"{written.shape}; pass that one",
        )


def _changed(source: ZarrArray, node: Any, retries: int) -> bool:
    """Whether the source's stored objects are others than the target's fingerprint says."""
    recorded = node.attrs.get(FINGERPRINT)
    of_source = recorded.get("source") if isinstance(recorded, dict) else None
    objects = of_source.get("objects") if isinstance(of_source, dict) else None
    if objects is None or node.attrs.get(UNREADABLE):
        return False
    try:
        return bool(objects != list_objects(source, retries=retries).digest)
    except RunError:
        return False  # where nothing can be listed nothing is known; what cannot be read is reported by unit


def _chosen(done: Any, units: int, share: float, seed: int) -> Any:
    """Units to compute, in C order: of those whose objects are all there, the share asked for of all units."""
    if share == 1.0:
        return done
    wanted = min(len(done), math.ceil(share * units))
    return np.sort(np.random.default_rng(seed).choice(done, wanted, replace=False))


def _those(counter: Counter, state: str) -> tuple[Outcome, ...]:
    return tuple(sorted((o for o in counter.outcomes if o.state == state), key=lambda o: o.index))
