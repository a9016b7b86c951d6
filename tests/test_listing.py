"""Which objects exist, in every kind of store, and which are damaged."""

import functools
import http.server
import json
import os
import threading
import time
import uuid

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ZipStore

from chunkq import stored
from chunkq.errors import RunError, SpecError
from chunkq.listing import (
    absent_inner_chunks,
    is_object,
    list_objects,
    metadata_digest,
    missing_keys,
    refuse_damaged,
    refuse_missing,
    remove_strays,
    undecodable,
)


def make(store, path="a", shape=(5, 7), chunks=(2, 3), **more):
    array = zarr.create_array(store=store, name=path, shape=shape, chunks=chunks, dtype="uint8", **more)
    array[...] = (np.arange(np.prod(shape)) % 255 + 1).reshape(shape)
    return array


def obstore_memory(tmp_path):
    obstore = pytest.importorskip("obstore")
    return zarr.storage.ObjectStore(obstore.store.MemoryStore())


def obstore_local(tmp_path):
    obstore = pytest.importorskip("obstore")
    return zarr.storage.ObjectStore(obstore.store.LocalStore(str(tmp_path)))


STORES = {
    "local": lambda tmp_path: LocalStore(tmp_path),
    "memory": lambda tmp_path: MemoryStore(),
    "fsspec": lambda tmp_path: FsspecStore.from_url(f"memory://{uuid.uuid4().hex}"),
    "fsspec local": lambda tmp_path: FsspecStore.from_url(f"file://{tmp_path}", {"auto_mkdir": True}),
    "obstore": obstore_memory,
    "obstore local": obstore_local,
    "wrapped": lambda tmp_path: zarr.storage.LoggingStore(MemoryStore(), log_level="ERROR"),
}


@pytest.mark.parametrize("layout", [{}, {"zarr_format": 2}, {"shards": (4, 6)}], ids=["v3", "v2", "shards"])
@pytest.mark.parametrize("name", STORES)
def test_counts_what_is_there_in_every_store(name, layout, tmp_path):
    array = make(STORES[name](tmp_path), "group/a", **layout)
    seen = []
    listing = list_objects(array, seen.append)
    total = 4 if "shards" in layout else 9
    assert (listing.total, listing.present, listing.missing) == (total, total, 0)
    assert sorted(seen) == list(range(total))
    assert listing.exact
    assert listing.strays == ()
    assert missing_keys(array, listing) == []

    gone = array.metadata.encode_chunk_key((1, 0))
    zarr.core.sync.sync(array.store_path.store.delete(f"group/a/{gone}"))
    seen.clear()
    again = list_objects(array, seen.append)
    assert again.missing == 1
    assert sorted(seen) == [n for n in range(total) if n != total // 2 - total % 2]
    assert missing_keys(array, again) == [gone]
    assert again.digest != listing.digest


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("local", ("key", "size", "mtime")),
        ("memory", ("key",)),
        ("fsspec", ("key", "size", "mtime")),
        ("fsspec local", ("key", "size", "mtime")),
        ("obstore", ("key", "size", "etag")),
        ("wrapped", ("key",)),
    ],
)
def test_says_what_the_store_could_tell(name, told, tmp_path):
    listing = list_objects(make(STORES[name](tmp_path), compressors=None))
    assert listing.told == told
    # every chunk is stored whole, at the edges too
    assert listing.bytes == (9 * 6 if "size" in told else None)


@pytest.mark.parametrize("name", ["local", "fsspec", "obstore"])
def test_digest_follows_the_content_and_nothing_else(name, tmp_path):
    array = make(STORES[name](tmp_path))
    before = list_objects(array).digest
    assert list_objects(array).digest == before
    time.sleep(0.02)  # a clock tick of the file system
    array[0, 0] = 200
    assert list_objects(array).digest != before


def test_rest_does_not_depend_on_what_is_left_out(tmp_path):
    array = make(tmp_path)
    left_out = frozenset({"c/0/0", "c/1/1"})
    before = list_objects(array, leave_out=left_out)
    assert before.rest != before.digest == list_objects(array).rest
    time.sleep(0.02)
    array[0, 0] = array[2, 3] = 200
    (tmp_path / "a/c/1/1").unlink()
    after = list_objects(array, leave_out=left_out)
    assert (after.rest, after.digest == before.digest) == (before.rest, False)
    array[4, 6] = 200
    assert list_objects(array, leave_out=left_out).rest != before.rest


