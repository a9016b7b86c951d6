"""Whether a target may be written: what is there, whether all of it is a target's own, and what it must not touch.

Writes nothing. Imports store and places.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zarr

from chunkq.contents import get, keys
from chunkq.errors import SpecError
from chunkq.lock import LOCK
from chunkq.places import Place, ancestors, comparable, first_line, parent, place_of, relation
from chunkq.store import CALIBRATION, OPERATOR, REPLACING, ZarrArray, open_node, refuse_odd_chunks
from chunkq.stored import Keys

#: What the group of a quantized tensor consists of.
DATA = "data"
GROUP_ARRAYS = (DATA, "scale", "zero_point")

DOCUMENT = "zarr.json"
METADATA_FILES = (DOCUMENT, ".zarray", ".zgroup", ".zattrs", ".zmetadata")
#: What zarr's LocalStore leaves of a write that was killed.
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")

#: obstore's errors for what the credentials do not allow.
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")


def check_target(place: Place, inputs: dict[str, ZarrArray]) -> ZarrArray | zarr.Group | None:
    """Refuse a target that cannot or must not be written. Writes nothing.

    Parameters
    ----------
    place : Place
        From `place_of`, with ``writing=True``.
    inputs : dict of zarr.Array
        The arrays that will be read, by name.

    Returns
    -------
    zarr.Array, zarr.Group or None
        What is there already, read-only; the caller compares fingerprints. What another run left of a write, its lock and
        empty folders count as nothing.

    Raises
    ------
    SpecError
        Reasons ``target``, ``same_array``.
    """
    _refuse_kind(place)
    try:
        for name, array in inputs.items():
            _refuse_shared(place, name, place_of(array.store_path))
        node = _existing(place)
        for above in ancestors(place):
            document = _document_above(above)
            what = "which chunkq wrote" if _is_chunkqs(document) else "a zarr array"
            if _is_chunkqs(document) or document.get("node_type") == "array":
                raise SpecError(
                    "target", f"target {place.shown!r} lies inside {above.shown!r}, {what}; choose another place"
                )
    except SpecError:
        raise
    except Exception as error:  # every store has errors of its own
        raise SpecError("target", f"target {place.shown!r} cannot be reached: {first_line(error)}") from error
    _refuse_unwritable(place)
    return node


def _refuse_kind(place: Place) -> None:
    if place.kind == "zip":
        raise SpecError(
            "target", f"target {place.shown!r} is a zip store, which cannot be written in parallel; pass a folder"
        )
    if place.read_only:
        raise SpecError("target", f"target {place.shown!r} is a store that is only read ({place.kind or 'read_only'})")
    if ".." in place.path.split("/") or "\0" in place.path:
        raise SpecError("target", f"target {place.shown!r} has '..' or a NUL in its name; pass the plain path")


def _refuse_shared(place: Place, name: str, source: Place) -> None:
    """Refuse a target that shares stored objects with an input: it would be removed before it is read."""
    if not comparable(place, source):
        return
    group = parent(source)
    if group is not None and _is_chunkqs(_document_above(group)):
        source = group  # what a run wrote belongs together
    found = relation(place, source)
    if found == "same":
        raise SpecError("same_array", f"target {place.shown!r} is the {name} itself")
    if found:
        shown = source.local or source.shown
        raise SpecError("same_array", f"target {place.shown!r} and {name} {shown!r} lie one inside the other")


def _attributes(document: dict[str, Any]) -> dict[str, Any]:
    """The attributes in a zarr v3 document; empty where there are none to be read."""
    attributes = document.get("attributes")
    return attributes if isinstance(attributes, dict) else {}


def _is_chunkqs(document: dict[str, Any]) -> bool:
    """Whether it is of a group that belongs together: a quantized tensor's, or a calibration's."""
    return not {OPERATOR, CALIBRATION}.isdisjoint(_attributes(document))


def _document_above(place: Place) -> dict[str, Any]:
    """The zarr v3 document of what lies above a target or an input; empty where there is none to be read."""
    try:
        found = json.loads(get(place, DOCUMENT) or b"null")
        return found if isinstance(found, dict) else {}
    except (ValueError, RecursionError):
        return {}
    except Exception as error:
        # who may write below a prefix need not be allowed to read above it
        if isinstance(error, PermissionError) or type(error).__name__ in _DENIED:
            return {}
        raise


def _existing(place: Place) -> ZarrArray | zarr.Group | None:
    """The node of a target, and nothing beside it that is not its own."""
    if place.local is not None and os.path.lexists(_spelled(place)) and not os.path.isdir(place.local):
        raise SpecError("target", f"target {place.shown!r} is a file, not a zarr array; nothing was touched")
    node = _node(place)
    if node is None:
        try:
            _refuse_strange(place, _is_remnant)
        except SpecError:
            node = _node(place)  # another run may have begun since
            if node is None:
                raise
    return node


def check_replaceable(place: Place, node: ZarrArray | zarr.Group) -> None:
    """Refuse to replace what `check_target` found if anything lies there that is not its own.

    Raises
    ------
    SpecError
        Reason ``target``.
    """
    try:
        _refuse_strange(place, _rule(place, node))
    except SpecError:
        raise
    except Exception as error:  # every store has errors of its own
        raise SpecError("target", f"target {place.shown!r} cannot be listed: {first_line(error)}") from error


def _refuse_strange(place: Place, allowed: Callable[[str], bool]) -> None:
    for key, plain in keys(place):
        if not plain or not allowed(key):
            raise strange(place, key)


def _spelled(place: Place) -> str:
    """A local place before links are followed."""
    return (
        os.path.join(getattr(place.store, "root", ""), place.path)
        if place.path
        else str(getattr(place.store, "root", ""))
    )


def strange(place: Place, key: str) -> SpecError:
    """The error for a key that is not a target's own."""
    return SpecError(
        "target", f"target {place.shown!r} holds {key!r}, which is no part of a zarr array; nothing was touched"
    )


