"""Quantized tensors on disk: what `chunkq quantize` writes, `chunkq dequantize` reads, and both refuse."""

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import reference
import zarr
from click.testing import CliRunner

import chunkq
from chunkq import metadata, workers
from chunkq.cli import main

SHAPE = (6, 40)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32) * 9
ROWS = np.linspace(0.1, 2, 6, dtype=np.float32)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e5m2fnuz")
TYPES = ("int8", "uint16", "int4", "uint2", *FLOAT8, "float6_e2m3fn", "float4_e2m1fn")
every_type = pytest.mark.parametrize("name", TYPES)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def foreign(dtype):
    """Whether it is a type of ml_dtypes, which zarr does not have."""
    return hasattr(ml_dtypes, dtype.name)


def plain(values):
    """What a reader without chunkq sees: numbers of integer types, codes of floats that zarr does not have."""
    name = values.dtype.name
    if not foreign(values.dtype):
        return values
    if "int" in name:
        return values.astype(np.uint8 if name.startswith("u") else np.int8)
    return values.view(np.uint16 if name == "bfloat16" else np.uint8)


def save(path, values, recorded=True, **how):
    """A zarr array as chunkq stores it; `recorded`: with the attribute that names its element type."""
    held = plain(np.asarray(values))
    attributes = how.pop("attributes", {}) | (
        {"chunkq.dtype": values.dtype.name} if recorded and held is not values else {}
    )
    chunks = how.pop("chunks", tuple(max(1, n) for n in held.shape))
    array = zarr.create_array(
        path, shape=held.shape, chunks=chunks, dtype=held.dtype, attributes=attributes, fill_value=0, **how,
        config={"write_empty_chunks": True},
    )  # fmt: skip
    array[...] = held
    return str(path)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def quantize(*arguments, code=0):
    return run("quantize", *arguments, "--scheduler", "sync", code=code)


def dequantize(*arguments, code=0):
    return run("dequantize", *arguments, "--scheduler", "sync", code=code)


def tree():
    """Everything there is, with its content."""
    found = {}
    for path in Path(".").rglob("*"):
        found[str(path)] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def refused(*arguments, part="", code=2):
    """One clear line, no traceback, nothing written or removed."""
    before = tree()
    result = run(*arguments, "--scheduler", "sync", code=code)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(("chunkq: ", "Error: "))
    assert part in last
    assert tree() == before
    return last


def stored(path):
    """An array of a group, by zarr alone, in its element type."""
    array = zarr.open_array(path, mode="r")
    values = np.asarray(array[...])
    name = array.attrs.get("chunkq.dtype")
    if name is None:
        return values
    return values.astype(dtype_of(name)) if "int" in name else values.view(dtype_of(name))


def checked(path, expected):
    """The stored form of an array is as documented."""
    array = zarr.open_array(path, mode="r")
    assert array.dtype == plain(expected).dtype
    assert array.attrs.get("chunkq.dtype") == (expected.dtype.name if foreign(expected.dtype) else None)
    held = np.asarray(array[...])
    if "int" in expected.dtype.name:
        assert reference.same_bits(held, plain(expected))
    else:
        assert reference.same_bits(held.view(expected.dtype), expected)


def through_a_group(x, scale, zero_point, attributes, arguments, name, output=None, source="x.zarr"):
    """Quantize and dequantize by command line; every array against the reference."""
    quantize(source, "q.zarr", *arguments, "--dtype", name)
    codes = reference.quantize_linear(x, scale, zero_point, **attributes, output_dtype=dtype_of(name))
    group = zarr.open_group("q.zarr", mode="r")
    assert sorted(group.array_keys()) == ["data", "scale"] + ["zero_point"] * (zero_point is not None)
    assert group.attrs["chunkq.complete"] is True
    assert group.attrs["chunkq.operator"]["operator"] == "QuantizeLinear"
    checked("q.zarr/data", codes)
    checked("q.zarr/scale", scale)
    if zero_point is not None:
        checked("q.zarr/zero_point", zero_point)
    dequantize("q.zarr", "y.zarr", *(["--output-dtype", output] if output else []))
    cut = {k: attributes[k] for k in ("axis", "block_size") if k in attributes}
    y_dtype = dtype_of(output) if output else None
    expected = reference.dequantize_linear(codes, scale, zero_point, **cut, output_dtype=y_dtype)
    checked("y.zarr", expected)
    call = {"output_dtype": name} | {k: v for k, v in attributes.items() if k != "precision"}
    by_hand = chunkq.dequantize_linear(
        chunkq.quantize_linear(x, scale, zero_point, **call, precision=attributes.get("precision")),
        scale, zero_point, **cut, output_dtype=y_dtype or (np.float32 if scale.dtype.itemsize == 1 else None),
    )  # fmt: skip
    assert reference.same_bits(stored("y.zarr"), by_hand)
    return group


# ---- there and back

GRANULARITIES = {
    "tensor": ((), {}, []),
    "one": ((1,), {}, []),
    "axis 0": ((6,), {"axis": 0}, ["--axis", 0]),
    "axis -1": ((40,), {"axis": -1}, ["--axis", -1]),
    "blocks": ((6, 2), {"axis": 1, "block_size": 32}, ["--axis", 1, "--block-size", 32]),
    "blocks off axis 1": ((2, 40), {"axis": 0, "block_size": 4}, ["--axis", 0, "--block-size", 4]),
    "n-d blocks": ((2, 8), {"block_size": (4, 5)}, ["--block-size", "4,5"]),
}


def zero_points(shape, name):
    """Any, where the type has zero points; zeros for float8 and float4."""
    rng = np.random.default_rng(5)
    if "int" in name:
        limits = ml_dtypes.iinfo(dtype_of(name))
        return np.asarray(rng.integers(int(limits.min), int(limits.max) + 1, shape)).astype(dtype_of(name))
    return np.asarray(rng.integers(0, 2 if "float6" in name else 1, shape)).astype(np.float32).astype(dtype_of(name))


