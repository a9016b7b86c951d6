"""zarr arrays and groups that are there: open, layout, which objects exist. Nothing here writes (target.py does).

Imports errors, dtypes, grid, places and spec's type names.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import numpy as np
import zarr

from chunkq import direct
from chunkq.contents import get, outward_link
from chunkq.dtypes import from_holder
from chunkq.errors import SpecError
from chunkq.places import Place, place_of, shown_as
from chunkq.places import first_line as first_line
from chunkq.retry import RETRIES, with_retries
from chunkq.spec import Region, Shape

#: Attributes of what chunkq writes: the operator it was made with, whether every object was written, which job it is of,
#: objects of the source that could not be read so far, and whether what was there before is still being removed.
OPERATOR = "chunkq.operator"
#: Attribute of the group that a calibration is kept in: what is no array.
CALIBRATION = "chunkq.calibration"
COMPLETE = "chunkq.complete"
FINGERPRINT = "chunkq.fingerprint"
UNREADABLE = "chunkq.unreadable"
REPLACING = "chunkq.replacing"

#: They say something of the run that wrote a target, not of the tensor.
OWN_ATTRIBUTES = (OPERATOR, COMPLETE, FINGERPRINT, UNREADABLE, REPLACING)

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
        found = direct.read(self.array, region)
        return from_holder("the zarr array", np.asarray(self.array[region]) if found is None else found, self.element)


def object_shape(array: ZarrArray) -> Shape:
    """Shape of one stored object: the shard where there are shards (zarr's `chunks` is the inner chunk), else the chunk."""
    return tuple(int(n) for n in (array.shards or array.chunks))


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
    refuse_odd_chunks(argument, array)
    _refuse_outward_link(argument, array)
    return array


def refuse_odd_chunks(argument: str, array: ZarrArray) -> None:
    """Refuse an array without a regular grid of chunks."""
    try:
        sizes = (*object_shape(array), *array.shape)
    except NotImplementedError as error:
        raise SpecError("source", f"{argument} has chunks of varying size; rewrite it on a regular grid") from error
    if any(n < 1 for n in object_shape(array)) or any(n < 0 for n in sizes):
        raise SpecError("source", f"{argument} has chunks of shape {object_shape(array)}; expected positive sizes")


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
        return with_retries(lambda: opener(place.store_path, mode="r", zarr_format=version), RETRIES)
    except Exception as error:  # zarr has an error class for each way to fail, and damaged metadata adds more
        raise SpecError("source", f"{unreadable}: {_what_failed(place, error)}") from error


def _what_failed(place: Place, error: Exception) -> str:
    if place.local is not None and not os.path.exists(place.local):
        return "there is no such file or folder"
    if place.local is not None and os.path.isfile(place.local):
        return "it is a file"
    if place.local is None and isinstance(error, FileNotFoundError):
        return "nothing is there, or there is no such bucket"
    if isinstance(error, PermissionError):
        return f"access denied ({first_line(error)})"
    return first_line(error)


def open_written(
    target: Any, storage_options: dict[str, Any] | None = None
) -> tuple[ZarrArray | zarr.Group, ZarrArray]:
    """Open what a run wrote, finished or not, for reading: the array or group itself, and the array that was filled.

    Raises
    ------
    SpecError
        Reason ``source``.
    """
    opened = isinstance(target, (zarr.Array, zarr.Group))
    node = target if opened else open_node(zarr.open, target, "target", storage_options)
    array = node
    if isinstance(node, zarr.Group):
        array = open_node(zarr.open_array, place_of(node.store_path).below("data"), "target")
    return node, open_source(array, "target", unfinished=True)


def codec_names(array: ZarrArray) -> list[str]:
    """What zarr calls the codecs of an array, in v2 and v3, those of inner chunks included."""
    found = [str(codec.to_dict().get("name", "")) for codec in getattr(array.metadata, "codecs", ())]
    compressor = getattr(array.metadata, "compressor", None)
    inner = [str(codec.to_dict().get("name", "")) for codec in array.compressors if hasattr(codec, "to_dict")]
    return [*found, *inner, *([] if compressor is None else [str(getattr(compressor, "codec_id", ""))])]


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
