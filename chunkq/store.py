"""The only module that touches zarr: open, layout, read and write regions. Imports errors and dtypes."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import zarr

from chunkq.spec import Region, Shape


def object_shape(array: zarr.Array[Any]) -> Shape:
    """Shape of one stored object: the shard where there are shards (zarr's `chunks` is the inner chunk), else the chunk."""
    return tuple(int(n) for n in (array.shards or array.chunks))


class Handle:
    """A zarr array as a Dask graph may hold it: picklable, with a token of its own.

    zarr's own token depends on path and metadata and stays the same when the content changes, so that a rewritten store
    gives stale results; every handle is therefore new to Dask.
    """

    __slots__ = ("array", "token")

    def __init__(self, array: zarr.Array[Any]) -> None:
        self.array = array
        self.token = uuid.uuid4().hex

    def __dask_tokenize__(self) -> tuple[str, str]:
        return "chunkq.store.Handle", self.token

    def read(self, region: Region) -> np.ndarray[Any, np.dtype[Any]]:
        """Read a region; 0-d comes back as an array too."""
        return np.asarray(self.array[region])