# every type with three granularities, every granularity with several types
COMBINED = [(name, list(GRANULARITIES)[(i + j) % 7]) for i, name in enumerate(TYPES) for j in (0, 2, 5)]


@pytest.mark.parametrize(("name", "granularity"), COMBINED)
def test_there_and_back(name, granularity):
    shape, attributes, arguments = GRANULARITIES[granularity]
    scale = np.asarray(np.random.default_rng(1).uniform(0.1, 3, shape)).astype(np.float32)
    zero_point = zero_points(shape, name)
    save("x.zarr", X, chunks=(4, 16))
    np.save("s.npy", scale)
    save("z.zarr", zero_point)
    arguments = ["--scale", "s.npy", "--zero-point", "z.zarr", *arguments]
    through_a_group(X, scale, zero_point, attributes, arguments, name)


@every_type
def test_without_a_zero_point_and_with_a_number(name):
    save("x.zarr", X)
    through_a_group(X, np.float32(0.3), None, {}, ["--scale", 0.3], name)
    shutil.rmtree("q.zarr")
    shutil.rmtree("y.zarr")
    zero = 1 if "int" in name else 0
    zero_point = np.asarray(zero).astype(np.float32).astype(dtype_of(name))
    through_a_group(X, np.float32(0.3), zero_point, {}, ["--scale", 0.3, "--zero-point", zero], name)


def scale_arguments(scale, how):
    """A scale on the command line: .npy, .npy of codes, zarr with its type recorded, zarr of codes."""
    named = ["--scale-dtype", scale.dtype.name] if foreign(scale.dtype) and how.startswith("codes") else []
    if how.endswith("npy"):
        np.save("s.npy", plain(scale))
        return ["--scale", "s.npy", *named]
    return ["--scale", save("s.zarr", scale, recorded=not how.startswith("codes")), *named]


@pytest.mark.parametrize(
    "granularity", [GRANULARITIES[n] for n in ("tensor", "axis 0", "n-d blocks")], ids=lambda g: str(g[0])
)
@pytest.mark.parametrize(
    ("scale_name", "how"),
    [
        ("float32", "zarr"),
        ("float16", "npy"),
        ("float16", "zarr"),
        ("bfloat16", "codes npy"),
        ("bfloat16", "codes zarr"),
        ("bfloat16", "zarr"),
        ("float8_e8m0fnu", "codes npy"),
        ("float8_e8m0fnu", "codes zarr"),
        ("float8_e8m0fnu", "zarr"),
    ],
)  # fmt: skip
def test_scales_of_every_type(granularity, scale_name, how):
    shape, attributes, arguments = granularity
    scale = np.asarray(2.0 ** np.random.default_rng(1).integers(-4, 3, shape)).astype(np.float32)
    if scale_name != "float8_e8m0fnu":
        scale = np.asarray(scale * np.float32(1.1))
    scale = scale.astype(dtype_of(scale_name))
    save("x.zarr", X)
    arguments = [*scale_arguments(scale, how), *arguments]
    through_a_group(X, scale, None, attributes, arguments, "int4")


