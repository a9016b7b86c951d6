"""Runs from store to store: a real S3 server, also one that fails, plain HTTP, zip; what may pass and what may not."""

import functools
import http.server
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import ObjectStore, StorePath, ZipStore

import chunkq
from chunkq import workers
from chunkq.errors import RunError, SpecError
from chunkq.lock import Lock
from chunkq.places import place_of
from chunkq.retry import transient, with_retries

pytest_plugins = ("s3",)

SHAPE = (30, 40)
SCALE = np.linspace(-2, 3, 30, dtype=np.float32)
X = np.random.default_rng(0).integers(-128, 128, SHAPE, dtype=np.int8)
Y = X.astype(np.float32) * SCALE[:, None]
OP = chunkq.DequantizeLinear(SCALE, axis=0)
UNITS = 9


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """One stored object a unit, however small."""
    monkeypatch.setattr(workers, "UNIT_BYTES", 1)


def write(location, x=X, chunks=(10, 15), **how):
    array = zarr.create_array(location, shape=x.shape, chunks=chunks, dtype=x.dtype, **how)
    array[...] = x
    return array


def read(bucket, path):
    return zarr.open_array(StorePath(bucket.obstore(), path), mode="r")[...]


def command(bucket, *arguments, wait=True):
    line = [sys.executable, "-m", "chunkq.cli", *map(str, arguments)]
    if bucket is not None:
        line += ["--storage-options", json.dumps(bucket.options)]
    if not wait:
        return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)


RUN_ALL = """
import json, sys
from chunkq.cli import main
print([main.main(line, standalone_mode=False) or 0 for line in json.load(sys.stdin)])
"""


