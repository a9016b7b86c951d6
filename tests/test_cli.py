"""The command line: parameters, axes, exit codes, what goes to stdout; and real models through it."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

import chunkq
from chunkq.cli import main

X = np.random.default_rng(0).integers(-128, 128, (6, 8), dtype=np.int8)
ROWS = np.linspace(0.1, 2, 6, dtype=np.float32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("x.zarr", X)
    return tmp_path


def save(path, x, **how):
    array = zarr.create_array(path, shape=x.shape, chunks=tuple(max(1, n) for n in x.shape), dtype=x.dtype, **how)
    array[...] = x


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def tree():
    return sorted(str(p) for p in Path(".").rglob("*"))


@pytest.mark.usefixtures("folder")
def test_parameters_as_number_list_npy_and_zarr():
    np.save("rows.npy", ROWS)
    save("store.zarr/scale", ROWS)
    text = ",".join(repr(float(v)) for v in ROWS)
    for index, scale in enumerate((text, "rows.npy", "store.zarr/scale")):
        target = f"y{index}.zarr"
        run("dequantize", "x.zarr", target, "--scale", scale, "--axis", "-2")
        np.testing.assert_array_equal(zarr.open_array(target)[:], X.astype(np.float32) * ROWS[:, None])
    run("dequantize", "x.zarr", "y.zarr", "--scale", "0.5", "--zero-point", "-128")
    np.testing.assert_array_equal(zarr.open_array("y.zarr")[:], (X.astype(np.float32) + 128) * np.float32(0.5))


@pytest.mark.usefixtures("folder")
def test_the_only_fitting_axis_is_taken_and_told():
    np.save("rows.npy", ROWS)
    result = run("dequantize", "x.zarr", "y.zarr", "--scale", "rows.npy")
    assert "axis 0: the only one with as many elements as scale (6)" in result.stderr
    np.testing.assert_array_equal(zarr.open_array("y.zarr")[:], X.astype(np.float32) * ROWS[:, None])


@pytest.mark.usefixtures("folder")
def test_a_square_tensor_needs_the_axis():
    save("square.zarr", X[:, :6])
    np.save("rows.npy", ROWS)
    before = tree()
    result = run("dequantize", "square.zarr", "y.zarr", "--scale", "rows.npy", code=2)
    assert "axes 0 and 1 have that length; pass --axis" in result.stderr
    assert tree() == before
    for axis, scale in ((0, ROWS[:, None]), (1, ROWS)):
        run("dequantize", "square.zarr", f"y{axis}.zarr", "--scale", "rows.npy", "--axis", axis)
        np.testing.assert_array_equal(zarr.open_array(f"y{axis}.zarr")[:], X[:, :6].astype(np.float32) * scale)


@pytest.mark.usefixtures("folder")
def test_a_scale_at_full_rank_says_which_axis():
    save("square.zarr", X[:, :6])
    for axis, shape in ((0, (6, 1)), (1, (1, 6))):
        np.save("scale.npy", ROWS.reshape(shape))
        np.save("zero.npy", np.int8(range(6)).reshape(shape))
        command = ["dequantize", "square.zarr", f"y{axis}.zarr", "--scale", "scale.npy", "--zero-point", "zero.npy"]
        assert f"axis {axis}: scale has the shape" in run(*command).stderr
        codes = X[:, :6].astype(np.float32) - np.float32(range(6)).reshape(shape)
        np.testing.assert_array_equal(zarr.open_array(f"y{axis}.zarr")[:], codes * ROWS.reshape(shape))


@pytest.mark.usefixtures("folder")
def test_fake_quantize():
    f = np.random.default_rng(1).standard_normal((2, 5, 5)).astype(np.float32)
    save("f.zarr", f)
    save("low.zarr", np.float32([[[-1]], [[-2]]]))
    ranges = ["--input-low", "low.zarr", "--input-high", "1", "--output-low", "-1.5", "--output-high", "1.5"]
    run("fake-quantize", "f.zarr", "y.zarr", *ranges, "--levels", 16)
    expected = chunkq.fake_quantize(f, np.float32([[[-1]], [[-2]]]), 1.0, -1.5, 1.5, 16)
    np.testing.assert_array_equal(zarr.open_array("y.zarr")[:], expected)
    pdpd = ["--auto-broadcast", "pdpd", "--broadcast-axis", 0, "--levels", 16]
    ranges = ["--input-low", "-1,-2", "--input-high", "1", "--output-low", "-1.5", "--output-high", "1.5"]
    run("fake-quantize", "f.zarr", "z.zarr", *ranges, *pdpd)
    np.testing.assert_array_equal(zarr.open_array("z.zarr")[:], expected)


@pytest.mark.usefixtures("folder")
def test_dry_run_and_plan_print_the_same_and_write_nothing():
    before = tree()
    dry = run("dequantize", "x.zarr", "y.zarr", "--scale", 1, "--dry-run", "--max-mem", "2GiB", "--scheduler", "sync")
    plan = run("plan", "dequantize", "x.zarr", "y.zarr", "--scale", 1, "--max-mem", "2GiB", "--scheduler", "sync")

    def stable(text):
        return [line for line in text.splitlines() if not line.startswith("memory")]

    assert stable(dry.stdout) == stable(plan.stdout)
    assert "projected peak, 2 GiB allowed" in plan.stdout
    as_json = run("plan", "dequantize", "x.zarr", "y.zarr", "--scale", 1, "--json")
    assert json.loads(as_json.stdout)["shape"] == [6, 8]
    assert tree() == before


@pytest.mark.usefixtures("folder")
def test_json_is_one_document_on_stdout():
    result = run("dequantize", "x.zarr", "y.zarr", "--scale", 1, "--json")
    document = json.loads(result.stdout)
    assert document["report"]["bytes_written"] == X.size * 4
    assert document["report"]["peak_memory"] <= document["plan"]["projected_memory"]


@pytest.mark.usefixtures("folder")
def test_layout_options():
    run("dequantize", "x.zarr", "y.zarr", "--scale", 1, "--chunks", "2,4", "--shards", "4,8", "--compressor", "none")
    y = zarr.open_array("y.zarr")
    assert (y.chunks, y.shards) == ((2, 4), (4, 8))


RANGE = ["--input-low", "0", "--input-high", "1", "--output-low", "0", "--output-high", "1"]
BAD = {
    "no source": (["dequantize", "none.zarr", "y.zarr", "--scale", "1"], "no such file"),
    "source is no array": (["dequantize", ".", "y.zarr", "--scale", "1"], "not a readable zarr array"),
    "wrong length": (["dequantize", "x.zarr", "y.zarr", "--scale", "1,2,3"], "scale has 3 elements"),
    "wrong length on the axis": (["dequantize", "x.zarr", "y.zarr", "--scale", "1,2,3", "--axis", "1"], "8 along axis"),
    "axis": (["dequantize", "x.zarr", "y.zarr", "--scale", "1,2,3,4,5,6", "--axis", "2"], "axis=2"),
    "zero point": (["dequantize", "x.zarr", "y.zarr", "--scale", "1", "--zero-point", "200"], "outside int8"),
    "float zero point": (["dequantize", "x.zarr", "y.zarr", "--scale", "1", "--zero-point", "1.5"], "integers"),
    "no such npy": (["dequantize", "x.zarr", "y.zarr", "--scale", "s.npy"], "s.npy"),
    "no such parameter": (["dequantize", "x.zarr", "y.zarr", "--scale", "word"], "--scale 'word'"),
    "target is the source": (["dequantize", "x.zarr", "x.zarr", "--scale", "1", "--overwrite"], "source itself"),
    "target exists": (["dequantize", "x.zarr", "there.zarr", "--scale", "1"], "--overwrite"),
    "limit": (["dequantize", "x.zarr", "y.zarr", "--scale", "1", "--max-mem", "1MiB"], "at least"),
    "limit in words": (["dequantize", "x.zarr", "y.zarr", "--scale", "1", "--max-mem", "much"], "max_mem='much'"),
    "chunks": (["dequantize", "x.zarr", "y.zarr", "--scale", "1", "--chunks", "a,b"], "--chunks 'a,b'"),
    "scheduler": (["dequantize", "x.zarr", "y.zarr", "--scale", "1", "--scheduler", "dask"], "scheduler='dask'"),
    "levels": (["fake-quantize", "f.zarr", "y.zarr", *RANGE, "--levels", "1"], "levels=1"),
    "range": (
        ["fake-quantize", "f.zarr", "y.zarr", *RANGE, "--input-low", "0,1", "--levels", "4"],
        "input_low has shape (2,)",
    ),
    "type": (["fake-quantize", "x.zarr", "y.zarr", *RANGE, "--levels", "4"], "x is int8"),
    "option": (["dequantize", "x.zarr", "y.zarr"], "--scale"),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("arguments", "part"), BAD.values(), ids=BAD)
def test_bad_requests_give_one_clear_line_and_leave_nothing(arguments, part):
    save("there.zarr", X)
    save("f.zarr", np.zeros((6, 8), np.float32))
    before = tree()
    result = run(*arguments, code=2)
    assert part in result.stderr
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert part in last
    assert tree() == before


@pytest.mark.usefixtures("folder")
def test_a_failed_run_exits_with_1():
    for path in Path("x.zarr/c").rglob("*"):
        if path.is_file():
            path.write_bytes(b"junk")
    result = run("dequantize", "x.zarr", "y.zarr", "--scale", 1, code=1)
    assert "cannot be read: c/" in result.stderr


def test_info():
    facts = json.loads(run("info", "--json").stdout)
    assert facts["instruction_set"] in facts["instruction_sets_built"]
    assert facts["zarr"] == zarr.__version__
    assert "instruction set" in run("info").stdout


def test_help_of_every_command():
    for command in ([], ["dequantize"], ["fake-quantize"], ["plan"], ["plan", "dequantize"], ["info"], ["demo"]):
        assert "Usage" in run(*command, "--help").stdout


def test_demo(tmp_path):
    result = run("demo", "--size", "8MiB", "--json")
    document = json.loads(result.stdout)
    assert document["wrong"] == 0
    assert document["report"]["peak_memory"] <= document["report"]["max_mem"]
    source = document["plan"]["source"]
    assert not Path(source).parent.exists()
    kept = tmp_path / "kept"
    run("demo", "--size", "1MiB", "--keep", kept)
    assert sorted(p.name for p in kept.iterdir()) == ["weights.zarr", "weights_int8.zarr"]
    assert "choose another folder" in run("demo", "--size", "1MiB", "--keep", kept, code=2).stderr


def test_the_demo_notices_a_wrong_element(tmp_path):
    from chunkq.demo import Demo

    with Demo("64KiB", "1GiB", str(tmp_path)) as demo:
        demo.write_source()
        demo.plan().run()
        assert demo.count_differences() == 0
        y = zarr.open_array(demo.target, mode="r+")
        y[3, 5] = np.float32(123)
        assert demo.count_differences() == 1


@pytest.mark.usefixtures("folder")
def test_progress_only_where_a_person_looks():
    command = [sys.executable, "-m", "chunkq.cli", "dequantize", "x.zarr", "y.zarr", "--scale", "1"]
    ours, theirs = pty.openpty()
    subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert b"GB/s" in seen or b"units" in seen.replace(b"units  ", b"", 1)
    assert b"\x1b[" in seen
    quiet = subprocess.run([*command, "--overwrite"], capture_output=True, check=True)
    assert b"\x1b[" not in quiet.stderr
