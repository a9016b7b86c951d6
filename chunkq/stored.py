"""The keys below a zarr array in any store, with what the store tells of each: size and version.

In batches, so that ten million objects do not fill the memory. What is not an object of the array comes along, for the
caller to leave out. Imports errors, grid, places and store.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, TypeVar

from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, ObjectStore, WrapperStore, ZipStore

from chunkq.contents import forget_listings
from chunkq.errors import ChunkqError, RunError, SpecError
from chunkq.grid import counts, unravel
from chunkq.places import first_line
from chunkq.store import ZarrArray, local_path, location, object_shape

#: Objects handled at a time.
BATCH = 1024

#: Requests to a remote store under way at a time.
REQUESTS = 32

#: A store that cannot list is asked for each key: for at most so many, and no further than so many that are not there.
PROBES = 1_000_000
PROBED_MISSING = 1000

#: Stray keys that a listing names; `remove_strays` removes all of them.
NAMED_STRAYS = 1000

#: What fsspec's file systems call the version of an object, the best first, and our word for it.
_VERSIONS = {
    "ETag": "etag",
    "etag": "etag",
    "generation": "generation",
    "md5Hash": "etag",
    "mtime": "mtime",
    "LastModified": "mtime",
    "last_modified": "mtime",
    "updated": "mtime",
    "created": "mtime",
}

_STRAY = re.compile(r".+\.[0-9a-f]{32}\.partial")
_NUMBER = "(0|[1-9][0-9]{0,18})"
T = TypeVar("T")


@contextmanager
def refused(argument: str, array: ZarrArray) -> Iterator[None]:
    """What a store fails with, in our words: each has error classes of its own."""
    try:
        yield
    except ChunkqError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise RunError(f"{argument} {location(array)} cannot be listed: {what}") from error


class Stored(NamedTuple):
    """One key below an array, with what the store says of it."""

    key: str
    size: int | None = None
    version: str = ""
    kind: str = ""


class Keys:
    """The keys of an array's objects: from key to flat index and back."""

    def __init__(self, array: ZarrArray) -> None:
        self.grid = counts(array.shape, object_shape(array))
        self.encode = array.metadata.encode_chunk_key
        zero = self.encode((0,) * len(self.grid))
        pieces = zero.split("0") if self.grid else [zero]
        self._match = re.compile(_NUMBER.join(map(re.escape, pieces))).fullmatch
        self._folders = zero.split("/")[:-1]
        places = tuple(range(9, 9 + len(self.grid)))
        found = self._match(self.encode(places))
        if found is None or found.groups() != tuple(map(str, places)):
            raise SpecError(
                "source", f"{location(array)} has keys such as {zero!r}; expected zarr's own chunk key encodings"
            )

    def index(self, key: str) -> int | None:
        """Flat index of an object in C order; None where the key is no object's."""
        found = self._match(key)
        if found is None:
            return None
        index = 0
        for text, n in zip(found.groups(), self.grid):  # noqa: B905 - strict takes a third of this function's time
            place = int(text)
            if place >= n:
                return None
            index = index * n + place
        return index

    def key(self, index: int) -> str:
        return self.encode(unravel(self.grid, index))

    def is_folder(self, level: int, name: str) -> bool:
        """Whether objects can lie in a folder of this name, so many levels below the array."""
        if level >= len(self._folders):
            return False
        return name == self._folders[level] or (self._folders[level] == "0" and name.isdecimal())


def is_object(array: ZarrArray, key: str) -> bool:
    """Whether a key is that of a stored object of the array."""
    return Keys(array).index(key) is not None


def objects_below(array: ZarrArray, keys: Keys, argument: str, strays: list[str]) -> Iterator[Stored]:
    """Every key below an array that is not known to be empty, and others than objects' among them."""
    path = local_path(array)
    if path is not None:
        return _local(path, keys, argument, strays)
    found = (stored for stored in _pulled(_remote(array, keys)) if stored.size != 0)
    if _is_zip(array):  # may hold one name twice; its table of names is in memory anyway
        return iter({stored.key: stored for stored in found}.values())
    return found


