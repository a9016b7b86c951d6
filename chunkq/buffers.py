"""Memory for results that a worker uses again from unit to unit: the system's fresh pages cost more than the arithmetic.

Kept by thread, and only where somebody who ends with the job asked for it. Imports nothing of chunkq.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

#: Bytes behind a result, for a checksum.
ROOM = 64

_own = threading.local()


def keep_results() -> None:
    """Let this thread keep memory for results, for as long as it lives."""
    _own.memory, _own.size = np.empty(0, np.uint8), 0


@contextmanager
def keeping_results() -> Iterator[None]:
    """The same for a while, in a thread that goes on."""
    keep_results()
    try:
        yield
    finally:
        _own.memory = None


def result_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    """An array for a result that nobody refers to when the next one is asked for; None where this thread keeps none."""
    if getattr(_own, "memory", None) is None:
        return None
    _own.size = prod(shape) * dtype.itemsize
    if _own.memory.nbytes < _own.size + ROOM:
        _own.memory = None  # the old one goes before the new one comes
        _own.memory = np.empty(_own.size + ROOM, np.uint8)
    memory: Array = _own.memory[: _own.size].view(dtype).reshape(shape)
    return memory


def with_room(result: Array, size: int) -> Array | None:
    """The bytes of the last result with room for some more behind them; None where they are not in this thread's memory."""
    memory = getattr(_own, "memory", None)
    if memory is None or size > ROOM or result.nbytes != _own.size or not result.flags.c_contiguous:
        return None
    if result.__array_interface__["data"][0] != memory.__array_interface__["data"][0]:
        return None
    found: Array = memory[: _own.size + size]
    return found
