"""The stored objects that a region of an array consists of: their keys, whether they exist, deleting them.

Imports grid and store.
"""

from __future__ import annotations

from itertools import product

from zarr.core.sync import sync

from chunkq.grid import Region
from chunkq.store import ZarrArray, object_shape


def object_keys(array: ZarrArray, region: Region) -> list[str]:
    """Keys, below the array, of the stored objects that a region touches, in C order."""
    places = [range(part.start // k, -(-part.stop // k)) for part, k in zip(region, object_shape(array), strict=True)]
    return [array.metadata.encode_chunk_key(place) for place in product(*places)]


def _key(array: ZarrArray, key: str) -> str:
    return f"{array.store_path.path}/{key}".lstrip("/")


def existing(array: ZarrArray, keys: list[str]) -> list[str]:
    """Those of the keys that exist."""
    return [key for key in keys if sync(array.store_path.store.exists(_key(array, key)))]


def delete_objects(array: ZarrArray, keys: list[str]) -> None:
    """Delete objects; one that is not there is no error."""
    for key in keys:
        sync(array.store_path.store.delete(_key(array, key)))
