"""Which stored objects of a zarr array exist, and which of them are damaged.

zarr reads an absent object as the fill value, silently, and so an empty one and an inner chunk that a shard leaves out;
so a run asks here first. Everything is counted as total minus listed, in batches: a hostile shape costs nothing and ten
million objects do not fill the memory. Imports errors, grid, retry, store, stored and shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import islice, product
from math import prod

from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from chunkq.errors import ChunkqError, RunError
from chunkq.grid import Region
from chunkq.interrupts import check_interrupts
from chunkq.places import first_line
from chunkq.retry import with_retries
from chunkq.run import Array
from chunkq.shards import InnerChunks
from chunkq.shards import absent_inner_chunks as absent_inner_chunks
from chunkq.store import Handle, ZarrArray, location, object_shape
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
    rest : str
        The fingerprint without the objects that were to be left out.
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
    rest: str
    strays: tuple[str, ...] = ()
    exact: bool = True

    @property
    def missing(self) -> int:
        return self.total - self.present


def list_objects(
    array: ZarrArray,
    each: Callable[[int], None] | None = None,
    argument: str = "source",
    retries: int = 0,
    leave_out: frozenset[str] = frozenset(),
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
    leave_out : frozenset of str
        Keys of objects that `Listing.rest` does not depend on.

    Raises
    ------
    SpecError
        Reason ``source`` (``target`` where that is the argument): a folder of the array is a symbolic link.
    RunError
        The store cannot be listed.
    """
    with refused(argument, array):
        return with_retries(lambda: _one_pass(array, each, argument, leave_out), retries)


def _one_pass(
    array: ZarrArray, each: Callable[[int], None] | None, argument: str, leave_out: frozenset[str]
) -> Listing:
    keys = Keys(array)
    present = known = sizeless = fingerprint = without = 0
    kinds: set[str] = set()
    strays: list[str] = []
    for key, size, version, kind in objects_below(array, keys, argument, strays):
        check_interrupts()
        index = keys.index(key)
        if index is None:
            continue
        present += 1
        kinds.add(kind)
        if size is None:
            sizeless += 1
        else:
            known += size
        line = f"{key}\0{size}\0{version}".encode()
        mark = int.from_bytes(blake2b(line, digest_size=16).digest())
        fingerprint += mark
        if key in leave_out:
            without += mark
        if each is not None:
            each(index)
    total = prod(keys.grid)
    # a version that not all have is no promise
    versions = tuple(kinds) if len(kinds) == 1 and "" not in kinds else ()
    return Listing(
        total=total,
        present=present,
        bytes=None if sizeless else known,
        digest=f"{fingerprint % 2**128:032x}",
        rest=f"{(fingerprint - without) % 2**128:032x}",
        told=("key", *(("size",) if present and not sizeless else ()), *versions),
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
        f"{argument} {location(array)} lacks {lacks}. zarr reads them as {array.fill_value}; it leaves out chunks that "
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


def read_parameter(name: str, array: ZarrArray, element: str) -> Array:
    """A whole parameter; what it lacks or cannot be decoded is an error, never a fill value."""
    refuse_missing(name, array, list_objects(array, argument=name), absent_inner_chunks(array, name))
    try:
        return Handle(array, element).read((slice(None),) * array.ndim)
    except ChunkqError:
        raise
    except Exception as error:  # codecs have an error class each
        raise RunError(f"{name} {location(array)} cannot be read: {first_line(error)}") from error


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
    return sha256(canonical.encode()).hexdigest()