def commands(options, lines):
    """Several command lines in one process, which is started once: their exit codes, and all that they say."""
    given = json.dumps([[*map(str, line), "--storage-options", str(options)] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=given, capture_output=True, text=True, check=True, timeout=200
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stdout, done.stderr


# ---- S3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsspec", "obstore"])
@pytest.mark.parametrize(
    ("server", "scheduler"), [("s3", "threads"), ("flaky_s3", "threads"), ("flaky_s3", "processes")]
)
def test_every_store_and_scheduler(request, server, kind, scheduler):
    """R14. Of the failing server 20 % of the answers are 503."""
    bucket = request.getfixturevalue(server)
    steady = request.getfixturevalue("s3")  # the same server without the proxy
    write(StorePath(type(steady)(steady.endpoint, bucket.name).obstore(), "x"), chunks=(15, 20))
    if kind == "fsspec":
        source, target, options = bucket.url("x"), bucket.url("y"), bucket.options
    else:
        source, target, options = StorePath(bucket.obstore(), "x"), StorePath(bucket.obstore(), "y"), None
    how = {"scheduler": scheduler, "workers": 2, "storage_options": options}
    report = chunkq.plan(OP, source, target, **how).run()
    assert report.units_done == 4
    assert report.compared == ("etag", "key", "size")
    np.testing.assert_array_equal(read(type(steady)(steady.endpoint, bucket.name), "y"), Y)
    again = chunkq.plan(OP, source, target, **how)
    assert (again.state, again.run().units_done) == ("finished", 0)
    assert chunkq.verify(source, target, workers=2, storage_options=options).ok
    if server == "flaky_s3":
        assert request.getfixturevalue("flaky").failed > 10


def test_streams(s3):
    write(StorePath(s3.obstore(), "x"))
    y = np.zeros(SHAPE, np.float32)
    for region, part in chunkq.stream(OP, s3.url("x"), storage_options=s3.options):
        y[region] = part
    np.testing.assert_array_equal(y, Y)


@pytest.mark.slow
def test_a_cluster(s3):
    from distributed import Client, LocalCluster

    write(StorePath(s3.obstore(), "x"))
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1") as cluster,
        Client(cluster) as client,
    ):
        for kind, (source, target, options) in {
            "fsspec": (s3.url("x"), s3.url("y"), s3.options),
            "obstore": (StorePath(s3.obstore(), "x"), StorePath(s3.obstore(), "z"), None),
        }.items():
            chunkq.plan(OP, source, target, scheduler=client, storage_options=options).run()
            assert chunkq.verify(source, target, scheduler=client, storage_options=options).ok, kind
    np.testing.assert_array_equal(read(s3, "y"), Y)
    np.testing.assert_array_equal(read(s3, "z"), Y)


class Reached:
    """In the place of the proxy's random numbers: nothing fails, and an event is set at the n-th request."""

    def __init__(self, n):
        self.left, self.event = n, threading.Event()

    def random(self):
        self.left -= 1
        if not self.left:
            self.event.set()
        return 1.0


@pytest.mark.slow
def test_killed_and_resumed(s3, flaky, flaky_s3):
    steady = type(s3)(s3.endpoint, flaky_s3.name)
    write(StorePath(steady.obstore(), "x"), chunks=(5, 5))
    job = (
        "dequantize",
        flaky_s3.url("x"),
        flaky_s3.url("y"),
        "--scale",
        "0.5",
        "--scheduler",
        "threads",
        "--workers",
        "2",
    )
    # small chunks are gathered into few units unless the layouts say otherwise
    job += ("--chunks", "5,5")
    for requests in (60, 110):
        reached = flaky.chance = Reached(requests)
        process = command(flaky_s3, *job, wait=False)
        assert reached.event.wait(60)
        process.kill()
        process.wait()
        with pytest.raises(SpecError, match=r"nothing is there|unfinished"):
            chunkq.stream(OP, flaky_s3.url("y"), storage_options=flaky_s3.options)
    done = command(flaky_s3, *job, "--json")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(read(steady, "y"), X.astype(np.float32) * np.float32(0.5))
    assert chunkq.verify(steady.url("x"), steady.url("y"), storage_options=steady.options).ok
    names = sorted(key for key, _ in _keys(steady, "y"))
    assert names == sorted(["zarr.json", *(f"c/{i}/{j}" for i in range(6) for j in range(8))])


def _keys(bucket, path):
    from chunkq.contents import keys

    return keys(place_of(StorePath(bucket.obstore(), path)))


def test_objects_that_are_gone_are_made_again(s3):
    write(StorePath(s3.obstore(), "x"))
    place = place_of(s3.url("y"), s3.options, writing=True)
    how = {"storage_options": s3.options}
    chunkq.plan(OP, s3.url("x"), s3.url("y"), **how).run()
    sync(place.store.delete("c/1/1"))
    assert not chunkq.verify(s3.url("x"), s3.url("y"), **how).ok
    assert chunkq.plan(OP, s3.url("x"), s3.url("y"), **how).run().units_done == 1
    np.testing.assert_array_equal(read(s3, "y"), Y)


def test_one_writer_at_a_time(s3):
    write(StorePath(s3.obstore(), "x"))
    place = place_of(s3.url("y"), s3.options, writing=True)
    plan = chunkq.plan(OP, s3.url("x"), s3.url("y"), storage_options=s3.options)
    with Lock(place.store, place.path, place.shown), pytest.raises(RunError, match=f"process {os.getpid()} on host"):
        plan.run()
    plan.run()
    np.testing.assert_array_equal(read(s3, "y"), Y)


def test_another_jobs_target(s3):
    write(StorePath(s3.obstore(), "x"))
    how = {"storage_options": s3.options}
    chunkq.plan(OP, s3.url("x"), s3.url("y"), target_chunks=(5, 5), **how).run()
    with pytest.raises(SpecError, match="overwrite") as caught:
        chunkq.plan(chunkq.DequantizeLinear(2.0), s3.url("x"), s3.url("y"), **how)
    assert caught.value.reason == "target_exists"
    chunkq.plan(chunkq.DequantizeLinear(2.0), s3.url("x"), s3.url("y"), overwrite=True, **how).run()
    np.testing.assert_array_equal(read(s3, "y"), X * np.float32(2))
    assert len(list(_keys(s3, "y"))) == UNITS + 1


def test_a_source_rewritten_meanwhile(s3):
    array = write(StorePath(s3.obstore(), "x"))
    how = {"storage_options": s3.options}
    chunkq.plan(OP, s3.url("x"), s3.url("y"), **how).run()
    array[0, 0] += 1
    with pytest.raises(SpecError, match="its stored objects were rewritten"):
        chunkq.plan(OP, s3.url("x"), s3.url("y"), **how).run()


@pytest.mark.slow
def test_command_line(s3, tmp_path):
    """Quantized to a group with consolidated metadata, dequantized from there, verified; a parameter on S3 too."""
    real = np.random.default_rng(1).normal(0, 9, SHAPE).astype(np.float32)
    write(StorePath(s3.obstore(), "real"), real)
    scale = np.linspace(0.1, 1, 30, dtype=np.float32)
    write(StorePath(s3.obstore(), "scale"), scale, (7,))
    file = tmp_path / "options.json"
    file.write_text(json.dumps(s3.options))

    codes, said, complaints = commands(
        file,
        [
            ("quantize", s3.url("real"), s3.url("q"), "--scale", s3.url("scale"), "--dtype", "int8", "--consolidate"),
            ("dequantize", s3.url("q"), s3.url("y")),
            ("dequantize", s3.url("q/data"), s3.url("z"), "--scale", s3.url("scale")),
            ("verify", s3.url("real"), s3.url("q")),
            ("verify", s3.url("q"), s3.url("y")),
            ("verify", s3.url("q/data"), s3.url("z")),
        ],
    )
    assert codes == [0] * 6, complaints
    assert said.count("every bit is the same") == 3
    group = zarr.open_group(StorePath(s3.obstore(), "q"), mode="r")
    assert group.metadata.consolidated_metadata is not None
    q = np.asarray(chunkq.QuantizeLinear(scale, axis=0, output_dtype="int8")(real))
    np.testing.assert_array_equal(read(s3, "q/data"), q)
    np.testing.assert_array_equal(read(s3, "y"), q * scale[:, None])
    np.testing.assert_array_equal(read(s3, "z"), q * scale[:, None])
    zarr.open_array(StorePath(s3.obstore(), "y"), mode="r+")[0, 0] = 99
    assert command(s3, "verify", s3.url("q"), s3.url("y")).returncode == 1  # the options as JSON text


# ---- credentials


def everything_stored(bucket):
    store = bucket.obstore()

    async def contents():
        return [(await store.get(key, default_buffer_prototype())).to_bytes() async for key in store.list()]

    return b"".join(sync(contents()))


@pytest.mark.slow
def test_no_credentials_are_told(s3, tmp_path):
    secret = "hush-hush-hush"
    bucket = type(s3)(s3.endpoint, s3.name)
    options = bucket.options | {"secret": secret, "key": f"key-{secret}"}
    write(StorePath(bucket.obstore(), "x"))
    write(StorePath(bucket.obstore(), "scale"), SCALE, (7,))
    file = tmp_path / "options.json"
    file.write_text(json.dumps(options))
    refused = options | {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}}
    job = ("dequantize", bucket.url("x"), bucket.url("y"), "--scale", bucket.url("scale"))
    codes, *said = commands(
        file,
        [
            ("plan", *job),
            job,
            (*job, "--json"),
            ("verify", bucket.url("x"), bucket.url("y"), "--json"),
            ("dequantize", bucket.url("x"), bucket.url("y"), "--scale", "9"),
            ("dequantize", bucket.url("none"), bucket.url("y"), "--scale", "9"),
            ("dequantize", "s3://no-such-bucket/x", bucket.url("y"), "--scale", "9"),
        ],
    )
    assert codes == [0, 0, 0, 0, 2, 2, 2]
    codes, *more = commands(json.dumps(refused), [job, ("verify", bucket.url("x"), bucket.url("y"))])
    assert codes == [2, 2]
    said += more
    assert sum(map(len, said)) > 1000
    assert secret not in "".join(said)
    stored = everything_stored(bucket)
    assert b"chunkq.operator" in stored
    assert secret.encode() not in stored


