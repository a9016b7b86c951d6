"""The target of a run: what may be written or replaced, its documents, its attributes. With store.py all that touches zarr.

A document is made in memory and put in one go, so that creating is atomic on every store and the same in every run.
Imports admission, store, places, grid and dtypes.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr.errors import ZarrUserWarning
from zarr.storage import MemoryStore

from chunkq import grid
from chunkq.admission import (
    DATA,
    DOCUMENT,
    may_be_replaced,
    strange,
)
from chunkq.contents import get, keys, put, remove
from chunkq.dtypes import DTYPE_ATTRIBUTE, ELEMENT_TYPES, fill_value, to_holder
from chunkq.errors import SpecError
from chunkq.listing import list_objects
from chunkq.lock import LOCK
from chunkq.places import Place
from chunkq.retry import RETRIES, with_retries
from chunkq.spec import ParamSpec, Shape
from chunkq.store import (
    COMPLETE,
    OPERATOR,
    OWN_ATTRIBUTES,
    REPLACING,
    Handle,
    ZarrArray,
    first_line,
)

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

#: Elements of a stored object of a parameter: small enough to be read for every unit that needs a part of it.
PARAM_OBJECT = 1 << 16


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


# ---- documents


@dataclass(frozen=True)
class Layout:
    """How an array is stored.

    Attributes
    ----------
    shape : tuple of int
        Of the tensor.
    element : str
        Its element type.
    chunks, shards : tuple of int or None
        Of one chunk, of one shard.
    compressors : tuple of zarr codecs
        From bytes to bytes.
    attributes : dict
        The array's.
    dimension_names : tuple of str or None
        Names of the axes.
    """

    shape: Shape
    element: str
    chunks: Shape
    shards: Shape | None
    compressors: tuple[Any, ...]
    attributes: dict[str, Any]
    dimension_names: tuple[str | None, ...] | None = None

    def document(self) -> bytes:
        """The zarr.json of the array. What is unwritten reads as `fill_value`."""
        row = ELEMENT_TYPES[self.element]
        attributes = self.attributes | ({DTYPE_ATTRIBUTE: self.element} if row.holder != row.dtype else {})
        store = MemoryStore()
        zarr.create_array(
            store,
            shape=self.shape,
            dtype=row.holder,
            chunks=self.chunks,
            shards=self.shards,
            compressors=self.compressors,
            filters=None,
            fill_value=fill_value(self.element),
            attributes=attributes,
            dimension_names=self.dimension_names,
            zarr_format=3,
        )
        return get(Place(store, "", "memory"), DOCUMENT) or b""

    def describe(self) -> dict[str, Any]:
        """All that decides the stored bytes, but for what chunkq says in the attributes of the run itself."""
        found: dict[str, Any] = json.loads(self.document())
        return found | {"attributes": {k: v for k, v in found["attributes"].items() if k not in OWN_ATTRIBUTES}}


def group_document(attributes: dict[str, Any]) -> bytes:
    """The zarr.json of a group."""
    store = MemoryStore()
    zarr.create_group(store, attributes=attributes, zarr_format=3)
    return get(Place(store, "", "memory"), DOCUMENT) or b""


def write_metadata(place: Place, name: str, document: bytes) -> None:
    """Put the document of a target (`name` is "") or of a child of it, in one write.

    Raises
    ------
    SpecError
        Reason ``target``.
    """
    try:
        put(place, f"{name}/{DOCUMENT}".lstrip("/"), document)
    except Exception as error:  # every store has errors of its own
        raise SpecError("target", f"target {place.shown!r} cannot be written: {first_line(error)}") from error


def replace(place: Place, document: bytes) -> None:
    """Replace what `check_target` returned by an array or group without objects. After a kill anywhere, call it again.

    The new document goes first, marked: from then on nothing takes old objects for the new array's.

    Raises
    ------
    SpecError
        Reason ``target``: not writable, or something strange appeared since it was checked; then that stays.
    """
    marked = json.loads(document)
    marked["attributes"] |= {COMPLETE: False, REPLACING: True}
    write_metadata(place, "", json.dumps(marked, indent=2).encode())
    try:
        remove(place, _old_keys(place))
    except (SpecError, KeyboardInterrupt):
        raise
    except Exception as error:  # every store has errors of its own
        raise SpecError("target", f"target {place.shown!r} cannot be replaced: {first_line(error)}") from error
    write_metadata(place, "", document)


def _old_keys(place: Place) -> Iterator[str]:
    for key, plain in keys(place):
        if not plain or not may_be_replaced(key):
            raise strange(place, key)
        if key not in (DOCUMENT, LOCK):
            yield key


def begin_array(place: Place, layout: Layout, attributes: dict[str, Any], state: str, more: dict[str, Any]) -> None:
    """Make an array of a target that is new, or that another job's gives way to; one that is there already stays."""
    document = dataclasses.replace(layout, attributes=layout.attributes | attributes | more).document()
    if state == "other":
        replace(place, document)
    elif state == "new":
        write_metadata(place, "", document)


def begin_quantized(
    place: Place,
    layout: Layout,
    attributes: dict[str, Any],
    params: tuple[ParamSpec, ...],
    values: tuple[Any, ...],
    state: str,
    more: dict[str, Any],
) -> None:
    """Make the group of a quantized tensor, or what is lacking of one."""
    if state == "other":
        replace(place, group_document(attributes | more))
    write_quantized(place, params, values, attributes | more, layout)


