"""Sources and targets on every kind of store: folders, zip files, HTTP, a real S3 server (also a failing one), memory."""

import functools
import http.server
import json
import os
import pickle
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, LoggingStore, MemoryStore, ObjectStore, StorePath, ZipStore

from chunkq import contents, linear, places
from chunkq.admission import LOCK, check_replaceable, check_target, replacing
from chunkq.errors import SpecError
from chunkq.places import Place, place_of
from chunkq.store import COMPLETE, REPLACING, location, open_quantized_group, open_source
from chunkq.target import (
    COMPRESSORS,
    Layout,
    group_document,
    mark_complete,
    open_root,
    open_target,
    operator_attributes,
    replace,
    write_metadata,
    write_quantized,
)

pytest_plugins = ("s3",)

X = np.arange(24, dtype=np.int8).reshape(4, 6)
NO_RETRIES = {"config_kwargs": {"retries": {"max_attempts": 0}}}
ATTRIBUTES = operator_attributes({"operator": "some"})


def layout(shape=(4, 6), element="float32", chunks=(2, 3), **changed):
    fields = {"shards": None, "compressors": COMPRESSORS["auto"], "attributes": ATTRIBUTES} | changed
    return Layout(shape, element, chunks, **fields)


def write(location, x=X, chunks=(2, 3), **how):
    array = zarr.create_array(location, shape=x.shape, chunks=chunks, dtype=x.dtype, **how)
    array[...] = x
    return array


def tree(folder):
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*"))


def names(place):
    return sorted(key for key, _ in contents.keys(place))


def admitted(place, inputs=None):
    """What a run that may overwrite does: find what is there, and refuse it where not all of it is a target's."""
    node = check_target(place, inputs or {})
    if node is not None:
        check_replaceable(place, node)
    return node


def refused(reason, call, *arguments, match=None, **keywords):
    with pytest.raises(SpecError, match=match) as caught:
        call(*arguments, **keywords)
    assert caught.value.reason == reason, caught.value
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- every kind of store, by the way it is named


def folder(tmp_path, request):
    return str(tmp_path / "t.zarr"), None


def path_in_a_store(tmp_path, request):
    return StorePath(LocalStore(tmp_path / "store"), "a/t"), None


def memory(tmp_path, request):
    return StorePath(MemoryStore(), "a/t"), None


def wrapped(tmp_path, request):
    return LoggingStore(LocalStore(tmp_path / "t.zarr"), log_level="CRITICAL"), None


def fsspec_memory(tmp_path, request):
    return f"memory://{tmp_path.name}/t.zarr", None


def s3_url(tmp_path, request):
    s3 = request.getfixturevalue("s3")
    return s3.url("a/t.zarr"), s3.options


def s3_obstore(tmp_path, request):
    return request.getfixturevalue("s3").obstore("a/t.zarr"), None


def flaky_s3_url(tmp_path, request):
    s3 = request.getfixturevalue("flaky_s3")
    return s3.url("a/t.zarr"), s3.options


def flaky_s3_obstore(tmp_path, request):
    return StorePath(request.getfixturevalue("flaky_s3").obstore(), "a/t.zarr"), None


STEADY = (folder, path_in_a_store, memory, wrapped, fsspec_memory, s3_url, s3_obstore)
FLAKY = (flaky_s3_url, flaky_s3_obstore)


@pytest.fixture(params=STEADY, ids=lambda kind: kind.__name__)
def target(request, tmp_path):
    """A place to be written, of each kind."""
    location, options = request.param(tmp_path, request)
    return place_of(location, options, writing=True)


def also_flaky(test):
    """The failing server too; only where it tells more, since its clients wait before they try again."""
    kinds = pytest.mark.parametrize("target", STEADY + FLAKY, indirect=True, ids=lambda kind: kind.__name__)
    return kinds(test)


def create(place, layout):
    write_metadata(place, "", layout.document())
    return open_target(place)


