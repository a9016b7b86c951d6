"""The indexes of shards: which inner chunks they leave out, and which of them are damaged.

zarr reads an inner chunk that is left out as the fill value, silently, and one that lies past the end of its shard too.
Imports errors, grid, store, stored and retry.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nsmallest
from math import prod
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore

from chunkq.errors import SpecError
from chunkq.grid import Shape, region
from chunkq.interrupts import check_interrupts
from chunkq.retry import with_retries
from chunkq.store import ZarrArray, location, object_shape
from chunkq.stored import BATCH, REQUESTS, Keys, Stored, ask, objects_below, refused, root_of

#: Bytes of shard indexes held at a time, where one index is smaller.
INDEX_BYTES = 64 << 20

_ABSENT = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class InnerChunks:
    """What the shards that are present hold of their inner chunks.

    Attributes
    ----------
    total, absent : int
        Inner chunks inside the array's shape, and those that the shards' indexes leave out.
    names : tuple of str
        Some of the absent ones.
    damaged : int
        Shards whose index cannot be read, or points past the end of the shard.
    reasons : tuple of (key, why)
        Some of those.
    """

    total: int = 0
    absent: int = 0
    names: tuple[str, ...] = ()
    damaged: int = 0
    reasons: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _Index:
    """How the index of a shard is stored."""

    entries: Shape
    at_start: bool
    order: str
    checksum: bool

    @property
    def size(self) -> int:
        return 16 * prod(self.entries) + 4 * self.checksum

    @property
    def request(self) -> RangeByteRequest | SuffixByteRequest:
        return RangeByteRequest(0, self.size) if self.at_start else SuffixByteRequest(self.size)


def _index_of(array: ZarrArray) -> _Index:
    document: dict[str, Any] = array.metadata.to_dict()
    settings = document["codecs"][0]["configuration"]
    first, *rest = settings["index_codecs"]
    if first["name"] != "bytes" or [codec["name"] for codec in rest] not in ([], ["crc32c"]):
        names = [codec["name"] for codec in settings["index_codecs"]]
        raise SpecError("source", f"{location(array)} has index_codecs {names}; expected bytes, or bytes and crc32c")
    little = first.get("configuration", {}).get("endian", "little") == "little"
    entries = tuple(s // c for s, c in zip(object_shape(array), settings["chunk_shape"], strict=True))
    return _Index(entries, settings["index_location"] == "start", "<u8" if little else ">u8", bool(rest))


class _Shard(NamedTuple):
    """What one shard's index says."""

    total: int
    absent: int = 0
    names: tuple[str, ...] = ()
    damage: str = ""


def absent_inner_chunks(array: ZarrArray, argument: str = "source", at_most: int = 5, retries: int = 0) -> InnerChunks:
    """Read the index of every shard that is present, and count the inner chunks that it leaves out.

    Only entries inside the array's shape count. Without shards there is nothing to read.
    """
    if not array.shards:
        return InnerChunks()
    with refused(argument, array):
        return _count(array, argument, at_most, retries)


def _count(array: ZarrArray, argument: str, at_most: int, retries: int) -> InnerChunks:
    index = _index_of(array)
    total = absent = damaged = 0
    names: list[tuple[int, int, str]] = []
    reasons: list[tuple[int, str, str]] = []
    for batch in _batches(array, argument):
        check_interrupts()
        for place, stored, shard in _read_shards(array, index, batch, at_most, retries):
            total += shard.total
            absent += shard.absent
            names = nsmallest(at_most, [*names, *((place, n, name) for n, name in enumerate(shard.names))])
            if shard.damage:
                damaged += 1
                reasons = nsmallest(at_most, [*reasons, (place, stored.key, shard.damage)])
    return InnerChunks(
        total, absent, tuple(name for _, _, name in names), damaged, tuple((key, why) for _, key, why in reasons)
    )


_Placed = tuple[int, Stored]


