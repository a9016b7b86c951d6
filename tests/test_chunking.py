"""The linear operators on Dask and zarr: any chunking of x, of the scale and of both gives the bits of the whole array."""

import os
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import pairwise, product
from math import prod

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import reference
import strategies
import test_graph
import test_quantize_linear as linear
import zarr
from dask import compute, config
from dask.callbacks import Callback
from distributed.protocol import deserialize, serialize
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantize_linear import E8M0, OPERATORS, QUANTIZED, REALS, chance, codes, refused, scales

import chunkq
from chunkq import direct, graph

client = test_graph.client  # the fixture: two processes
ATTRIBUTE = "chunkq.dtype"
X_FORMS = ("dask", "zarr", "dask integers", "zarr integers")  # integers: of types that the call names
FORMS = ("numpy", *X_FORMS)
NO_CODES = {"int4": 8, "int2": -3, "uint4": 16, "uint2": 0xE4, "float4_e2m1fn": 0x21, "float6_e3m2fn": 64}
FORMS_DRAWN = [st.sampled_from(forms) for forms in (X_FORMS, FORMS, FORMS)]


def as_integers(values):
    """What zarr stores for a type it does not have: int4 and int2 as numbers, of the others the codes."""
    if reference.is_integer(values.dtype):
        return values.astype(values.dtype.name.replace("int4", "int8").replace("int2", "int8"))
    return values.view(f"u{values.dtype.itemsize}") if hasattr(ml_dtypes, values.dtype.name) else values


def hold(rng, values, form, folder):
    """Values as a form says, in random chunks, shards and zarr formats."""
    held = as_integers(values) if form != "dask" else values
    if "dask" in form:
        return da.from_array(held, chunks=tuple(strategies.cut(rng, n) for n in held.shape))
    chunks = tuple(int(rng.integers(1, n + 2)) for n in held.shape)
    shards = {"shards": tuple(c * int(rng.integers(1, 3)) for c in chunks)}
    how = {"zarr_format": 2} if chance(rng, 0.2) else shards if chunks and chance(rng, 0.4) else {}
    how["attributes"] = {ATTRIBUTE: values.dtype.name} if form == "zarr" else {}
    return zarr.create_array(f"{folder}/{rng.integers(1 << 60)}" if folder else {}, data=held, chunks=chunks, **how)


def request(rng, operator, quantized, scale_name):
    """x, scale, zero point and attributes of any operator."""
    if operator == "dequantize_linear":
        return linear.dequantize_request(rng, (quantized,), (scale_name,))
    *arrays, how = linear.quantize_request(rng, (*REALS, "int32"), (scale_name,), (quantized,))
    how["precision"] = str(rng.choice(REALS)) if chance(rng, 0.2) else None
    if operator == "quantize_dequantize":
        how["quantized_dtype"] = how.pop("output_dtype", None)
        how["output_dtype"] = str(rng.choice(REALS)) if scale_name == E8M0 or chance(rng, 0.3) else None
    return *arrays, how


def lazily(rng, operator, drawn, forms, folder=None):
    *values, attributes = drawn
    declared = {n: v.dtype.name for n, v, f in zip(("x_dtype", "scale_dtype"), drawn, forms, strict=False) if " " in f}
    if operator != "dequantize_linear" or "x_dtype" not in declared:
        forms = (*forms[:2], forms[2].split()[0])  # nothing else names the type of the zero point
    held = [v if v is None or f == "numpy" else hold(rng, v, f, folder) for v, f in zip(values, forms, strict=True)]
    with pytest.MonkeyPatch.context() as patch, config.set({"array.chunk-size": f"{rng.integers(1, 400)}B"}):
        if chance(rng, 0.5):
            patch.setattr(graph, "HELD_BYTES", 0)  # every NumPy parameter counts as large
        y = getattr(chunkq, operator)(*held, **attributes, **declared)
    assert "dask" not in forms[0] or y.chunks == held[0].chunks
    return y


@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=30 if test_graph.PLANNING else 60)
@given(strategies.seeds, st.sampled_from(QUANTIZED), st.sampled_from((*REALS, E8M0)), st.tuples(*FORMS_DRAWN))
def test_any_chunking_gives_the_bits_of_the_whole(operator, seed, quantized, scale_name, forms):
    """Phases inside blocks, ragged tails, empty chunks, several axes, stored scales."""
    rng = np.random.default_rng(seed)
    drawn = request(rng, operator, quantized, scale_name)
    whole = getattr(chunkq, operator)(*drawn[:3], **drawn[3])
    y = lazily(rng, operator, drawn, forms)
    assert (y.shape, y.dtype, y._meta.dtype, y._meta.ndim) == (whole.shape, whole.dtype, whole.dtype, y.ndim)
    parts = [(), (slice(1, 3),) * bool(y.ndim), strategies.region(rng, y.shape)]
    for part, found in zip(parts, compute(*(y[part] for part in parts), scheduler="sync"), strict=True):
        assert reference.same_bits(found, whole[part]), part