@also_flaky
def test_a_target_is_created_opened_found_and_marked(target):
    assert admitted(target) is None
    array = create(target, layout())
    array[:2] = np.nan
    assert names(target) == ["c/0/0", "c/0/1", "zarr.json"]  # objects of nothing but the fill value too
    found = admitted(target)
    assert dict(found.attrs) == ATTRIBUTES
    assert np.isnan(found[3, 5])
    mark_complete(open_root(target))
    assert admitted(target).attrs[COMPLETE] is True
    assert open_source(target).shape == (4, 6)


def test_leftovers_count_as_nothing_and_are_removed(target):
    stray = f"c/0/0.{'0' * 32}.partial"
    for key in (LOCK, stray, f"zarr.{'1' * 32}.partial"):
        contents.put(target, key, b"x")
    assert admitted(target) is None
    create(target, layout())
    assert admitted(target) is not None
    contents.remove(target, [*(key for key, _ in contents.keys(target) if key.endswith(".partial")), "c/9/9"])
    assert names(target) == [LOCK, "zarr.json"]


@pytest.mark.parametrize("key", ["notes.txt", "c/0/notes", "c/7/7", "c/0/0.partial", "data/zarr.json"])
def test_a_stranger_is_refused(target, key):
    contents.put(target, key, b"mine")
    refused("target", admitted, target, match=f"holds '{key}'")
    create(target, layout())
    refused("target", admitted, target, match=f"holds '{key}'")
    assert names(target) == sorted(["zarr.json", key])


def test_replace_leaves_what_a_first_run_leaves(target):
    create(target, layout(shape=(9, 9)))[...] = 1
    contents.put(target, LOCK, b"x")
    replace(target, layout().document())
    assert names(target) == [LOCK, "zarr.json"]
    assert contents.get(target, "zarr.json") == layout().document()
    assert not replacing(admitted(target))


@also_flaky
def test_replace_goes_on_after_a_kill(target, monkeypatch):
    """Killed while it deletes: the new document is there, marked, and what is left of the old array is still its own."""
    create(target, layout(shape=(9, 9)))[...] = 1

    def killed(place, keys):
        contents.remove(place, sorted(keys)[:3])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("chunkq.target.remove", killed)
        with pytest.raises(KeyboardInterrupt):
            replace(target, layout().document())
    found = admitted(target)
    assert replacing(found)
    assert found.attrs[COMPLETE] is False
    assert found.shape == (4, 6)
    assert "c/4/2" in names(target)
    replace(target, layout().document())
    assert names(target) == ["zarr.json"]
    assert contents.get(target, "zarr.json") == layout().document()


def test_replace_stops_at_what_appeared_meanwhile(target):
    create(target, layout())
    contents.put(target, "notes.txt", b"mine")
    refused("target", replace, target, layout().document(), match=r"holds 'notes\.txt'")
    assert contents.get(target, "notes.txt") == b"mine"


def quantized(place, element="int8", **changed):
    scale = np.linspace(1, 2, 6, dtype=np.float32)
    spec, params = linear.QuantizeLinear(scale, np.zeros(6, np.int8), axis=1).bind(X.shape, "float32")
    write_quantized(place, spec.params, params, ATTRIBUTES, layout(element=element, attributes={}, **changed))
    return scale


def test_a_quantized_group(target):
    scale = quantized(target)
    group = admitted(target)
    assert isinstance(group, zarr.Group)
    np.testing.assert_array_equal(group["scale"][:], scale)
    open_target(target)[...] = X
    assert [key for key in names(target) if key.startswith("data/")][:2] == ["data/c/0/0", "data/c/0/1"]
    refused("source", open_quantized_group, target, match="is unfinished")
    mark_complete(open_root(target), consolidate=True)
    assert list(json.loads(contents.get(target, "zarr.json"))["consolidated_metadata"]["metadata"]) == [
        "data",
        "scale",
        "zero_point",
    ]
    np.testing.assert_array_equal(open_quantized_group(target)["data"][:], X)
    contents.remove(target, ["data/zarr.json", "scale/zarr.json"])
    # the consolidated document of the group has all that zarr needs
    np.testing.assert_array_equal(open_quantized_group(target)["data"][:], X)