@pytest.mark.parametrize("format", [2, 3])
@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("shape", [(), (11,), (12, 13, 3)])
def test_keys_of_every_encoding(tmp_path, shape, separator, format):
    encoding = {"name": "v2" if format == 2 else "default", "separator": separator}
    array = make(tmp_path, shape=shape, chunks=(1,) * len(shape), zarr_format=format, chunk_key_encoding=encoding)
    seen = set()
    listing = list_objects(array, seen.add)
    assert listing.missing == 0
    assert seen == set(range(int(np.prod(shape))))


def test_foreign_keys_are_no_objects(tmp_path):
    array = make(tmp_path)
    for key in (
        "c/0/3",
        "c/00/0",
        "c/0/0/0",
        "c/0",
        "0/0",
        "c/0.0",
        "c/-1/0",
        "c/\u0660/0",
        "zarr.json",
        "c/" + "9" * 5000,
    ):
        assert not is_object(array, key), key
    assert is_object(array, "c/2/2")
    listing = list_objects(array)
    for name in ("c/0/03", "c/notes", "c/0/3", "readme.txt"):
        (tmp_path / "a" / name).write_text("x")
    (tmp_path / "a/c/0/7").mkdir()
    (tmp_path / "a/other/0").mkdir(parents=True)
    assert list_objects(array) == listing


def test_empty_objects_and_folders_in_their_place_are_missing(tmp_path):
    array = make(tmp_path)
    (tmp_path / "a/c/0/1").write_bytes(b"")
    (tmp_path / "a/c/2/2").unlink()
    (tmp_path / "a/c/2/2").mkdir()
    listing = list_objects(array)
    assert missing_keys(array, listing) == ["c/0/1", "c/2/2"]


def test_an_array_without_any_object(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(5, 7), chunks=(2, 3), dtype="uint8")
    listing = list_objects(array)
    assert (listing.present, listing.missing, listing.told) == (0, 9, ("key",))
    assert missing_keys(array, listing, at_most=2) == ["c/0/0", "c/0/1"]
    empty = zarr.create_array(tmp_path / "b", shape=(0, 7), chunks=(2, 3), dtype="uint8")
    assert list_objects(empty).total == list_objects(empty).missing == 0
    refuse_missing("source", empty, list_objects(empty))


