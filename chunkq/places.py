"""Where a source or a target is: a zarr store and a path in it, whatever the user named it by.

Imports errors, and of zarr only the stores. Nothing is asked of a store here; contents.py does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from zarr.abc.store import Store
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, StorePath, WrapperStore, ZipStore

from chunkq.errors import SpecError

Result = TypeVar("Result")

#: Kinds of fsspec file systems whose writes appear whole or not at all.
_ATOMIC = {"s3", "gs", "az", "memory", "http"}
#: Kinds that cannot be written, or not by several tasks at a time.
_READ_ONLY = {"http", "zip"}
#: Other names of a kind.
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az", "https": "http", "local": "file"}
#: What obstore's stores are.
_OBSTORES = {
    "S3Store": "s3",
    "GCSStore": "gs",
    "AzureStore": "az",
    "HTTPStore": "http",
    "LocalStore": "file",
    "MemoryStore": "memory",
}


@dataclass(frozen=True)
class Place:
    """A prefix in a store.

    Attributes
    ----------
    store : zarr.abc.store.Store
        The store.
    path : str
        The prefix, without slashes at its ends; "" for the root of the store.
    shown : str
        What messages call it: without credentials.
    """

    store: Store
    path: str
    shown: str

    @property
    def kind(self) -> str:
        """What holds the bytes: "file", "memory", "zip", "s3", "gs", "az", "http", another protocol; "" if unknown."""
        return _kind(innermost(self.store))

    @property
    def local(self) -> str | None:
        """The real path on a local file system, None elsewhere."""
        if self.kind != "file":
            return None
        return os.path.realpath(os.path.join(_root(innermost(self.store)), self.path))

    @property
    def atomic(self) -> bool:
        """Whether an object that exists is whole, even after a kill."""
        store = innermost(self.store)
        return isinstance(store, (LocalStore, ObjectStore, MemoryStore)) or (
            isinstance(store, FsspecStore) and self.kind in _ATOMIC
        )

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written here."""
        store = self.store
        writes = store.supports_writes and store.supports_deletes and store.supports_listing
        return store.read_only or not writes or self.kind in _READ_ONLY

    @property
    def in_process(self) -> bool:
        """Whether no other process sees it."""
        return self.kind == "memory"

    @property
    def store_path(self) -> StorePath:
        """As zarr's functions take it."""
        return StorePath(self.store, self.path)

    def key(self, name: str) -> str:
        """The store's key of a name below this place."""
        return "/".join(part for part in (self.path, name) if part)

    def below(self, name: str) -> Place:
        """The place of a child."""
        return replace(self, path=self.key(name), shown=f"{self.shown.rstrip('/')}/{name}")


# ---- from what the user passes


def place_of(
    location: Any, storage_options: dict[str, Any] | None = None, *, writing: bool = False, argument: str | None = None
) -> Place:
    """Find where a source or target is. Opens nothing.

    Parameters
    ----------
    location : str, path, URL, zarr store, StorePath or Place
        A path or URL may lead into a group, or into a zip file.
    storage_options : dict, optional
        What fsspec needs to know for a URL: credentials, endpoint.
    writing : bool
        Whether it is to be written.
    argument : str, optional
        What the caller calls it, for the message.

    Raises
    ------
    SpecError
        Reasons ``source`` or ``target``, and ``argument`` for storage options that do not apply.
    """
    reason = "target" if writing else "source"
    name = argument or reason
    if storage_options is not None and not (
        isinstance(storage_options, dict) and all(isinstance(key, str) for key in storage_options)
    ):
        raise SpecError("argument", f"storage_options is a {type(storage_options).__name__}; expected names and values")
    if isinstance(location, os.PathLike):
        location = os.fspath(location)
    if isinstance(location, str) and _is_url(location):
        return _of_url(location, storage_options or {}, writing, reason, name)
    if storage_options:
        raise SpecError(
            "argument", f"storage_options go with a URL; {name} is {_shown_input(location)}, which needs none"
        )
    if isinstance(location, Place):
        return location
    if isinstance(location, Store):
        return Place(location, "", shown_as(location))
    if isinstance(location, StorePath):
        return Place(location.store, location.path, shown_as(location.store, location.path))
    if not isinstance(location, str):
        raise SpecError(reason, f"{name} is a {type(location).__name__}; expected a path, a URL or a zarr store")
    return _of_path(_path_of_file_url(location), writing, reason, name)


