"""Names, links and metadata that mean harm: R7 and R8, through the command line. Nothing is written, nothing allocated."""

import contextlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from processes import contents, finished, run

import chunkq

X = np.random.default_rng(5).integers(1, 100, (30, 40), np.int8)


def write(path, x=X, chunks=(10, 15), **how):
    array = zarr.create_array(str(path), shape=x.shape, chunks=chunks, dtype=x.dtype, **how)
    array[...] = x
    return path


# ---- R7: names and links


@pytest.fixture
def place(tmp_path):
    """A folder with a source, a parameter, a quantized group, a stranger's file and links."""
    write(tmp_path / "data" / "x.zarr")
    write(tmp_path / "data" / "scale.zarr", np.ones(30, np.float32), (10,))
    quantize = chunkq.QuantizeLinear(np.float32(0.5), output_dtype="int8")
    write(tmp_path / "f.zarr", X.astype(np.float32))
    chunkq.plan(quantize, tmp_path / "f.zarr", tmp_path / "q.zarr").run()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "data" / "x.zarr")
    (tmp_path / "up").symlink_to(tmp_path / "data")
    return tmp_path


TARGETS = {
    "the source": "data/x.zarr",
    "the source by ..": "notes/../data/x.zarr",
    "the source by a link": "link",
    "the source by a linked folder": "up/x.zarr",
    "in the source": "data/x.zarr/y.zarr",
    "in the source's chunks": "data/x.zarr/c",
    "in the source by a link": "link/y.zarr",
    "above the source": "data",
    "the parameter": "data/scale.zarr",
    "in the parameter": "data/scale.zarr/c/y.zarr",
    "somebody's folder": "notes",
    "somebody's file": "notes/mine.txt",
    "in somebody's file": "notes/mine.txt/y.zarr",
    "in a group of chunkq's": "q.zarr/y.zarr",
    "the data of such a group": "q.zarr/data",
    "a NUL": "y\0.zarr",
}


@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
@pytest.mark.parametrize("name", TARGETS)
def test_targets_that_would_destroy_something_are_refused(place, name, overwrite):
    before = contents(place)
    op = chunkq.DequantizeLinear(zarr.open_array(place / "data" / "scale.zarr", mode="r"), axis=0)
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.plan(op, place / "data" / "x.zarr", f"{place}/{TARGETS[name]}", overwrite=overwrite).run()
    assert caught.value.reason in ("same_array", "target", "target_exists")
    assert "\n" not in str(caught.value)
    assert contents(place) == before


@pytest.mark.parametrize("name", ["the source by ..", "in the source by a link", "above the source"])
def test_the_command_line_exits_with_2(place, name):
    before = contents(place)
    code, out, err = run("dequantize", place / "data/x.zarr", f"{place}/{TARGETS[name]}", "--scale", "1", "--overwrite")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "x.zarr" in err
    assert contents(place) == before


def test_a_group_as_source_counts_as_a_whole(place):
    before = contents(place)
    for target in ("q.zarr", "q.zarr/data", "q.zarr/scale", "q.zarr/y"):
        code, _, err = run("dequantize", place / "q.zarr", place / target, "--overwrite")
        assert (code, err.count("\n")) == (2, 1)
    assert contents(place) == before


def test_names_in_a_store_do_not_lead_out_of_it(tmp_path):
    (tmp_path / "root").mkdir()
    source = write(tmp_path / "x.zarr")
    store = zarr.storage.LocalStore(tmp_path / "root")
    before = contents(tmp_path)
    for name in ("../y.zarr", "a/../../y.zarr", "..", "/etc/y.zarr", "a/./../../y.zarr"):
        try:
            target = zarr.storage.StorePath(store, name)
        except ValueError:  # zarr's own refusal
            continue
        try:
            chunkq.plan(chunkq.DequantizeLinear(0.5), source, target).run()
        except chunkq.SpecError:
            assert contents(tmp_path) == before
        else:
            written = contents(tmp_path).keys() - before.keys()
            assert written
            assert all(key.startswith("root/") for key in written)
            before = contents(tmp_path)