# ---- HTTP


class Files(http.server.SimpleHTTPRequestHandler):
    """A folder, with ranges. What the server is told to `refuse` it refuses."""

    def send_head(self):
        self.server.asked.append((self.command, self.path, self.headers.get("Range")))
        status = next((code for part, code in self.server.refuse.items() if part in self.path), None)
        if status:
            self.send_error(status)
            return None
        path = self.translate_path(self.path)
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if not wanted or not os.path.isfile(path):
            return super().send_head()
        size = os.path.getsize(path)
        first, last = wanted.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        file = open(path, "rb")  # noqa: SIM115 - its caller closes it
        file.seek(start)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.left = stop - start
        return file

    def copyfile(self, source, outputfile):
        outputfile.write(source.read(self.__dict__.pop("left", -1)))

    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path):
    """A folder behind HTTP: `folder`, `url`, what was `asked`, what to `refuse`."""
    folder = tmp_path / "web"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(folder)))
    server.asked, server.refuse = [], {}
    server.folder, server.url = folder, f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


LAYOUTS = {"v3": {}, "v2": {"zarr_format": 2}, "sharded": {"shards": (20, 30)}}


@pytest.mark.parametrize("how", LAYOUTS.values(), ids=LAYOUTS)
def test_http_sources(web, tmp_path, how):
    write(str(web.folder / "x.zarr"), **how)
    target = str(tmp_path / "y.zarr")
    chunkq.plan(OP, f"{web.url}/x.zarr", target, target_chunks=(10, 15)).run()
    np.testing.assert_array_equal(zarr.open_array(target)[:], Y)
    assert chunkq.verify(f"{web.url}/x.zarr", target).ok
    ranges = [wanted for _, path, wanted in web.asked if wanted and "/c/" in path]
    assert bool(ranges) == ("shards" in how)
    with pytest.raises(SpecError) as caught:
        chunkq.plan(OP, str(web.folder / "x.zarr"), f"{web.url}/z.zarr")
    assert caught.value.reason == "target"