@pytest.mark.parametrize("output", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scale_name", ["float32", "float16", "bfloat16", "float8_e8m0fnu"])
def test_output_dtype(scale_name, output):
    scale = np.float32([0.25, 4, 0.5, 1, 2, 8]).astype(dtype_of(scale_name))
    save("x.zarr", X)
    save("s.zarr", scale)
    through_a_group(X, scale, None, {"axis": 0}, ["--scale", "s.zarr", "--axis", 0], "float8_e4m3fn", output)


@pytest.mark.parametrize("arguments", [[], ["--no-saturate"], ["--precision", "float16"]], ids=str)
def test_options_of_quantize(arguments):
    x = np.float32([0.1, 500, -np.inf, np.nan, 464, 1e9])
    save("x.zarr", x)
    attributes = {"saturate": False} if arguments == ["--no-saturate"] else {}
    attributes |= {"precision": np.dtype(np.float16)} if "--precision" in arguments else {}
    through_a_group(x, np.float32(1), None, attributes, ["--scale", 1, *arguments], "float8_e4m3fn")


# ---- sources


@pytest.mark.parametrize("x_name", ["float32", "float16", "bfloat16 recorded", "bfloat16", "int32"])
@pytest.mark.parametrize("name", ["int8", "float8_e5m2fnuz"])
def test_types_of_sources(x_name, name):
    x = (X * 100).astype(dtype_of(x_name.split()[0]))
    save("x.zarr", x, recorded=x_name != "bfloat16")
    declared = ["--x-dtype", "bfloat16"] if x_name == "bfloat16" else []
    arguments = ["--scale", ",".join(str(float(s)) for s in ROWS), *declared]
    through_a_group(x, ROWS, None, {"axis": 0}, arguments, name)


SOURCES = {
    "sharded": {"chunks": (2, 10), "shards": (4, 20)},
    "v2": {"chunks": (4, 16), "zarr_format": 2},
    "v2 F order": {"chunks": (4, 16), "zarr_format": 2, "order": "F"},
    "uncompressed": {"chunks": (3, 14), "compressors": None},
    "large chunks": {"chunks": (64, 64)},
}


@pytest.mark.parametrize("how", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("scheduler", ["threads", "sync"])
def test_layouts_of_sources(how, scheduler, monkeypatch):
    monkeypatch.setattr(workers, "UNIT_BYTES", 1)
    save("x.zarr", X, **how)
    zero_point = np.int8(range(6)).astype(ml_dtypes.int4)
    command = ["--scale", ",".join(map(repr, ROWS.tolist())), "--zero-point", "0,1,2,3,4,5", "--dtype", "int4"]
    run("quantize", "x.zarr", "q.zarr", *command, "--scheduler", scheduler, "--workers", 2)
    run("dequantize", "q.zarr", "y.zarr", "--scheduler", scheduler, "--workers", 2)
    codes = reference.quantize_linear(X, ROWS, zero_point, 0)
    checked("q.zarr/data", codes)
    checked("y.zarr", reference.dequantize_linear(codes, ROWS, zero_point, 0))
    x, data, y = (zarr.open_array(p) for p in ("x.zarr", "q.zarr/data", "y.zarr"))
    assert (data.chunks, data.shards) == (y.chunks, y.shards) == (x.chunks, x.shards)


@pytest.mark.parametrize("byte_order", ["<", ">"])
def test_byte_orders_of_sources(byte_order):
    save("x.zarr", X.astype(f"{byte_order}f4"), zarr_format=2)
    np.save("s.npy", ROWS.astype(f"{byte_order}f4"))
    np.save("z.npy", np.arange(6, dtype=f"{byte_order}u2"))
    arguments = ["--scale", "s.npy", "--zero-point", "z.npy", "--axis", 0]
    through_a_group(X, ROWS, np.arange(6, dtype=np.uint16), {"axis": 0}, arguments, "uint16")


@pytest.mark.parametrize("name", ["int8", "uint2", "float4_e2m1fn"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1, 1), (7,)])
def test_small_and_empty_tensors(shape, name):
    x = np.full(shape, 1.3, np.float32)
    save("x.zarr", x)
    through_a_group(x, np.float32(0.5), None, {}, ["--scale", 0.5], name)


@pytest.mark.parametrize("scheduler", ["threads", "processes", "auto"])
def test_schedulers(scheduler, monkeypatch):
    monkeypatch.setattr(workers, "UNIT_BYTES", 1)
    save("x.zarr", X, chunks=(3, 20))
    save("s.zarr", ROWS.astype(ml_dtypes.bfloat16), chunks=(2,))
    how = ["--scheduler", scheduler, "--workers", 2]
    run("quantize", "x.zarr", "q.zarr", "--scale", "s.zarr", "--dtype", "float6_e2m3fn", "--axis", 0, *how)
    run("dequantize", "q.zarr", "y.zarr", *how)
    scale = ROWS.astype(ml_dtypes.bfloat16)
    codes = reference.quantize_linear(X, scale, None, 0, 0, ml_dtypes.float6_e2m3fn)
    checked("q.zarr/data", codes)
    checked("y.zarr", reference.dequantize_linear(codes, scale, None, 0))


def test_layout_options_names_and_attributes():
    save("x.zarr", X, dimension_names=("row", "column"), attributes={"units": "K"})
    layout = ["--chunks", "2,8", "--shards", "4,16", "--compressor", "none"]
    quantize("x.zarr", "q.zarr", "--scale", 0.5, "--dtype", "int8", *layout)
    data = zarr.open_array("q.zarr/data")
    assert (data.chunks, data.shards) == ((2, 8), (4, 16))
    assert data.metadata.dimension_names == ("row", "column")
    assert data.attrs["units"] == "K"
    dequantize("q.zarr", "y.zarr")
    y = zarr.open_array("y.zarr")
    assert y.metadata.dimension_names == ("row", "column")
    assert y.attrs["units"] == "K"
    assert y.attrs["chunkq.operator"]["operator"] == "DequantizeLinear"


def test_plans_write_nothing_and_json_is_one_document():
    save("x.zarr", X)
    before = tree()
    dry = run("quantize", "x.zarr", "q.zarr", "--scale", 1, "--dtype", "int4", "--dry-run")
    assert "QuantizeLinear" in dry.stdout
    planned = run("plan", "quantize", "x.zarr", "q.zarr", "--scale", 1, "--dtype", "uint8", "--json")
    assert json.loads(planned.stdout)["target_dtype"] == "uint8"
    assert tree() == before
    document = json.loads(quantize("x.zarr", "q.zarr", "--scale", 1, "--dtype", "int4", "--json").stdout)
    assert document["report"]["bytes_written"] == X.size
    assert "DequantizeLinear" in run("plan", "dequantize", "q.zarr", "y.zarr").stdout
    assert not Path("y.zarr").exists()


def test_the_data_array_alone_is_a_source_too():
    save("x.zarr", X)
    quantize("x.zarr", "q.zarr", "--scale", 0.25, "--dtype", "float8_e4m3fn")
    dequantize("q.zarr/data", "y.zarr", "--scale", "q.zarr/scale")
    dequantize("q.zarr", "z.zarr")
    assert reference.same_bits(stored("y.zarr"), stored("z.zarr"))


# ---- the axis


def test_the_axis_is_told_or_asked_for():
    save("x.zarr", X)
    np.save("s.npy", ROWS)
    assert "axis 0: the only one" in quantize("x.zarr", "q.zarr", "--scale", "s.npy", "--dtype", "int8").stderr
    dequantize("q.zarr", "y.zarr")
    codes = reference.quantize_linear(X, ROWS, None, 0, 0, np.dtype(np.int8))
    checked("y.zarr", reference.dequantize_linear(codes, ROWS, None, 0))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_scale_at_full_rank_says_which_axis(axis):
    x = X[:, :6].copy()
    shape = (6, 1) if axis == 0 else (1, 6)
    save("x.zarr", x)
    np.save("s.npy", ROWS.reshape(shape))
    np.save("z.npy", np.int8(range(6)).reshape(shape))
    through_a_group(
        x, ROWS, np.int8(range(6)), {"axis": axis}, ["--scale", "s.npy", "--zero-point", "z.npy"], "int8"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "scale_shape", "more", "part"),
    [
        ((6, 6), (6,), [], "axes 0 and 1 have that length"),
        ((6, 4, 6), (6,), [], "axes 0 and 2 have that length"),
        ((6, 4), (5,), [], "no axis has that length"),
        ((4, 4), (4, 4), ["--block-size", 1], "axes 0 and 1 fit"),
        ((1, 1), (1, 1), ["--block-size", 4], "axes 0 and 1 fit"),
        ((8, 8), (2, 8, 1), ["--block-size", 4], "scale has shape (2, 8, 1)"),
        ((8, 8), (3, 8), ["--block-size", 4], "no axis fits"),
        ((8, 8), (2,), ["--block-size", 4], "scale has shape (2,)"),
        ((8, 8), (2, 2), ["--axis", 0], "block_size"),
        ((6, 4), (6,), ["--axis", 1], "6 elements"),
        ((6, 4), (6,), ["--axis", 2], "axis=2"),
        ((6, 4), (1, 2), ["--block-size", "6,3,1"], "block_size"),
    ],
)
def test_the_axis_is_never_guessed(shape, scale_shape, more, part):
    save("x.zarr", np.ones(shape, np.float32))
    np.save("s.npy", np.ones(scale_shape, np.float32))
    refused("quantize", "x.zarr", "q.zarr", "--scale", "s.npy", "--dtype", "int8", *more, part=part)