def test_the_document_of_the_data_is_written_last(target, monkeypatch):
    class Killed(Exception):
        pass

    written = []

    def put(place, name, data):
        if name == "data/zarr.json":
            raise Killed
        written.append(name)
        contents.put(place, name, data)

    with monkeypatch.context() as patch:
        patch.setattr("chunkq.target.put", put)
        refused("target", quantized, target, match="cannot be written")
    assert written == ["zarr.json", "scale/zarr.json", "zero_point/zarr.json"]
    assert isinstance(admitted(target), zarr.Group)
    contents.remove(target, ["scale/c/0"])
    scale = quantized(target)
    np.testing.assert_array_equal(admitted(target)["scale"][:], scale)
    contents.remove(target, ["scale/c/0"])
    before = contents.get(target, "zero_point/c/0")
    contents.put(target, "zero_point/c/0", b"whole, for all that is looked at")
    scale = quantized(target)
    np.testing.assert_array_equal(
        admitted(target)["scale"][:], scale
    )  # what is lost is written again, and nothing else
    assert contents.get(target, "zero_point/c/0") != before


@also_flaky
def test_an_array_replaces_a_group_and_a_group_an_array(target):
    quantized(target)
    replace(target, layout().document())
    assert names(target) == ["zarr.json"]
    open_target(target)[...] = 1
    replace(target, group_document(ATTRIBUTES))
    quantized(target)
    assert {key.split("/")[0] for key in names(target)} == {"zarr.json", "data", "scale", "zero_point"}


def test_targets_that_touch_an_input(target):
    x = create(target, layout())
    refused("same_array", admitted, target, {"source": x}, match="itself")
    for place in (places.parent(target), target.below("c")):
        if place is not None:
            place = Place(place.store.with_read_only(False), place.path, place.shown)
            refused("same_array", admitted, place, {"source": x}, match="inside")
    assert names(target) == ["zarr.json"]


def test_a_group_of_chunkq_counts_as_a_whole(target):
    quantized(target)
    data, beside = open_target(target), target.below("more")
    refused("same_array", admitted, beside, {"source": data})
    refused("target", admitted, beside, match="which chunkq wrote")


def test_a_target_next_to_a_longer_name(target):
    """A prefix ends at a slash: t.zarr is not above t.zarr2."""
    beside = _beside(target)
    x = create(beside, layout())
    contents.put(beside, "notes.txt", b"mine")
    assert admitted(target, {"source": x}) is None
    replace(target, layout().document())
    assert names(beside) == ["notes.txt", "zarr.json"]


def _beside(place):
    """The place whose name has a 2 more."""
    if place.local:
        return place_of(f"{place.local}2", writing=True)
    if place.path:
        return Place(place.store, f"{place.path}2", place.shown)
    if isinstance(place.store, FsspecStore):
        return Place(FsspecStore(place.store.fs, path=f"{place.store.path}2"), "", "beside")
    upstream = place.store.store
    beside = type(upstream)(**upstream.config, prefix="a/t.zarr2", client_options={"allow_http": True})
    return Place(ObjectStore(beside), "", "beside")


def test_places_travel_and_say_nothing_secret(target):
    assert "secret" not in target.shown
    if not target.in_process:
        copy = pickle.loads(pickle.dumps(target))
        create(copy, layout())
        assert admitted(target) is not None
        assert places.relation(copy, target) == "same"


def test_the_proxy_failed_a_fifth(flaky, flaky_s3):
    place = place_of(flaky_s3.url("x.zarr"), flaky_s3.options, writing=True)
    array = create(place, layout(shape=(20, 20)))
    array[...] = np.arange(400).reshape(20, 20)
    np.testing.assert_array_equal(open_source(place, unfinished=True)[:], np.arange(400).reshape(20, 20))
    assert 0.1 < flaky.failed / flaky.requests < 0.3


