"""Whole stored objects, through zarr's own codecs and stores, in the thread that asks.

zarr runs checksums and byte orders on its one event loop, where the workers of a process queue up, and copies what it
decodes once more; the checksum that it calls keeps other threads from running meanwhile. An object that is read or written
as a whole needs none of that. All else is left to zarr: shards, zarr v2, edges on writing, codecs that have no synchronous
form. Imports grid and kernels.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import zarr
from zarr.abc.codec import SupportsSyncCodec
from zarr.codecs import Crc32cCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from chunkq.buffers import with_room
from chunkq.grid import Region, Shape
from chunkq.kernels import kernels

Array = np.ndarray[Any, np.dtype[Any]]

_Steps = list[tuple[Any, ArraySpec]]


def read(array: zarr.Array[Any], region: Region) -> Array | None:
    """A region, perhaps read-only; None where zarr must read it: no whole objects, or one that is not stored."""
    steps = _steps(array)
    if steps is None or not region:
        return None
    region = tuple(slice(*part.indices(n)) for part, n in zip(region, array.shape, strict=True))
    chunk = tuple(map(int, array.chunks))
    places = _whole_objects(region, chunk, array.shape)
    if places is None:
        return None
    if len(places) == 1:
        found = _decoded(array, steps, places[0])
        return None if found is None else found[tuple(slice(p.stop - p.start) for p in region)]
    out = np.empty(tuple(p.stop - p.start for p in region), array.dtype)
    for place in places:
        found = _decoded(array, steps, place)
        if found is None:
            return None
        part = out[_within(region, chunk, place)]
        part[...] = found[tuple(slice(n) for n in part.shape)]
    return out


def write(array: zarr.Array[Any], region: Region, values: Array) -> bool:
    """Write a region that consists of whole objects; False, with nothing written, where zarr must do it."""
    steps = _steps(array)
    chunk = tuple(map(int, array.chunks))
    if steps is None or not region or values.dtype != array.dtype or not values.dtype.isnative:
        return False
    region = tuple(slice(*part.indices(n)) for part, n in zip(region, array.shape, strict=True))
    if any(p.stop % k for p, k in zip(region, chunk, strict=True)):
        return False
    places = _whole_objects(region, chunk, array.shape)
    if places is None:
        return False
    for place in places:
        data: Any = default_buffer_prototype().nd_buffer.from_numpy_array(values[_within(region, chunk, place)])
        for codec, spec in steps:
            data = _with_checksum(data) if _is_ours(codec) else codec._encode_sync(data, spec)
        sync(array.store_path.store.set(_key(array, place), data))
    return True


def _steps(array: zarr.Array[Any]) -> _Steps | None:
    """The codecs in the order of writing, each with what it is told of the chunk; None where there is more to it."""
    if array.metadata.zarr_format != 3 or array.shards is not None:
        return None
    metadata: Any = array.metadata
    spec = ArraySpec(
        tuple(array.chunks), metadata.data_type, metadata.fill_value, array.config, default_buffer_prototype()
    )
    steps: _Steps = []
    for codec in metadata.codecs:
        evolved = codec.evolve_from_array_spec(spec)
        if not isinstance(evolved, SupportsSyncCodec) or not getattr(evolved, "_sync_capable", True):
            return None
        steps.append((evolved, spec))
        spec = codec.resolve_metadata(spec)
    return steps


def _whole_objects(region: Region, chunk: Shape, shape: Shape) -> list[Shape] | None:
    """Where the objects of a region lie in their grid, in C order; None where it cuts one."""
    ranges = []
    for part, k, n in zip(region, chunk, shape, strict=True):
        if part.step != 1 or part.start % k or (part.stop % k and part.stop != n) or part.start >= part.stop:
            return None
        ranges.append(range(part.start // k, -(-part.stop // k)))
    return list(product(*ranges))


def _within(region: Region, chunk: Shape, place: Shape) -> Region:
    """The part of a region's array that an object has."""
    return tuple(
        slice(i * k - part.start, min((i + 1) * k, part.stop) - part.start)
        for part, k, i in zip(region, chunk, place, strict=True)
    )


def _key(array: zarr.Array[Any], place: Shape) -> str:
    return f"{array.store_path.path}/{array.metadata.encode_chunk_key(place)}".lstrip("/")


def _decoded(array: zarr.Array[Any], steps: _Steps, place: Shape) -> Array | None:
    data: Any = sync(array.store_path.store.get(_key(array, place), default_buffer_prototype()))
    if data is None:
        return None
    for codec, spec in reversed(steps):
        bare = _without_checksum(data) if _is_ours(codec) else None
        data = codec._decode_sync(data, spec) if bare is None else bare
    found: Array = data.as_numpy_array()
    return found


# ---- the checksum


def _is_ours(codec: Any) -> bool:
    return type(codec) is Crc32cCodec and kernels.CRC32C


def _with_checksum(data: Any) -> Any:
    """What Crc32cCodec makes of encoded bytes."""
    plain = data.as_numpy_array()
    encoded = with_room(plain, 4)
    if encoded is None:
        encoded = np.empty(plain.size + 4, np.uint8)
        encoded[:-4] = plain
    encoded[-4:] = np.frombuffer(kernels.crc32c(plain).to_bytes(4, "little"), np.uint8)
    return type(data).from_array_like(encoded)


def _without_checksum(data: Any) -> Any:
    """The bytes before the checksum; None where it is not theirs, which is for Crc32cCodec to say."""
    encoded = data.as_numpy_array()
    if encoded.size < 4 or kernels.crc32c(encoded[:-4]).to_bytes(4, "little") != encoded[-4:].tobytes():
        return None
    return type(data).from_array_like(encoded[:-4])
