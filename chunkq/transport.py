"""Lets distributed send float8_e5m2. Imports nothing of chunkq; distributed only where it is loaded already.

ml_dtypes gives that type alone the kind of NumPy's floats; distributed then sends its name, ``<f1``, which nobody can read,
and asks for the block again without end.
"""

from __future__ import annotations

import pickle
import sys
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

E5M2 = np.dtype(ml_dtypes.float8_e5m2)


def teach_distributed() -> None:
    """Register how arrays of float8_e5m2 are serialized, once, where distributed is in use."""
    if "distributed" in sys.modules:
        _register()


@cache
def _register() -> None:
    from distributed.protocol import dask_serialize
    from distributed.protocol.numpy import serialize_numpy_ndarray

    def serialize(x: Any, context: Any = None) -> Any:
        if x.dtype != E5M2:
            return serialize_numpy_ndarray(x, context=context)
        header, frames = serialize_numpy_ndarray(x.view(np.uint8), context=context)
        return header | {"dtype": (1, pickle.dumps(x.dtype))}, frames

    dask_serialize.register(np.ndarray)(serialize)
