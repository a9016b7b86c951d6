"""The only module that touches zarr: open, layout, which objects exist, create and replace.

Imports errors and spec's type names. Nothing here computes, and only the `create_` functions and `mark_complete` write.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr.core.sync import sync
from zarr.storage import LocalStore

from chunkq.dtypes import from_holder
from chunkq.errors import SpecError
from chunkq.grid import counts, unravel
from chunkq.spec import Region, Shape

#: Attributes by which xarray and others scale or mask on reading. On a dequantized target they would apply a second time.
PACKING_ATTRIBUTES = (
    "scale_factor",
    "add_offset",
    "_FillValue",
    "missing_value",
    "valid_min",
    "valid_max",
    "valid_range",
    "_Unsigned",
)

#: What `compressors` may be by name. Each ends in crc32c: without it most bit flips pass unseen.
COMPRESSORS: dict[str, tuple[Any, ...]] = {
    "auto": (ZstdCodec(), Crc32cCodec()),
    "none": (Crc32cCodec(),),
    "zstd": (ZstdCodec(), Crc32cCodec()),
    "blosc": (BloscCodec(), Crc32cCodec()),
    "gzip": (GzipCodec(), Crc32cCodec()),
}

_METADATA_FILES = ("zarr.json", ".zarray", ".zattrs", ".zmetadata", ".zgroup")

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


def _plain_path(location: Any) -> Any:
    """A local path as a path: zarr makes a store of a ``file://`` URL whose writes are not atomic."""
    if isinstance(location, os.PathLike):
        return os.fspath(location)
    if isinstance(location, str) and location.startswith("file:"):
        return unquote(urlsplit(location).path)
    return location


def _is_local(location: Any) -> bool:
    return isinstance(location, str) and "://" not in location


def open_source(source: Any, argument: str = "source") -> ZarrArray:
    """Open a zarr array for reading.

    Parameters
    ----------
    source : str, path, zarr store or zarr.Array
        A path may lead into a group: ``store.zarr/scale``.
    argument : str
        What the caller calls it, for the message.

    Raises
    ------
    SpecError
        Reason ``source``.
    """
    if isinstance(source, zarr.Array):
        array = source
    else:
        location = _plain_path(source)
        if isinstance(location, str) and not location:
            raise SpecError("source", f"{argument} is empty; expected the path of a zarr array")
        try:
            array = zarr.open_array(location, mode="r")
        except Exception as error:  # zarr has an error class for each way to fail, and damaged metadata adds more
            what = "there is no such file or folder" if _absent(location) else _first_line(error)
            raise SpecError("source", f"{argument} {location!r} is not a readable zarr array: {what}") from error
    try:
        sizes = (*object_shape(array), *array.shape)
    except NotImplementedError as error:
        raise SpecError("source", f"{argument} has chunks of varying size; rewrite it on a regular grid") from error
    if any(n < 1 for n in object_shape(array)) or any(n < 0 for n in sizes):
        raise SpecError("source", f"{argument} has chunks of shape {object_shape(array)}; expected positive sizes")
    return array


def _absent(location: Any) -> bool:
    return _is_local(location) and not os.path.exists(location)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def local_path(array: ZarrArray) -> str | None:
    """Real path of an array on a local file system, None elsewhere."""
    store = array.store_path.store
    if not isinstance(store, LocalStore):
        return None
    return os.path.realpath(os.path.join(store.root, array.store_path.path))


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


# ---- the target


def resolve_compressors(compressors: Any) -> tuple[Any, ...]:
    """The bytes-to-bytes codecs of a target: by name, or zarr's own objects as they are."""
    if isinstance(compressors, str):
        if compressors not in COMPRESSORS:
            raise SpecError(
                "compressors",
                f"compressors={compressors!r}: expected one of {', '.join(COMPRESSORS)}, or zarr codecs",
            )
        return COMPRESSORS[compressors]
    return tuple(compressors) if isinstance(compressors, (list, tuple)) else (compressors,)


def check_target(target: Any, source: ZarrArray, overwrite: bool) -> Any:
    """Refuse a target that cannot or must not be written; return it as zarr takes it. Writes nothing.

    Raises
    ------
    SpecError
        Reasons ``target``, ``target_exists``, ``same_array``.
    """
    target = _plain_path(target)
    if isinstance(target, zarr.Array):
        raise SpecError("target", "target is an open zarr array; pass its path or store")
    if isinstance(target, zarr.storage.ZipStore) or (isinstance(target, str) and target.endswith(".zip")):
        raise SpecError("target", "target is a zip store, which cannot be written in parallel; pass a folder")
    if not _is_local(target):
        return _check_remote_target(target, source, overwrite)
    if not target or "\0" in target:
        raise SpecError("target", f"target={target!r}: expected a path")
    path = os.path.realpath(target)
    source_path = local_path(source)
    if source_path is not None:
        if path == source_path:
            raise SpecError("same_array", f"target {target!r} is the source itself")
        if _inside(path, source_path) or _inside(source_path, path):
            raise SpecError("same_array", f"target {target!r} and source {source_path!r} lie one inside the other")
    if os.path.lexists(target) and not (os.path.isdir(path) and not os.listdir(path)):
        _check_replaceable(target, path, overwrite)
    parent = Path(path)
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise SpecError("target", f"target {target!r} cannot be written: {str(parent)!r} is not a writable folder")
    return path


