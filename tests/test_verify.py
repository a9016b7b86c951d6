"""verify: what it finds and what it says, for every kind of target, over whole and damaged ones."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import zarr

import chunkq
from chunkq import workers
from chunkq.errors import RunError, SpecError

SHAPE = (30, 40)
SCALE = np.linspace(-2, 3, 30, dtype=np.float32)
X = np.random.default_rng(0).integers(-128, 128, SHAPE, dtype=np.int8)
REAL = np.random.default_rng(1).normal(0, 3, SHAPE).astype(np.float32)
REAL[0, :8] = [np.nan, -0.0, 0.0, np.inf, -np.inf, 1e-45, 3e38, -1]
OP = chunkq.DequantizeLinear(SCALE, axis=0)
LARGE = np.linspace(0.1, 1, X.size, dtype=np.float32).reshape(SHAPE)  # recorded by its digest


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """One stored object a unit, however small."""
    monkeypatch.setattr(workers, "UNIT_BYTES", 1)


def write(path, x=X, chunks=(10, 15), **how):
    array = zarr.create_array(str(path), shape=x.shape, chunks=chunks, dtype=x.dtype, **how)
    array[...] = x
    return str(path)


def make(tmp_path, op=OP, x=X, source=None, **how):
    """A source and a finished target."""
    source = source or write(tmp_path / "x.zarr", x)
    target = str(tmp_path / "y.zarr")
    chunkq.plan(op, source, target, **how).run()
    return source, target


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "chunkq.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


OPERATORS = {
    "float32": (OP, X),
    "float16": (chunkq.DequantizeLinear(np.float16(0.1)), X),
    "bfloat16": (chunkq.DequantizeLinear(0.1, output_dtype="bfloat16"), X),
    "int8": (chunkq.QuantizeLinear(0.05, output_dtype="int8"), REAL),
    "int4": (chunkq.QuantizeLinear(0.5, output_dtype="int4"), REAL),
    "uint2": (chunkq.QuantizeLinear(0.5, output_dtype="uint2"), REAL),
    "float8": (chunkq.QuantizeLinear(0.5, output_dtype="float8_e4m3fn"), REAL),
    "float4": (chunkq.QuantizeLinear(0.5, output_dtype="float4_e2m1fn"), REAL),
    "quantize and dequantize": (chunkq.QuantizeDequantize(0.5, quantized_dtype="int4"), REAL),
    "fake quantize": (chunkq.FakeQuantize(-1.0, 1.0, -1.0, 1.0, 255), REAL),
    "fake quantize float64": (chunkq.FakeQuantize(-1.0, 1.0, -1.0, 1.0, 255), REAL.astype(np.float64)),
    "NaN and -0.0": (chunkq.DequantizeLinear(np.float32([np.nan, -0.0, np.inf] * 10), axis=0), X),
}


@pytest.mark.parametrize(("op", "x"), OPERATORS.values(), ids=OPERATORS)
def test_every_operator_and_type(tmp_path, op, x):
    """A finished target is right; one element of another value, stored as zarr stores it, is found with its region."""
    source, target = make(tmp_path, op, x)
    found = chunkq.verify(source, target)
    assert found.ok, found
    assert (found.checked, found.lacking) == (found.units, 0)
    assert str(found).endswith("every bit is the same")
    array = zarr.open(target, mode="r+")
    array = array["data"] if isinstance(array, zarr.Group) else array
    element = np.asarray(array[15, 20]).reshape(1)
    bits = element.view(f"u{element.dtype.itemsize}")
    bits ^= bits.dtype.type(1)
    array[15, 20] = element[0]
    found = chunkq.verify(source, target)
    assert not found.ok
    assert [(o.region, o.message) for o in found.differing] == [("[10:20, 15:30]", "1 of 150 elements")]
    assert "1 with differences" in str(found)
    assert "every bit" not in str(found)


@pytest.mark.parametrize(
    ("before", "after"),
    [(0.0, -0.0), (np.float32(np.nan), np.uint32(0x7FC00001).view(np.float32)), (np.nan, 0.0)],
    ids=["-0.0", "payload of a NaN", "NaN"],
)
def test_bits_are_compared_and_not_values(tmp_path, before, after):
    x = np.full(SHAPE, before, np.float32)
    x[:, ::2] = 0.7  # zarr does not store what is nothing but the fill value
    source, target = make(tmp_path, chunkq.FakeQuantize(-1.0, 1.0, -1.0, 1.0, 3), x)
    assert chunkq.verify(source, target).ok
    zarr.open_array(target, mode="r+")[29, 39] = after
    assert [o.region for o in chunkq.verify(source, target).differing] == ["[20:30, 30:40]"]


LAYOUTS = {
    "v2 source": ({"zarr_format": 2}, {}),
    "F order": ({"zarr_format": 2, "order": "F"}, {}),
    "sharded source": ({"shards": (20, 30)}, {}),
    "sharded target": ({}, {"target_chunks": (10, 15), "target_shards": (20, 30)}),
    "other chunks": ({}, {"target_chunks": (7, 9)}),
    "no codec": ({}, {"compressors": "none"}),
}


@pytest.mark.parametrize(("source_layout", "target_layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout(tmp_path, source_layout, target_layout):
    source, target = make(tmp_path, source=write(tmp_path / "x.zarr", **source_layout), **target_layout)
    assert chunkq.verify(source, target).ok
    zarr.open_array(target, mode="r+")[0, 0] = 1
    assert len(chunkq.verify(source, target).differing) == 1


def test_a_source_that_was_rewritten_is_mentioned(tmp_path):
    source, target = make(tmp_path)
    assert not chunkq.verify(source, target).source_changed
    key = next(p for p in (tmp_path / "x.zarr").rglob("*") if p.is_file() and p.name != "zarr.json")
    os.utime(key, (1, 1))
    found = chunkq.verify(source, target)
    assert (found.ok, found.source_changed) == (True, True)
    assert "not those that the run read" in str(found)


def test_missing_and_damaged_objects(tmp_path):
    source, target = make(tmp_path)
    shutil.copytree(target, tmp_path / "whole.zarr")
    (tmp_path / "y.zarr" / "c" / "1" / "1").unlink()
    found = chunkq.verify(source, target)
    assert (found.ok, found.missing_objects, found.missing_keys, found.lacking) == (False, 1, ("c/1/1",), 1)
    assert "8 of 9 units compared" in str(found)
    assert "in these every bit is the same" in str(found)
    assert "missing: 1 object, among them c/1/1; not compared, since they lack some: 1 unit" in str(found)
    (tmp_path / "y.zarr" / "c" / "0" / "2").write_bytes(b"junk")
    found = chunkq.verify(source, target)
    assert [[key for key, _ in o.keys] for o in found.failed] == [["c/0/2"]]
    assert "7 of 9 units compared" in str(found)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["7", "missing:", "[0:10,"]
    assert lines[2].startswith("[0:10, 30:40] cannot be checked")
    shutil.rmtree(tmp_path / "y.zarr" / "c")
    found = chunkq.verify(source, target)
    assert (found.missing_objects, found.checked) == (9, 0)
    assert "0 of 9 units compared" in str(found)
    assert "every bit" not in str(found)


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path):
    source, target = make(tmp_path, compressors="none")
    path = tmp_path / "y.zarr" / "c" / "2" / "0"
    content = bytearray(path.read_bytes())
    content[7] ^= 16
    path.write_bytes(content)
    found = chunkq.verify(source, target)
    assert [o.keys[0][0] for o in found.failed] == ["c/2/0"]
    assert "checksum" in found.failed[0].message.lower()


def test_damaged_sources(tmp_path):
    source, target = make(tmp_path)
    (tmp_path / "x.zarr" / "c" / "1" / "1").write_bytes(b"junk")
    found = chunkq.verify(source, target)
    assert [[key for key, _ in o.keys] for o in found.failed] == [["c/1/1"]]
    assert "x.zarr" in found.failed[0].message


def test_another_content_of_the_source(tmp_path):
    source, target = make(tmp_path)
    zarr.open_array(source, mode="r+")[25, 35] += 1
    assert [o.region for o in chunkq.verify(source, target).differing] == ["[20:30, 30:40]"]


def test_objects_of_a_groups_parameters(tmp_path):
    source, target = make(
        tmp_path, chunkq.QuantizeLinear(np.full(30, 0.5, np.float32), axis=0, output_dtype="int8"), REAL
    )
    assert chunkq.verify(source, target).ok
    scale = tmp_path / "y.zarr" / "scale" / "c" / "0"
    content = scale.read_bytes()
    scale.unlink()
    found = chunkq.verify(source, target)
    assert not found.ok
    assert (found.missing_objects, found.missing_keys) == (1, ("scale/c/0",))
    scale.write_bytes(b"junk")
    with pytest.raises(RunError, match=r"parameters.*y\.zarr/scale"):
        chunkq.verify(source, target)
    scale.write_bytes(content)
    assert chunkq.verify(source, target).ok


def test_unfinished_targets(tmp_path):
    source, target = make(tmp_path)
    zarr.open_array(target, mode="r+").attrs["chunkq.complete"] = False
    found = chunkq.verify(source, target)
    assert (found.ok, found.complete, found.differing) == (False, False, ())
    assert "unfinished" in str(found)


def test_a_sample_is_chosen_by_its_seed(tmp_path):
    source, target = make(tmp_path, source=write(tmp_path / "x.zarr", chunks=(3, 4)))
    zarr.open_array(target, mode="r+")[:] = 1
    units = 100

    def regions(**how):
        found = chunkq.verify(source, target, **how)
        assert found.checked == len(found.differing)
        return [o.region for o in found.differing]

    assert len(regions()) == units
    assert regions(sample=1.0) == regions()
    tenth = regions(sample=0.1, seed=1)
    assert len(tenth) == units // 10
    assert tenth == regions(sample=0.1, seed=1)
    assert tenth != regions(sample=0.1, seed=2)
    assert len(regions(sample=1e-9)) == 1
    for sample in (0, -1, 1.1, "x", True, np.nan):
        with pytest.raises(SpecError, match="sample"):
            chunkq.verify(source, target, sample=sample)


def test_a_clean_sample_does_not_speak_of_the_rest(tmp_path):
    source, target = make(tmp_path)
    found = chunkq.verify(source, target, sample=0.3)
    assert found.ok
    assert "3 of 9 units compared" in str(found)
    assert "in these every bit is the same" in str(found)


# ---- parameters


def test_large_parameters_from_python(tmp_path):
    op = chunkq.DequantizeLinear(LARGE, block_size=1)
    source, target = make(tmp_path, op)
    with pytest.raises(SpecError, match="scale is recorded by its digest only"):
        chunkq.verify(source, target)
    assert chunkq.verify(source, target, params={"scale": LARGE}).ok
    for wrong in (LARGE + 1, LARGE[:, :20], LARGE.astype(np.float64), 0.5):
        with pytest.raises(SpecError, match="scale"):
            chunkq.verify(source, target, params={"scale": wrong})
    with pytest.raises(SpecError, match="no such parameter"):
        chunkq.verify(source, target, params={"scale": LARGE, "input_low": 1.0})


def test_parameters_that_are_recorded_are_not_to_be_passed(tmp_path):
    source, target = make(tmp_path)
    with pytest.raises(SpecError, match="recorded"):
        chunkq.verify(source, target, params={"scale": SCALE})


def test_zarr_parameters_stay_or_move(tmp_path):
    scale = write(tmp_path / "scale.zarr", SCALE, (7,))
    source, target = make(tmp_path, chunkq.DequantizeLinear(zarr.open_array(scale), axis=0))
    assert chunkq.verify(source, target).ok
    (tmp_path / "scale.zarr").rename(tmp_path / "moved.zarr")
    with pytest.raises(SpecError, match="scale"):
        chunkq.verify(source, target)
    moved = zarr.open_array(tmp_path / "moved.zarr", mode="r+")
    assert chunkq.verify(source, target, params={"scale": moved}).ok
    moved[0] = 99
    assert len(chunkq.verify(source, target, params={"scale": moved}).differing) == 3
    other = zarr.open_array(write(tmp_path / "short.zarr", SCALE[:9], (7,)))
    with pytest.raises(SpecError, match="scale"):
        chunkq.verify(source, target, params={"scale": other})


@pytest.mark.parametrize("scale", [np.float32(0.5), LARGE], ids=["small", "large"])
def test_a_group_as_the_source(tmp_path, scale):
    """What was dequantized from a group is verified against the group, whatever its parameters."""
    op = chunkq.QuantizeLinear(scale, output_dtype="int8", block_size=int(scale.ndim > 0))
    real, group = make(tmp_path, op, REAL)
    assert chunkq.verify(real, group).ok
    data, undo = chunkq.open_quantized(group)
    chunkq.plan(undo, data, tmp_path / "z.zarr").run()
    assert chunkq.verify(group, tmp_path / "z.zarr").ok
    zarr.open_array(tmp_path / "z.zarr", mode="r+")[0, 0] = 77
    assert len(chunkq.verify(group, tmp_path / "z.zarr").differing) == 1


# ---- what does not belong together


def test_wrong_pairs(tmp_path):
    source, target = make(tmp_path)
    other = write(tmp_path / "other.zarr", X[:20])
    plain = write(tmp_path / "plain.zarr", REAL)
    for pair in ((other, target), (source, source), (source, plain), (source, tmp_path / "none.zarr"), ("", target)):
        with pytest.raises(SpecError):
            chunkq.verify(*pair)
    array = zarr.open_array(target, mode="r+")
    array.attrs["chunkq.operator"] = array.attrs["chunkq.operator"] | {"operator": "QuantizeLinear"}
    with pytest.raises(SpecError):
        chunkq.verify(source, target)


# ---- the command line


@pytest.mark.slow
def test_command_line(tmp_path):
    np.save(tmp_path / "scale.npy", LARGE)
    source = write(tmp_path / "x.zarr")
    target = tmp_path / "y.zarr"
    run = ("dequantize", source, target, "--scale", tmp_path / "scale.npy", "--block-size", "1,1", "--chunks", "10,15")
    done = command(*run)
    assert done.returncode == 0, done.stderr
    done = command("verify", source, target)  # the record names the file
    assert (done.returncode, done.stderr) == (0, "")
    assert "every bit is the same" in done.stdout
    zarr.open_array(target, mode="r+")[29, 39] = 77
    done = command("verify", source, target, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"], len(found["differing"])) == (1, False, 1)
    (tmp_path / "scale.npy").rename(tmp_path / "moved.npy")
    assert command("verify", source, target).returncode == 2
    assert command("verify", source, target, "--scale", tmp_path / "moved.npy").returncode == 1
    np.save(tmp_path / "other.npy", LARGE + 1)
    done = command("verify", source, target, "--scale", tmp_path / "other.npy")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    done = command("verify", write(tmp_path / "short.zarr", X[:20]), target, "--scale", tmp_path / "moved.npy")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.slow
def test_worker_processes(tmp_path):
    source, target = make(tmp_path)
    zarr.open_array(target, mode="r+")[29, 39] = 77
    (tmp_path / "y.zarr" / "c" / "0" / "0").write_bytes(b"junk")
    found = chunkq.verify(source, target, scheduler="processes", workers=2)
    assert [o.region for o in found.differing] == ["[20:30, 30:40]"]
    assert [o.region for o in found.failed] == ["[0:10, 0:15]"]


def test_progress(tmp_path):
    source, target = make(tmp_path)
    seen = []
    chunkq.verify(source, target, workers=1, progress=lambda done, units: seen.append((done, units)))
    assert seen == [(i, 9) for i in range(1, 10)]


MEASURED = """
import sys
from chunkq.cli import main
try:
    main()
finally:
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(peak, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("compressor", ["zstd", "none"])
def test_memory_stays_within_the_limit(tmp_path, compressor):
    rows, limit = 1 << 20, 256 << 20
    source = str(tmp_path / "x.zarr")
    array = zarr.create_array(source, shape=(20 * rows, 4), chunks=(rows, 4), dtype="int8", compressors=None)
    for i in range(20):
        array[i * rows : (i + 1) * rows] = np.random.default_rng(i % 3).integers(0, 9, (rows, 4), np.int8)
    target = str(tmp_path / "y.zarr")
    run = ["dequantize", source, target, "--scale", "0.5", "--compressor", compressor, "--scheduler", "threads"]
    assert command(*run).returncode == 0
    arguments = ["verify", source, target, "--max-mem", str(limit), "--scheduler", "threads"]
    done = subprocess.run([sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) <= limit
