"""Trying again what a store may fail at once and do the next time. Imports nothing of chunkq."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

#: Seconds before the first repetition; doubled each time, up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0

#: What of OSError may pass by itself. An error without a number is a remote store's.
_PASSING = {
    None,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ESTALE,
    errno.ETIMEDOUT,
}

#: Libraries of remote stores whose errors derive from Exception alone.
_REMOTE = ("aiohttp", "azure", "botocore", "gcsfs", "google", "obstore", "requests", "s3fs", "urllib3")


def transient(error: BaseException) -> bool:
    """Whether an error may be gone when the same is tried again: the store's or the network's, not the data's."""
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return False
    if isinstance(error, OSError):
        # gzip's error about bad data is an OSError too
        return error.errno in _PASSING and type(error).__module__.split(".")[0] != "gzip"
    return type(error).__module__.split(".")[0] in _REMOTE


def with_retries(call: Callable[[], Result], retries: int, before_retry: Callable[[], object] = lambda: None) -> Result:
    """Call until it succeeds, at most `retries` times more, waiting twice as long each time."""
    for attempt in range(retries):
        try:
            return call()
        except Exception as error:
            if not transient(error):
                raise
        time.sleep(min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE))
        before_retry()
    return call()