def _local(
    path: str, keys: Keys, argument: str, strays: list[str], at_most: int | None = NAMED_STRAYS
) -> Iterator[Stored]:
    """Files below a local array. Folders are entered only where objects can lie, so that no cycle goes on for ever."""
    folders = [("", 0)]
    while folders:
        prefix, level = folders.pop()
        try:
            with os.scandir(os.path.join(path, prefix)) as entries:
                for entry in entries:
                    name = entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if keys.is_folder(level, name):
                            folders.append((f"{prefix}{name}/", level + 1))
                    elif entry.is_symlink() and entry.is_dir():
                        if keys.is_folder(level, name) or keys.index(prefix + name) is not None:
                            raise SpecError(
                                "target" if argument == "target" else "source",
                                f"{argument} {path!r} has a symbolic link for a folder, {prefix + name!r}, and what lies "
                                "behind it may be shared or elsewhere; put the folder itself there",
                            )
                    elif name.endswith(".partial"):
                        if _STRAY.fullmatch(name) and (at_most is None or len(strays) < at_most):
                            strays.append(prefix + name)
                    else:
                        try:
                            status = entry.stat()
                        except FileNotFoundError:  # gone since, or a link to nothing: missing
                            continue
                        if status.st_size:
                            yield Stored(prefix + name, status.st_size, str(status.st_mtime_ns), "mtime")
        except FileNotFoundError:  # gone since: what was in it is missing
            continue


# ---- remote stores


