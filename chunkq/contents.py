"""What lies below a place: keys and their bytes, without zarr's arrays and groups. Imports places and retry."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from itertools import islice
from typing import Any

from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from chunkq.places import Place, innermost
from chunkq.retry import RETRIES, transient, with_retries

#: Requests in flight at a time.
_CONCURRENT = 64
#: Keys asked of a listing at a time.
_BATCH = 1000


def get(place: Place, name: str) -> bytes | None:
    """The bytes of a key below a place, None where there is none. Makes no folder, as a writable LocalStore would."""
    if place.local is not None and not os.path.isdir(place.local):
        return None
    found = with_retries(lambda: sync(_get(place.store, place.key(name))), RETRIES)
    return None if found is None else found.to_bytes()


async def _get(store: Store, key: str) -> Any:
    await store._ensure_open()  # a ZipStore does not by itself
    return await store.get(key, default_buffer_prototype())


def put(place: Place, name: str, data: bytes) -> None:
    """Write a key below a place in one go."""
    buffer = default_buffer_prototype().buffer.from_bytes(data)
    with_retries(lambda: sync(place.store.set(place.key(name), buffer)), RETRIES)


def keys(place: Place) -> Iterator[tuple[str, bool]]:
    """Keys below a place as they are found, each with whether it is a plain file or object (no link, no device).

    One may come twice, where a listing broke off and was begun again.
    """
    if place.local is not None:
        yield from _files(place.local)
        return
    for left in reversed(range(RETRIES + 1)):
        try:
            yield from _listed(place)
        except Exception as error:
            if not left or not transient(error):
                raise
        else:
            return


def _listed(place: Place) -> Iterator[tuple[str, bool]]:
    forget_listings(place.store)
    prefix = f"{place.path}/" if place.path else ""
    found = place.store.list_prefix(prefix)
    while batch := sync(_take(found, _BATCH)):
        for key in batch:
            yield key.removeprefix(prefix), True


def forget_listings(store: Store) -> None:
    """Make an fsspec store ask again what exists: other processes write too."""
    fs = getattr(innermost(store), "fs", None)
    if fs is not None:
        getattr(fs, "sync_fs", fs).invalidate_cache()


async def _take(found: AsyncIterator[str], most: int) -> list[str]:
    batch: list[str] = []
    async for key in found:
        batch.append(key)
        if len(batch) == most:
            break
    return batch


def _files(folder: str) -> Iterator[tuple[str, bool]]:
    """Everything below a folder but folders."""
    folders = [folder]
    while folders:
        try:
            entries = os.scandir(folders.pop())
        except (FileNotFoundError, NotADirectoryError):  # nothing there, or removed meanwhile
            continue
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                key = os.path.relpath(entry.path, folder).replace(os.sep, "/")
                yield key, entry.is_file(follow_symlinks=False)


def remove(place: Place, names: Iterable[str]) -> None:
    """Delete keys below a place; one that is not there is no error. Folders that this leaves empty go too."""
    names = iter(names)
    if place.local is not None:
        for name in names:
            _unlink(place.local, name)
        return
    while batch := list(islice(names, _CONCURRENT)):
        # what is gone already is no error
        with_retries(lambda: sync(_all(place.store.delete(place.key(name)) for name in batch)), RETRIES)


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*coroutines)


def _unlink(folder: str, name: str) -> None:
    path = os.path.join(folder, name)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    while (path := os.path.dirname(path)) != folder and not os.listdir(path):
        os.rmdir(path)


def outward_link(place: Place, name: str) -> str | None:
    """The first folder on the way to a key that is a link out of the place, None where there is none."""
    if place.local is None:
        return None
    path = place.local
    for part in name.split("/")[:-1]:
        path = os.path.join(path, part)
        try:
            linked = stat.S_ISLNK(os.lstat(path).st_mode)
        except FileNotFoundError:
            return None
        if linked and os.path.commonpath([os.path.realpath(path), place.local]) != place.local:
            return os.path.relpath(path, place.local)
    return None