def test_obstores_http(web, tmp_path):
    from obstore.store import HTTPStore

    write(str(web.folder / "x.zarr"), shards=(20, 30))
    store = HTTPStore.from_url(f"{web.url}/x.zarr", client_options={"allow_http": True})
    chunkq.plan(OP, ObjectStore(store, read_only=True), tmp_path / "y.zarr").run()
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "y.zarr")[:], Y)


def test_http_objects_that_are_missing_or_forbidden(web, tmp_path):
    write(str(web.folder / "x.zarr"))
    (web.folder / "x.zarr" / "c" / "1" / "1").unlink()
    with pytest.raises(RunError, match="c/1/1"):
        chunkq.plan(OP, f"{web.url}/x.zarr", tmp_path / "y.zarr").run()
    assert not (tmp_path / "y.zarr").exists()
    web.refuse["c/2/0"] = 403
    web.asked.clear()
    with pytest.raises(RunError, match="403"):
        chunkq.plan(OP, f"{web.url}/x.zarr", tmp_path / "y.zarr", missing="fill", retries=5).run()
    assert sum("c/2/0" in path for _, path, _ in web.asked) <= 3


def test_a_password_in_a_url_is_not_told(web, tmp_path):
    write(str(web.folder / "x.zarr"))
    url = f"{web.url.replace('//', '//user:hush-hush@')}/x.zarr"
    said = [str(chunkq.plan(OP, url, tmp_path / "y.zarr")), chunkq.plan(OP, url, tmp_path / "y.zarr").to_json()]
    chunkq.plan(OP, url, tmp_path / "y.zarr").run()
    said.append((tmp_path / "y.zarr" / "zarr.json").read_text())
    web.refuse["c/1/1"] = 403
    said.append(str(chunkq.verify(url, tmp_path / "y.zarr")))
    assert "403" in said[-1]
    for call in (
        lambda: chunkq.plan(OP, url, tmp_path / "z.zarr", missing="fill").run(),
        lambda: list(chunkq.stream(OP, url, missing="fill")),
    ):
        with pytest.raises(RunError) as caught:
            call()
        said.append(str(caught.value))
    assert "hush" not in "".join(said)


# ---- zip


@pytest.mark.parametrize("scheduler", ["threads", "processes"])
def test_zip_sources(tmp_path, scheduler):
    with ZipStore(tmp_path / "x.zip", mode="w") as store:
        zarr.create_group(store)
        write(StorePath(store, "inner/x"), shards=(20, 30))
    source = f"{tmp_path}/x.zip/inner/x"
    chunkq.plan(OP, source, tmp_path / "y.zarr", scheduler=scheduler, workers=2, target_chunks=(10, 15)).run()
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "y.zarr")[:], Y)
    assert chunkq.verify(source, tmp_path / "y.zarr").ok
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        assert archive.testzip() is None
    with pytest.raises(SpecError, match="zip"):
        chunkq.plan(OP, source, tmp_path / "y.zip")


