"""The lock of a target: one object beside its metadata, which says who writes it.

Whoever finds the owner dead, or on another host silent for STALE_AFTER seconds, takes it over. Imports errors and places.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache
from types import TracebackType
from typing import Any, Self

from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore

from chunkq.errors import ChunkqError, RunError, SpecError
from chunkq.places import first_line
from chunkq.retry import RETRIES, with_retries

#: Name of the lock, below the target's path.
LOCK = "chunkq.lock"

#: Seconds between two renewals, and the age at which an owner that cannot be looked up counts as dead.
RENEW_EVERY = 10.0
STALE_AFTER = 120.0

#: Seconds after which a lock is read again that another may have taken at the same moment.
CONFIRM_AFTER = 0.5

#: Times to try for a lock that vanishes between writing and reading.
ATTEMPTS = 5

#: zarr's stores whose `set_if_not_exists` is one step; elsewhere it asks first and writes then.
_ATOMIC = (LocalStore, MemoryStore, ObjectStore)


@dataclass(frozen=True)
class Owner:
    """What stands in a lock.

    A process is looked up only by those of its own host, boot and process namespace: elsewhere its number says nothing.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    start: int | None
    token: str
    heartbeat: float

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def _decode(content: bytes) -> Owner | None:
    """The owner that a lock names, None where it is damaged."""
    try:
        document = json.loads(content)
        owner = Owner(**document)
    except (ValueError, TypeError, RecursionError):
        return None
    kinds: dict[str, Any] = {"host": str, "boot": str, "namespace": str, "pid": int, "token": str, "heartbeat": float}
    if not all(isinstance(document[name], kind) for name, kind in kinds.items()):
        return None
    start_fits = owner.start is None or isinstance(owner.start, int)
    return owner if start_fits and owner.pid > 0 and abs(owner.heartbeat) < 1e12 else None


def _text_of(path: str) -> str:
    """A file of /proc; empty where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


@cache
def _here() -> tuple[str, str, str]:
    """Host, boot and process namespace: containers on one machine share the first two."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return socket.gethostname(), _text_of("/proc/sys/kernel/random/boot_id").strip(), namespace


def _start_of(pid: int) -> tuple[bool, int | None]:
    """Whether a process of this host lives, and when it started (ticks after boot) where that is to be had."""
    fields = _text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) > 19:
        # fields 3 and 22 of proc(5); a zombie writes no more
        return fields[0] not in ("Z", "X"), int(fields[19])
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False, None
    except PermissionError:  # another user's, and /proc hides it
        pass
    return True, None


def _me() -> Owner:
    pid = os.getpid()
    return Owner(*_here(), pid, _start_of(pid)[1], uuid.uuid4().hex, time.time())


def _is_dead(owner: Owner) -> bool:
    if (owner.host, owner.boot, owner.namespace) != _here():
        return time.time() - owner.heartbeat > STALE_AFTER
    lives, start = _start_of(owner.pid)
    return not lives or (None not in (start, owner.start) and start != owner.start)


