"""Other readers and writers of zarr, other memory, other machines' instructions: the bits stay the same."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import zarr
from conftest import USABLE
from zarr.codecs import BytesCodec, TransposeCodec

import chunkq
from chunkq import workers

SHAPE = (30, 40)
SCALE = np.linspace(-2, 3, 30, dtype=np.float32)
X = np.random.default_rng(0).integers(-30000, 30000, SHAPE, dtype=np.int16)
Y = X.astype(np.float32) * SCALE[:, None]
REAL = np.random.default_rng(1).normal(0, 3, SHAPE).astype(np.float32)
REAL[0, :8] = [np.nan, -0.0, 0.0, np.inf, -np.inf, 1e-45, 3e38, -1]
OP = chunkq.DequantizeLinear(SCALE, axis=0)
CHUNKS = (10, 15)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """One stored object a unit, however small."""
    monkeypatch.setattr(workers, "UNIT_BYTES", 1)


def write(path, x, chunks=CHUNKS, dtype=None, **how):
    array = zarr.create_array(str(path), shape=x.shape, chunks=chunks, dtype=dtype or x.dtype, **how)
    array[...] = x
    return str(path)


# ---- R16: what is read and what is written


SOURCES = {
    "v2": {"zarr_format": 2},
    "v2 big-endian": {"zarr_format": 2, "dtype": ">i2"},
    "v2 F order": {"zarr_format": 2, "order": "F"},
    "v2 big-endian in F order": {"zarr_format": 2, "dtype": ">i2", "order": "F"},
    "v2 nested": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "v3": {},
    "v3 big-endian": {"serializer": BytesCodec(endian="big")},
    "v3 transposed": {"filters": [TransposeCodec(order=(1, 0))]},
    "v3 transposed and big-endian": {
        "filters": [TransposeCodec(order=(1, 0))],
        "serializer": BytesCodec(endian="big"),
    },
    "v3 sharded": {"shards": (20, 30)},
    "v3 sharded and transposed": {"shards": (20, 30), "filters": [TransposeCodec(order=(1, 0))]},
    "v3 keys of v2": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
}
TARGETS = {
    "float32": (OP, X, Y),
    "float16": (chunkq.DequantizeLinear(np.float16(0.001)), X, None),
    "bfloat16": (chunkq.DequantizeLinear(0.001, output_dtype="bfloat16"), X, None),
    "int8": (chunkq.QuantizeLinear(0.05, output_dtype="int8"), REAL, None),
    "int4": (chunkq.QuantizeLinear(0.5, output_dtype="int4"), REAL, None),
    "float8": (chunkq.QuantizeLinear(0.5, output_dtype="float8_e4m3fn"), REAL, None),
    "fake quantize": (chunkq.FakeQuantize(-1.0, 1.0, -1.0, 1.0, 255), REAL, None),
    "float64": (chunkq.FakeQuantize(-1.0, 1.0, -1.0, 1.0, 255), REAL.astype(np.float64), None),
}
STORED = {
    "none": {"compressors": "none"},
    "zstd": {"compressors": "zstd"},
    "blosc": {"compressors": "blosc"},
    "gzip": {"compressors": "gzip"},
    "sharded": {"target_shards": (20, 30), "target_chunks": CHUNKS},
}


@pytest.mark.parametrize("how", SOURCES.values(), ids=SOURCES)
def test_every_source(tmp_path, how):
    source = write(tmp_path / "x.zarr", X, **how)
    chunkq.plan(OP, source, tmp_path / "y.zarr").run()
    y = zarr.open_array(tmp_path / "y.zarr", mode="r")
    np.testing.assert_array_equal(y[:].view(np.uint32), Y.view(np.uint32))
    assert chunkq.verify(source, tmp_path / "y.zarr").ok


def plain_bytes(array):
    """Of the values in C order, little-endian."""
    array = np.asarray(array)
    little = array.dtype.newbyteorder("<") if array.dtype.kind != "V" else array.dtype
    return np.ascontiguousarray(array, little).tobytes()


def digest(array):
    return hashlib.sha256(plain_bytes(array)).hexdigest()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Targets of every type and layout: the path of each array, and the digest of the values that NumPy gives."""
    folder = tmp_path_factory.mktemp("written")
    found = {}
    for name, (op, x, expected) in TARGETS.items():
        expected = np.asarray(op(x)) if expected is None else expected
        source = write(folder / f"{name} x.zarr", x)
        for stored, how in STORED.items():
            path = folder / f"{name} {stored}.zarr"
            chunkq.plan(op, source, path, **how).run()
            node = zarr.open(path, mode="r")
            array = path / "data" if isinstance(node, zarr.Group) else path
            holder = zarr.open_array(array, mode="r").dtype
            found[str(array)] = digest(expected.astype(holder) if "int" in expected.dtype.name else expected)
    return found


def test_this_zarr_reads_what_is_written(written):
    assert {path: digest(zarr.open_array(path, mode="r")[...]) for path in written} == written


def test_tensorstore_reads_what_is_written(written):
    tensorstore = pytest.importorskip("tensorstore", reason="no wheel for this Python")

    def read(path):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        return tensorstore.open(spec, read=True).result().read().result()

    assert {path: digest(read(path)) for path in written} == written


READ_ALL = """
import hashlib, json, sys
import numpy as np, zarr
def digest(path):
    array = np.asarray(zarr.open_array(path, mode="r")[...])
    return hashlib.sha256(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()).hexdigest()
print(zarr.__version__, file=sys.stderr)
print(json.dumps({path: digest(path) for path in json.load(sys.stdin)}))
"""