def test_absurd_shapes_cost_nothing(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(2**30, 2**30), chunks=(10, 15), dtype="uint8")
    array[:20, :15] = 1
    start = time.perf_counter()
    listing = list_objects(array)
    assert listing.missing == (-(-(2**30) // 10)) * (-(-(2**30) // 15)) - 2
    assert missing_keys(array, listing, at_most=3) == ["c/0/1", "c/0/2", "c/0/3"]
    assert time.perf_counter() - start < 1


def test_strays_are_named_and_removed(tmp_path, monkeypatch):
    array = make(tmp_path)
    strays = [f"c/0/1.{uuid.uuid4().hex}.partial", f"zarr.{uuid.uuid4().hex}.partial"]
    kept = ["c/0/my.partial", "c/0/1.abc.partial"]
    for key in strays + kept:
        (tmp_path / "a" / key).write_text("x")
    listing = list_objects(array)
    assert listing.strays == tuple(sorted(strays))
    assert listing.missing == 0
    monkeypatch.setattr(stored, "NAMED_STRAYS", 1)
    assert remove_strays(array) == 2
    assert list_objects(array).strays == ()
    assert all((tmp_path / "a" / key).exists() for key in kept)


@pytest.mark.parametrize("where", ["c", "c/1", "c/1/0"])
def test_a_linked_folder_is_refused(tmp_path, where):
    array = make(tmp_path)
    folder = tmp_path / "a" / where
    if folder.is_dir():
        folder.rename(tmp_path / "elsewhere")
    else:
        folder.unlink()
        (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(SpecError, match="symbolic link") as caught:
        list_objects(array)
    assert caught.value.reason == "source"
    with pytest.raises(SpecError) as caught:
        list_objects(array, argument="target")
    assert caught.value.reason == "target"


def test_linked_files_count_and_cycles_end(tmp_path):
    array = make(tmp_path)
    (tmp_path / "a/c/0/0").rename(tmp_path / "0")
    (tmp_path / "a/c/0/0").symlink_to(tmp_path / "0")
    (tmp_path / "a/loop").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "a/c/1/1").unlink()
    (tmp_path / "a/c/1/1").symlink_to(tmp_path / "nowhere")
    assert missing_keys(array, list_objects(array)) == ["c/1/1"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may list everything")
def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path):
    array = make(tmp_path)
    (tmp_path / "a/c/1").chmod(0)
    try:
        with pytest.raises(RunError, match="cannot be listed: PermissionError"):
            list_objects(array)
    finally:
        (tmp_path / "a/c/1").chmod(0o700)


def test_a_name_that_stands_twice_in_a_zip_counts_once(tmp_path):
    with ZipStore(tmp_path / "a.zip", mode="w") as store:
        array = make(store, shape=(4,), chunks=(2,))
        with pytest.warns(UserWarning, match="Duplicate name"):
            array[:2] = 9
    with ZipStore(tmp_path / "a.zip", mode="r") as store:
        array = zarr.open_array(store, path="a", mode="r")
        assert list_objects(array).present == 2


def test_refusal_names_keys_and_the_way_out(tmp_path):
    array = make(tmp_path)
    refuse_missing("source", array, list_objects(array))
    (tmp_path / "a/c/2/1").unlink()
    with pytest.raises(RunError, match=r"source .*/a lacks 1 stored objects, among them c/2/1\. .*missing='fill'"):
        refuse_missing("source", array, list_objects(array))


# ---- a store without a listing


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # with the 5 there are, connections wait a second to be tried again


class _Quiet(http.server.SimpleHTTPRequestHandler):
    failing = False

    def log_message(self, *args):
        pass

    def do_GET(self):
        if self.failing and "/c/1/" in self.path:
            self.send_error(503)
        else:
            super().do_GET()


@pytest.fixture
def served(tmp_path):
    pytest.importorskip("aiohttp")
    handler = type("Handler", (_Quiet,), {})
    server = _Server(("127.0.0.1", 0), functools.partial(handler, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_http_is_asked_key_by_key(tmp_path, served, monkeypatch):
    url, handler = served
    make(tmp_path)
    (tmp_path / "a/c/1/1").unlink()
    array = zarr.open_array(f"{url}/a", mode="r")
    listing = list_objects(array)
    assert (listing.total, listing.present, listing.told, listing.exact) == (9, 8, ("key",), True)
    assert missing_keys(array, listing) == ["c/1/1"]

    monkeypatch.setattr(handler, "failing", True)  # a server in trouble lacks nothing
    with pytest.raises(RunError, match=r"cannot be listed: ClientResponseError: 503"):
        list_objects(array)


def test_http_is_not_asked_for_ever(tmp_path, served):
    zarr.create_array(tmp_path / "a", shape=(10**5,), chunks=(1,), dtype="uint8")
    array = zarr.open_array(f"{served[0]}/a", mode="r")
    listing = list_objects(array)
    assert not listing.exact
    with pytest.raises(RunError, match=r"lacks at least 1000 stored objects, among them c/0, c/1"):
        refuse_missing("source", array, listing)
    zarr.create_array(tmp_path / "b", shape=(2**60,), chunks=(10,), dtype="uint8")
    with pytest.raises(RunError, match="too many to ask for"):
        list_objects(zarr.open_array(f"{served[0]}/b", mode="r"))


# ---- inner chunks


def sharded(store, location="end", checksum=True, shape=(5, 7), shards=(4, 6)):
    index = [BytesCodec(), Crc32cCodec()] if checksum else [BytesCodec(endian="big")]
    codec = ShardingCodec(chunk_shape=(2, 3), codecs=[BytesCodec()], index_codecs=index, index_location=location)
    return zarr.create_array(
        store=store,
        name="a",
        shape=shape,
        chunks=shards,
        dtype="uint8",
        serializer=codec,
        compressors=None,
        fill_value=0,
    )


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("name", STORES)
def test_inner_chunks_that_are_left_out(name, location, checksum, tmp_path):
    array = sharded(STORES[name](tmp_path), location, checksum)
    array[...] = 1
    inner = absent_inner_chunks(array)
    assert (inner.total, inner.absent, inner.damaged) == (9, 0, 0)  # the shards' own corners are no part of it
    array[2:4, 3:6] = 0
    inner = absent_inner_chunks(array)
    assert (inner.absent, inner.names) == (1, ("c/0/0 (inner chunk 1.1)",))
    with pytest.raises(RunError, match=r"lacks 1 inner chunks of its shards, among them c/0/0 .*--missing fill"):
        refuse_missing("source", array, list_objects(array), inner)


def test_many_left_out_are_named_in_order(tmp_path):
    array = sharded(tmp_path, shape=(40, 60), shards=(20, 30))
    array[::2, ::3] = 1
    array[0:2, :] = 0
    inner = absent_inner_chunks(array)
    assert inner.absent == 20
    assert inner.names == tuple(f"c/0/0 (inner chunk 0.{n})" for n in range(5))


def all_absent(content):
    return b"\xff" * 64 + zarr.codecs.crc32c_.google_crc32c.value(b"\xff" * 64).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("location", "damage", "why"),
    [
        ("end", lambda b: b[:-1], "crc32c of its index does not fit"),
        ("end", lambda b: b[:30], "has no room for its index"),
        ("end", lambda b: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:], "crc32c of its index does not fit"),
        ("end", lambda b: b[10:], "points outside its data"),
        ("start", lambda b: bytes([b[0] ^ 1]) + b[1:], "crc32c of its index does not fit"),
        ("start", lambda b: b[:-3], "points outside its data"),
        ("start", lambda b: b[:68], "points outside its data"),
    ],
)
@pytest.mark.parametrize("name", ["local", "memory", "fsspec", "obstore"])
def test_damaged_shards_are_named(name, location, damage, why, tmp_path):
    if why == "points outside its data" and location == "end" and name == "memory":
        pytest.skip("MemoryStore tells no size, and the end of the shard is not asked for it")
    array = sharded(STORES[name](tmp_path), location)
    array[...] = 1
    rewrite(array, "c/0/0", damage)
    inner = absent_inner_chunks(array)
    assert inner.damaged == 1
    assert inner.reasons[0][0] == "c/0/0"
    assert why in inner.reasons[0][1]
    with pytest.raises(RunError, match="1 damaged shards, among them c/0/0: "):
        refuse_damaged("source", array, inner)
    with pytest.raises(RunError, match="1 damaged shards"):
        refuse_missing("source", array, list_objects(array), inner)


def test_a_shard_without_any_inner_chunk_is_named(tmp_path):
    array = sharded(tmp_path)
    array[...] = 1
    rewrite(array, "c/0/0", all_absent)
    inner = absent_inner_chunks(array)
    assert (inner.absent, inner.names) == (4, ("c/0/0 (all of its 4 inner chunks)",))


def rewrite(array, key, change):
    store, key = array.store_path.store, f"{array.store_path.path}/{key}"
    prototype = zarr.core.buffer.default_buffer_prototype()
    content = zarr.core.sync.sync(store.get(key, prototype)).to_bytes()
    zarr.core.sync.sync(store.set(key, prototype.buffer.from_bytes(change(content))))


def test_without_shards_there_is_nothing_to_read(tmp_path):
    assert absent_inner_chunks(make(tmp_path)).total == 0


# ---- decoding


def test_undecodable_objects_are_named(tmp_path):
    array = make(tmp_path, compressors=[Crc32cCodec()])
    for key in ("c/0/0", "c/1/2"):
        rewrite(array, key, lambda content: bytes([content[0] ^ 1]) + content[1:])
    (tmp_path / "a/c/2/0").unlink()
    whole = (slice(0, 5), slice(0, 7))
    assert [key for key, _ in undecodable(array, whole)] == ["c/0/0", "c/1/2"]
    assert "crc32c" in undecodable(array, whole)[0][1].lower() or "checksum" in undecodable(array, whole)[0][1]
    assert [key for key, _ in undecodable(array, (slice(3, 4), slice(5, 7)))] == ["c/1/2"]
    assert undecodable(array, (slice(3, 4), slice(0, 6))) == []
    assert undecodable(array, (slice(3, 3), slice(0, 6))) == []
    scalar = make(tmp_path, "s", shape=(), chunks=())
    assert undecodable(scalar, ()) == []


@pytest.mark.parametrize("format", [2, 3])
def test_metadata_digest(tmp_path, format):
    array = make(tmp_path, zarr_format=format, fill_value=None if format == 2 else 0)
    before = metadata_digest(array)
    document = tmp_path / "a" / (".zarray" if format == 2 else "zarr.json")
    content = json.loads(document.read_text())
    document.write_text(json.dumps(dict(reversed(content.items())), indent=7))
    assert metadata_digest(array) == before
    array.attrs["unit"] = "K"
    assert metadata_digest(array) != before