def _node(place: Place) -> ZarrArray | zarr.Group | None:
    """The array or the group of chunkq's at a place."""
    found = next((name for name in METADATA_FILES if get(place, name) is not None), None)
    if found is None:
        return None
    try:
        node = open_node(zarr.open, place)
        if isinstance(node, zarr.Array):
            refuse_odd_chunks("target", node)
    except SpecError as error:
        raise strange(place, found) from error
    if isinstance(node, zarr.Group) and OPERATOR not in node.attrs:
        raise strange(place, f"{found} of a group")
    return node  # type: ignore[no-any-return]


def _is_remnant(key: str) -> bool:
    """Whether a key is a lock, or what a killed write left."""
    return key == LOCK or PARTIAL.search(key) is not None


def _rule(place: Place, node: ZarrArray | zarr.Group) -> Callable[[str], bool]:
    """Which keys a target may hold."""
    if replacing(node):
        return may_be_replaced
    if isinstance(node, zarr.Array):
        return partial(belongs, Keys(node))
    children = {name: _node(place.below(name)) for name in GROUP_ARRAYS}
    arrays = {name: Keys(child) for name, child in children.items() if isinstance(child, zarr.Array)}

    def of_group(key: str) -> bool:
        name, _, rest = key.partition("/")
        return _is_remnant(key) or key in METADATA_FILES or (name in arrays and belongs(arrays[name], rest))

    return of_group


def may_be_replaced(key: str) -> bool:
    """Whether a key looks like a zarr array's or a group's of chunkq: what says more is gone while it is replaced."""
    inner = re.sub(rf"^({'|'.join(GROUP_ARRAYS)})/", "", key)
    return _is_remnant(key) or inner in METADATA_FILES or re.fullmatch(r"c|(c[./])?\d+([./]\d+)*", inner) is not None


def belongs(keys: Keys, key: str) -> bool:
    """Whether a key is an array's metadata, one of its objects, or what a write left of one."""
    return key in METADATA_FILES or keys.index(key) is not None or _is_remnant(key)


def replacing(node: ZarrArray | zarr.Group) -> bool:
    """Whether a target's predecessor is not yet removed: then `replace` goes on."""
    return node.attrs.get(REPLACING) is True


def _refuse_unwritable(place: Place) -> None:
    if place.local is None:
        return
    above = Path(place.local)
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise SpecError("target", f"target {place.shown!r} cannot be written: {str(above)!r} is not a writable folder")