@pytest.mark.parametrize("name", [*QUANTIZED, *REALS, E8M0])
def test_every_type_travels(name):  # distributed asks again without end for a block that it cannot read
    chunkq.dequantize_linear(da.zeros(3, dtype="i1"), 1.0)  # whoever builds a graph has taught it
    values = codes(np.random.default_rng(0), (3, 2), name)
    assert reference.same_bits(deserialize(*serialize(values)), values)


def test_on_a_cluster(tmp_path, client):
    rng = np.random.default_rng(0)
    names, lazy, wholes = QUANTIZED, [], []
    for i, forms in enumerate(product(X_FORMS, FORMS)):
        operator = OPERATORS[i % 3]
        drawn = request(rng, operator, names[i % len(names)], (*REALS, E8M0)[i % 4])
        lazy.append(lazily(rng, operator, drawn, (*forms, FORMS[i % 5]), tmp_path))
        wholes.append(getattr(chunkq, operator)(*drawn[:3], **drawn[3]))
    for future, whole, forms in zip(client.compute(lazy), wholes, product(X_FORMS, FORMS), strict=True):
        assert reference.same_bits(future.result(timeout=20), whole), forms


@pytest.fixture
def reads(monkeypatch):
    """What is read of any zarr array: its dtype and the bounds of the region."""
    seen, read, directly = [], zarr.Array.__getitem__, direct.read

    def note(array, selection):
        parts = selection if isinstance(selection, tuple) else (slice(None),) * array.ndim
        seen.append((array.dtype.name, tuple(s.indices(n)[:2] for s, n in zip(parts, array.shape, strict=True))))

    def spy(array, selection):
        note(array, selection)
        return read(array, selection)

    def spy_directly(array, region):
        found = directly(array, region)
        if found is not None:
            note(array, region)
        return found

    monkeypatch.setattr(zarr.Array, "__getitem__", spy)
    monkeypatch.setattr(direct, "read", spy_directly)
    return seen


def stored(values, name=None):
    attributes = {ATTRIBUTE: name} if name is not None else {}
    return zarr.create_array({}, data=values, chunks=(3,) * values.ndim, attributes=attributes)