# ---- properties


def test_what_a_place_is(tmp_path, s3):
    from obstore.store import LocalStore as ObstoreLocal
    from obstore.store import MemoryStore as ObstoreMemory

    def properties(location, options=None, writing=True):
        place = place_of(location, options, writing=writing)
        return place.local, place.atomic, place.read_only, place.in_process

    local = str(tmp_path / "x.zarr")
    assert properties(local) == (local, True, False, False)
    assert properties(f"file://{tmp_path}/x%2Ezarr") == (local, True, False, False)
    assert properties(StorePath(LocalStore(tmp_path), "x.zarr")) == (local, True, False, False)
    assert properties(LocalStore(tmp_path, read_only=True)) == (str(tmp_path), True, True, False)
    assert properties(ObjectStore(ObstoreLocal(tmp_path))) == (str(tmp_path), True, False, False)
    assert properties(s3.url("x.zarr"), s3.options) == (None, True, False, False)
    assert properties(s3.obstore()) == (None, True, False, False)
    assert properties(MemoryStore()) == (None, True, False, True)
    assert properties(ObjectStore(ObstoreMemory())) == (None, True, False, True)
    assert properties("memory://x") == (None, True, False, True)
    assert properties("http://127.0.0.1/x", writing=False) == (None, True, True, False)
    on_disk = FsspecStore.from_url(f"file://{local}", storage_options={"auto_mkdir": True})
    assert properties(on_disk) == (local, False, False, False)
    assert places.relation(place_of(on_disk), place_of(local)) == "same"
    assert places.relation(place_of(s3.url("a/b"), s3.options), place_of(StorePath(s3.obstore("a"), "b"))) == "same"
    assert places.relation(place_of(MemoryStore()), place_of(MemoryStore())) == ""


def test_credentials_are_never_shown():
    url = "http://user:some-secret@127.0.0.1:9/x.zarr?token=some-secret"
    assert place_of(url).shown == "http://127.0.0.1:9/x.zarr?..."
    options = {"key": "some-secret", "secret": "some-secret", "endpoint_url": "http://127.0.0.1:9"} | NO_RETRIES
    for message in (
        refused("source", open_source, url, match="connect"),
        refused("source", open_source, "s3://b/x", storage_options=options),
        refused("source", open_source, "memory://x", storage_options={"asynchronous": "some-secret"}),
    ):
        assert "some-secret" not in message


def test_storage_options_go_with_urls_only(tmp_path):
    write(str(tmp_path / "x.zarr"))
    for named in (str(tmp_path / "x.zarr"), tmp_path / "x.zarr", f"file://{tmp_path}/x.zarr", MemoryStore()):
        refused("argument", place_of, named, {"key": "k"}, match="go with a URL")
    refused("argument", open_source, zarr.open_array(tmp_path / "x.zarr"), storage_options={"key": "k"})
    refused("argument", place_of, "memory://x", ["key"], match="is a list")
    assert place_of(str(tmp_path / "x.zarr"), {}).local == str(tmp_path / "x.zarr")


# ---- sources


def test_documents_are_the_same_in_every_run_and_described_as_json():
    one, other = layout(), layout()
    assert one.document() == other.document()
    described = one.describe()
    assert json.loads(json.dumps(described)) == described
    assert described == layout(attributes=ATTRIBUTES | {COMPLETE: True, "chunkq.fingerprint": "x"}).describe()
    for change in ({"chunks": (4, 3)}, {"shards": (4, 6)}, {"compressors": COMPRESSORS["none"]}, {"element": "int8"}):
        assert layout(**change).describe() != described
    assert layout(attributes={"units": "K"}).describe() != described
    assert layout(element="int4").describe() != layout(element="int8").describe()


