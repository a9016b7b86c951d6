"""Trying again what a store may fail at once and do the next time. Imports interrupts."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from chunkq.interrupts import check_interrupts

Result = TypeVar("Result")

#: Seconds before the first repetition; doubled each time, up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0

#: Repetitions of the few requests that no option is for: documents, locks, deletions.
RETRIES = 3

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
    getattr(errno, "EREMOTEIO", errno.EIO),  # s3fs: 500
}

#: Answers of a server below 500 after which the same request may succeed: a timeout, a conflict, too early, too many.
_PASSING_ANSWERS = {408, 409, 425, 429}

#: Libraries of remote stores whose errors derive from Exception alone.
_REMOTE = ("aiohttp", "azure", "botocore", "gcsfs", "google", "obstore", "requests", "s3fs", "urllib3")

#: Of their errors, by class, those that say the request itself is wrong, or that there is nothing to sign it with.
_WRONG = {
    "AlreadyExistsError",
    "InvalidPathError",
    "NoAuthTokenError",
    "NoCredentialsError",
    "NoRegionError",
    "NotFoundError",
    "NotSupportedError",
    "ParamValidationError",
    "PartialCredentialsError",
    "PermissionDeniedError",
    "PreconditionError",
    "UnauthenticatedError",
    "UnknownConfigurationKeyError",
}

#: How obstore tells an answer that it has no class for; a redirect to nowhere is a wrong region.
_OBSTORE_ANSWER = re.compile(r"Server returned [^:]*status code: (\d{3})|(Received redirect)")


def transient(error: BaseException) -> bool:
    """Whether an error may be gone when the same is tried again: the store's or the network's, not the data's."""
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return False
    library = type(error).__module__.split(".")[0]
    if isinstance(error, OSError):
        # gzip's error about bad data is an OSError too
        passing = error.errno in _PASSING and library != "gzip"
    else:
        passing = library in _REMOTE and type(error).__name__ not in _WRONG
    return passing and _may_change(_answer(error))


def _may_change(status: int | None) -> bool:
    return status is None or status >= 500 or status in _PASSING_ANSWERS


def _answer(error: BaseException) -> int | None:
    """The HTTP status that an error stands for; None where there was no answer, or it is not told."""
    library = type(error).__module__.split(".")[0]
    if library == "obstore":
        told = _OBSTORE_ANSWER.search(str(error).partition("\n")[0])
        return None if told is None else int(told[1] or 301)
    # aiohttp also numbers answers that broke off, as `code`
    names = ("code",) if library in ("gcsfs", "google") else ("status", "status_code")
    found: list[Any] = [getattr(error, name, None) for name in names]
    for source in (error, error.__cause__):  # s3fs puts botocore's error into the cause of its own
        response = getattr(source, "response", None)
        if isinstance(response, dict):
            found.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next((status for status in found if isinstance(status, int)), None)


def with_retries(call: Callable[[], Result], retries: int, before_retry: Callable[[], object] = lambda: None) -> Result:
    """Call until it succeeds, at most `retries` times more, waiting twice as long each time."""
    for attempt in range(retries):
        try:
            return call()
        except Exception as error:
            if not transient(error):
                raise
        check_interrupts()
        time.sleep(min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE))
        before_retry()
    return call()
