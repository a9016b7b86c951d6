"""Which stored objects of a zarr array exist, and which of them are damaged.

zarr reads an absent object as the fill value, silently, and so an empty one and an inner chunk that a shard leaves out;
so a run asks here first. Everything is counted as total minus listed, in batches: a hostile shape costs nothing and ten
million objects do not fill the memory. Imports errors, grid, retry, store, stored and shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, product
from math import prod

from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from chunkq.errors import RunError
from chunkq.grid import Region
from chunkq.places import first_line
from chunkq.retry import with_retries
from chunkq.shards import InnerChunks
from chunkq.shards import absent_inner_chunks as absent_inner_chunks
from chunkq.store import ZarrArray, location, object_shape
from chunkq.stored import PROBED_MISSING, Keys, ask, cannot_list, objects_below, refused, root_of
from chunkq.stored import is_object as is_object
from chunkq.stored import remove_strays as remove_strays


@dataclass(frozen=True)
class Listing:
    """What a store holds of an array.

    Attributes
    ----------
    total, present : int
        Objects that the shape calls for, and those that are there and not empty.
    bytes : int or None
        Their stored size, None where the store did not tell it.
    digest : str
        Fingerprint of the key, size and version of all that are present, whatever their order.
    told : tuple of str
        What went into it: ``key``, ``size``, and one of ``mtime``, ``etag``, ``generation``.
    strays : tuple of str
        Keys of files that killed writers left, the first `NAMED_STRAYS` (local stores).
    exact : bool
        Whether every object was looked for. A store without a listing is asked no further than `PROBED_MISSING`
        that are not there.
    """

    total: int
    present: int
    bytes: int | None
    digest: str
    told: tuple[str, ...]
    strays: tuple[str, ...] = ()
    exact: bool = True

    @property
    def missing(self) -> int:
        return self.total - self.present


def list_objects(
    array: ZarrArray, each: Callable[[int], None] | None = None, argument: str = "source", retries: int = 0
) -> Listing:
    """List the stored objects of an array in one pass that holds no more than a batch of them.

    Parameters
    ----------
    array : zarr.Array
    each : callable, optional
        Called with the flat index of every object that is present, in any order; twice where a pass is repeated.
    argument : str
        What the caller calls the array, for the message.
    retries : int
        How often the pass may be repeated where the store fails in a way that may pass.

    Raises
    ------
    SpecError
        Reason ``source`` (``target`` where that is the argument): a folder of the array is a symbolic link.
    RunError
        The store cannot be listed.
    """
    with refused(argument, array):
        return with_retries(lambda: _one_pass(array, each, argument), retries)


def _one_pass(array: ZarrArray, each: Callable[[int], None] | None, argument: str) -> Listing:
    keys = Keys(array)
    present = size = fingerprint = 0
    sized = True
    kinds: set[str] = set()
    strays: list[str] = []
    for stored in objects_below(array, keys, argument, strays):
        index = keys.index(stored.key)
        if index is None:
            continue
        present += 1
        kinds.add(stored.kind)
        if stored.size is None:
            sized = False
        else:
            size += stored.size
        line = f"{stored.key}\0{stored.size}\0{stored.version}".encode()
        fingerprint += int.from_bytes(hashlib.blake2b(line, digest_size=16).digest())
        if each is not None:
            each(index)
    total = prod(keys.grid)
    # a version that not all have is no promise
    kind = tuple(kinds) if len(kinds) == 1 and "" not in kinds else ()
    return Listing(
        total=total,
        present=present,
        bytes=size if sized else None,
        digest=f"{fingerprint % 2**128:032x}",
        told=("key", *(("size",) if sized and present else ()), *kind),
        strays=tuple(sorted(strays)),
        exact=not cannot_list(array) or total - present < PROBED_MISSING,
    )


def missing_keys(array: ZarrArray, listing: Listing, at_most: int = 5, retries: int = 0) -> list[str]:
    """Name the first objects that are not there, by a second pass.

    Of the first `present + at_most` indexes at least `at_most` are missing, so a bit for each of those will do.
    """
    if not listing.missing:
        return []
    bits = min(listing.total, listing.present + at_most)
    seen = bytearray(-(-bits // 8))

    def see(index: int) -> None:
        if index < bits:
            seen[index >> 3] |= 1 << (index & 7)

    list_objects(array, see, retries=retries)
    keys = Keys(array)
    absent = (index for index in range(bits) if not seen[index >> 3] >> (index & 7) & 1)
    return [keys.key(index) for index in islice(absent, at_most)]


def refuse_missing(
    argument: str, array: ZarrArray, listing: Listing, inner: InnerChunks | None = None, retries: int = 0
) -> None:
    """Refuse an array that lacks stored objects or inner chunks of shards.

    Raises
    ------
    RunError
        Naming some of the keys, and the way out.
    """
    refuse_damaged(argument, array, inner or InnerChunks())
    if listing.missing:
        number = str(listing.missing) if listing.exact else f"at least {PROBED_MISSING}"
        lacks = f"{number} stored objects, among them {', '.join(missing_keys(array, listing, retries=retries))}"
    elif inner and inner.absent:
        lacks = f"{inner.absent} inner chunks of its shards, among them {', '.join(inner.names)}"
    else:
        return
    raise RunError(
        f"{argument} {location(array)} lacks {lacks}. zarr reads them as {array.fill_value!r}; it leaves out chunks that "
        "hold nothing else, so they may be meant: then pass missing='fill' (--missing fill)"
    )


def refuse_damaged(argument: str, array: ZarrArray, inner: InnerChunks) -> None:
    """Refuse an array with shards whose index is damaged: no fill value is meant there.

    Raises
    ------
    RunError
        Naming some of the keys, and why.
    """
    if inner.damaged:
        reasons = "; ".join(f"{key}: {why}" for key, why in inner.reasons)
        raise RunError(f"{argument} {location(array)} has {inner.damaged} damaged shards, among them {reasons}")


def undecodable(array: ZarrArray, within: Region) -> list[tuple[str, str]]:
    """Name every stored object that touches a region and cannot be read and decoded, and why.

    Each is read by itself, one after another; an absent one is not undecodable.
    """
    keys, unit = Keys(array), object_shape(array)
    bounds = [s.indices(n)[:2] for s, n in zip(within, array.shape, strict=True)]
    if any(start >= stop for start, stop in bounds):
        return []
    ranges = (range(start // k, -(-stop // k)) for (start, stop), k in zip(bounds, unit, strict=True))
    bad = []
    for places in product(*ranges):
        key = keys.encode(places)
        own = tuple(slice(i * k, min((i + 1) * k, n)) for i, k, n in zip(places, unit, array.shape, strict=True))
        try:
            array[own]
        except FileNotFoundError:  # gone, which is another matter
            continue
        except Exception as error:  # noqa: BLE001 - codecs have an error class each; each becomes a line for the caller
            bad.append((key, f"{type(error).__name__}: {first_line(error)}"))
    return bad


def metadata_digest(array: ZarrArray) -> str:
    """sha256 of an array's metadata as it is stored, spaces and the order of names aside."""
    store, root = array.store_path.store, root_of(array)
    written = array.metadata.to_buffer_dict(default_buffer_prototype())

    async def stored(name: str) -> bytes | None:
        found = await ask(store.get, root + name, default_buffer_prototype())
        return found.to_bytes() if found is not None else None

    documents = {}
    for name in sorted(written):
        # consolidated metadata may be all that there is
        content = sync(stored(name)) or written[name].to_bytes()
        documents[name] = json.loads(content)
    canonical = json.dumps(documents, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