@pytest.mark.parametrize("where", ["c", "c/1", "."])
def test_a_linked_chunk_folder_is_neither_read_nor_written(tmp_path, where):
    """What the link leads to is another's: a target would write there, a source read what its name does not say."""
    outside = write(tmp_path / "outside.zarr", X + 1)
    source = write(tmp_path / "x.zarr")
    linked = tmp_path / "linked.zarr"
    finished("dequantize", source, linked, "--scale", "0.5")
    inside = linked / where if where != "." else linked / "c" / "2"
    moved = outside / where if where != "." else outside / "c" / "0"
    for path in sorted(inside.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    inside.rmdir()
    inside.symlink_to(moved)
    before = contents(outside)
    for arguments in (
        ("dequantize", source, linked, "--scale", "0.5"),
        ("dequantize", source, linked, "--scale", "2", "--overwrite"),
        ("fake-quantize", linked, tmp_path / "z.zarr", *FAKE),
    ):
        code, _, err = run(*arguments)
        assert code in (1, 2)
        assert "link" in err or "no part of a zarr array" in err
    assert contents(outside) == before
    assert not (tmp_path / "z.zarr").exists()


FAKE = ("--input-low", "0", "--input-high", "1", "--output-low", "0", "--output-high", "1", "--levels", "16")

# ---- R8: metadata that lie

LIMITED = """
import sys, time
import numpy, zarr, dask, chunkq.cli, chunkq.checking, chunkq.metadata, chunkq.planning, chunkq.streaming
began = time.process_time()
try:
    if sys.argv[1] == "stream":
        op = chunkq.DequantizeLinear(numpy.float32(0.5))
        for _ in chunkq.stream(op, sys.argv[2]):
            pass
        code = 0
    else:
        chunkq.cli.main()
except SystemExit as end:
    code = end.code
except chunkq.errors.ChunkqError as error:
    print(f"chunkq: {error}", file=sys.stderr)
    code = 2
print(time.process_time() - began)
sys.exit(code)
"""


def limited(*arguments):
    """A command under an address-space limit of 2 GiB: exit code, stderr, seconds of processor time after the imports."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, arguments)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        check=False,
        timeout=60,
    )
    assert done.stdout, done.stderr
    return done.returncode, done.stderr, float(done.stdout.splitlines()[-1])


def hostile(path, shape=None, chunk_shape=None, x=X, **how):
    """An array whose document says something else than what is there."""
    write(path, x, compressors=None, **how)
    document = json.loads((path / "zarr.json").read_text())
    if shape is not None:
        document["shape"] = shape
    if chunk_shape is not None:
        document["chunk_grid"]["configuration"]["chunk_shape"] = chunk_shape
    (path / "zarr.json").write_text(json.dumps(document))
    return path


def lying_blosc(path):
    """A chunk of a few bytes whose header promises 1 GiB."""
    write(path, compressors=zarr.codecs.BloscCodec())
    header = bytes([2, 1, 0x21, 1]) + (2**30).to_bytes(4, "little") * 2 + (1024).to_bytes(4, "little")
    (path / "c" / "0" / "0").write_bytes(header + bytes(1008))
    return path


HOSTILE = {
    "2**60 elements": lambda path: hostile(path, [2**30, 2**30]),
    "a chunk of 1 TiB": lambda path: hostile(path, [2**20, 2**20], [2**20, 2**20]),
    "2**30 chunks": lambda path: hostile(path, [2**15, 2**15], [1, 1]),
    "lying blosc": lying_blosc,
}


def assert_clear(code, err, seconds, codes):
    assert code in codes, err
    # a plan that was printed before the run began is no part of the message
    assert err.splitlines()[-1].startswith("chunkq: ")
    assert "Traceback" not in err
    assert "MemoryError" not in err
    assert seconds < 1.0


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("command", ["dequantize", "stream", "verify"])
def test_a_hostile_source_gives_a_clear_error_at_once(tmp_path, command, name):
    source, target = HOSTILE[name](tmp_path / "x.zarr"), tmp_path / "y.zarr"
    if command == "dequantize":
        codes, found = (1, 2), limited(command, source, target, "--scale", "0.5")
    elif command == "stream":
        codes, found = (2,), limited(command, source)
    else:
        finished("dequantize", write(tmp_path / "good.zarr"), target, "--scale", "0.5")
        codes, found = (1, 2), limited(command, source, target)
    if command == "verify" and name == "lying blosc":
        # a finding, and not a failure of the check
        assert found[0] == 1
        assert found[2] < 1.0
    else:
        assert_clear(*found, codes)


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "lying blosc"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
def test_a_hostile_target_gives_a_clear_error_or_is_replaced_at_once(tmp_path, name, overwrite):
    source, target = write(tmp_path / "x.zarr"), HOSTILE[name](tmp_path / "y.zarr")
    before = contents(target)
    code, err, seconds = limited(
        "dequantize", source, target, "--scale", "0.5", "--no-progress", *(["--overwrite"] if overwrite else [])
    )
    if overwrite and name != "a chunk of 1 TiB":
        assert code == 0, err
        np.testing.assert_array_equal(zarr.open_array(target, mode="r")[:], X.astype(np.float32) * 0.5)
    else:  # also where what lies there is, by the document, no part of the array
        assert_clear(code, err, seconds, (2,))
        assert contents(target) == before


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_target_is_not_verified(tmp_path, name):
    source = write(tmp_path / "x.zarr")
    target = HOSTILE[name](tmp_path / "y.zarr")
    document = json.loads((target / "zarr.json").read_text())
    finished("dequantize", source, tmp_path / "good.zarr", "--scale", "0.5")
    document["attributes"] = json.loads((tmp_path / "good.zarr" / "zarr.json").read_text())["attributes"]
    (target / "zarr.json").write_text(json.dumps(document))
    code, err, seconds = limited("verify", source, target)
    assert_clear(code, err, seconds, (2,))


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "lying blosc"])
def test_a_hostile_parameter_gives_a_clear_error_at_once(tmp_path, name):
    source = write(tmp_path / "x.zarr")
    scale = HOSTILE[name](tmp_path / "scale.zarr")
    code, err, seconds = limited("dequantize", source, tmp_path / "y.zarr", "--scale", scale, "--axis", "0")
    assert_clear(code, err, seconds, (1, 2))
    assert not (tmp_path / "y.zarr").exists()


ATTRIBUTES = {
    "unreadable is a number": {"chunkq.unreadable": 7},
    "unreadable is nonsense": {"chunkq.unreadable": [None, {"a": 1}, "c/0/99999999999999999999", "../../x", "c/0/0\0"]},
    "unreadable is text": {"chunkq.unreadable": "c/0/0"},
    "fingerprint is a list": {"chunkq.fingerprint": [1, 2]},
    "fingerprint is null": {"chunkq.fingerprint": None},
    "fingerprint of numbers": {"chunkq.fingerprint": {"source": 1, "operator": {"a": []}, "layout": None}},
    "complete is text": {"chunkq.complete": "yes"},
    "replacing is text": {"chunkq.replacing": "yes"},
    "operator is text": {"chunkq.operator": "DequantizeLinear"},
    "operator is nonsense": {"chunkq.operator": {"operator": 3, "attributes": [], "inputs": {"scale": None}}},
    "operator with deep values": {
        "chunkq.operator": {"operator": "DequantizeLinear", "inputs": {"scale": {"dtype": "float32", "values": [[[]]]}}}
    },
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_hostile_attributes_of_a_target(tmp_path, name):
    """Continued where they do not matter, else refused; never a traceback, and the source is never touched."""
    source, target = write(tmp_path / "x.zarr"), tmp_path / "y.zarr"
    op = chunkq.DequantizeLinear(np.float32(0.5))
    chunkq.plan(op, source, target).run()
    expected = zarr.open_array(target, mode="r")[:]
    os.unlink(target / "c" / "1" / "1")
    document = json.loads((target / "zarr.json").read_text())
    document["attributes"] |= ATTRIBUTES[name]
    (target / "zarr.json").write_text(json.dumps(document))
    before = contents(source)
    for call in (
        lambda: chunkq.plan(op, source, target).run(),
        lambda: chunkq.verify(source, target),
        lambda: chunkq.plan(op, target, tmp_path / "z.zarr"),
        lambda: chunkq.plan(op, source, target, overwrite=True).run(),
    ):
        with contextlib.suppress(chunkq.ChunkqError):
            call()
    assert contents(source) == before
    y = zarr.open_array(target, mode="r")
    if y.attrs["chunkq.complete"] is True:
        np.testing.assert_array_equal(y[:], expected)
    assert not Path(tmp_path / "z.zarr").exists()
