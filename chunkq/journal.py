"""What a target says of the job that writes it, and how much of it is done: the output store is its own journal.

Every object is written whole, by one task; what exists is done. The fingerprint in the attributes tells one job's target
from another's. Imports metadata, listing and grid.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from chunkq.grid import Shape, counts, unravel
from chunkq.listing import Listing, list_objects, metadata_digest
from chunkq.metadata import digest
from chunkq.spec import FORMULAS, QuantSpec
from chunkq.store import ZarrArray, object_shape


def _sha256(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def fingerprint(
    spec: QuantSpec,
    inputs: dict[str, Any],
    layout: dict[str, Any],
    listings: dict[str, Listing] | None = None,
    part: bool = False,
) -> dict[str, Any]:
    """All that decides a target's bits: no time, no place, so that two runs of one job leave the same bytes.

    Parameters
    ----------
    spec : QuantSpec
        The operation.
    inputs : dict
        The source and the parameters by name: zarr arrays, or NumPy arrays.
    layout : dict
        How the target is stored, as JSON has it.
    listings : dict, optional
        Of the stored objects of each zarr input; without them the fingerprint says less, see `differences`.
    part : bool
        Leave out those objects of the source that its listing was told to.
    """
    what = [spec.op, FORMULAS[spec.op], spec.x_dtype, spec.y_dtype, spec.q_dtype, spec.division]
    how = [spec.levels, spec.saturate, [[p.name, p.dtype, list(p.steps)] for p in spec.params]]
    found: dict[str, Any] = {"operator": _sha256([what, how]), "layout": _sha256(layout)}
    for name, value in inputs.items():
        if isinstance(value, np.ndarray):
            found[name] = {"values": digest(value)["sha256"]}
        else:
            found[name] = {"metadata": metadata_digest(value)}
            if listings is not None:
                found[name]["objects"] = listings[name].rest if name == "source" and part else listings[name].digest
    return found


def differences(ours: dict[str, Any], theirs: Any) -> list[str]:
    """In what two fingerprints differ, in words; what only one of them knows of an input's objects is not compared."""
    if not isinstance(theirs, dict):
        return ["no fingerprint of chunkq"]
    words = {"operator": "the operator or its attributes", "layout": "the layout, codecs or attributes of the target"}
    return [
        words.get(name, f"{name} ({_what_differs(ours.get(name), theirs.get(name))})")
        for name in sorted(ours.keys() | theirs.keys())
        if not _same(ours.get(name), theirs.get(name))
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        ignored = set() if "objects" in one and "objects" in other else {"objects"}
        return all(one.get(key) == other.get(key) for key in (one.keys() | other.keys()) - ignored)
    return bool(one == other)


def _what_differs(one: Any, other: Any) -> str:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return "only one of the two has it"
    differing = [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
    if "metadata" in differing:
        return "another array, or its metadata were changed"
    if "objects" in differing:
        return "its stored objects were rewritten: names, sizes or times differ; with their old ones they are accepted"
    return "other values"


def _outer(lengths: list[Any], dtype: Any) -> Any:
    """The product of one number for each axis, at every place of the grid."""
    product: Any = np.ones((), dtype)
    for along_axis in lengths:
        product = np.multiply.outer(product, along_axis)
    return product


class Progressed:
    """Which units of a target are done: those whose every object exists."""

    def __init__(self, target: ZarrArray, unit_shape: Shape) -> None:
        objects = object_shape(target)
        shape = tuple(int(n) for n in target.shape)
        self.target = target
        self._regions = shape, tuple(unit_shape)
        self._objects = counts(shape, objects)
        self._unit = tuple(
            u // k if u % k == 0 else -(-n // k) for u, k, n in zip(unit_shape, objects, shape, strict=True)
        )
        self._units = counts(self._objects, self._unit)
        self._present = np.zeros(self._units, np.uint32)
        self.listing = list_objects(target, self._see)

    def _see(self, index: int) -> None:
        place = unravel(self._objects, index)
        self._present[tuple(i // k for i, k in zip(place, self._unit, strict=True))] += 1

    def _expected(self) -> Any:
        """How many objects each unit has: fewer at the edges."""
        lengths = [
            np.minimum(k, n - k * np.arange(m)).astype(np.uint32)
            for n, k, m in zip(self._objects, self._unit, self._units, strict=True)
        ]
        return _outer(lengths, np.uint32)

    def todo(self) -> Any:
        """Flat numbers of the units that lack objects, in C order."""
        return np.flatnonzero(self._present < self._expected())

    def begun(self) -> Any:
        """Of those, the ones that have some."""
        return np.flatnonzero((self._present > 0) & (self._present < self._expected()))

    def done(self) -> Any:
        """Flat numbers of the units whose every object exists."""
        return np.flatnonzero(self._present >= self._expected())

    def elements(self, units: Any) -> int:
        """How many elements the units have together."""
        lengths = [
            np.minimum(u, n - u * np.arange(m, dtype=np.int64))
            for n, u, m in zip(*self._regions, self._units, strict=True)
        ]
        return int(_outer(lengths, np.int64).reshape(-1)[units].sum())