class Lock:
    """The lock of one target, held within a ``with`` block.

    Parameters
    ----------
    store : zarr.abc.store.Store
    path : str
        The target's path in the store.
    shown : str
        What to call the target in messages.

    Raises
    ------
    RunError
        On entering: another process, or another part of this one, holds it.
    """

    def __init__(self, store: Store, path: str, shown: str) -> None:
        self._store = store
        self._key = f"{path}/{LOCK}".lstrip("/")
        self._shown = shown
        self._named = f"{shown.rstrip('/')}/{LOCK}"
        self._owner: Owner | None = None
        self._lost = ""
        self._renewed = 0.0
        self._failure = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        mine = self._owner = _me()
        try:
            self._take(mine)
        except ChunkqError:
            raise
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise SpecError("target", f"target {self._shown} cannot be written: {first_line(error)}") from error
        except Exception as error:  # stores have an error class each
            raise RunError(
                f"the lock {self._named!r} of target {self._shown} cannot be written: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
        except BaseException:  # Ctrl-C while waiting: it would stay for as long as this process lives
            self._give_back(mine)
            raise
        self._lost, self._failure, self._renewed = "", "", time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(mine, self._stop), name="chunkq lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mine = self._owner
        if mine is None or mine.pid != os.getpid():  # a fork's copy: its parent holds the lock
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join(RENEW_EVERY)
        self._owner = self._thread = None
        try:
            self._give_back(mine)
        except Exception as failure:
            # The next run takes it over, this process being gone; what went wrong inside says more.
            if error is None:
                raise RunError(
                    f"the lock {self._named!r} of target {self._shown} cannot be removed: {first_line(failure)}; the run "
                    "itself has ended, delete it by hand"
                ) from failure

    def check(self, *, read: bool = False) -> None:
        """Refuse to go on where the lock was lost; cheap, what the last renewal saw, unless asked to read.

        Raises
        ------
        RunError
            Another has the lock, it is gone, or it could not be renewed for so long that another may take it.
        """
        mine = self._owner
        if mine is None:
            raise RunError(f"the lock of target {self._shown} is not held")
        if read and not self._lost:
            self._lost = self._loss(mine)
        if self._lost:
            raise RunError(f"target {self._shown} is no longer ours: {self._lost}; nothing more is written to it")
        silent = time.monotonic() - self._renewed
        if silent > STALE_AFTER and mine.pid == os.getpid():
            raise RunError(
                f"the lock {self._named!r} of target {self._shown} was not renewed for {silent:.0f} s "
                f"({self._failure or 'this process stood still'}), so that another run may have taken it over"
            )

    # ---- taking

    def _take(self, mine: Owner) -> None:
        sure = isinstance(self._store, _ATOMIC)
        for _ in range(ATTEMPTS):
            mine = self._owner = replace(mine, heartbeat=time.time())
            self._ask(self._store.set_if_not_exists, self._key, self._buffer(mine))
            content = self._read()
            there = _decode(content) if content is not None else None
            if there is None or there.token != mine.token:
                if content is None:
                    continue  # its owner has just ended
                self._refuse_living(there)
                self._ask(self._store.set, self._key, self._buffer(mine))
                sure = False
            if sure:
                return
            # two may find the same dead owner, or the same empty place: of those who wrote, the last has it
            threading.Event().wait(CONFIRM_AFTER)
            content = self._read()
            there = _decode(content) if content is not None else None
            if there is not None and there.token == mine.token:
                return
        raise RunError(
            f"target {self._shown} could not be locked in {ATTEMPTS} attempts: its lock {self._named!r} appears and goes; "
            "is another run of the same job at work? If not, delete it"
        )

    def _refuse_living(self, owner: Owner | None) -> None:
        """Refuse a target whose lock is another's who lives, or may live."""
        if owner is None:
            age = self._age()
            if age is not None and age > STALE_AFTER:
                return
            when = f"was written {age:.0f} s ago" if age is not None else "has an age that this store does not tell"
            what = (
                f"is locked, and by whom cannot be read: its lock {self._named!r} is damaged and {when}. If no other run "
                "writes this target, delete that object"
            )
            if age is not None:
                what += f"; after {STALE_AFTER:.0f} s it counts as nobody's"
        elif _is_dead(owner):
            return
        else:
            age = max(0.0, time.time() - owner.heartbeat)
            what = (
                f"is being written by process {owner.pid} on host {owner.host} (last sign of life {age:.0f} s ago). Wait "
                "for it or stop it"
            )
            if (owner.host, owner.boot, owner.namespace) != _here():
                what += f"; {STALE_AFTER:.0f} s after its last sign of life this run may be started again"
            what += f". If it is surely dead, delete {self._named!r}"
        raise RunError(f"target {self._shown} {what}")

    def _age(self) -> float | None:
        """Seconds since the lock was written, by the store; None where it does not tell."""
        store = self._store
        if isinstance(store, LocalStore):
            try:
                return time.time() - os.stat(store.root / self._key).st_mtime
            except FileNotFoundError:
                return None
        if isinstance(store, ObjectStore):
            written: Any = self._ask(store.store.head_async, self._key)["last_modified"]
        elif isinstance(store, FsspecStore):
            info = self._ask(store.fs._info, f"{store.path.rstrip('/')}/{self._key}")
            names = ("mtime", "LastModified", "last_modified", "updated", "created")
            written = next((info[name] for name in names if info.get(name) is not None), None)
        else:
            return None
        if isinstance(written, datetime):
            written = written.timestamp()
        return time.time() - written if isinstance(written, (int, float)) else None

    # ---- holding

    def _beat(self, mine: Owner, stop: threading.Event) -> None:
        """Renew the lock until told to stop or until it is another's."""
        while not stop.wait(RENEW_EVERY):
            try:
                self._lost = self._loss(mine)
                if self._lost or stop.is_set():
                    return
                self._ask(self._store.set, self._key, self._buffer(replace(mine, heartbeat=time.time())))
                self._renewed, self._failure = time.monotonic(), ""
            except Exception as error:  # noqa: BLE001 - may pass; `check` speaks when it lasts
                self._failure = first_line(error)

    def _loss(self, mine: Owner) -> str:
        """How the lock was lost; empty while it is ours."""
        content = self._read()
        if content is None:
            return f"its lock {self._named!r} was deleted"
        there = _decode(content)
        if there is None:
            return f"its lock {self._named!r} was overwritten"
        if there.token != mine.token:
            return f"process {there.pid} on host {there.host} took its lock {self._named!r} over"
        return ""

    def _give_back(self, mine: Owner) -> None:
        content = self._read()
        there = _decode(content) if content is not None else None
        if there is not None and there.token == mine.token:
            self._ask(self._store.delete, self._key)

    # ---- the store

    def _read(self) -> bytes | None:
        found = self._ask(self._store.get, self._key, default_buffer_prototype())
        return found.to_bytes() if found is not None else None

    def _buffer(self, owner: Owner) -> Any:
        return default_buffer_prototype().buffer.from_bytes(owner.encode())

    @staticmethod
    def _ask(request: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """One request, repeated where that may help: a lock that was written and not acknowledged is told by its token."""

        async def asked() -> Any:
            return await request(*arguments)

        return with_retries(lambda: sync(asked()), RETRIES)