WRITE_ALL = """
import json, sys
import numpy as np, zarr
from zarr.codecs import BytesCodec, TransposeCodec
folder = sys.argv[1]
x = np.load(sys.argv[2])
hows = {
    "v2": {"zarr_format": 2},
    "v2 big-endian": {"zarr_format": 2, "dtype": ">i2", "order": "F"},
    "v3": {},
    "v3 other": {"filters": [TransposeCodec(order=(1, 0))], "serializer": BytesCodec(endian="big")},
    "v3 sharded": {"shards": (20, 30)},
}
for name, how in hows.items():
    array = zarr.create_array(f"{folder}/{name}", shape=x.shape, chunks=(10, 15), **{"dtype": x.dtype, **how})
    array[...] = x
print(json.dumps(list(hows)))
"""


@pytest.fixture
def other_python():
    """An interpreter with another version of zarr."""
    found = os.environ.get("CHUNKQ_OTHER_PYTHON")
    if not found:
        pytest.skip("CHUNKQ_OTHER_PYTHON names no interpreter with another zarr")

    def run(code, *arguments, given=""):
        line = [found, "-c", code, *map(str, arguments)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(line, input=given, capture_output=True, text=True, check=False, timeout=120, env=clean)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_the_other_zarr_reads_what_is_written(written, other_python):
    assert other_python(READ_ALL, given=json.dumps(list(written))) == written


def test_what_the_other_zarr_writes_is_read(tmp_path, other_python):
    np.save(tmp_path / "x.npy", X)
    names = other_python(WRITE_ALL, tmp_path, tmp_path / "x.npy")
    for name in names:
        target = tmp_path / f"{name} y.zarr"
        chunkq.plan(OP, tmp_path / name, target).run()
        np.testing.assert_array_equal(zarr.open_array(target)[...].view(np.uint32), Y.view(np.uint32), err_msg=name)
    assert len(names) == 5


# ---- R10: one table of bits


REQUESTS = {
    "dequantize": (OP, X),
    "quantize": (chunkq.QuantizeLinear(0.05, output_dtype="int8"), REAL),
    "quantize to float8": (chunkq.QuantizeLinear(0.5, output_dtype="float8_e5m2"), REAL),
    "fake quantize": (chunkq.FakeQuantize(-1.0, SCALE[:, None] + 9, -1.0, SCALE[:, None] + 9, 255), REAL),
}
GRIDS = [((30, 40), None), ((10, 15), None), ((7, 3), None), ((10, 15), (20, 30))]
# what a run on this machine, in the memory of this process, is compared with
BASELINE = {name: plain_bytes(op(x, n_threads=1)) for name, (op, x) in REQUESTS.items()}
REQUEST = pytest.mark.parametrize("name", REQUESTS)


def stored(folder, name):
    node = zarr.open(folder, mode="r")
    array = node["data"] if isinstance(node, zarr.Group) else node
    return plain_bytes(array[...])


@REQUEST
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("endian", ["<", ">"])
def test_numpy(isa, name, threads, order, endian):
    op, x = REQUESTS[name]
    x = x.astype(x.dtype.newbyteorder(endian))
    if order == "strided":
        wide = np.zeros((x.shape[0] * 2, x.shape[1] * 3), x.dtype)
        wide[::2, ::3] = x
        x = wide[::2, ::3]
    elif order == "F":
        x = np.asfortranarray(x)
    assert plain_bytes(op(x, n_threads=threads)) == BASELINE[name]


@REQUEST
@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_runs_in_this_process(tmp_path, isa, name, scheduler):
    op, x = REQUESTS[name]
    for index, (chunks, shards) in enumerate(GRIDS):
        for layout, how in {"C": {}, ">": {"serializer": BytesCodec(endian="big")}}.items():
            source = write(tmp_path / f"x{index}{layout}", x, chunks, shards=shards, **how)
            target = tmp_path / f"y{index}{layout}"
            chunkq.plan(op, source, target, scheduler=scheduler, workers=2).run()
            assert stored(target, name) == BASELINE[name], (chunks, shards, layout)


@REQUEST
def test_dask_in_this_process(isa, name):
    import dask.array as da

    op, x = REQUESTS[name]
    for scheduler in ("sync", "threads"):
        for chunks, _ in GRIDS:
            y = op(da.from_array(x, chunks=chunks)).compute(scheduler=scheduler)
            assert plain_bytes(y) == BASELINE[name], (scheduler, chunks)


@pytest.mark.slow
@pytest.mark.parametrize("forced", USABLE)
@pytest.mark.parametrize("kind", ["processes", "cluster"])
def test_runs_in_other_processes(tmp_path, monkeypatch, kind, forced):
    """Workers take the instruction set of their environment."""
    from distributed import Client, LocalCluster

    monkeypatch.setenv("CHUNKQ_ISA", forced)
    sources = {name: write(tmp_path / f"{name} x", x, (10, 15)) for name, (_, x) in REQUESTS.items()}

    def run_all(scheduler):
        for name, (op, _) in REQUESTS.items():
            target = tmp_path / f"{name} y"
            chunkq.plan(op, sources[name], target, scheduler=scheduler, workers=2).run()
            assert stored(target, name) == BASELINE[name], name

    if kind == "processes":
        run_all("processes")
        return
    local = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0", "host": "127.0.0.1"}
    with LocalCluster(**local) as cluster, Client(cluster) as client:

        def active():  # goes to the workers as it is: they cannot import the tests
            from chunkq.kernels import ISA

            return ISA

        assert set(client.run(active).values()) == {forced}
        run_all(client)


def test_the_forced_instruction_set_is_used():
    for forced in USABLE:
        code = "from chunkq.kernels import ISA; print(ISA)"
        environment = os.environ | {"CHUNKQ_ISA": forced}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == forced
