"""What a caller may pass as tensor and parameters: kinds of array, Python numbers, declared element types.

Imports errors, dtypes and run; neither dask nor zarr.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import numpy as np

from chunkq.dtypes import DTYPE_ATTRIBUTE, ELEMENT_TYPES, declared_dtype, element_name, element_type, from_holder
from chunkq.errors import SpecError
from chunkq.run import Array, refuse_masked
from chunkq.spec import Shape

_NUMBERS = (bool, int, float)
_ALL_TYPES = tuple(ELEMENT_TYPES)


def kind(x: Any) -> str:
    """Say how x is held: "numpy", "dask", "zarr", "number" for a Python number or list, or "other"."""
    if isinstance(x, (np.ndarray, np.generic)):
        return "numpy"
    for name, module, class_name in (("dask", "dask.array", "Array"), ("zarr", "zarr", "Array")):
        # an array of a library that was never imported cannot be here
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(x, getattr(loaded, class_name)):
            return name
    if isinstance(x, (*_NUMBERS, list, tuple)):
        return "number"
    return "other"


def dashed(name: str) -> str:
    """An argument's name as options have it."""
    return name.replace("_", "-")


class FromFile(np.ndarray[Any, np.dtype[Any]]):
    """An array read from a .npy file that it still knows."""

    file: str | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.file = getattr(other, "file", None)


def load_npy(name: str, path: str) -> FromFile:
    """Read a .npy file.

    Raises
    ------
    SpecError
        Reason ``argument``.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise SpecError("argument", f"{name}: {path!r} is not a file")
    try:
        # mapped first: a header may declare more than there is
        array = np.array(np.load(path, mmap_mode="r", allow_pickle=False)).view(FromFile)
    except (OSError, ValueError, EOFError) as error:
        raise SpecError("argument", f"{name}: {path!r} is not a readable .npy file: {error}") from error
    array.file = os.path.abspath(path)
    return array


def weak(name: str, value: Any, dtype: str) -> Array:
    """A Python number or list in the type the operator wants, without wrapping, overflow, or loss in a narrow type."""
    row = ELEMENT_TYPES[dtype]
    try:
        wide = np.array(value)
    except ValueError as error:
        raise SpecError("value", f"{name} is a ragged list: {error}") from error
    if wide.size == 0:
        wide = wide.astype(np.int64)
    if wide.dtype.kind not in "iuf" or (row.limits and wide.dtype.kind == "f"):
        raise SpecError("value", f"{name}={value!r}: expected {'integers' if row.limits else 'numbers'}")
    if row.limits:
        low, high = row.limits
        if wide.size and (int(wide.min()) < low or int(wide.max()) > high):
            raise SpecError("value", f"{name}={value!r} is outside {dtype}, {low} .. {high}")
        return wide.astype(row.dtype)
    with np.errstate(over="ignore"):
        result = wide.astype(row.dtype) if row.dtype.kind == "f" else wide.astype(np.float32).astype(row.dtype)
        back = result.astype(np.float64)
    if bool(np.any(np.isinf(back) & ~np.isinf(wide))):
        raise SpecError("value", f"{name}={value!r} is too large for {dtype}")
    if row.bits < 16 and not np.array_equal(back, wide, equal_nan=True):
        raise SpecError("value", f"{name}={value!r} is no value of {dtype}")
    return result


def parameter(name: str, value: Any, weak_dtype: str, declared: str | None = None) -> Any:
    """A parameter as an array of some kind, of its declared type; Python numbers and lists take the type wanted."""
    found = kind(value)
    if found == "number":
        return weak(name, value, declared or weak_dtype)
    if found == "other":
        raise SpecError(
            "argument",
            f"{name} is a {type(value).__name__}; expected a number, list, NumPy, Dask or zarr array",
        )
    refuse_masked(name, value)
    if found == "numpy":
        value = value if isinstance(value, FromFile) else np.asarray(value)
    return declare(name, value, declared) if declared else value


def declare(name: str, value: Any, element: str) -> Any:
    """The array with its declared element type: a view of NumPy's, a lazy view of Dask's; zarr's is read so later."""
    found = kind(value)
    if found == "numpy":
        return from_holder(name, value, element)
    dtype = declared_dtype(name, np.dtype(value.dtype), element)
    if found == "zarr" or value.dtype == dtype:
        return value
    meta = np.empty((0,) * value.ndim, dtype)
    return value.map_blocks(partial(_view, name, element), dtype=dtype, meta=meta)


def _view(name: str, element: str, block: Array) -> Array:
    return from_holder(name, np.asarray(block), element)


def element_of(name: str, array: Any, declared: str | None, allowed: tuple[str, ...]) -> str:
    """Name an array's element type: as declared, as its store records it, or as NumPy knows it.

    Raises
    ------
    SpecError
        Reason ``dtype``; ``metadata`` where the store records another type than the one declared.
    """
    recorded = array.attrs.get(DTYPE_ATTRIBUTE) if kind(array) == "zarr" else None
    if recorded is not None:
        try:
            recorded = element_type(DTYPE_ATTRIBUTE, recorded, tuple(ELEMENT_TYPES))
            declared_dtype(name, np.dtype(array.dtype), recorded)
        except SpecError as error:
            raise SpecError("metadata", f"attribute {DTYPE_ATTRIBUTE} of {name}: {error}") from error
        if declared not in (None, recorded):
            raise SpecError("metadata", f"{name} was declared {declared}, but its store records {recorded}")
    named = declared or recorded
    if named is None:
        return element_name(array.dtype, name, allowed)
    declared_dtype(name, np.dtype(array.dtype), named)
    if named not in allowed:
        raise SpecError("dtype", f"{name} is {named}; expected one of {', '.join(allowed)}")
    return named


def described(name: str, value: Any, declared: str | None = None) -> tuple[Shape, str]:
    """Shape and element type of a parameter."""
    if isinstance(value, np.ndarray):
        return value.shape, element_of(name, value, declared, _ALL_TYPES)
    shape = tuple(value.shape)
    if any(n != n for n in shape):
        raise SpecError("shape", f"{name} has unknown chunk sizes; call compute_chunk_sizes() on it first")
    return tuple(int(n) for n in shape), element_of(name, value, declared, _ALL_TYPES)


def optional_type(name: str, value: Any, allowed: tuple[str, ...] = _ALL_TYPES) -> str | None:
    """The element type an optional argument names."""
    return None if value is None else element_type(name, value, allowed)