def test_file_urls(tmp_path):
    write(str(tmp_path / "a b.zarr"))
    array = open_source(f"file://{tmp_path}/a%20b.zarr")
    np.testing.assert_array_equal(array[:], X)
    assert location(array) == str(tmp_path / "a b.zarr")


def test_zip_sources(tmp_path):
    with ZipStore(tmp_path / "x.zip", mode="w") as store:
        write(store)
    with ZipStore(tmp_path / "g.zip", mode="w") as store:
        zarr.create_group(store)
        write(StorePath(store, "inner/x"))
    np.testing.assert_array_equal(open_source(tmp_path / "x.zip")[:], X)
    np.testing.assert_array_equal(open_source(f"{tmp_path}/g.zip/inner/x")[:], X)
    np.testing.assert_array_equal(open_source(ZipStore(tmp_path / "x.zip", read_only=True))[:], X)
    assert tree(tmp_path) == ["g.zip", "x.zip"]
    (tmp_path / "no.zip").write_bytes(b"no zip")
    refused("source", open_source, tmp_path / "no.zip", match="not a zip file")
    refused("source", open_source, f"{tmp_path}/x.zip/../x.zip", match=r"'\.\.'")
    refused("source", open_source, f"{tmp_path}/x.zip/nothing")
    refused("target", place_of, tmp_path / "y.zip", writing=True, match="zip")
    refused("target", admitted, place_of(ZipStore(tmp_path / "y.zip", mode="w"), writing=True), match="zip")


def test_a_quantized_group_in_a_zip(tmp_path):
    place = place_of(tmp_path / "q.zarr", writing=True)
    quantized(place)
    open_target(place)[...] = X
    mark_complete(open_root(place))
    with zipfile.ZipFile(tmp_path / "q.zip", "w") as archive:
        for name in names(place):
            archive.write(tmp_path / "q.zarr" / name, name)
    np.testing.assert_array_equal(open_quantized_group(tmp_path / "q.zip")["data"][:], X)