def _inside(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _check_replaceable(target: str, path: str, overwrite: bool) -> None:
    if not os.path.isdir(path):
        raise SpecError("target", f"target {target!r} is a file, not a zarr array; nothing was touched")
    strange = _strange_entry(path)
    if strange is not None:
        raise SpecError(
            "target",
            f"target {target!r} holds {strange!r}, which is no part of a zarr array; nothing was touched",
        )
    if not overwrite:
        raise SpecError("target_exists", f"target {target!r} exists; pass overwrite (--overwrite) to replace it")


def _strange_entry(path: str) -> str | None:
    """Anything in a folder that a zarr array does not consist of; the folder's metadata where it is no array at all."""
    names = os.listdir(path)
    if not any(name in names for name in ("zarr.json", ".zarray")):
        return sorted(names)[0]
    if "zarr.json" in names and _node_type(os.path.join(path, "zarr.json")) == "group":
        return "zarr.json of a group"
    folders = [path]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                known = entry.name in _METADATA_FILES or re.fullmatch(r"c?[0-9./]*(\.[0-9a-f]+\.partial)?", entry.name)
                if entry.is_symlink() or not known:
                    return os.path.relpath(entry.path, path)
                if entry.is_dir():
                    folders.append(entry.path)
    return None


def _node_type(metadata: str) -> str:
    match = re.search(r'"node_type"\s*:\s*"(\w+)"', Path(metadata).read_text(errors="replace"))
    return match[1] if match else ""


def _check_remote_target(target: Any, source: ZarrArray, overwrite: bool) -> Any:
    if target == source.store_path.store and source.store_path.path == "":
        raise SpecError("same_array", "target is the store of the source itself")
    try:
        zarr.open(target, mode="r")
    except (FileNotFoundError, KeyError):
        return target
    except Exception as error:
        raise SpecError("target", f"target {target!r} cannot be reached: {_first_line(error)}") from error
    if not overwrite:
        raise SpecError("target_exists", f"target {target!r} exists; pass overwrite (--overwrite) to replace it")
    raise SpecError("target", f"target {target!r} exists and is not a local folder: delete it first")


def create_target(
    target: Any,
    *,
    shape: Shape,
    dtype: str,
    chunks: Shape,
    shards: Shape | None,
    compressors: tuple[Any, ...],
    attributes: dict[str, Any],
    dimension_names: tuple[str | None, ...] | None,
) -> ZarrArray:
    """Create the target array, removing the zarr array that `check_target` allowed to be replaced.

    Its fill value is NaN, so that what was not written does not read as zeros. Every object is written, all-zero ones too.
    """
    try:
        if _is_local(target) and os.path.isdir(target):
            shutil.rmtree(target)
        array = zarr.create_array(
            target,
            shape=shape,
            dtype=dtype,
            chunks=chunks,
            shards=shards,
            compressors=compressors,
            filters=None,
            fill_value=float("nan"),
            attributes=attributes,
            dimension_names=dimension_names,
            zarr_format=3,
            config={"write_empty_chunks": True},
        )
    except OSError as error:
        raise SpecError("target", f"target {target!r} cannot be written: {error}") from error
    return writable(array)


def create_source(path: str, shape: Shape, chunks: Shape, dtype: str, names: tuple[str, ...]) -> ZarrArray:
    """Create a zarr array to be filled with integers, every object written."""
    array = zarr.create_array(
        path,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        dimension_names=names,
        compressors=COMPRESSORS["auto"],
        config={"write_empty_chunks": True},
    )
    return writable(array)


def writable(array: ZarrArray) -> ZarrArray:
    """The array, set to write all-fill objects too: zarr forgets that setting when an array is opened again."""
    return array.with_config({"write_empty_chunks": True})


def mark_complete(array: ZarrArray) -> None:
    """Record that every object was written; the last write of a run."""
    array.attrs["chunkq.complete"] = True


def target_attributes(source: ZarrArray, operator: dict[str, Any], unpacks: bool) -> dict[str, Any]:
    """Attributes of a target: the source's, the operator, and CF packing set aside where the operator has undone it."""
    attributes = dict(source.attrs)
    if unpacks:
        packing = {name: attributes.pop(name) for name in PACKING_ATTRIBUTES if name in attributes}
        if packing:
            attributes["chunkq.source_attributes"] = packing
    attributes["chunkq.operator"] = operator
    attributes["chunkq.complete"] = False
    return attributes


def dimension_names(source: ZarrArray) -> tuple[str | None, ...] | None:
    """Names of the axes: zarr v3's own, or what xarray keeps in the attributes of a v2 array."""
    names = getattr(source.metadata, "dimension_names", None) or source.attrs.get("_ARRAY_DIMENSIONS")
    if not isinstance(names, (list, tuple)) or len(names) != source.ndim:
        return None
    return tuple(name if isinstance(name, str) else None for name in names)
