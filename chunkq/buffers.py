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

_own = threading.local()


def keep_results() -> None:
    """Let this thread keep memory for results, for as long as it lives."""
    _own.memory = np.empty(0, np.uint8)


@contextmanager
def keeping_results() -> Iterator[None]:
    """The same for a while, in a thread that goes on."""
    keep_results()
    try:
        yield
    finally:
        _own.memory = None


def result_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]] | None:
    """An array for a result that nobody refers to when the next one is asked for; None where this thread keeps none."""
    if getattr(_own, "memory", None) is None:
        return None
    size = prod(shape) * dtype.itemsize
    if _own.memory.nbytes < size:
        _own.memory = None  # the old one goes before the new one comes
        _own.memory = np.empty(size, np.uint8)
    memory: np.ndarray[Any, np.dtype[Any]] = _own.memory[:size].view(dtype).reshape(shape)
    return memory