@pytest.fixture
def http_folder(tmp_path):
    """A folder, and its URL; below /private is forbidden. Requested paths are kept."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path.startswith("/private"):
                self.send_error(403)
            else:
                super().do_GET()

        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("version", [2, 3])
def test_http_sources(tmp_path, http_folder, version):
    url, _ = http_folder
    write(str(tmp_path / "x.zarr"), zarr_format=version)
    array = open_source(f"{url}/x.zarr")
    np.testing.assert_array_equal(array[:], X)
    assert location(array) == f"{url}/x.zarr"
    refused("source", open_source, f"{url}/nothing.zarr", match="nothing is there")
    refused("source", open_source, f"{url}/private", match="403")
    refused("source", open_source, f"{url}/a/%2e%2e/x.zarr", match=r"'\.\.'")
    refused("target", admitted, place_of(f"{url}/y.zarr", writing=True), match="only read")


def test_consolidated_metadata_is_used(tmp_path, http_folder):
    place = place_of(tmp_path / "q.zarr", writing=True)
    quantized(place)
    open_target(place)[...] = X
    mark_complete(open_root(place), consolidate=True)
    url, asked = http_folder
    np.testing.assert_array_equal(open_quantized_group(f"{url}/q.zarr")["scale"][:], np.linspace(1, 2, 6, dtype="f4"))
    assert {path for path in asked if path.endswith("zarr.json")} == {"/q.zarr/zarr.json"}


@pytest.mark.parametrize("version", [2, 3])
def test_s3_sources(s3, version):
    write(StorePath(s3.obstore(), "a/x.zarr"), zarr_format=version)
    array = open_source(s3.url("a/x.zarr"), storage_options=s3.options)
    np.testing.assert_array_equal(array[:], X)
    assert location(array) == s3.url("a/x.zarr")
    assert location(open_source(StorePath(s3.obstore("a"), "x.zarr"))) == s3.url("a/x.zarr")


@pytest.mark.parametrize("cached", [False, True])
def test_what_another_process_wrote_is_seen(s3, cached):
    """s3fs keeps listings and, with them, sizes: place_of turns that off, and a store that does is made to ask again."""
    place = place_of(s3.url("x.zarr"), s3.options | ({"use_listings_cache": True} if cached else {}), writing=True)
    create(place, layout())

    async def listed():
        return sorted([key async for key in place.store.list_dir("")])

    assert sync(listed()) == ["zarr.json"]
    open_target(place_of(StorePath(s3.obstore(), "x.zarr"), writing=True))[:2] = 1
    if cached:
        assert sync(listed()) == ["zarr.json"]
        assert names(place) == ["c/0/0", "c/0/1", "zarr.json"]
    assert sync(listed()) == ["c", "zarr.json"]


def test_stores_that_cannot_be_reached(s3, tmp_path):
    nowhere = s3.options | {"endpoint_url": "http://127.0.0.1:9"} | NO_RETRIES
    for options, url, match in (
        (nowhere, s3.url("x"), "Could not connect"),
        (s3.options, "s3://no-such-bucket/x", "no such bucket"),
    ):
        refused("source", open_source, url, storage_options=options, match=match)
    refused("target", admitted, place_of(s3.url("x"), nowhere, writing=True), match="Could not connect")
    place = place_of("s3://no-such-bucket/x", s3.options, writing=True)
    refused("target", admitted, place, match="bucket does not exist")
    refused("source", open_source, "http://127.0.0.1:9/x.zarr", match="connect")


def test_missing_credentials(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    refused("source", open_source, s3.url("x"), storage_options={"endpoint_url": s3.endpoint}, match="credentials")


def test_missing_packages_and_unknown_protocols():
    refused("source", place_of, "gs://bucket/x.zarr", match="gcsfs")
    refused("source", place_of, "nosuch://x.zarr", match="nosuch")
    code = "import sys; sys.modules['fsspec'] = None; from chunkq.places import place_of; place_of('s3://b/x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "SpecError" in done.stderr.strip().splitlines()[-1]
    assert "fsspec" in done.stderr.strip().splitlines()[-1]


def test_what_is_no_location(tmp_path):
    for named in (3, None, {}, b"x", ""):
        refused("source", place_of, named)
        refused("target", place_of, named, writing=True)
    refused("source", place_of, "a\0b")
    refused("source", place_of, "s3://bucket/a/../b", match=r"'\.\.'")
    refused("target", place_of, "simplecache::s3://bucket/b", writing=True, match="another file system")
    refused("source", open_source, 3, "scale", match="scale is a int")


def test_a_chunk_folder_that_is_a_link_out_of_the_array(tmp_path):
    write(str(tmp_path / "x.zarr"))
    os.rename(tmp_path / "x.zarr" / "c", tmp_path / "c")
    (tmp_path / "x.zarr" / "c").symlink_to(tmp_path / "c")
    refused("source", open_source, tmp_path / "x.zarr", match="'c' is a link out of the array")
    # the array as a whole may be a link
    write(str(tmp_path / "y.zarr"))
    (tmp_path / "link").symlink_to(tmp_path / "y.zarr")
    np.testing.assert_array_equal(open_source(tmp_path / "link")[:], X)


# ---- local targets


@pytest.mark.parametrize("version", [2, 3])
def test_replacing_arrays_of_both_formats(tmp_path, version):
    write(str(tmp_path / "y.zarr"), zarr_format=version, attributes={"a": 1})
    place = place_of(tmp_path / "y.zarr", writing=True)
    assert admitted(place).metadata.zarr_format == version
    replace(place, layout().document())
    assert tree(tmp_path / "y.zarr") == ["zarr.json"]


def test_a_v2_array_half_replaced(tmp_path):
    write(str(tmp_path / "y.zarr"), zarr_format=2)
    place = place_of(tmp_path / "y.zarr", writing=True)
    marked = json.loads(layout().document())
    marked["attributes"][REPLACING] = True
    write_metadata(place, "", json.dumps(marked).encode())
    assert replacing(admitted(place))
    replace(place, layout().document())
    assert tree(tmp_path / "y.zarr") == ["zarr.json"]


def test_replace_killed_at_any_write(tmp_path):
    """A process that kills itself at its n-th write or removal; the rerun ends as if there had been none."""
    code = """