async def ask(call: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """Every request to a store goes through here."""
    return await call(*args, **kwargs)


def _pulled(batches: AsyncIterator[list[Stored]]) -> Iterator[Stored]:
    """Batches made in zarr's event loop, taken by the calling thread, which may use zarr between them."""

    async def following() -> list[Stored] | None:
        return await anext(batches, None)

    while (batch := sync(following())) is not None:
        yield from batch


def root_of(array: ZarrArray) -> str:
    """What the keys of an array start with in its store."""
    path: str = array.store_path.path
    return f"{path}/" if path else ""


def _is_zip(array: ZarrArray) -> bool:
    store = array.store_path.store
    while isinstance(store, WrapperStore):
        store = store._store
    return isinstance(store, ZipStore)


def cannot_list(array: ZarrArray) -> bool:
    """Whether an array lies behind plain HTTP, which has no listing worth trusting."""
    store = array.store_path.store
    if isinstance(store, ObjectStore):
        return type(store.store).__name__ == "HTTPStore"
    if not isinstance(store, FsspecStore):
        return False
    protocol = store.fs.protocol
    return not {"http", "https"}.isdisjoint((protocol,) if isinstance(protocol, str) else protocol)


def _remote(array: ZarrArray, keys: Keys) -> AsyncIterator[list[Stored]]:
    store = array.store_path.store
    if cannot_list(array):
        return _probe(array, keys)
    if isinstance(store, ObjectStore):
        return _list_obstore(store, root_of(array))
    if isinstance(store, FsspecStore):
        return _list_fsspec(store, root_of(array), keys)
    return _list_any(store, root_of(array))


async def _list_any(store: Any, root: str) -> AsyncIterator[list[Stored]]:
    batch = []
    async for key in store.list_prefix(root):
        batch.append(Stored(key.removeprefix(root)))
        if len(batch) == BATCH:
            yield batch
            batch = []
    yield batch


async def _list_obstore(store: Any, root: str) -> AsyncIterator[list[Stored]]:
    async for metas in store.store.list(prefix=root or None, chunk_size=BATCH):
        yield [_from_meta(meta, root) for meta in metas]


def _from_meta(meta: dict[str, Any], root: str) -> Stored:
    key, etag = meta["path"].removeprefix(root), meta.get("e_tag")
    if etag:
        return Stored(key, meta["size"], etag.strip('"'), "etag")
    return Stored(key, meta["size"], str(meta["last_modified"]), "mtime")


async def _list_fsspec(store: Any, root: str, keys: Keys) -> AsyncIterator[list[Stored]]:
    fs = store.fs
    place = fs._strip_protocol(f"{store.path.rstrip('/')}/{root}").rstrip("/")
    start = f"{place}/".lstrip("/")
    forget_listings(store)
    if hasattr(fs, "_iterdir") and hasattr(fs, "split_path"):
        infos = _s3_pages(fs, place)
    elif type(fs)._find.__module__ != "fsspec.asyn":
        infos = _found(fs, place)
    else:
        infos = _walk(fs, place, keys)
    async for batch in infos:
        yield [_from_info(info, start) for info in batch]


def _from_info(info: dict[str, Any], start: str) -> Stored:
    key = info["name"].lstrip("/").removeprefix(start)
    name = next((name for name in _VERSIONS if info.get(name) is not None), None)
    size = info.get("size")
    if name is None:
        return Stored(key, size)
    return Stored(key, size, str(info[name]).strip('"'), _VERSIONS[name])


async def _s3_pages(fs: Any, place: str) -> AsyncIterator[list[dict[str, Any]]]:
    """s3fs gives pages; its `_find` would hold them all."""
    bucket, key, _ = fs.split_path(place)
    batch = []
    async for info in fs._iterdir(bucket, delimiter="", prefix=f"{key}/" if key else ""):
        batch.append(info)
        if len(batch) == BATCH:
            yield batch
            batch = []
    yield batch


async def _found(fs: Any, place: str) -> AsyncIterator[list[dict[str, Any]]]:
    """File systems with one flat listing of their own."""
    infos = list((await ask(fs._find, place, detail=True)).values())
    for start in range(0, len(infos), BATCH):
        yield infos[start : start + BATCH]


async def _walk(fs: Any, place: str, keys: Keys) -> AsyncIterator[list[dict[str, Any]]]:
    """Folder by folder. fsspec's own walk leaves out, silently, a folder that cannot be listed."""
    folders = [(place, 0)]
    while folders:
        folder, level = folders.pop()
        try:
            infos = await ask(fs._ls, folder, detail=True)
        except FileNotFoundError:
            continue
        files = []
        for info in infos:
            if info["type"] != "directory":
                files.append(info)
            elif keys.is_folder(level, info["name"].rstrip("/").rsplit("/", 1)[-1]):
                folders.append((info["name"].rstrip("/"), level + 1))
        yield files


async def _probe(array: ZarrArray, keys: Keys) -> AsyncIterator[list[Stored]]:
    """Ask for each key in C order, until too many are missing."""
    total = prod(keys.grid)
    if total > PROBES:
        raise RunError(
            f"{location(array)} cannot be listed (HTTP has no listing), and its {total} objects are too many to ask for "
            f"one by one (limit {PROBES}); copy it to a store that lists, or pass missing='fill' (--missing fill)"
        )
    missing = 0
    for start in range(0, total, REQUESTS):
        asked = [keys.key(index) for index in range(start, min(start + REQUESTS, total))]
        there = await asyncio.gather(*(_is_there(array.store_path.store, root_of(array) + key) for key in asked))
        yield [Stored(key) for key, found in zip(asked, there, strict=True) if found]
        missing += there.count(False)
        if missing >= PROBED_MISSING:
            return


async def _is_there(store: Any, key: str) -> bool:
    if await ask(store.exists, key):
        return True
    # fsspec's HTTP takes every failure for absence; reading one byte tells a 404 from a server in trouble
    return bool(await ask(store.get, key, default_buffer_prototype(), RangeByteRequest(0, 1)))


def remove_strays(array: ZarrArray) -> int:
    """Remove the files that killed writers left in a local array; for who holds its lock. Returns how many."""
    path = local_path(array)
    if path is None:
        return 0
    strays: list[str] = []
    for _ in _local(path, Keys(array), "target", strays, at_most=None):
        pass
    for key in strays:
        os.unlink(os.path.join(path, key))
    return len(strays)