def test_blocks_on_the_only_axis_that_fits():
    save("x.zarr", X)
    np.save("s.npy", np.full((2, 40), 0.5, np.float32))
    result = quantize("x.zarr", "q.zarr", "--scale", "s.npy", "--block-size", 4, "--dtype", "int8")
    assert "axis 0" in result.stderr
    assert zarr.open_group("q.zarr").attrs["chunkq.operator"]["attributes"]["axis"] == 0
    dequantize("q.zarr", "y.zarr")


# ---- options beside a group


@pytest.fixture(scope="module")
def group_made_once(tmp_path_factory):
    """int4, one scale and zero point a row; what it was made of beside it."""
    made = tmp_path_factory.mktemp("group")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        save("x.zarr", X)
        np.save("s.npy", ROWS)
        save("z.zarr", np.int8(range(6)).astype(ml_dtypes.int4))
        quantize("x.zarr", "q.zarr", "--scale", "s.npy", "--zero-point", "z.zarr", "--axis", 0, "--dtype", "int4")
    return made


@pytest.fixture
def group(group_made_once, folder):
    shutil.copytree(group_made_once, folder, dirs_exist_ok=True)
    return "q.zarr"


REPEATED = {
    "scale": ["--scale", "s.npy"],
    "scale as zarr": ["--scale", "q.zarr/scale"],
    "scale as list": ["--scale", ",".join(map(repr, ROWS.tolist()))],
    "zero point": ["--zero-point", "0,1,2,3,4,5"],
    "zero point as zarr": ["--zero-point", "z.zarr"],
    "axis": ["--axis", 0],
    "axis from the end": ["--axis", -2],
    "no blocks": ["--block-size", 0],
    "x_dtype": ["--x-dtype", "int4"],
    "scale_dtype": ["--scale-dtype", "float"],
    "all": ["--scale", "s.npy", "--zero-point", "z.zarr", "--axis", 0, "--x-dtype", "INT4", "--scale-dtype", "float32"],
}


@pytest.mark.parametrize("arguments", REPEATED.values(), ids=REPEATED)
def test_options_that_repeat_the_group(group, arguments):
    dequantize(group, "y.zarr", *arguments)
    dequantize(group, "z", "--output-dtype", "float32")
    assert reference.same_bits(stored("y.zarr"), stored("z"))


@pytest.mark.parametrize("how", ["codes npy", "codes zarr", "zarr"])
@pytest.mark.parametrize("scale_name", ["bfloat16", "float8_e8m0fnu"])
def test_the_options_of_quantize_may_all_be_repeated(scale_name, how):
    scale = np.float32([0.25, 4, 0.5, 1, 2, 8]).astype(dtype_of(scale_name))
    save("x.zarr", X)
    arguments = [*scale_arguments(scale, how), "--axis", 0]
    quantize("x.zarr", "q.zarr", *arguments, "--dtype", "int8")
    dequantize("q.zarr", "y.zarr", *arguments)


def test_sizes_of_blocks_may_be_repeated():
    save("x.zarr", X)
    save("s.zarr", np.full((2, 8), 0.5, np.float32))
    quantize("x.zarr", "q.zarr", "--scale", "s.zarr", "--block-size", "4,5", "--dtype", "int8")
    dequantize("q.zarr", "y.zarr", "--block-size", "4,5", "--axis", 0)
    for other in ("5,4", "4", "4,5,1", "0"):
        refused("dequantize", "q.zarr", "z.zarr", "--block-size", other, part="--block-size")


DISAGREEING = {
    "scale": (["--scale", "0.5"], "--scale 0.5"),
    "scale of other values": (["--scale", "1,2,3,4,5,6"], "--scale"),
    "scale of another type": (["--scale", "half.npy"], "--scale half.npy"),
    "scale of another shape": (["--scale", "column.npy"], "--scale column.npy"),
    "no such scale": (["--scale", "none.npy"], "none.npy"),
    "zero point": (["--zero-point", "1"], "--zero-point 1"),
    "zero point of other values": (["--zero-point", "0,1,2,3,4,4"], "--zero-point"),
    "zero point out of range": (["--zero-point", "0,1,2,3,4,8"], "int4"),
    "zero point of another type": (["--zero-point", "z8.npy"], "--zero-point"),
    "axis": (["--axis", "1"], "--axis 1"),
    "axis from the end": (["--axis", "-1"], "--axis"),
    "axis out of range": (["--axis", "2"], "axis"),
    "axis far below": (["--axis", "-4"], "axis"),
    "blocks": (["--block-size", "32"], "--block-size"),
    "blocks of two": (["--block-size", "4,5"], "--block-size"),
    "x_dtype": (["--x-dtype", "int8"], "--x-dtype int8"),
    "x_dtype of the source": (["--x-dtype", "float32"], "--x-dtype float32"),
    "unknown x_dtype": (["--x-dtype", "int5"], "int5"),
    "scale_dtype": (["--scale-dtype", "float16"], "--scale-dtype float16"),
    "output_dtype": (["--output-dtype", "int8"], "output_dtype"),
    "one right, one wrong": (["--scale", "s.npy", "--axis", "1"], "--axis 1"),
}


