"""A store that notes every key it reads and writes, in a file that all processes append to."""

import os
from collections import Counter
from pathlib import Path

from zarr.storage import LocalStore, WrapperStore


class CountingStore(WrapperStore):
    """A folder; `log` takes one line for each request, written at once."""

    def __init__(self, store, log=None):
        super().__init__(store)
        self.log = log or f"{store.root}.log"

    def _with_store(self, store):
        return type(self)(store, self.log)

    def _note(self, what, key):
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, f"{what} {key}\n".encode())
        finally:
            os.close(descriptor)

    async def set(self, key, value):
        self._note("set", key)
        await super().set(key, value)

    async def get(self, key, prototype, byte_range=None):
        self._note("get", key)
        return await super().get(key, prototype, byte_range)

    async def delete(self, key):
        self._note("delete", key)
        await super().delete(key)


def counting(folder):
    """A counting store of a folder."""
    return CountingStore(LocalStore(folder))


def counted(store):
    """How often each object was asked for and written, and how many deletions: by request, then by key."""
    found = {"set": Counter(), "get": Counter(), "delete": Counter()}
    log = Path(store.log)
    for line in log.read_text().splitlines() if log.exists() else []:
        what, _, key = line.partition(" ")
        if "zarr.json" not in key and not key.startswith("."):
            found[what][key] += 1
    return found