def _batches(array: ZarrArray, argument: str) -> Iterator[list[_Placed]]:
    keys = Keys(array)
    batch: list[_Placed] = []
    for stored in objects_below(array, keys, argument, []):
        place = keys.index(stored.key)
        if place is not None:
            batch.append((place, stored))
        if len(batch) == BATCH:
            yield batch
            batch = []
    yield batch


def _read_shards(
    array: ZarrArray, index: _Index, batch: list[_Placed], at_most: int, retries: int
) -> list[tuple[int, Stored, _Shard]]:
    """Judge a batch of shards, as many at a time as their indexes fit into INDEX_BYTES."""
    store, root = array.store_path.store, root_of(array)

    if isinstance(store, LocalStore):
        return [
            (place, stored, _judge(array, index, place, stored, _local_index(store, root, index, stored), at_most))
            for place, stored in batch
        ]

    async def all_of_them() -> list[tuple[int, Stored, _Shard]]:
        free = asyncio.Semaphore(max(1, min(REQUESTS, INDEX_BYTES // index.size)))

        async def one(place: int, stored: Stored) -> tuple[int, Stored, _Shard]:
            async with free:
                if stored.size is None and index.at_start:  # a cut-off shard still shows its index
                    stored = stored._replace(size=await ask(store.getsize, root + stored.key))
                content = None
                if stored.size is None or stored.size >= index.size:
                    found = await ask(store.get, root + stored.key, default_buffer_prototype(), index.request)
                    content = found.to_bytes() if found is not None else None
                return place, stored, _judge(array, index, place, stored, content, at_most)

        return await asyncio.gather(*(one(place, stored) for place, stored in batch))

    return with_retries(lambda: sync(all_of_them()), retries)


def _local_index(store: LocalStore, root: str, index: _Index, stored: Stored) -> bytes | None:
    if stored.size is not None and stored.size < index.size:
        return None
    with open(store.root / (root + stored.key), "rb") as file:
        file.seek(0 if index.at_start else -index.size, os.SEEK_SET if index.at_start else os.SEEK_END)
        return file.read(index.size)


def _judge(array: ZarrArray, index: _Index, place: int, stored: Stored, content: bytes | None, at_most: int) -> _Shard:
    """Count the absent inner chunks of one shard."""
    here = region(array.shape, object_shape(array), place)
    inside = tuple(-(-(s.stop - s.start) // c) for s, c in zip(here, array.chunks, strict=True))
    total = prod(inside)
    if content is None or len(content) < index.size:
        return _Shard(total, damage=f"it has no room for its index of {index.size} bytes")
    if index.checksum:
        content, checksum = content[:-4], int.from_bytes(content[-4:], "little")
        if google_crc32c.value(content) != checksum:
            return _Shard(total, damage="the crc32c of its index does not fit")
    entries = np.frombuffer(content, index.order).astype(np.uint64, copy=False).reshape(*index.entries, 2)
    entries = entries[tuple(slice(n) for n in inside)]
    offset, length = entries[..., 0], entries[..., 1]
    # zarr reads an empty inner chunk as the fill value too
    absent = ((offset == _ABSENT) & (length == _ABSENT)) | (length == 0)
    if stored.size is not None:
        lowest, end = (index.size, stored.size) if index.at_start else (0, stored.size - index.size)
        last = np.uint64(end) - np.minimum(offset, np.uint64(end))
        outside = ~absent & ((offset < np.uint64(lowest)) | (offset > np.uint64(end)) | (length > last))
        if outside.any():
            return _Shard(total, damage=f"its index points outside its data for {int(outside.sum())} inner chunks")
    number = int(absent.sum())
    if number == total and number > 1:
        return _Shard(total, number, (f"{stored.key} (all of its {total} inner chunks)",))
    places = zip(*(axis[:at_most].tolist() for axis in np.nonzero(absent)), strict=True) if array.ndim else iter(())
    return _Shard(total, number, tuple(f"{stored.key} (inner chunk {'.'.join(map(str, p))})" for p in places))
