"""zarr arrays and groups that are there: open, layout, which objects exist. Nothing here writes (target.py does).

Imports errors, dtypes, grid, places and spec's type names.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from math import prod
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import zarr
from zarr.core.sync import sync
from zarr.storage import LocalStore

from chunkq.dtypes import from_holder
from chunkq.errors import ChunkqError, RunError, SpecError
from chunkq.grid import counts, unravel
from chunkq.places import Place, get, outward_link, place_of, shown_as
from chunkq.places import first_line as first_line
from chunkq.spec import Region, Shape

#: Attributes of what chunkq writes: the operator it was made with, and whether every object was written.
OPERATOR = "chunkq.operator"
COMPLETE = "chunkq.complete"

ZarrArray = zarr.Array[Any]


class Handle:
    """A zarr array as a Dask graph may hold it: picklable, with a token of its own.

    zarr's own token depends on path and metadata and stays the same when the content changes, so that a rewritten store
    gives stale results; every handle is therefore new to Dask.
    """

    __slots__ = ("array", "element", "token")

    def __init__(self, array: ZarrArray, element: str) -> None:
        self.array = array
        self.element = element
        self.token = uuid.uuid4().hex

    def __dask_tokenize__(self) -> tuple[str, str]:
        return "chunkq.store.Handle", self.token

    def read(self, region: Region) -> np.ndarray[Any, np.dtype[Any]]:
        """Read a region in its element type; 0-d comes back as an array too."""
        return from_holder("the zarr array", np.asarray(self.array[region]), self.element)


def object_shape(array: ZarrArray) -> Shape:
    """Shape of one stored object: the shard where there are shards (zarr's `chunks` is the inner chunk), else the chunk."""
    return tuple(int(n) for n in (array.shards or array.chunks))


def plain_path(location: Any) -> Any:
    """A local path as a path: zarr makes a store of a ``file://`` URL whose writes are not atomic."""
    if isinstance(location, os.PathLike):
        return os.fspath(location)
    if isinstance(location, LocalStore):
        return str(location.root)
    if isinstance(location, str) and location.startswith("file:"):
        return unquote(urlsplit(location).path)
    return location


def is_local(location: Any) -> bool:
    return isinstance(location, str) and "://" not in location


def open_source(
    source: Any,
    argument: str = "source",
    *,
    unfinished: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> ZarrArray:
    """Open a zarr array for reading.

    Parameters
    ----------
    source : str, path, URL, zarr store, Place or zarr.Array
        A path may lead into a group: ``store.zarr/scale``.
    argument : str
        What the caller calls it, for the message.
    unfinished : bool
        Whether the target of a run that has not ended will do.
    storage_options : dict, optional
        What fsspec needs to know for a URL.

    Raises
    ------
    SpecError
        Reason ``source``.
    """
    if isinstance(source, zarr.Array):
        array = source
        _refuse_options(argument, storage_options)
    else:
        array = open_node(zarr.open_array, source, argument, storage_options)
    if array.attrs.get(COMPLETE) is False and not unfinished:
        raise SpecError(
            "source", f"{argument} is an unfinished target of chunkq ({COMPLETE} is false); run its job again"
        )
    try:
        sizes = (*object_shape(array), *array.shape)
    except NotImplementedError as error:
        raise SpecError("source", f"{argument} has chunks of varying size; rewrite it on a regular grid") from error
    if any(n < 1 for n in object_shape(array)) or any(n < 0 for n in sizes):
        raise SpecError("source", f"{argument} has chunks of shape {object_shape(array)}; expected positive sizes")
    _refuse_outward_link(argument, array)
    return array


def _refuse_options(argument: str, storage_options: dict[str, Any] | None) -> None:
    if storage_options:
        raise SpecError("argument", f"storage_options go with a URL; {argument} is open already")


def _refuse_outward_link(argument: str, array: ZarrArray) -> None:
    """Refuse an array whose folder of chunks is a link to elsewhere; the listing looks at every other folder."""
    place = place_of(array.store_path)
    link = outward_link(place, array.metadata.encode_chunk_key((0,) * array.ndim))
    if link is not None:
        raise SpecError(
            "source", f"{argument} {place.shown!r}: {link!r} is a link out of the array; pass what it leads to"
        )


def open_node(opener: Any, source: Any, argument: str = "source", storage_options: dict[str, Any] | None = None) -> Any:
    """What zarr's `opener` makes of a place, for reading; every way to fail is one SpecError of reason ``source``."""
    if isinstance(source, str) and not source:
        raise SpecError("source", f"{argument} is empty; expected the path of a zarr array")
    place = place_of(source, storage_options, argument=argument)
    unreadable = f"{argument} {place.shown!r} is not a readable zarr array"
    try:
        # one request first: of the several that zarr has in flight when the first fails, the others leave noise
        version = 2 if get(place, "zarr.json") is None else 3
        return opener(place.store_path, mode="r", zarr_format=version)
    except Exception as error:  # zarr has an error class for each way to fail, and damaged metadata adds more
        raise SpecError("source", f"{unreadable}: {_what_failed(place, error)}") from error


def _what_failed(place: Place, error: Exception) -> str:
    if place.local is not None and not os.path.exists(place.local):
        return "there is no such file or folder"
    if place.local is None and isinstance(error, FileNotFoundError):
        return "nothing is there, or there is no such bucket"
    if isinstance(error, PermissionError):
        return f"access denied ({first_line(error)})"
    return first_line(error)


def open_quantized_group(source: Any, storage_options: dict[str, Any] | None = None) -> zarr.Group | None:
    """The group that a quantizing run wrote, None where `source` is something else; with its consolidated metadata."""
    if isinstance(source, (zarr.Array, zarr.Group)):
        node = source
        _refuse_options("source", storage_options)
    else:
        node = open_node(zarr.open, source, "source", storage_options)
    if not isinstance(node, zarr.Group) or OPERATOR not in node.attrs:
        return None
    if node.attrs.get(COMPLETE) is not True:
        shown = place_of(node.store_path).shown
        raise SpecError("source", f"source {shown!r} is unfinished ({COMPLETE} is not true); run its job again")
    return node


def location(array: ZarrArray) -> str:
    """Where an array is, as `open_source` takes it."""
    return local_path(array) or shown_as(array.store_path.store, array.store_path.path)


def local_path(array: ZarrArray) -> str | None:
    """Real path of an array on a local file system, None elsewhere."""
    return place_of(array.store_path).local


# ---- which objects exist


def _object_index(array: ZarrArray, grid: Shape, key: str) -> int | None:
    """Flat position of a key in the grid of objects; None where the key is none of them."""
    parts = [int(p) for p in re.split(r"[./]", key) if p.isdecimal()]
    if not grid:
        return 0 if array.metadata.encode_chunk_key(()) == key else None
    if len(parts) != len(grid) or any(p >= n for p, n in zip(parts, grid, strict=True)):
        return None
    if array.metadata.encode_chunk_key(tuple(parts)) != key:
        return None
    index = 0
    for place, n in zip(parts, grid, strict=True):
        index = index * n + place
    return index


def is_object(array: ZarrArray, key: str) -> bool:
    """Whether a key is that of a stored object of the array."""
    return _object_index(array, counts(array.shape, object_shape(array)), key) is not None


def _keys(array: ZarrArray) -> Iterator[str]:
    """Keys below an array that hold at least one byte where sizes are to be had."""
    path = local_path(array)
    if path is None:
        prefix = f"{array.store_path.path}/".lstrip("/")

        async def listed() -> list[str]:
            return [key async for key in array.store_path.store.list_prefix(prefix)]

        yield from (key.removeprefix(prefix) for key in sync(listed()))
        return
    folders = [path]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.path)
                elif entry.stat().st_size:
                    yield os.path.relpath(entry.path, path).replace(os.sep, "/")


def refuse_missing(argument: str, array: ZarrArray) -> None:
    """Refuse an array that lacks stored objects.

    Raises
    ------
    RunError
        Naming some of the keys, and the way out.
    """
    count, keys = missing_objects(array)
    if count:
        raise RunError(
            f"{argument} {location(array)} lacks {count} stored objects, among them {', '.join(keys)}. zarr reads them as "
            f"{array.fill_value!r}; it leaves out chunks that hold nothing else, so they may be meant: then pass "
            "missing='fill' (--missing fill)"
        )


def read_parameter(name: str, array: ZarrArray, element: str) -> np.ndarray[Any, np.dtype[Any]]:
    """A whole parameter; what it lacks or cannot be decoded is an error, never a fill value."""
    refuse_missing(name, array)
    try:
        return Handle(array, element).read((slice(None),) * array.ndim)
    except ChunkqError:
        raise
    except Exception as error:  # codecs have an error class each
        raise RunError(f"{name} {location(array)} cannot be read: {first_line(error)}") from error


def missing_objects(array: ZarrArray, name_at_most: int = 5) -> tuple[int, list[str]]:
    """Count the stored objects that are not there, and name some of their keys.

    zarr reads a missing object (and an empty one) as the fill value, silently. Total minus listed: the declared shape
    may be absurd, so nothing of its size is made.
    """
    grid = counts(array.shape, object_shape(array))
    total = prod(grid)
    present = {i for key in _keys(array) if (i := _object_index(array, grid, key)) is not None}
    missing = total - len(present)
    keys: list[str] = []
    index = 0
    while len(keys) < min(missing, name_at_most):
        if index not in present:
            keys.append(array.metadata.encode_chunk_key(unravel(grid, index)))
        index += 1
    return missing, keys