@pytest.mark.parametrize(("arguments", "part"), DISAGREEING.values(), ids=DISAGREEING)
def test_options_that_disagree_with_the_group(group, arguments, part):
    np.save("half.npy", ROWS.astype(np.float16))
    np.save("column.npy", ROWS.reshape(6, 1))
    np.save("z8.npy", np.int16(range(6)))
    refused("dequantize", group, "y.zarr", *arguments, part=part)


def test_a_zero_point_where_there_is_none():
    save("x.zarr", X)
    quantize("x.zarr", "q.zarr", "--scale", 0.5, "--dtype", "int8")
    refused("dequantize", "q.zarr", "y.zarr", "--zero-point", 1, part="--zero-point 1")


# ---- sources that are no finished group


def change(path, **attributes):
    """Attributes in a zarr.json, by hand; None takes one away."""
    file = Path(path, "zarr.json")
    content = json.loads(file.read_text())
    for name, value in attributes.items():
        key = f"chunkq.{name}"
        content["attributes"].pop(key, None)
        if value is not None:
            content["attributes"][key] = value
    file.write_text(json.dumps(content))


def operator_of(path):
    return json.loads(Path(path, "zarr.json").read_text())["attributes"]["chunkq.operator"]


@pytest.mark.parametrize("complete", [False, None, "yes", 0])
def test_an_unfinished_group(group, complete):
    change(group, complete=complete)
    refused("dequantize", group, "y.zarr", part="unfinished")
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.open_quantized(group)
    assert caught.value.reason == "source"


def test_an_unfinished_array_in_every_place(group):
    change(save("half.zarr", X), complete=False)
    refused("quantize", "half.zarr", "p.zarr", "--scale", 1, part="unfinished")
    refused("dequantize", "half.zarr", "p.zarr", "--scale", 1, part="unfinished")
    change(save("s.zarr", ROWS), complete=False)
    refused("quantize", "x.zarr", "p.zarr", "--scale", "s.zarr", "--axis", 0, part="unfinished")
    change("q.zarr/data", complete=False)
    refused("dequantize", "q.zarr", "p.zarr", part="unfinished")


def test_a_run_that_failed_leaves_an_unfinished_group():
    save("x.zarr", X)
    for path in Path("x.zarr/c").rglob("*"):
        if path.is_file():
            path.write_bytes(b"junk")
    quantize("x.zarr", "q.zarr", "--scale", 1, "--dtype", "int8", code=1)
    assert zarr.open_group("q.zarr").attrs["chunkq.complete"] is False
    refused("dequantize", "q.zarr", "y.zarr", part="unfinished")
    shutil.rmtree("x.zarr")
    save("x.zarr", X)
    quantize("x.zarr", "q.zarr", "--scale", 1, "--dtype", "int8", "--overwrite")
    dequantize("q.zarr", "y.zarr")


@pytest.mark.parametrize("name", ["data", "scale", "zero_point"])
def test_a_group_that_lacks_an_array(group, name):
    shutil.rmtree(f"{group}/{name}")
    refused("dequantize", group, "y.zarr", part=name)


@pytest.mark.parametrize("name", ["data", "scale", "zero_point"])
def test_a_group_with_a_group_in_place_of_an_array(group, name):
    shutil.rmtree(f"{group}/{name}")
    zarr.create_group(f"{group}/{name}")
    refused("dequantize", group, "y.zarr", part=name)


JUNK = ["", "{", "null", "[]", "{}", '{"zarr_format": 3}', '{"zarr_format": 3, "node_type": "tree"}', "\x00\xff"]


@pytest.mark.parametrize("junk", JUNK, ids=ascii)
@pytest.mark.parametrize("where", ["", "data", "scale", "zero_point"])
def test_damaged_metadata(group, where, junk):
    Path(group, where, "zarr.json").write_text(junk)
    refused("dequantize", group, "y.zarr", code=2)


@pytest.mark.parametrize("name", ["scale", "zero_point"])
@pytest.mark.parametrize("content", [None, b"", b"junk"], ids=["missing", "empty", "junk"])
def test_a_parameter_whose_object_is_lost(group, name, content):
    """zarr reads a missing object as the fill value: every result would be NaN, or off by the lowest zero point."""
    path = Path(group, name, "c", "0")
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    before = tree()
    result = CliRunner().invoke(main, ["dequantize", group, "y.zarr", "--scheduler", "sync"])
    assert result.exit_code in (1, 2), result.stderr
    assert isinstance(result.exception, SystemExit)
    assert name in result.stderr.splitlines()[-1]
    assert tree() == before


def test_a_lost_object_of_the_data(group):
    Path(group, "data/c/0/0").unlink()
    refused("dequantize", group, "y.zarr", part="lacks 1 stored objects", code=1)


