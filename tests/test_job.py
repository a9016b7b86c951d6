"""Zarr to zarr: layouts, schedulers, memory, refusals. Expected values come from plain NumPy."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

import chunkq
from chunkq import grid, workers
from chunkq.memory import MIB, children
from chunkq.store import object_shape

SHAPE = (30, 40)
SCALE = np.linspace(-2, 3, 30, dtype=np.float32)
X = np.random.default_rng(0).integers(-128, 128, SHAPE, dtype=np.int8)
Y = X.astype(np.float32) * SCALE[:, None]
OP = chunkq.DequantizeLinear(SCALE, axis=0)


@pytest.fixture
def small_units(monkeypatch):
    """One stored object a unit, however small."""
    monkeypatch.setattr(workers, "UNIT_BYTES", 1)


def write(path, x=X, chunks=(10, 15), **how):
    array = zarr.create_array(str(path), shape=x.shape, chunks=chunks, dtype=x.dtype, **how)
    array[...] = x
    return str(path)


def tree(folder):
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*"))


SOURCES = {
    "v3": {},
    "v2": {"zarr_format": 2},
    "v2 F order": {"zarr_format": 2, "order": "F"},
    "sharded": {"shards": (20, 30)},
    "v2 nested": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "uncompressed": {"compressors": None},
}


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("scheduler", ["threads", "sync"])
@pytest.mark.parametrize("how", SOURCES.values(), ids=SOURCES)
def test_every_layout(tmp_path, how, scheduler):
    source = write(tmp_path / "x.zarr", **how)
    plan = chunkq.plan(OP, source, tmp_path / "y.zarr", scheduler=scheduler)
    report = plan.run()
    y = zarr.open_array(tmp_path / "y.zarr", mode="r")
    np.testing.assert_array_equal(y[:].view(np.uint32), Y.view(np.uint32))
    assert report.units == plan.units == grid.count(SHAPE, object_shape(y)) > 1
    assert (y.chunks, y.shards) == (zarr.open_array(source).chunks, zarr.open_array(source).shards)


@pytest.mark.parametrize("dtype", [">i2", ">u2", ">i4", "<i2"])
def test_byte_orders(tmp_path, dtype):
    x = X.astype(np.int32).astype(dtype) if dtype[1] != "u" else (X.astype(np.int32) + 128).astype(dtype)
    source = write(tmp_path / "x.zarr", x, zarr_format=2)
    chunkq.plan(OP, source, tmp_path / "y.zarr").run()
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "y.zarr")[:], x.astype(np.float32) * SCALE[:, None])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7,)])
def test_small_and_empty_tensors(tmp_path, shape):
    x = np.full(shape, 3, np.uint8)
    source = write(tmp_path / "x.zarr", x, chunks=tuple(max(n, 1) for n in shape))
    chunkq.plan(chunkq.DequantizeLinear(0.5, 1), source, tmp_path / "y.zarr").run()
    y = zarr.open_array(tmp_path / "y.zarr")
    assert y.shape == shape
    np.testing.assert_array_equal(np.asarray(y[...]), np.full(shape, 1.0, np.float32))


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("scheduler", ["processes", "auto", "cluster"])
def test_processes_and_clusters(tmp_path, scheduler):
    from distributed import Client, LocalCluster

    source = write(tmp_path / "x.zarr", shards=(10, 30))
    if scheduler != "cluster":
        chunkq.plan(OP, source, tmp_path / "y.zarr", scheduler=scheduler, workers=2).run()
    else:
        with (
            LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1"
            ) as cluster,
            Client(cluster) as client,
        ):
            plan = chunkq.plan(OP, source, tmp_path / "y.zarr", scheduler=cluster.scheduler_address)
            assert "cluster" in str(plan)
            plan.run()
            chunkq.plan(OP, source, tmp_path / "again.zarr", scheduler=client).run()
        np.testing.assert_array_equal(zarr.open_array(tmp_path / "again.zarr")[:], Y)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "y.zarr")[:], Y)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("layout", [((7, 9), None), ((10, 15), (20, 30)), ((40, 50), None), ((1, 40), (3, 40))])
def test_target_layouts(tmp_path, layout):
    source = write(tmp_path / "x.zarr")
    chunks, shards = layout
    plan = chunkq.plan(OP, source, tmp_path / "y.zarr", target_chunks=chunks, target_shards=shards)
    plan.run()
    y = zarr.open_array(tmp_path / "y.zarr")
    np.testing.assert_array_equal(y[:], Y)
    assert (y.chunks, y.shards) == layout
    # one writer per stored object: every unit begins and ends on object edges
    for region in grid.regions(SHAPE, plan.unit_shape):
        for part, n, k in zip(region, SHAPE, object_shape(y), strict=True):
            assert part.start % k == 0
            assert part.stop % k == 0 or part.stop == n


def test_parameters_in_zarr_and_fake_quantize(tmp_path):
    scale = write(tmp_path / "scale.zarr", SCALE, chunks=(7,))
    source = write(tmp_path / "x.zarr")
    op = chunkq.DequantizeLinear(zarr.open_array(scale), axis=0)
    chunkq.plan(op, source, tmp_path / "y.zarr").run()
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "y.zarr")[:], Y)
    low = Y.min(axis=1, keepdims=True)
    op = chunkq.FakeQuantize(low, -low, low, -low, 256)
    chunkq.plan(op, tmp_path / "y.zarr", tmp_path / "f.zarr").run()
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "f.zarr")[:], op(Y))


def test_attributes_names_and_fill(tmp_path):
    attributes = {"units": "K", "scale_factor": 0.1, "_FillValue": -128}
    source = write(tmp_path / "x.zarr", attributes=attributes, dimension_names=("band", "pixel"))
    plan = chunkq.plan(OP, source, tmp_path / "y.zarr")
    assert "missing data with _FillValue = -128" in str(plan)
    plan.run()
    y = zarr.open_array(tmp_path / "y.zarr")
    assert y.metadata.dimension_names == ("band", "pixel")
    assert np.isnan(y.fill_value)
    found = dict(y.attrs)
    assert found["units"] == "K"
    assert "scale_factor" not in found
    assert "_FillValue" not in found
    assert found["chunkq.source_attributes"] == {"scale_factor": 0.1, "_FillValue": -128}
    assert found["chunkq.operator"]["operator"] == "DequantizeLinear"
    assert found["chunkq.operator"]["attributes"]["axis"] == 0
    assert found["chunkq.complete"] is True


def test_xarray_names_of_v2_arrays(tmp_path):
    source = write(tmp_path / "x.zarr", zarr_format=2, attributes={"_ARRAY_DIMENSIONS": ["a", "b"]})
    chunkq.plan(OP, source, tmp_path / "y.zarr").run()
    assert zarr.open_array(tmp_path / "y.zarr").metadata.dimension_names == ("a", "b")


def test_every_object_is_written_and_checked(tmp_path):
    source = write(tmp_path / "x.zarr", np.zeros(SHAPE, np.int8), config={"write_empty_chunks": True})
    chunkq.plan(OP, source, tmp_path / "y.zarr", compressors="none").run()
    objects = [p for p in Path(tmp_path / "y.zarr" / "c").rglob("*") if p.is_file()]
    assert len(objects) == 9
    # a flipped bit is seen even without a compressor: crc32c
    data = bytearray(objects[0].read_bytes())
    data[3] ^= 1
    objects[0].write_bytes(data)
    with pytest.raises(ValueError, match=r"(?i)checksum"):
        zarr.open_array(tmp_path / "y.zarr")[:]


@pytest.mark.parametrize("name", ["auto", "none", "zstd", "blosc", "gzip"])
def test_compressors(tmp_path, name):
    source = write(tmp_path / "x.zarr")
    chunkq.plan(OP, source, tmp_path / "y.zarr", compressors=name).run()
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "y.zarr")[:], Y)


def test_plan_shows_everything_and_writes_nothing(tmp_path):
    source = write(tmp_path / "x.zarr")
    before = tree(tmp_path)
    plan = chunkq.plan(OP, source, tmp_path / "y.zarr", max_mem="3GiB")
    text = str(plan)
    for part in (
        "(x - zero_point) * scale",
        "per-axis, axis 0",
        "int8 (30, 40)",
        "float32",
        "(10, 15)",
        "zstd, crc32c",
    ):
        assert part in text
    fields = json.loads(plan.to_json())
    assert fields["units"] == plan.units
    assert fields["projected_memory"] == plan.memory.total <= fields["max_mem"] == 3 << 30
    assert fields["bytes_read"] == X.nbytes
    assert fields["bytes_written"] == Y.nbytes
    assert tree(tmp_path) == before


# ---- memory


def test_parameters_count_as_cut_and_as_computed_with():
    spec, _ = chunkq.DequantizeLinear(SCALE, np.zeros(30, np.int8), axis=0).bind(SHAPE, "int8")
    # 10 scales of 4 bytes and 10 zero points of 1, all once more as float32; a zarr object three times
    assert workers.params_bytes(spec, (10, 40), [100]) == 10 * (4 + 4) + 10 * (1 + 4) + 300
    full = np.zeros(SHAPE, np.float32)
    spec, _ = chunkq.FakeQuantize(full, full, full, np.float32(1), 16).bind(SHAPE, "float32")
    assert workers.params_bytes(spec, (10, 40), []) == 3 * 400 * 8 + 8


def test_too_little_memory_names_the_least(tmp_path):
    source = write(tmp_path / "x.zarr")
    with pytest.raises(chunkq.SpecError, match=r"at least [0-9.]+ MiB") as caught:
        chunkq.plan(OP, source, tmp_path / "y.zarr", max_mem="1MiB")
    assert caught.value.reason == "max_mem"
    least = str(caught.value).split("at least ")[1].split(" (")[0]
    plan = chunkq.plan(OP, source, tmp_path / "y.zarr", max_mem=float(least.split()[0]).__ceil__() * MIB + MIB)
    assert plan.memory.total <= plan.max_mem


@pytest.mark.parametrize(
    ("scheduler", "rows", "columns"),
    [("threads", 64, 4096), ("threads", 1024, 1024), ("processes", 512, 4096)],
)
def test_measured_peak_stays_below_the_projected_one_and_is_flat(tmp_path, scheduler, rows, columns):
    """R11, in fresh interpreters: 10 and 200 units of one shape take the same memory."""
    peaks = []
    for units in (10, 200):
        shape = (rows * units, columns)
        source = tmp_path / f"x{units}.zarr"
        x = zarr.create_array(str(source), shape=shape, chunks=(rows, columns), dtype="uint8", fill_value=0)
        for region in grid.regions(shape, (rows * 10, columns)):
            x[region] = np.random.default_rng(1).integers(1, 255, (rows * 10, columns), np.uint8)
        command = [sys.executable, "-m", "chunkq.cli", "dequantize", str(source), str(tmp_path / f"y{units}.zarr")]
        command += ["--scale", "0.5", "--scheduler", scheduler, "--workers", "2", "--json", "--chunks"]
        command += [f"{rows},{columns}", "--max-mem", "1GiB"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        report = json.loads(done.stdout)["report"]
        if rows * columns >= MIB:
            assert report["units"] == units
        assert report["peak_memory"] <= report["projected_memory"] <= report["max_mem"]
        peaks.append(report["peak_memory"])
    assert abs(peaks[1] - peaks[0]) < 24 * MIB


def test_processes_that_ran_before_do_not_count(tmp_path):
    source = write(tmp_path / "x.zarr")
    hold = [sys.executable, "-c", f"held = b'x' * {128 * MIB}; print(flush=True); input()"]
    with subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        report = chunkq.plan(OP, source, tmp_path / "y.zarr").run()
        assert other.pid in children(os.getpid())
        other.communicate(b"\n")
    assert report.peak_memory <= report.projected_memory


# ---- what is wrong with the data


def test_missing_objects_are_an_error_unless_filled(tmp_path):
    source = write(tmp_path / "x.zarr", fill_value=7)
    os.unlink(Path(source) / "c" / "1" / "2")
    with pytest.raises(chunkq.RunError, match=r"lacks 1 stored objects, among them c/1/2.*missing='fill'"):
        chunkq.plan(OP, source, tmp_path / "y.zarr").run()
    assert not (tmp_path / "y.zarr").exists()
    chunkq.plan(OP, source, tmp_path / "y.zarr", missing="fill").run()
    expected = X.copy()
    expected[10:20, 30:40] = 7
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "y.zarr")[:], expected.astype(np.float32) * SCALE[:, None])


def test_an_empty_object_counts_as_missing(tmp_path):
    source = write(tmp_path / "x.zarr", shards=(20, 30))
    (Path(source) / "c" / "1" / "1").write_bytes(b"")
    with pytest.raises(chunkq.RunError, match="among them c/1/1"):
        chunkq.plan(OP, source, tmp_path / "y.zarr").run()


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("scheduler", ["threads", "sync", "processes"])
def test_a_damaged_object_stops_the_run_and_is_named(tmp_path, scheduler):
    source = write(tmp_path / "x.zarr")
    (Path(source) / "c" / "1" / "2").write_bytes(b"not zstd at all")
    plan = chunkq.plan(OP, source, tmp_path / "y.zarr", scheduler=scheduler, workers=1)
    with pytest.raises(chunkq.RunError, match=r"\[10:20, 30:40\]: reading the source .* failed.*cannot be read: c/1/2"):
        plan.run()
    assert zarr.open_array(tmp_path / "y.zarr").attrs["chunkq.complete"] is False


def test_an_int32_zero_point_in_zarr_is_refused_when_it_is_read(tmp_path):
    source = write(tmp_path / "x.zarr", X.astype(np.int32))
    zero = write(tmp_path / "z.zarr", np.arange(30, dtype=np.int32), chunks=(30,))
    op = chunkq.DequantizeLinear(SCALE, zarr.open_array(zero), axis=0)
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.plan(op, source, tmp_path / "y.zarr").run()
    assert caught.value.reason == "int32_zero_point"


def _hostile(folder, **changes):
    source = Path(write(folder / "x.zarr", compressors=None))
    metadata = json.loads((source / "zarr.json").read_text())
    metadata |= {k: v for k, v in changes.items() if k != "chunk_shape"}
    if "chunk_shape" in changes:
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = changes["chunk_shape"]
    (source / "zarr.json").write_text(json.dumps(metadata))
    return source


LYING_BLOSC = bytes([2, 1, 0x21, 1]) + (2**30).to_bytes(4, "little") * 2 + (1024).to_bytes(4, "little") + bytes(1008)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"shape": [2**30, 2**30], "chunk_shape": [10, 15]}, 2),  # 2**60 elements
        ({"shape": [2**20, 2**20], "chunk_shape": [2**20, 2**20]}, 2),  # a chunk of 1 TiB
        ({"shape": [2**15, 2**15], "chunk_shape": [1, 1]}, 2),  # 2**30 chunks
        ({"shape": [-3, 40]}, 2),
        # zarr 3.4 reads a size of 0 as 1; then every object is missing
        ({"chunk_shape": [0, 15]}, 2 if zarr.__version__ < "3.2" else 1),
        ({"shape": [30]}, 2),
        ({"data_type": "complex64", "fill_value": [0, 0]}, 2),
    ],
)
def test_hostile_metadata(tmp_path, changes, code):
    """R8: a clear error under a 2 GiB address space, and nothing left behind."""
    source = _hostile(tmp_path, **changes)
    done = _limited(["dequantize", str(source), str(tmp_path / "y.zarr"), "--scale", "1", "--scheduler", "sync"])
    assert done.returncode == code, done.stderr
    assert len(done.stderr.strip().splitlines()[-1]) > 20
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "y.zarr").exists()


def test_a_lying_blosc_header(tmp_path):
    source = Path(write(tmp_path / "x.zarr", compressors=zarr.codecs.BloscCodec()))
    for path in (source / "c").rglob("*"):
        if path.is_file():
            path.write_bytes(LYING_BLOSC)
    done = _limited(["dequantize", str(source), str(tmp_path / "y.zarr"), "--scale", "1", "--scheduler", "sync"])
    assert done.returncode == 1
    assert "cannot be read: c/" in done.stderr
    assert "Traceback" not in done.stderr


def _limited(arguments):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

    command = [sys.executable, "-m", "chunkq.cli", *arguments]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        command, preexec_fn=limit, capture_output=True, text=True, env=environment, check=False, timeout=60
    )


# ---- what is wrong with the request


def _refused(reason, *arguments, **keywords):
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.plan(*arguments, **keywords).run()
    assert caught.value.reason == reason, caught.value
    assert "\n" not in str(caught.value)


def test_an_existing_target(tmp_path):
    source = write(tmp_path / "x.zarr")
    target = write(tmp_path / "y.zarr", X + np.int8(1))
    _refused("target_exists", OP, source, target)
    np.testing.assert_array_equal(zarr.open_array(target)[:], X + np.int8(1))
    chunkq.plan(OP, source, target, overwrite=True).run()
    np.testing.assert_array_equal(zarr.open_array(target)[:], Y)


def test_overwrite_removes_only_a_zarr_array(tmp_path):
    source = write(tmp_path / "x.zarr")
    guarded = {
        "file": lambda p: p.write_text("mine"),
        "folder": lambda p: (p.mkdir(), (p / "notes.txt").write_text("mine")),
        "group": lambda p: zarr.create_group(str(p)),
        "array with a stranger": lambda p: (write(p), (p / "notes.txt").write_text("mine")),
        "array with a deep stranger": lambda p: (write(p), (p / "c" / "0" / "notes").write_text("mine")),
        "array with a link": lambda p: (write(p), (p / "c" / "9").symlink_to(tmp_path / "x.zarr")),
    }
    for name, make in guarded.items():
        make(tmp_path / name)
    before = tree(tmp_path)
    for name in guarded:
        _refused("target", OP, source, tmp_path / name, overwrite=True)
    assert tree(tmp_path) == before


def test_targets_that_touch_the_source(tmp_path):
    source = write(tmp_path / "data" / "x.zarr")
    (tmp_path / "link").symlink_to(source)
    before = tree(tmp_path)
    for target in (source, f"{source}/c", f"{source}/new", tmp_path / "data", tmp_path / "link", f"{source}/../x.zarr"):
        _refused("same_array", OP, source, target, overwrite=True)
    assert tree(tmp_path) == before


def test_unwritable_targets(tmp_path):
    source = write(tmp_path / "x.zarr")
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    for target in (tmp_path / "file" / "y.zarr", "/proc/nowhere/y.zarr", "", "bad\0name", tmp_path / "y.zip"):
        _refused("target", OP, source, target)
    assert tree(tmp_path) == before


def test_requests_that_make_no_sense(tmp_path):
    source = write(tmp_path / "x.zarr")
    target = tmp_path / "y.zarr"
    before = tree(tmp_path)
    _refused("source", OP, tmp_path / "nothing.zarr", target)
    _refused("source", OP, tmp_path, target)
    _refused("source", OP, "", target)
    _refused("source", OP, 3, target)
    _refused("argument", lambda x: x, source, target)
    _refused("argument", OP, source, target, missing="ignore")
    _refused("axis", chunkq.DequantizeLinear(SCALE, axis=2), source, target)
    _refused("scale_shape", chunkq.DequantizeLinear(SCALE[1:], axis=0), source, target)
    _refused("dtype", chunkq.FakeQuantize(0.0, 1.0, 0.0, 1.0, 16), source, target)
    _refused("max_mem", OP, source, target, max_mem="lots")
    _refused("max_mem", OP, source, target, max_mem=-1)
    _refused("chunks", OP, source, target, target_chunks=(10,))
    _refused("chunks", OP, source, target, target_chunks=(10, 0))
    _refused("chunks", OP, source, target, target_chunks=(10, 10), target_shards=(15, 10))
    _refused("compressors", OP, source, target, compressors="lzma")
    _refused("scheduler", OP, source, target, scheduler="magic")
    _refused("n_threads", OP, source, target, workers=0)
    assert tree(tmp_path) == before