# ---- what may pass


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers every request as the server is told: with a status and an S3 code, or not at all."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests += 1
        how = self.server.how
        if how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif how == "silence":
            self.server.over.wait(20)
        if isinstance(how, str):
            self.close_connection = True
            return
        status, code = how
        body = f"<Error><Code>{code}</Code><Message>so it is</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

    def log_message(self, *_):
        pass


class Quiet(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):
        pass


@pytest.fixture(scope="module")
def answers():
    server = Quiet(("127.0.0.1", 0), Answers)
    server.how, server.requests, server.over = "reset", 0, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def by_s3fs(url):
    patient = {"config_kwargs": {"retries": {"max_attempts": 0}, "read_timeout": 0.3, "connect_timeout": 0.3}}
    options = {"key": "some-key", "secret": "some-secret", "endpoint_url": url} | patient
    return place_of("s3://bucket/x", options, writing=True).store


def by_obstore(url):
    from datetime import timedelta

    from obstore.store import S3Store

    return ObjectStore(
        S3Store(
            "bucket",
            endpoint=url,
            access_key_id="some-key",
            secret_access_key="some-secret",
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "300ms"},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        )
    )


def by_http(url):
    from aiohttp import ClientTimeout

    return place_of(f"{url}/x", {"client_kwargs": {"timeout": ClientTimeout(total=0.3)}}).store


def failure(store, write):
    """The error of a request, None where there is none."""
    prototype = default_buffer_prototype()

    async def request():
        if write:
            await store.set("a", prototype.buffer.from_bytes(b"content"))
        else:
            await store.get("a", prototype)

    try:
        sync(request())
    except Exception as error:  # noqa: BLE001 - which one is the question
        return error
    return None


PASSING = [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests"), (502, ""), "reset"]
LASTING = [(403, "AccessDenied"), (403, "SignatureDoesNotMatch"), (401, ""), (400, "InvalidArgument")]


@pytest.mark.parametrize(
    ("library", "write"),
    [(by_s3fs, False), (by_s3fs, True), (by_obstore, False), (by_obstore, True), (by_http, False)],
)
def test_errors_of_stores(answers, library, write):
    store = library(answers.url)
    for expected, hows in ((True, PASSING), (False, LASTING)):
        for answers.how in hows:
            error = failure(store, write)
            assert error is not None, answers.how
            assert transient(error) is expected, (answers.how, repr(error))
    if write:
        answers.how = (404, "NoSuchBucket")
        assert not transient(failure(store, write))


@pytest.mark.parametrize("library", [by_s3fs, by_obstore, by_http])
def test_nobody_answers(answers, library):
    assert transient(failure(library("http://127.0.0.1:9"), False))
    if library is not by_s3fs:  # it tries five times by itself
        answers.how = "silence"
        assert transient(failure(library(answers.url), False))


def test_errors_of_this_machine(tmp_path):
    with pytest.raises(OSError, match="Input/output") as caught, open("/proc/self/mem", "rb") as file:
        file.read(1)
    assert transient(caught.value)
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(OSError, match=r"No such|Is a directory") as caught:
            path.read_bytes()
        assert not transient(caught.value)
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space") as caught, open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")
        assert not transient(caught.value)


def test_how_often():
    for error, times in ((ConnectionResetError(104, "reset"), 3), (PermissionError("no"), 1), (ValueError("no"), 1)):
        calls = []

        def call(error=error, calls=calls):
            calls.append(1)
            raise error

        with pytest.raises(type(error)):
            with_retries(call, 2)
        assert len(calls) == times


def test_what_is_forbidden_is_not_asked_for_long(answers):
    answers.how = (403, "AccessDenied")
    for call in (
        lambda: chunkq.stream(OP, StorePath(by_obstore(answers.url), "x")),
        lambda: chunkq.plan(OP, StorePath(by_s3fs(answers.url), "x"), "y"),
    ):
        answers.requests = 0
        with pytest.raises(SpecError, match=r"access denied|Forbidden|403"):
            call()
        assert answers.requests <= 2