RECORDS = {
    "null": lambda record: None,
    "number": lambda record: 3,
    "word": lambda record: "QuantizeLinear",
    "list": lambda record: [record],
    "empty": lambda record: {},
    "DequantizeLinear": lambda record: record | {"operator": "DequantizeLinear", "attributes": {"axis": 0}},
    "FakeQuantize": lambda record: {
        "operator": "FakeQuantize",
        "attributes": {"levels": 4},
        "inputs": dict.fromkeys(("input_low", "input_high", "output_low", "output_high"), 1),
    },
    "unknown operator": lambda record: record | {"operator": "Quantize"},
    "no attributes": lambda record: {k: v for k, v in record.items() if k != "attributes"},
    "no inputs": lambda record: record | {"inputs": {}},
    "another attribute": lambda record: record | {"attributes": record["attributes"] | {"levels": 3}},
    "axis out of range": lambda record: record | {"attributes": record["attributes"] | {"axis": 2}},
    "axis that does not fit": lambda record: record | {"attributes": record["attributes"] | {"axis": 1}},
    "blocks that do not fit": lambda record: record | {"attributes": record["attributes"] | {"block_size": 4}},
    "another type": lambda record: record | {"attributes": record["attributes"] | {"output_dtype": "int8"}},
    "a digest": lambda record: record | {"inputs": {"scale": {"dtype": "float32", "shape": [6], "sha256": "0" * 64}}},
    "a line break": lambda record: record | {"attributes": {"a\nb": 1}},
}


@pytest.mark.parametrize("make", RECORDS.values(), ids=RECORDS)
def test_a_damaged_record(group, make):
    change(group, operator=make(operator_of(group)))
    refused("dequantize", group, "y.zarr")


@pytest.mark.parametrize(
    "place",
    ["../../x", "../scale", "/etc", "", ".", "data", "zero_point", "scale/", "./scale", "x.zarr", 3, None, ["scale"]],
)
def test_a_record_that_leads_elsewhere(group, place):
    save("../x", ROWS)
    record = operator_of(group)
    record["inputs"]["scale"]["zarr"] = place
    change(group, operator=record)
    refused("dequantize", group, "y.zarr")
    with pytest.raises(chunkq.SpecError):
        chunkq.open_quantized(group)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn"])
def test_data_of_another_type_than_recorded(name):
    """Codes of a float taken for integers would be plainly wrong numbers."""
    save("x.zarr", X)
    quantize("x.zarr", "q.zarr", "--scale", 0.5, "--dtype", name)
    change("q.zarr/data", dtype=None)
    refused("dequantize", "q.zarr", "y.zarr")
    change("q.zarr/data", dtype="float8_e5m2")
    refused("dequantize", "q.zarr", "y.zarr")


@pytest.mark.parametrize("other", [ROWS.astype(np.float16), np.float32(2)], ids=["type", "shape"])
def test_a_scale_of_another_type_or_shape_than_recorded(group, other):
    shutil.rmtree(f"{group}/scale")
    save(f"{group}/scale", other)
    refused("dequantize", group, "y.zarr")


def test_what_is_no_group_of_ours():
    zarr.create_group("plain", attributes={"a": 1})
    Path("folder").mkdir()
    Path("file").write_text("mine")
    for source in ("plain", "folder", "file", "nowhere"):
        refused("dequantize", source, "y.zarr")
        refused("dequantize", source, "y.zarr", "--scale", 1, part="source")
        refused("quantize", source, "y.zarr", "--scale", 1, "--dtype", "uint8", part="source")


def test_a_quantized_group_is_not_quantized_again(group):
    refused("quantize", group, "p.zarr", "--scale", 1, "--dtype", "uint8")
    refused("quantize", f"{group}/data", "p.zarr", "--scale", 1, "--dtype", "uint8", part="x is int4")


def test_an_array_without_a_scale():
    save("x.zarr", X.astype(np.int8))
    refused("dequantize", "x.zarr", "y.zarr", part="--scale")


BAD = {
    "no scale": ([], "--scale"),
    "unknown type": (["--scale", 1, "--dtype", "int3"], "int3"),
    "type of no quantized values": (["--scale", 1, "--dtype", "int32"], "int32"),
    "two types": (["--scale", 1, "--zero-point", "z.npy", "--dtype", "uint8"], "zero_point is int8"),
    "zero point out of range": (["--scale", 1, "--zero-point", 9, "--dtype", "int4"], "outside int4"),
    "zero point of a float8": (["--scale", 1, "--zero-point", 1, "--dtype", "float8_e5m2"], "zero_point"),
    "codes out of range": (["--scale", 1, "--zero-point", "z.zarr"], "0 .. 15"),
    "no dtype": (["--scale", 1], "--dtype is missing"),
    "precision": (["--scale", 1, "--precision", "float64", "--dtype", "int8"], "precision"),
    "scale of float64": (["--scale", "s64.npy", "--dtype", "int8"], "float64"),
    "scale_dtype of other width": (["--scale", "s64.npy", "--scale-dtype", "bfloat16", "--dtype", "int8"], "scale"),
    "x_dtype of other width": (["--scale", 1, "--x-dtype", "bfloat16", "--dtype", "int8"], "x is float32"),
}


@pytest.mark.parametrize(("arguments", "part"), BAD.values(), ids=BAD)
def test_bad_requests(arguments, part):
    save("x.zarr", X)
    np.save("z.npy", np.int8(3))
    np.save("s64.npy", np.float64(1))
    zarr.create_array("z.zarr", data=np.uint8(16), attributes={"chunkq.dtype": "uint4"})
    refused("quantize", "x.zarr", "q.zarr", *arguments, part=part)


LATE = {
    "zero point of a float8": ["--scale", 1, "--zero-point", 1, "--dtype", "float8_e5m2"],
    "zero points of a float4": [
        "--scale",
        "s.npy",
        "--zero-point",
        "0,0,0,0,0,1",
        "--dtype",
        "float4_e2m1fn",
        "--axis",
        0,
    ],
    "codes out of range": ["--scale", 1, "--zero-point", "z.zarr"],
}


@pytest.mark.parametrize("arguments", LATE.values(), ids=LATE)
def test_a_bad_request_does_not_cost_the_old_target(group, arguments):
    zarr.create_array("z.zarr", data=np.uint8(16), attributes={"chunkq.dtype": "uint4"}, overwrite=True)
    refused("quantize", "x.zarr", group, *arguments, "--overwrite", part="zero_point")