import os, signal, sys
from chunkq import contents, places, target
left = int(sys.argv[2])
def counted(function):
    def call(*arguments):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
contents._unlink, target.put = counted(contents._unlink), counted(target.put)
place = places.place_of(sys.argv[1], writing=True)
target.replace(place, open(sys.argv[3], "rb").read())
"""
    path, document = str(tmp_path / "y.zarr"), tmp_path / "document"
    document.write_bytes(layout().document())
    for left in (0, 1, 3, 10):
        write(path, np.ones((9, 9), np.int8), overwrite=True)
        run = functools.partial(subprocess.run, capture_output=True, timeout=60, check=False)
        assert run([sys.executable, "-c", code, path, str(left), str(document)]).returncode == -9
        found = admitted(place_of(path, writing=True))
        assert replacing(found) is (left > 0)
        replace(place_of(path, writing=True), layout().document())
        assert tree(path) == ["zarr.json"]
        assert Path(path, "zarr.json").read_bytes() == layout().document()


def test_links_and_names_in_targets(tmp_path):
    place = place_of(tmp_path / "y.zarr", writing=True)
    write(str(tmp_path / "x.zarr"))
    create(place, layout())
    (tmp_path / "y.zarr" / "c").symlink_to(tmp_path / "x.zarr")
    refused("target", admitted, place, match="holds 'c'")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    refused("target", admitted, place_of(tmp_path / "dangling", writing=True), match="is a file")
    refused("target", admitted, Place(MemoryStore(), "a/../b", "m"), match=r"'\.\.'")
    refused("target", admitted, place_of(LocalStore(tmp_path, read_only=True), writing=True), match="only read")
    (tmp_path / "file").write_text("mine")
    refused("target", admitted, place_of(tmp_path / "file", writing=True), match="is a file")
    refused("target", admitted, place_of(tmp_path / "file" / "y", writing=True), match="not a writable folder")


def test_checking_makes_nothing(tmp_path):
    assert admitted(place_of(tmp_path / "a" / "y.zarr", writing=True)) is None
    assert admitted(place_of(StorePath(LocalStore(tmp_path / "b"), "y"), writing=True)) is None
    assert tree(tmp_path) == []
    os.makedirs(tmp_path / "y.zarr" / "c" / "0")
    assert admitted(place_of(tmp_path / "y.zarr", writing=True)) is None


def test_groups_of_others_and_damaged_documents(tmp_path):
    zarr.create_group(str(tmp_path / "g"))
    refused("target", admitted, place_of(tmp_path / "g", writing=True), match=r"zarr\.json of a group")
    zarr.create_group(str(tmp_path / "g2"), zarr_format=2)
    refused("target", admitted, place_of(tmp_path / "g2", writing=True), match=r"\.zgroup of a group")
    place = place_of(tmp_path / "y", writing=True)
    for document in (b"", b"{", b"[" * 100_000, b'{"zarr_format": 3}', b"null"):
        contents.put(place, "zarr.json", document)
        refused("target", admitted, place, match=r"holds 'zarr\.json")
        refused("source", open_source, tmp_path / "y")


def test_a_process_that_used_s3_ends_and_says_nothing(s3):
    """No hanging event loop, no complaint about open sessions."""
    code = (
        "import sys, json; from chunkq.places import place_of; from chunkq.admission import check_target\n"
        "place = place_of(sys.argv[1], json.loads(sys.argv[2]), writing=True); print(check_target(place, {}))"
    )
    command = [sys.executable, "-c", code, s3.url("x.zarr"), json.dumps(s3.options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("None", "")
