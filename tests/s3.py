"""Fixtures: an S3 server (moto) in a process of its own on loopback, and a proxy before it that fails at random.

A test file asks for them with ``pytest_plugins = ("s3",)``.
"""

import http.client
import random
import re
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

KEY, SECRET = "some-key", "some-secret"
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass(frozen=True)
class Bucket:
    """A bucket of its own for each test."""

    endpoint: str
    name: str

    @property
    def options(self):
        """Storage options of fsspec."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}

    def url(self, path):
        return f"s3://{self.name}/{path}"

    def obstore(self, prefix=None):
        """The same as zarr's ObjectStore."""
        from obstore.store import S3Store
        from zarr.storage import ObjectStore

        return ObjectStore(
            S3Store(
                self.name,
                prefix=prefix,
                endpoint=self.endpoint,
                access_key_id=KEY,
                secret_access_key=SECRET,
                region="us-east-1",
                client_options={"allow_http": True},
            )
        )


@pytest.fixture(scope="session")
def s3_server():
    """Endpoint of an S3 server; it chooses the port, and says so once it listens."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    found = None
    for line in process.stderr:
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        if found:
            break
    assert found, f"moto_server ended with {process.wait()}"
    # it logs every request: a full pipe would stop it
    drain = threading.Thread(target=lambda: [None for _ in process.stderr], daemon=True)
    drain.start()
    yield found.group()
    process.kill()
    process.wait()
    drain.join()
    process.stderr.close()


def _new_bucket(endpoint):
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=30)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()
    return name


@pytest.fixture
def s3(s3_server):
    """A new bucket."""
    return Bucket(s3_server, _new_bucket(s3_server))


@dataclass
class Flaky:
    """What the proxy does and did: `share` of the requests is answered by 503 and goes no further."""

    share: float = 0.2
    requests: int = 0
    failed: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fails(self):
        with self.lock:
            self.requests += 1
            failing = self.chance.random() < self.share
            self.failed += failing
            return failing


def _handler(server, flaky):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if flaky.fails():
                self.answer(503, {"Content-Type": "application/xml"}, SLOW_DOWN)
                return
            connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=30)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            headers = {k: v for k, v in response.getheaders() if k.lower() not in HOP_BY_HOP}
            self.answer(response.status, headers, response.read(), response.getheader("Content-Length"))
            connection.close()

        def answer(self, status, headers, body, length=None):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        def log_message(self, *_):
            pass

    return Handler


@pytest.fixture
def flaky(s3_server):
    """A proxy before the S3 server; set its `share`, read its `requests` and `failed`."""
    flaky = Flaky()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(s3_server, flaky))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    flaky.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield flaky
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def flaky_s3(s3_server, flaky):
    """A new bucket behind the proxy: 20 % of the answers are 503."""
    return Bucket(flaky.endpoint, _new_bucket(s3_server))