def test_codes_of_the_data_that_are_none():
    """Seen when they are read, in a run that has begun: that is a failed run."""
    zarr.create_array("x.zarr", data=np.int8([[1, 100]]), attributes={"chunkq.dtype": "int4"})
    result = dequantize("x.zarr", "y.zarr", "--scale", 1, code=1)
    assert "-8 .. 7" in result.stderr
    assert zarr.open_array("y.zarr").attrs["chunkq.complete"] is False


# ---- targets


def test_overwrite_replaces_a_group_of_ours(group):
    refused("quantize", "x.zarr", group, "--scale", 1, "--dtype", "uint8", part="--overwrite")
    refused("dequantize", group, group, part="source")
    quantize("x.zarr", group, "--scale", 1, "--dtype", "int8", "--overwrite")
    assert sorted(os.listdir(group)) == ["data", "scale", "zarr.json"]
    quantize("x.zarr", "p.zarr", "--scale", 0.5, "--dtype", "int8")
    dequantize("p.zarr", group, "--overwrite")
    assert zarr.open_array(group).dtype == np.float32
    quantize("x.zarr", group, "--scale", 1, "--dtype", "int8", "--overwrite")
    assert chunkq.open_quantized(group) is not None


STRANGERS = {
    "file": lambda g: Path(g, "notes.txt").write_text("mine"),
    "hidden file": lambda g: Path(g, ".notes").write_text("mine"),
    "array": lambda g: save(f"{g}/extra", X),
    "group": lambda g: zarr.create_group(f"{g}/extra"),
    "array in the data": lambda g: save(f"{g}/data/extra", X),
    "file in the data": lambda g: Path(g, "data", "notes.txt").write_text("mine"),
    "file among the chunks": lambda g: Path(g, "data", "c", "0", "notes").write_text("mine"),
    "file with a number": lambda g: Path(g, "data", "2024.10").write_text("mine"),
    "file in place of the scale": lambda g: (shutil.rmtree(f"{g}/scale"), Path(g, "scale").write_text("mine")),
    "folder in place of the scale": lambda g: (shutil.rmtree(f"{g}/scale"), Path(g, "scale").mkdir(),
                                               Path(g, "scale", "a.txt").write_text("mine")),
    "link to a file": lambda g: Path(g, "link").symlink_to(Path("x.zarr/zarr.json").resolve()),
    "link in place of the scale": lambda g: (shutil.rmtree(f"{g}/scale"),
                                             Path(g, "scale").symlink_to(Path("x.zarr").resolve())),
    "link among the chunks": lambda g: Path(g, "data", "c", "9").symlink_to(Path("x.zarr").resolve()),
    "link in place of zarr.json": lambda g: (Path(g, "zarr.json").rename("elsewhere"),
                                             Path(g, "zarr.json").symlink_to(Path("elsewhere").resolve())),
    "no zarr.json": lambda g: Path(g, "zarr.json").unlink(),
    "a group of another's": lambda g: change(g, operator=None),
}  # fmt: skip


@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS)
def test_overwrite_removes_nothing_of_the_users(group, make):
    save("int8.zarr", X.astype(np.int8))
    make(group)
    refused("quantize", "x.zarr", group, "--scale", 1, "--dtype", "uint8", "--overwrite", part="target")
    refused("dequantize", "int8.zarr", group, "--scale", 1, "--overwrite", part="target")


@pytest.mark.parametrize("attributes", [{}, {"node_type": "array"}, {"text": "chunkq.operator"}])
def test_overwrite_spares_groups_of_others(folder, attributes):
    """Consolidated metadata, as OME-Zarr has it, names arrays before it says that this is a group."""
    other = zarr.open_group("other.zarr", mode="w", attributes=attributes)
    for name in "01":
        other.create_array(name, data=np.ones((4, 4), "u1"), chunks=(2, 2))
    zarr.consolidate_metadata("other.zarr")
    save("x.zarr", X)
    refused("quantize", "x.zarr", "other.zarr", "--scale", 1, "--dtype", "uint8", "--overwrite", part="no part of")


def test_a_local_store_is_a_path(folder):
    save("x.zarr", X)
    Path("mine").mkdir()
    Path("mine", "precious.txt").write_text("mine")
    for place in ("x.zarr/sub", "mine"):
        with pytest.raises(chunkq.SpecError):
            chunkq.plan(chunkq.QuantizeLinear(1.0), "x.zarr", zarr.storage.LocalStore(place), overwrite=True)


@pytest.mark.parametrize("place", ["q.zarr/data", "q.zarr/scale", "q.zarr", "q.zarr/new", "q.zarr/data/c"])
def test_targets_that_touch_the_source(group, place):
    refused("dequantize", group, place, "--overwrite", part="source")


@pytest.mark.parametrize("place", ["q.zarr/data", "q.zarr/scale", "q.zarr/new"])
def test_targets_inside_a_finished_group(group, place):
    """A run that writes there would leave a group that says it is complete, with another content."""
    for more in ([], ["--overwrite"]):
        refused("quantize", "x.zarr", place, "--scale", 1, "--dtype", "uint8", *more)


@pytest.mark.parametrize("option", ["--scale", "--zero-point"])
def test_a_target_that_holds_a_parameter(group, option):
    """It would be removed before it was read."""
    name = option[2:].replace("-", "_")
    others = ["--scale", "s.npy"] if option == "--zero-point" else ["--dtype", "int8"]
    command = ["quantize", "x.zarr", group, option, f"{group}/{name}", *others, "--axis", 0, "--overwrite"]
    refused(*command, part=name)
    refused("quantize", "x.zarr", f"{group}/{name}", *command[3:])


def test_a_dequantized_target_that_is_the_scale():
    save("x.zarr", X.astype(np.int8))
    save("s.zarr", ROWS)
    refused("dequantize", "x.zarr", "s.zarr", "--scale", "s.zarr", "--axis", 0, "--overwrite", part="scale")