def open_root(place: Place) -> ZarrArray | zarr.Group:
    """The target itself, array or group, to be marked."""
    return with_retries(lambda: zarr.open(place.store_path, mode="r+", zarr_format=3), RETRIES)


def open_target(place: Place) -> ZarrArray:
    """The array of a target that is to be filled, a group's `data`; all-fill objects are written too."""
    node = open_root(place)
    if isinstance(node, zarr.Group):
        return _open_child(place, DATA)
    return writable(node)


def _open_child(place: Place, name: str) -> ZarrArray:
    at = place.below(name).store_path
    return writable(with_retries(lambda: zarr.open_array(at, mode="r+", zarr_format=3), RETRIES))


def change_attributes(node: ZarrArray | zarr.Group, changes: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    """Set some attributes of a target and take others away, in one write."""
    attributes = {name: value for name, value in node.attrs.items() if name not in without} | changes
    with_retries(lambda: node.attrs.put(attributes), RETRIES)


def write_quantized(
    place: Place,
    params: tuple[ParamSpec, ...],
    values: tuple[Any, ...],
    group_attributes: dict[str, Any],
    layout: Layout,
) -> None:
    """Make the group of a quantized tensor, or what it lacks: its document, its parameters, the document of its data."""
    if get(place, DOCUMENT) is None:
        write_metadata(place, "", group_document(group_attributes))
    lacking = lacking_in_group(place, params)
    for param, value in zip(params, values, strict=True):
        if param.name in lacking:
            _write_param(place, param, value)
    if DATA in lacking:
        write_metadata(place, DATA, layout.document())


def lacking_in_group(place: Place, params: tuple[ParamSpec, ...]) -> list[str]:
    """Parameters of a quantized tensor's group that are not there whole, and its data where that has no document."""
    lacking = [param.name for param in params if not _is_whole(place, param.name)]
    return lacking + ([DATA] if get(place.below(DATA), DOCUMENT) is None else [])


def _is_whole(place: Place, name: str) -> bool:
    if get(place.below(name), DOCUMENT) is None:
        return False
    return list_objects(_open_child(place, name), argument="target").missing == 0


def _write_param(place: Place, param: ParamSpec, value: Any) -> None:
    """Copy a parameter into the group, one stored object at a time."""
    shape = tuple(int(n) for n in value.shape)
    layout = Layout(shape, param.dtype, _param_chunks(shape), None, COMPRESSORS["auto"], {})
    write_metadata(place, param.name, layout.document())
    _fill(_open_child(place, param.name), param, value)


def _param_chunks(shape: Shape) -> Shape:
    chunks = [max(1, n) for n in shape]
    for axis in range(len(chunks)):
        while prod(chunks) > PARAM_OBJECT and chunks[axis] > 1:
            chunks[axis] = -(-chunks[axis] // 2)
    return tuple(chunks)


def _fill(array: ZarrArray, param: ParamSpec, value: Any) -> None:
    read = (lambda region: value[region]) if isinstance(value, np.ndarray) else Handle(value, param.dtype).read
    for region in grid.regions(tuple(int(n) for n in array.shape), tuple(int(n) for n in array.chunks)):
        plain = to_holder(np.asarray(with_retries(partial(read, region), RETRIES)))
        native = plain.astype(plain.dtype.newbyteorder("="), copy=False)
        with_retries(partial(array.__setitem__, region, native), RETRIES)


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


def mark_complete(node: ZarrArray | zarr.Group, consolidate: bool = False) -> None:
    """Record that every object was written; the last write of a run. A group's metadata may be consolidated before."""
    if consolidate and isinstance(node, zarr.Group):
        with warnings.catch_warnings():
            # that zarr v3 has not adopted it yet is for who asked for it to know
            warnings.simplefilter("ignore", ZarrUserWarning)
            # a group that was opened before would write its document without
            at = node.store_path
            node = with_retries(lambda: zarr.consolidate_metadata(at.store, path=at.path, zarr_format=3), RETRIES)
    change_attributes(node, {COMPLETE: True})


def operator_attributes(operator: dict[str, Any]) -> dict[str, Any]:
    """What a target says of the run that writes it."""
    return {OPERATOR: operator, COMPLETE: False}


def source_attributes(source: ZarrArray, unpacks: bool) -> dict[str, Any]:
    """Attributes of a source, without chunkq's own of it; CF packing set aside where the operator has undone it."""
    own = (DTYPE_ATTRIBUTE, *OWN_ATTRIBUTES)
    attributes = {name: value for name, value in source.attrs.items() if name not in own}
    if unpacks:
        packing = {name: attributes.pop(name) for name in PACKING_ATTRIBUTES if name in attributes}
        if packing:
            attributes["chunkq.source_attributes"] = packing
    return attributes


def dimension_names(source: ZarrArray) -> tuple[str | None, ...] | None:
    """Names of the axes: zarr v3's own, or what xarray keeps in the attributes of a v2 array."""
    names = getattr(source.metadata, "dimension_names", None) or source.attrs.get("_ARRAY_DIMENSIONS")
    if not isinstance(names, (list, tuple)) or len(names) != source.ndim:
        return None
    return tuple(name if isinstance(name, str) else None for name in names)