def options_for(location: Any, storage_options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Storage options for a place: they are for those that are named by a URL."""
    return storage_options if isinstance(location, str) and _is_url(location) else None


def options_beside(known: list[Any], storage_options: dict[str, Any] | None, location: Any) -> dict[str, Any] | None:
    """Storage options for a place that somebody else named: only on a server, or in a bucket, that the user named too.

    They hold credentials.
    """
    servers = {urlsplit(place)[:2] for place in known if isinstance(place, str) and _is_url(place)}
    if isinstance(location, str) and _is_url(location) and urlsplit(location)[:2] in servers:
        return storage_options
    return None


def _shown_input(location: Any) -> str:
    return repr(location) if isinstance(location, str) else f"a {type(location).__name__}"


def _is_url(text: str) -> bool:
    """Whether fsspec has to find out what is meant; ``file:`` is a path."""
    return ("://" in text or "::" in text.split("/")[0]) and not text.startswith(("file:", "local:"))


def _path_of_file_url(text: str) -> str:
    """A ``file:`` URL as a path: zarr 3.1.6 makes a store of it whose writes are not atomic."""
    if not text.startswith(("file:", "local://")):
        return text
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or "?" in text or "#" in text:
        raise SpecError("argument", f"{text!r} has a host, a query or a fragment; pass the plain path")
    return unquote(parts.path)


def _of_path(path: str, writing: bool, reason: str, name: str) -> Place:
    if not path or "\0" in path:
        raise SpecError(reason, f"{name}={path!r}: expected the path of a zarr array")
    if writing:
        if path.endswith(".zip"):
            raise SpecError(
                reason, f"{name} {path!r} is a zip file, which cannot be written in parallel; pass a folder"
            )
        return Place(LocalStore(os.path.abspath(path)), "", path)
    archive, inner = _zip_in(path)
    if archive:
        return Place(ZipStore(archive, mode="r", read_only=True), _inside(inner, reason, name), path)
    return Place(LocalStore(os.path.abspath(path), read_only=True), "", path)


def _zip_in(path: str) -> tuple[str, str]:
    """The zip file that a path leads to or into, and the rest of the path; empty where there is none."""
    for found in re.finditer(r"\.zip(?=/|$)", path):
        archive = path[: found.end()]
        if os.path.isfile(archive):
            return archive, path[found.end() :].strip("/")
    return "", ""


def _inside(path: str, reason: str, name: str) -> str:
    """A path in a store, without the ways out of it."""
    if ".." in unquote(path).split("/") or "\0" in path:
        raise SpecError(reason, f"{name} {redacted(path)!r} has '..' or a NUL in it; pass the plain path")
    return path


def _of_url(url: str, options: dict[str, Any], writing: bool, reason: str, name: str) -> Place:
    shown = redacted(url)
    _inside(url, reason, name)
    if writing and "::" in url:
        raise SpecError(reason, f"{name} {shown!r} goes through another file system; pass the URL of the store itself")
    # with its cache of listings s3fs takes the sizes of objects, and what exists, from before another process wrote
    try:
        store = FsspecStore.from_url(
            url, storage_options={"use_listings_cache": False, **options}, read_only=not writing
        )
    except ImportError as error:
        raise SpecError(reason, f"{name} {shown!r} needs a package that is missing: {first_line(error)}") from error
    except Exception as error:  # every file system has errors of its own
        text = _without_values(first_line(error), options)
        raise SpecError(reason, f"{name} {shown!r} cannot be opened: {text}") from error
    return Place(store, "", shown)


def redacted(text: str) -> str:
    """A text without the user, the password and the query of any URL in it."""
    text = re.sub(r"(\w://)[^\s'\"]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?#'\"]*)([?#])[^\s'\"]*", r"\1\2...", text)


def _without_values(text: str, options: dict[str, Any]) -> str:
    for value in options.values():
        if isinstance(value, dict):
            text = _without_values(text, value)
        elif isinstance(value, str) and len(value) > 3:
            text = text.replace(value, "...")
    return text


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without credentials."""
    return redacted((str(error).strip() or type(error).__name__).splitlines()[0])


def shown_as(store: Store, path: str = "") -> str:
    """What messages call a path in a store; `place_of` takes it where the store is a folder or has a URL."""
    store = innermost(store)
    kind, root = _kind(store), _root(store)
    if isinstance(store, (FsspecStore, ObjectStore)) and kind:
        full = _joined(root, path)
        return redacted(full if "://" in full else f"{kind}://{full.lstrip('/')}")
    if isinstance(store, (LocalStore, ZipStore)):
        return os.path.join(root, path) if path else root
    return redacted(f"{store}/{path}".rstrip("/"))


# ---- what a store is


def innermost(store: Any) -> Any:
    """A store without what is wrapped around it."""
    while isinstance(store, WrapperStore):
        store = store._store
    return store


def _kind(store: Any) -> str:
    if isinstance(store, LocalStore):
        return "file"
    if isinstance(store, MemoryStore):
        return "memory"
    if isinstance(store, ZipStore):
        return "zip"
    if isinstance(store, ObjectStore):
        return _OBSTORES.get(type(store.store).__name__, "")
    if isinstance(store, FsspecStore):
        names = _file_system(store).protocol
        name = names if isinstance(names, str) else names[0]
        return _ALIASES.get(name, name)
    return ""


def _file_system(store: FsspecStore) -> Any:
    """What holds the bytes of an fsspec store, caches aside."""
    fs = getattr(store.fs, "sync_fs", store.fs)
    while type(fs).__module__.startswith("fsspec.implementations.cache") and getattr(fs, "fs", None) is not None:
        fs = fs.fs
    return fs


def _root(store: Any) -> str:
    """The prefix of the store itself in what holds the bytes: a folder, a bucket and a prefix."""
    if isinstance(store, LocalStore):
        return str(store.root)
    if isinstance(store, ZipStore):
        return str(store.path)
    if isinstance(store, FsspecStore):
        return store.path
    if isinstance(store, ObjectStore):
        config = getattr(store.store, "config", None) or {}
        bucket = config.get("bucket") or config.get("container_name") or getattr(store.store, "url", "") or ""
        return _joined(str(bucket), str(getattr(store.store, "prefix", None) or ""))
    return ""


def _joined(*parts: str) -> str:
    return "/".join(part.rstrip("/") for part in parts if part)


def _endpoint(store: Any) -> str | None:
    """Which server, where it is told; None may be any."""
    if isinstance(store, ObjectStore):
        return (getattr(store.store, "config", None) or {}).get("endpoint")
    options = getattr(getattr(store, "fs", None), "storage_options", None) or {}
    found = options.get("endpoint_url") or (options.get("client_kwargs") or {}).get("endpoint_url")
    return found if isinstance(found, str) else None


def _realm(store: Any) -> Any:
    """What two stores have in common whose prefixes may be compared."""
    kind = _kind(store)
    if isinstance(store, MemoryStore):
        return id(store._store_dict)  # read-only copies share it
    if isinstance(store, ObjectStore) and kind in ("memory", ""):
        return id(store.store)
    return kind or store


def _address(place: Place) -> list[str]:
    full = place.local or _joined(_root(innermost(place.store)), place.path)
    return [part for part in full.split("/") if part]


def comparable(one: Place, other: Place) -> bool:
    """Whether two places are in one and the same: folders of this machine, buckets of one service, one memory store."""
    stores = innermost(one.store), innermost(other.store)
    servers = {server.rstrip("/") for store in stores if (server := _endpoint(store))}
    return len(servers) < 2 and bool(_realm(stores[0]) == _realm(stores[1]))


def relation(one: Place, other: Place) -> str:
    """How two places lie: "same", "nested", or "" for apart."""
    if not comparable(one, other):
        return ""
    if one.local is not None and other.local is not None:
        return _relation_on_disk(one.local, other.local)
    a, b = _address(one), _address(other)
    if a == b:
        return "same"
    return "nested" if a[: len(b)] == b or b[: len(a)] == a else ""


def _relation_on_disk(one: str, other: str) -> str:
    """The same by path, or by what the file system says: one folder may be mounted at two places."""
    a, b = _ids(one), _ids(other)
    if one == other or (None not in (a[0], b[0]) and a[0] == b[0]):
        return "same"
    nested = one.startswith(f"{other.rstrip('/')}/") or other.startswith(f"{one.rstrip('/')}/")
    return "nested" if nested or (a[0] is not None and a[0] in b) or (b[0] is not None and b[0] in a) else ""


def _ids(path: str) -> list[tuple[int, int] | None]:
    """Device and number of a folder and of those above it; None for what is not there."""
    found: list[tuple[int, int] | None] = []
    while True:
        try:
            status = os.stat(path)
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
        above = os.path.dirname(path)
        if above == path:
            return found
        path = above


def parent(place: Place) -> Place | None:
    """The place one level up, None at the top or where the store shows nothing above itself."""
    store = innermost(place.store)
    if isinstance(store, ZipStore) and not place.path:
        return None
    shown = place.shown.rstrip("/").rpartition("/")[0]
    if place.local is not None:
        above = os.path.dirname(place.local)
        return None if above == place.local else Place(LocalStore(above, read_only=True), "", above)
    if place.path:
        return replace(place, path=place.path.rpartition("/")[0], shown=shown)
    if isinstance(store, FsspecStore):
        above = store.path.rstrip("/").rpartition("/")[0]
        if above.strip("/") and not above.endswith((":", ":/")):
            return Place(FsspecStore(store.fs, read_only=True, path=above), "", shown)
    return None


def ancestors(place: Place) -> Iterator[Place]:
    """The places above, nearest first."""
    above = parent(place)
    while above is not None:
        yield above
        above = parent(above)