# ---- plan and open_quantized


def made(target, **how):
    op = chunkq.QuantizeLinear(ROWS, np.int8(range(6)), axis=0)
    chunkq.plan(op, save("x.zarr", X) if not Path("x.zarr").exists() else "x.zarr", target, **how).run()
    return reference.dequantize_linear(
        reference.quantize_linear(X, ROWS, np.int8(range(6)), 0), ROWS, np.int8(range(6)), 0
    )  # fmt: skip


def test_open_quantized_by_every_name(folder):
    expected = made("q.zarr")
    for source in (
        "q.zarr",
        folder / "q.zarr",
        f"file://{folder}/q.zarr",
        zarr.open_group("q.zarr"),
        zarr.open_group("q.zarr", mode="r"),
        zarr.storage.LocalStore(folder / "q.zarr"),
    ):
        data, op = chunkq.open_quantized(source)
        assert isinstance(data, zarr.Array)
        assert isinstance(op, chunkq.DequantizeLinear)
        assert isinstance(op.scale, np.ndarray)
        assert reference.same_bits(op.scale, ROWS)
        assert reference.same_bits(op(data).compute(), expected)
        chunkq.plan(op, data, "y.zarr", overwrite=True).run()
        checked("y.zarr", expected)


def test_a_group_in_memory():
    store = zarr.storage.MemoryStore()
    expected = made(store)
    data, op = chunkq.open_quantized(store)
    assert reference.same_bits(op(data).compute(), expected)


def test_a_group_inside_a_users_group():
    parent = zarr.create_group("model.zarr")
    expected = made("model.zarr/layer.0/weight")
    data, op = chunkq.open_quantized("model.zarr/layer.0/weight")
    assert reference.same_bits(op(data).compute(), expected)
    assert chunkq.open_quantized(parent) is None


def test_open_quantized_on_what_is_none(group):
    assert chunkq.open_quantized("x.zarr") is None
    assert chunkq.open_quantized(zarr.open_array("x.zarr")) is None
    assert chunkq.open_quantized(f"{group}/data") is None
    zarr.create_group("plain")
    assert chunkq.open_quantized("plain") is None
    save("v2.zarr", X, zarr_format=2)
    assert chunkq.open_quantized("v2.zarr") is None


@pytest.mark.parametrize("source", ["nowhere", "nowhere/deep", "", 3, None, "file", "folder"])
def test_open_quantized_on_nothing(source):
    Path("file").write_text("mine")
    Path("folder").mkdir()
    before = tree()
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.open_quantized(source)
    assert caught.value.reason == "source"
    assert tree() == before


def test_open_quantized_takes_the_type_of_y(group):
    for output, expected in ((None, "float32"), ("float16", "float16"), (ml_dtypes.bfloat16, "bfloat16")):
        data, op = chunkq.open_quantized(group, output)
        assert op(data).dtype.name == expected
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.open_quantized(group, "float33")
    assert caught.value.reason == "dtype"


def test_the_operator_of_a_group_names_its_arrays(group):
    record = operator_of(group)
    assert {n: v["zarr"] for n, v in record["inputs"].items()} == {"scale": "scale", "zero_point": "zero_point"}
    assert record["inputs"]["zero_point"]["dtype"] == "int4"
    assert record["attributes"]["output_dtype"] == "int4"
    shutil.move(group, "moved.zarr")
    dequantize("moved.zarr", "y.zarr")


def test_a_large_scale_stays_in_zarr():
    rows = metadata.AT_ONCE // 4 + 1
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((rows, 2)).astype(np.float32), rng.uniform(0.1, 2, rows).astype(np.float32)
    save("x.zarr", x, chunks=(100_000, 2))
    np.save("s.npy", scale)
    through_a_group(x, scale, None, {"axis": 0}, ["--scale", "s.npy", "--axis", 0], "int4")
    data, op = chunkq.open_quantized("q.zarr")
    assert isinstance(op.scale, zarr.Array)
    assert op.scale.chunks[0] <= 1 << 16
    assert reference.same_bits(op(data)[-5:].compute(), stored("y.zarr")[-5:])
    before = tree()
    Path("q.zarr/scale/c/2").unlink()
    run("dequantize", "q.zarr", "z.zarr", code=1)
    assert tree() == {k: v for k, v in before.items() if k != "q.zarr/scale/c/2"}


@pytest.mark.parametrize("name", ["bfloat16", "float8_e8m0fnu"])
def test_a_large_scale_that_zarr_does_not_have(name, monkeypatch):
    monkeypatch.setattr(metadata, "AT_ONCE", 4)
    scale = np.float32([0.25, 4, 0.5, 1, 2, 8]).astype(dtype_of(name))
    save("x.zarr", X)
    save("s.zarr", scale)
    through_a_group(X, scale, None, {"axis": 0}, ["--scale", "s.zarr", "--axis", 0], "uint2")
    assert isinstance(chunkq.open_quantized("q.zarr")[1].scale, zarr.Array)


def test_other_operators_write_arrays():
    save("x.zarr", X)
    for op in (chunkq.QuantizeDequantize(0.5, quantized_dtype="int4"), chunkq.FakeQuantize(-1.0, 1.0, -1.0, 1.0, 16)):
        chunkq.plan(op, "x.zarr", "y.zarr", overwrite=True).run()
        assert chunkq.open_quantized("y.zarr") is None
        assert reference.same_bits(stored("y.zarr"), op(X))


def test_plan_says_what_quantize_will_do():
    save("x.zarr", X)
    plan = chunkq.plan(chunkq.QuantizeLinear(ROWS, axis=0, output_dtype="int4"), "x.zarr", "q.zarr")
    assert "QuantizeLinear" in str(plan)
    assert "int4 (6, 40)" in str(plan)
    assert json.loads(plan.to_json())["target_dtype"] == "int4"
    assert not Path("q.zarr").exists()