def cuts(chunks, steps):
    """For each block of x the bounds of what it needs of a parameter."""
    edges = [pairwise(np.cumsum([0, *lengths]).tolist()) for lengths in chunks]
    return list(product(*([(a // k, -(-b // k)) for a, b in edge] for edge, k in zip(edges, steps, strict=True))))


def computed(y):
    """The result, and for each dtype the elements of the largest array that a task made."""
    most = Counter()

    def note(key, found, *_):
        if isinstance(found, np.ndarray):
            most[found.dtype.name] = max(most[found.dtype.name], found.size)

    with Callback(posttask=note):
        return y.compute(scheduler="sync", optimize_graph=False), most


@pytest.mark.parametrize("held", ["dask", "zarr"])
@pytest.mark.parametrize("steps", [(4, 7), (1, 7), (5, 1), (40, 3)])
def test_a_stored_scale_is_read_cut_by_cut(reads, held, steps):
    """Once for each block of x that is asked for, and only its piece."""
    rng = np.random.default_rng(2)
    counts = tuple(-(-n // k) for n, k in zip((23, 30), steps, strict=True))
    x, *params = codes(rng, (23, 30), "uint2"), scales(rng, counts, "bfloat16", 0), codes(rng, counts, "uint2")
    source = stored(as_integers(x), "uint2") if held == "zarr" else da.from_array(x, chunks=((5, 9, 9), (11, 1, 18)))
    scale = stored(as_integers(params[0]), "bfloat16")
    op = partial(chunkq.dequantize_linear, block_size=steps)
    with config.set({"array.chunk-size": "1B"}):
        y, whole = op(source, scale, params[1]), op(x, *params)
    for part, needed in ((slice(None),) * 2, cuts(y.chunks, steps)), ((slice(3), slice(2)), cuts(y.chunks, steps)[:1]):
        reads.clear()
        assert reference.same_bits(y[part].compute(scheduler="sync"), whole[part])
        assert Counter(bounds for name, bounds in reads if name == "uint16") == Counter(needed)


@pytest.mark.parametrize(("x_chunks", "param_chunks", "steps"), [
    ((8, 12), (1, 2), (4, 3)), ((5, 7), (2, 2), (4, 3)), ((5, 48), (1, 4), (1, 3)), ((48, 5), (4, 1), (3, 1)),
    ((48, 3), (1, 48), (1, 3)), ((3, 48), (48, 1), (3, 1)), ((48, 3), (1, 48), (5, 2)), ((3, 48), (48, 1), (2, 5)),
    ((10, 10), (16, 1), (3, 1)), ((10, 10), (1, 16), (1, 3)),
])  # fmt: skip
def test_no_task_holds_more_of_a_parameter_than_a_block_needs(x_chunks, param_chunks, steps):
    """Nor more than one of the blocks that it came in; rows of one and columns of the other among them."""
    rng = np.random.default_rng(3)
    counts = tuple(-(-48 // k) for k in steps)
    x, *params = scales(rng, (48, 48), "float32", 0), scales(rng, counts, "float16", 0), codes(rng, counts, "int8")
    op = partial(chunkq.quantize_dequantize, block_size=steps, output_dtype="bfloat16")
    lazy = [da.from_array(v, chunks=param_chunks) for v in params]
    found, most = computed(y := op(da.from_array(x, chunks=x_chunks), *lazy))
    assert reference.same_bits(found, op(x, *params))
    allowed = max(prod(b - a for a, b in bounds) for bounds in (*cuts(y.chunks, steps), *cuts(lazy[0].chunks, (1, 1))))
    assert 0 < max(most["float16"], most["int8"]) <= allowed


@pytest.mark.parametrize("held", ["dask", "zarr"])
def test_a_scale_larger_than_memory(reads, held):
    """21 GiB of scales, of which two blocks of x need 43 MiB."""
    n, k = 1 << 17, 1 << 12
    x = zarr.create_array({}, shape=(n, n), chunks=(k, k), dtype="u1", fill_value=0x38)
    how = {"shape": (n, -(-n // 3)), "fill_value": 3, "chunks": (k, 1000), "dtype": "f4"}
    scale = da.full(**how) if held == "dask" else zarr.create_array({}, **how)
    with config.set({"array.chunk-size": "1B"}):
        y = chunkq.dequantize_linear(x, scale, block_size=3, output_dtype="bfloat16", x_dtype="float8_e4m3fn")
    found, most = computed(y[5:7, k - 2 : k + 4])
    assert reference.same_bits(found, np.full((2, 6), 3, ml_dtypes.bfloat16))
    assert sorted(b for name, b in reads if name == "float32") == cuts(((k,), (k, k)), (1, 3)) * (held == "zarr")
    assert most["float32"] <= k * (k // 3 + 2)


@pytest.mark.parametrize(("reason", "held", "recorded", "declared"), [
    ("metadata", "u1", "float8_e4m3fn", "float8_e5m2"), ("metadata", "u1", "uint4", "float4_e2m1fn"),
    ("metadata", "i1", "int4", "int8"), ("metadata", "u1", "no type", "float8_e5m2"),
    *(("metadata", "u1", odd, None) for odd in ("float8_e4m3", "no type", "", 7, True, ["uint4"])),
    *(("metadata", "u1", odd, None) for odd in ({"name": "uint4"}, "99999999999f8", "f4,", "int16")),
    ("metadata", "u2", "float8_e5m2", None), ("metadata", "f4", "float8_e5m2", None),
    ("dtype", "u2", None, "float8_e5m2"), ("dtype", "i2", None, "int4"), ("dtype", "f4", None, "float8_e5m2"),
    ("dtype", "u1", None, "uint16"),
])  # fmt: skip
def test_element_types_that_disagree(reason, held, recorded, declared):
    x = np.ones((4, 4), held)
    for source in (stored(x, recorded), da.from_array(x, chunks=2))[: 1 + (recorded is None)]:
        refused(reason, chunkq.dequantize_linear, source, 1.0, x_dtype=declared)
    for operator, dtype in zip(OPERATORS, ("f4", "i1", "f4"), strict=True):
        ones, scale = da.ones((4, 4), chunks=2, dtype=dtype), stored(x[0], recorded)
        refused(reason, getattr(chunkq, operator), ones, scale, axis=0, scale_dtype=declared)


@pytest.mark.parametrize("name", NO_CODES)
def test_packed_bytes_are_refused_by_the_task(name):
    """As x and as zero point, held by Dask and by zarr, the type recorded or declared."""
    scale, x = np.ones(6, np.float32), np.zeros((4, 6), np.int8 if name.startswith("int") else np.uint8)
    good = da.from_array(x.copy(), chunks=3)
    x[3, 5] = NO_CODES[name]
    with config.set({"array.chunk-size": "1B"}):
        lazy = (
            chunkq.dequantize_linear(da.from_array(x, chunks=3), 1.0, x_dtype=name),
            chunkq.dequantize_linear(stored(x, name), 1.0),
            chunkq.dequantize_linear(stored(x), scale, x_dtype=name),
            chunkq.dequantize_linear(good, scale, da.from_array(x[3], chunks=3), x_dtype=name),
            chunkq.dequantize_linear(good, scale, stored(x[3]), x_dtype=name),
            chunkq.quantize_linear(good.astype("f4"), scale, stored(x[3], name)),
        )
    for y in lazy:
        assert y[:3, :3].compute(scheduler="sync").shape == (3, 3)  # the other blocks are sound
        with pytest.raises(chunkq.SpecError, match=r"chunkq\.unpack"):
            y.compute(scheduler="sync")
        refused("value", y.compute, scheduler="sync")


@pytest.mark.skipif(test_graph.PLANNING, reason="this is that run")
def test_with_query_planning():
    """Most of this file once more, with array expressions switched on before dask.array is imported."""
    how = {"env": {**os.environ, "DASK_ARRAY__QUERY_PLANNING": "True"}, "capture_output": True, "text": True}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not cluster", __file__]
    done = subprocess.run(command, **how, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
