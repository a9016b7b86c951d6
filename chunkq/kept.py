"""A calibration kept in zarr: a group with an array for each of its fields.

Imports calibration, admission, target and store.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np
import zarr

from chunkq.admission import DOCUMENT, check_target
from chunkq.calibration import METHODS, Calibration
from chunkq.contents import get, keys, remove
from chunkq.dtypes import FAKE_QUANTIZE_X
from chunkq.errors import RunError, SpecError
from chunkq.groups import Groups
from chunkq.listing import list_objects, refuse_missing
from chunkq.places import Place, options_for, place_of
from chunkq.run import Array
from chunkq.spec import as_integer
from chunkq.store import CALIBRATION, COMPLETE, open_node
from chunkq.target import COMPRESSORS, change_attributes, group_document, write_metadata

#: The arrays, and what they hold.
FIELDS = {
    "minimum": np.float64,
    "maximum": np.float64,
    "count": np.int64,
    "nan": np.int64,
    "positive_infinite": np.int64,
    "negative_infinite": np.int64,
    "histogram": np.int64,
}

#: Elements of a stored object.
OBJECT = 1 << 20

_NAMES = "|".join(FIELDS)
#: Keys of a calibration, and what a killed write leaves of them.
_OWN = re.compile(rf"((({_NAMES})/)?{re.escape(DOCUMENT)}|({_NAMES})/c(/\d+)*)(\.[0-9a-f]{{32}}\.partial)?")


def check_kept(target: Any, overwrite: bool = False, storage_options: dict[str, Any] | None = None) -> Place:
    """The place of a calibration that is to be kept. Writes nothing.

    Raises
    ------
    SpecError
        Reasons ``target`` and ``target_exists``: something is there, and no calibration or not to be replaced.
    """
    place = place_of(target, options_for(target, storage_options), writing=True)
    if get(place, DOCUMENT) is None:
        if check_target(place, {}) is not None:
            raise SpecError("target_exists", f"target {place.shown!r} is there already; choose another place")
        return place
    node = open_node(zarr.open, place, "target")
    if not isinstance(node, zarr.Group) or not isinstance(node.attrs.get(CALIBRATION), dict):
        raise SpecError("target_exists", f"target {place.shown!r} is there and no calibration; choose another place")
    if not overwrite and node.attrs.get(COMPLETE) is True:
        raise SpecError(
            "target_exists",
            f"target {place.shown!r} is there already; pass overwrite (--overwrite) to replace it, or choose another place",
        )
    for key, plain in keys(place):
        if not plain or not _OWN.fullmatch(key):
            raise SpecError("target", f"target {place.shown!r} holds {key!r}, which is no part of a calibration")
    return place


def keep(found: Calibration, target: Any, overwrite: bool, storage_options: dict[str, Any] | None) -> None:
    """What `Calibration.to_zarr` does."""
    place = check_kept(target, overwrite, storage_options)
    head = {
        "shape": list(found.shape),
        "x_dtype": found.x_dtype,
        "steps": list(found.steps),
        "method": found.method,
        "percentile": found.percentile,
        "peak_memory": found.peak_memory,
        "projected_memory": found.projected_memory,
    }
    # unfinished first: nobody takes a half of it for the whole
    write_metadata(place, "", group_document({CALIBRATION: head, COMPLETE: False}))
    remove(place, [key for key, _ in keys(place) if key != DOCUMENT and _OWN.fullmatch(key)])
    group = zarr.open_group(place.store_path, mode="r+", zarr_format=3)
    for name, dtype in FIELDS.items():
        value = getattr(found, name)
        if value is not None:
            array = np.asarray(value, dtype)
            how: Any = {"compressors": COMPRESSORS["auto"], "config": {"write_empty_chunks": True}}
            group.create_array(name, data=array, chunks=_chunks(array.shape), fill_value=-1, **how)
    change_attributes(group, {COMPLETE: True})


def _chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
    chunks = [max(1, n) for n in shape]
    for axis in range(len(chunks)):
        chunks[axis] = max(1, min(chunks[axis], OBJECT // max(1, prod(chunks[axis + 1 :]))))
    return tuple(chunks)


def open_calibration(source: Any, *, storage_options: dict[str, Any] | None = None) -> Calibration:
    """Open what `Calibration.to_zarr` wrote.

    Parameters
    ----------
    source : str, path, URL, zarr store or zarr.Group
        The group.
    storage_options : dict, optional
        What fsspec needs to know for a URL.

    Raises
    ------
    SpecError
        Reason ``source`` where there is no such group or it is unfinished; ``metadata`` where it is damaged.

    Examples
    --------
    >>> import tempfile, numpy as np, chunkq
    >>> folder = tempfile.mkdtemp()
    >>> chunkq.calibrate(np.float32([-1, 3])).to_zarr(f"{folder}/found.zarr")
    >>> float(chunkq.open_calibration(f"{folder}/found.zarr").maximum)
    3.0
    """
    opened = isinstance(source, zarr.Group)
    node = source if opened else open_node(zarr.open, source, "calibration", options_for(source, storage_options))
    head = node.attrs.get(CALIBRATION)
    if not isinstance(node, zarr.Group) or head is None:
        raise SpecError("source", f"{source!r} is no calibration; `chunkq calibrate SRC -o PLACE` makes one")
    if node.attrs.get(COMPLETE) is not True:
        raise SpecError("source", f"the calibration {source!r} is unfinished; make it again")
    try:
        return _read(node, head)
    except (KeyError, TypeError, ValueError, OverflowError, OSError, RuntimeError, RunError) as error:
        raise SpecError("metadata", f"the calibration {source!r} is damaged: {error}") from error


def _read(node: zarr.Group, head: dict[str, Any]) -> Calibration:
    shape, steps = (tuple(_size(n) for n in head[name]) for name in ("shape", "steps"))
    if len(shape) != len(steps) or head["method"] not in METHODS or head["x_dtype"] not in FAKE_QUANTIZE_X:
        raise ValueError(f"{CALIBRATION} is {head}")
    kept = Groups(shape, steps).result_shape
    fields: dict[str, Array | None] = {"histogram": None}
    for name, dtype in FIELDS.items():
        if name != "histogram" or name in node:
            fields[name] = _field(node, name, np.dtype(dtype), kept)
    _check(fields, float(head["percentile"]))
    made: Any = fields
    return Calibration(
        shape=shape,
        x_dtype=head["x_dtype"],
        steps=steps,
        method=head["method"],
        percentile=float(head["percentile"]),
        peak_memory=_size(head["peak_memory"]),
        projected_memory=_size(head["projected_memory"]),
        **made,
    )


def _field(node: zarr.Group, name: str, dtype: np.dtype[Any], kept: tuple[int, ...]) -> Array:
    """An array of the group, whose every object is there: a shape that is only declared takes no memory."""
    array: Any = node[name]
    if not isinstance(array, zarr.Array):
        raise ValueError(f"{name} is no array")
    held = tuple(array.shape) if name != "histogram" else tuple(array.shape[:-1])
    if held != kept or array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype} {array.shape}")
    refuse_missing(name, array, list_objects(array, argument="calibration"))
    return np.asarray(array[...])


def _check(fields: dict[str, Any], percentile: float) -> None:
    """Refuse numbers that no calibration finds."""
    low, high, counts = fields["minimum"], fields["maximum"], fields["histogram"]
    if not (np.isfinite(low) & np.isfinite(high) & (low <= high)).all() or not 50 < percentile <= 100:
        raise ValueError("a minimum is above its maximum, or a number is out of range")
    if any((fields[name] < 0).any() for name in ("count", "nan", "positive_infinite", "negative_infinite")):
        raise ValueError("a count is below 0")
    if counts is None:
        return
    bins = counts.shape[-1]
    if bins < 2 or bins % 2 or (counts < 0).any() or not np.array_equal(counts.sum(axis=-1), fields["count"]):
        raise ValueError("the histogram is none of the values counted")


def _size(value: Any) -> int:
    found = as_integer(value)
    if found is None or not 0 <= found < 1 << 63:
        raise ValueError(f"{value!r} is no size")
    return found
