"""Operators as JSON: there and back to the last bit, and documents that are damaged."""

import copy
import hashlib
import json
import re
import tracemalloc

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import reference
import strategies
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import chunkq
from chunkq.dtypes import ELEMENT_TYPES, to_holder
from chunkq.metadata import WRITTEN_OUT, describe, open_quantized

NAN, INF = float("nan"), float("inf")
F32 = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32) * 9
I8 = np.random.default_rng(1).integers(-128, 128, (2, 6), np.int8)


def strict(text):
    """A document as any JSON reader takes it: no NaN, no Infinity, no key twice."""

    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    def no_double(pairs):
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    return json.loads(text, parse_constant=no_constant, object_pairs_hook=no_double)


def same_input(a, b):
    if a is None or b is None:
        return a is b
    if isinstance(a, zarr.Array):
        return isinstance(b, zarr.Array) and a.store_path == b.store_path
    if isinstance(a, np.ndarray | np.generic):
        return isinstance(b, np.ndarray) and b.dtype.isnative and reference.same_bits(a, b)
    if isinstance(a, list | tuple):
        return isinstance(b, list) and len(a) == len(b) and all(map(same_input, a, b))
    return type(a) is type(b) and (repr(a) == repr(b))


def again(op):
    """The operator made again of its JSON."""
    text = op.to_json()
    document = strict(text)
    assert list(document) == ["operator", "attributes", "inputs"]
    twin = chunkq.from_json(text)
    assert type(twin) is type(op)
    for name in op.ATTRIBUTES:
        assert getattr(twin, name) == getattr(op, name)
        assert type(getattr(twin, name)) is type(getattr(op, name))
    for name in op.INPUTS:
        assert same_input(getattr(op, name), getattr(twin, name)), name
    assert twin.to_json() == text
    assert chunkq.from_json(json.dumps(document, indent=1, sort_keys=True)).to_json() == text
    return twin


def made(cls, *inputs, **attributes):
    return lambda: getattr(chunkq, cls)(*inputs, **attributes)


SCALE = np.float32([[0.1], [-3e-5]])
E8M0 = np.uint8([120, 129])
OPERATORS = {
    "dq plain": (made("DequantizeLinear", 0.5), I8),
    "dq weak": (made("DequantizeLinear", 1 / 3, 3), I8),
    "dq list": (made("DequantizeLinear", [0.1, 2], [1, -128], axis=0), I8),
    "dq negative axis": (made("DequantizeLinear", np.float32([0.1, 2]), np.int8([1, 2]), axis=-2), I8),
    "dq blocks": (made("DequantizeLinear", np.tile(SCALE, 2), axis=1, block_size=4), I8),
    "dq tuple": (made("DequantizeLinear", SCALE, np.int8([[1], [2]]), block_size=(1, 6)), I8),
    "dq list of blocks": (made("DequantizeLinear", SCALE, block_size=[1, 6]), I8),
    "dq output": (made("DequantizeLinear", 0.5, output_dtype="float16"), I8),
    "dq all": (
        made("DequantizeLinear", E8M0, np.uint8([0, 0]), axis=0, block_size=0, output_dtype=ml_dtypes.bfloat16,
             x_dtype="float8_e4m3fn", scale_dtype="float8e8m0"),
        I8.view(np.uint8),
    ),
    "q plain": (made("QuantizeLinear", 0.5), F32),
    "q weak": (made("QuantizeLinear", 1 / 3, 3, output_dtype="int4"), F32),
    "q list": (made("QuantizeLinear", [0.1, 2], np.int16([1, -3]), axis=0), F32),
    "q saturate": (made("QuantizeLinear", 1e-4, output_dtype="float8_e5m2", saturate=False), F32),
    "q saturate 1": (made("QuantizeLinear", 1e-4, output_dtype="float8_e5m2", saturate=1), F32),
    "q tuple": (made("QuantizeLinear", SCALE, block_size=(1, 6), output_dtype="uint2"), F32),
    "q all": (
        made("QuantizeLinear", E8M0, [0, 0], axis=-2, block_size=0, output_dtype="float6_e2m3fn", saturate=False,
             precision="float16", x_dtype="bfloat16", scale_dtype="float8_e8m0fnu"),
        F32.astype(ml_dtypes.bfloat16).view(np.uint16),
    ),
    "qdq plain": (made("QuantizeDequantize", 0.5), F32),
    "qdq weak": (made("QuantizeDequantize", 1 / 3, -2, quantized_dtype="int2"), F32),
    "qdq tuple": (made("QuantizeDequantize", SCALE, quantized_dtype="int8", block_size=(1, 6)), F32),
    "qdq all": (
        made("QuantizeDequantize", E8M0, np.int8([3, 4]), axis=0, block_size=0, quantized_dtype="int8", saturate=False,
             precision="bfloat16", output_dtype="float32", x_dtype="bfloat16", scale_dtype="float8_e8m0fnu"),
        F32.astype(ml_dtypes.bfloat16).view(np.uint16),
    ),
    "fq plain": (made("FakeQuantize", 0, 1, 0, 1, 256), F32),
    "fq floats": (made("FakeQuantize", -0.0, 0.1 + 0.2, -1e-45, 1 / 3, 16), F32),
    "fq not finite": (made("FakeQuantize", -1.0, INF, NAN, -INF, 4), F32),
    "fq lists": (made("FakeQuantize", [[-1], [-0.0]], (1, 2, 3, 4, 5, 6), [NAN], [[INF], [-INF]], 4), F32),
    "fq arrays": (made("FakeQuantize", SCALE, SCALE + 1, np.float32(NAN), np.float32([5]), 2**24 + 1), F32),
    "fq none": (made("FakeQuantize", F32, F32 + 1, F32, F32, 4, auto_broadcast="none"), F32),
    "fq pdpd": (
        made("FakeQuantize", np.float32([1, 2]), 3, 0, [1.5], 9, auto_broadcast="pdpd", broadcast_axis=0), F32,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "x"), OPERATORS.values(), ids=OPERATORS)
def test_there_and_back(make, x):
    op = make()
    twin = again(op)
    assert reference.same_bits(op(x), twin(x))


def test_unset_attributes_are_left_out_and_set_ones_written():
    attributes = strict(chunkq.QuantizeLinear(0.5).to_json())["attributes"]
    assert attributes == {"axis": 1, "block_size": 0, "saturate": True}
    attributes = strict(OPERATORS["q all"][0]().to_json())["attributes"]
    assert set(attributes) == set(chunkq.QuantizeLinear.ATTRIBUTES)
    assert attributes["scale_dtype"] == "float8_e8m0fnu"
    assert strict(chunkq.DequantizeLinear(SCALE, block_size=(1, 6)).to_json())["attributes"]["block_size"] == [1, 6]


def test_the_text_by_hand():
    op = chunkq.DequantizeLinear(np.float32([0.1, np.nan]), np.int8([[1], [-2]]), axis=0)
    assert strict(op.to_json()) == {
        "operator": "DequantizeLinear",
        "attributes": {"axis": 0, "block_size": 0},
        "inputs": {
            "scale": {"dtype": "float32", "shape": [2], "values": [0.10000000149011612, "nan"]},
            "zero_point": {"dtype": "int8", "shape": [2, 1], "values": [1, -2]},
        },
    }
    op = chunkq.FakeQuantize(NAN, [INF, -INF, -0.0], 1, 2.5, 4)
    inputs = strict(op.to_json())["inputs"]
    assert inputs == {"input_low": "nan", "input_high": ["inf", "-inf", -0.0], "output_low": 1, "output_high": 2.5}
    assert str(inputs["input_high"][2]) == "-0.0"


# ---- NumPy parameters


def array_of(name, codes):
    return np.asarray(codes).view(ELEMENT_TYPES[name].dtype)


def all_codes(name):
    """Every code; of a float's NaNs one, they are all alike."""
    row = ELEMENT_TYPES[name]
    codes = array_of(name, np.arange(1 << row.bits, dtype=f"u{row.dtype.itemsize}"))
    nan = reference.is_nan(codes)
    return np.concatenate([codes[~nan], codes[nan][-1:]])


def range_twin(value):
    """An array through the JSON of a FakeQuantize, which looks at no types before it is called."""
    return again(chunkq.FakeQuantize(value, 1, 0, 1, 4)).input_low


@pytest.mark.parametrize("name", [name for name, row in ELEMENT_TYPES.items() if row.bits <= 16])
def test_every_code(name):
    twin = range_twin(all_codes(name))
    assert twin.dtype == ELEMENT_TYPES[name].dtype
    again(chunkq.DequantizeLinear(all_codes(name)))


SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.17549435e-38, 1e-40, 3.4028235e38, INF, -INF, NAN, 0.1, 1 / 3, 16777217.0]


@pytest.mark.parametrize("dtype", ["f4", ">f4", "f8", ">f8"])
def test_special_values_and_random_bits(dtype):
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        special = np.array([*SPECIAL, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308]).astype(dtype)
    bits = rng.integers(0, 1 << 32, 4000, np.uint32).view(dtype)
    for value in (special, bits[~reference.is_nan(bits)]):
        twin = range_twin(value)
        assert reference.same_bits(value, twin)
        assert strict(chunkq.FakeQuantize(value, 0, 0, 0, 4).to_json()) == strict(
            chunkq.FakeQuantize(value.astype(value.dtype.newbyteorder("=")), 0, 0, 0, 4).to_json()
        )


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "float8_e5m2"])
def test_every_nan_is_alike(name):
    """Quiet, signalling, of either sign: taken without a warning."""
    row = ELEMENT_TYPES[name]
    bits = 8 * row.dtype.itemsize
    infinity = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float8_e5m2": 0x7C}.get(
        name, 0x7FF << 52
    )
    codes = np.array([infinity + 1, infinity + 3, infinity + 1 + (1 << (bits - 1))], f"u{row.dtype.itemsize}")
    value = array_of(name, codes)
    assert reference.is_nan(value).all()
    assert reference.is_nan(range_twin(value)).all()


def test_float64_with_17_digits():
    value = np.float64([0.1, 0.1 + 0.2, 1 / 3, np.nextafter(1, 2), np.pi * 1e300])
    op = chunkq.FakeQuantize(value[:1], value[1:2], value[2:3], value[3:4], 2**53 + 1)
    x = np.linspace(0, 1, 1001)
    assert reference.same_bits(again(op)(x), op(x))
    assert range_twin(value).tolist() == value.tolist()


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4"])
def test_integers_and_their_limits(dtype):
    limits = np.iinfo(dtype)
    value = np.array([limits.min, limits.max, 0, 1], dtype)
    assert range_twin(value).tolist() == value.tolist()
    assert again(chunkq.DequantizeLinear([1.0] * 4, value, axis=0)).zero_point.dtype == value.dtype.newbyteorder("=")


@pytest.mark.parametrize("name", ELEMENT_TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (2, 3, 4), (1, 1, 1)])
def test_shapes(name, shape):
    row = ELEMENT_TYPES[name]
    codes = np.random.default_rng(0).integers(0, 1 << min(row.bits, 62), shape, np.uint64)
    value = array_of(name, np.asarray(codes).astype(f"u{row.dtype.itemsize}"))
    assert range_twin(value).shape == shape
    assert strict(chunkq.DequantizeLinear(value).to_json())["inputs"]["scale"]["shape"] == list(shape)


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda v: v[::-1], lambda v: v[:, ::2], np.transpose])
def test_layouts(layout):
    value = layout(F32)
    assert reference.same_bits(range_twin(value), np.ascontiguousarray(value))


@pytest.mark.parametrize(
    "value", [np.float32(0.1), np.float64(0.1), np.float16(0.1), np.int8(-3), np.uint8(3)], ids=repr
)
def test_numpy_scalars(value):
    assert range_twin(value).dtype == value.dtype


@pytest.mark.parametrize(
    "value", [[np.float32(0.5), 2], [np.int8(1), 2], [np.float64(0.5)], [np.float32([1, 2]), [3, 4]]], ids=repr
)
def test_numpy_scalars_in_lists(value):
    x = np.float32([[0.3, 1.7]])
    op = chunkq.FakeQuantize(value, 3, 0, 3, 4)
    expected = None
    if np.ndim(value) == 1:
        expected = op(x)
    twin = chunkq.from_json(op.to_json())
    assert strict(op.to_json())["inputs"]["input_low"] == np.asarray(value, np.float64).tolist()
    if expected is not None:
        assert reference.same_bits(twin(x), expected)


def test_a_list_of_numpy_integers_as_zero_point():
    op = chunkq.DequantizeLinear([0.5, 2.0], [np.int8(1), np.int8(-2)], axis=0)
    op(I8)
    assert strict(op.to_json())["inputs"]["zero_point"] == [1, -2]


@settings(max_examples=40)
@given(st.data())
def test_random_operators(data):
    rng = np.random.default_rng(data.draw(strategies.seeds))
    shape = data.draw(strategies.solid_shapes)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    scale = strategies.scales(rng, (shape[axis],))
    zero_point = strategies.integers(rng, (shape[axis],), np.int16)
    op = chunkq.DequantizeLinear(scale, zero_point, axis=axis)
    x = strategies.integers(rng, shape, np.int16)
    assert reference.same_bits(again(op)(x), op(x))
    op = chunkq.QuantizeDequantize(scale, zero_point, axis=axis)
    x = strategies.floats(rng, shape, np.float32)
    assert reference.same_bits(again(op)(x), op(x))
    ranges = [strategies.ranges(rng, shape, np.float64) for _ in range(4)]
    op = chunkq.FakeQuantize(*ranges, levels=data.draw(st.integers(2, 2**53 + 1)))
    x = strategies.floats(rng, shape, np.float64)
    assert reference.same_bits(again(op)(x), op(x))


# ---- zarr parameters


def stored(path, value):
    """A parameter in zarr as chunkq stores it: what zarr does not have as integers with an attribute."""
    plain = to_holder(value)
    attributes = {} if plain.dtype == value.dtype else {"chunkq.dtype": value.dtype.name}
    return zarr.create_array(str(path), data=plain, attributes=attributes)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e8m0fnu"])
def test_zarr_scales_by_their_place(tmp_path, name):
    value = np.float32([0.5, 2.0]).astype(ELEMENT_TYPES[name].dtype)
    scale, zero_point = stored(tmp_path / "scale", value), stored(tmp_path / "group.zarr/zero", np.int8([1, 2]))
    op = chunkq.DequantizeLinear(scale, zero_point, axis=0, output_dtype="float32")
    inputs = strict(op.to_json())["inputs"]
    assert inputs["scale"] == {"dtype": name, "shape": [2], "zarr": str((tmp_path / "scale").resolve())}
    assert inputs["zero_point"] == {"dtype": "int8", "shape": [2], "zarr": str(tmp_path.resolve() / "group.zarr/zero")}
    expected = reference.dequantize_linear(I8, value, np.int8([1, 2]), 0, 0, np.float32)
    assert reference.same_bits(op(I8), expected)
    assert reference.same_bits(again(op)(I8), expected)


def test_zarr_parameters_declared_by_the_operator(tmp_path):
    codes = np.uint8([120, 129])
    scale = zarr.create_array(str(tmp_path / "scale"), data=codes)
    op = chunkq.DequantizeLinear(scale, axis=0, output_dtype="bfloat16", scale_dtype="float8_e8m0fnu")
    expected = chunkq.DequantizeLinear(codes.view(ml_dtypes.float8_e8m0fnu), axis=0, output_dtype="bfloat16")(I8)
    assert reference.same_bits(again(op)(I8), expected)


@pytest.mark.parametrize("name", ["int4", "uint2", "float8_e5m2fnuz", "float4_e2m1fn"])
def test_narrow_zero_points_in_zarr(tmp_path, name):
    zero_point = stored(tmp_path / "zero", np.zeros(2, ELEMENT_TYPES[name].dtype))
    op = chunkq.QuantizeLinear([0.5, 2.0], zero_point, axis=0)
    assert strict(op.to_json())["inputs"]["zero_point"]["dtype"] == name
    assert reference.same_bits(again(op)(F32), op(F32))


def test_zarr_ranges(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    low = stored("low", SCALE)
    op = chunkq.FakeQuantize(low, 1, 0, 1, 4)
    text = op.to_json()
    monkeypatch.chdir("/")
    assert reference.same_bits(chunkq.from_json(text)(F32), chunkq.FakeQuantize(SCALE, 1, 0, 1, 4)(F32))


def test_a_zarr_parameter_that_is_gone(tmp_path):
    text = chunkq.DequantizeLinear(stored(tmp_path / "scale", SCALE)).to_json()
    (tmp_path / "scale").rename(tmp_path / "elsewhere")
    with pytest.raises(chunkq.SpecError, match="no such file") as caught:
        chunkq.from_json(text)
    assert caught.value.reason == "source"


@pytest.mark.parametrize("other", [np.float32([1, 2, 3]), np.float16([[1], [2]])], ids=["shape", "dtype"])
def test_a_zarr_parameter_that_has_become_another(tmp_path, other):
    """The document says its type and shape; an array that has others is not the one that was meant."""
    text = chunkq.DequantizeLinear(stored(tmp_path / "scale", SCALE)).to_json()
    zarr.create_array(str(tmp_path / "scale"), data=other, overwrite=True)
    refused(text)


# ---- what JSON cannot hold


@pytest.mark.parametrize("place", ["scale", "zero_point", "input_low", "output_high"])
def test_dask_parameters(place):
    dask = da.from_array(np.int8([1, 2]) if place == "zero_point" else np.float32([1, 2]))
    linear = {"scale": [1.0, 2.0], "axis": 0} | {place: dask}
    ranges = {"input_low": 0, "input_high": 1, "output_low": 0, "output_high": 1, "levels": 4} | {place: dask}
    classes = ["FakeQuantize"] if "put" in place else ["DequantizeLinear", "QuantizeLinear", "QuantizeDequantize"]
    for cls in classes:
        op = getattr(chunkq, cls)(**(ranges if cls == "FakeQuantize" else linear))
        with pytest.raises(chunkq.SpecError, match=place) as caught:
            op.to_json()
        assert caught.value.reason == "argument"


@pytest.mark.parametrize("value", [np.int64([1]), np.array([True]), np.complex64([1]), np.array(["a"])], ids=repr)
def test_arrays_of_other_types(value):
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.FakeQuantize(value, 1, 0, 1, 4).to_json()
    assert caught.value.reason == "dtype"


def test_masks_are_not_lost():
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.FakeQuantize(np.ma.masked_array(np.float32([1, 2]), [True, False]), 1, 0, 1, 4).to_json()
    assert caught.value.reason == "masked"


@pytest.mark.parametrize("value", ["1", None, {1}, object(), 1j, [None], ["a"], [1j]], ids=lambda v: type(v).__name__)
def test_ranges_that_are_no_numbers(value):
    with pytest.raises(chunkq.SpecError):
        chunkq.FakeQuantize(value, 1, 0, 1, 4).to_json()


# ---- digests


@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
@pytest.mark.parametrize("layout", [np.ascontiguousarray, np.asfortranarray])
def test_large_arrays_by_their_digest(dtype, layout):
    value = layout(np.arange(WRITTEN_OUT + 1, dtype=np.float32).reshape(5, -1).astype(dtype))
    entry = describe(chunkq.DequantizeLinear(value), WRITTEN_OUT)["inputs"]["scale"]
    digest = hashlib.sha256(np.ascontiguousarray(value).astype("<f4").tobytes()).hexdigest()
    assert entry == {"dtype": "float32", "shape": [5, 205], "sha256": digest}
    assert "values" in describe(chunkq.DequantizeLinear(value[:-1]), WRITTEN_OUT)["inputs"]["scale"]
    assert len(strict(chunkq.DequantizeLinear(value).to_json())["inputs"]["scale"]["values"]) == WRITTEN_OUT + 1


@pytest.mark.parametrize("name", ["bfloat16", "float8_e8m0fnu", "int4"])
def test_digests_of_types_that_numpy_does_not_have(name):
    value = array_of(name, np.zeros(3, f"u{ELEMENT_TYPES[name].dtype.itemsize}"))
    entry = describe(chunkq.FakeQuantize(value, 1, 0, 1, 4), 0)["inputs"]["input_low"]
    assert entry == {"dtype": name, "shape": [3], "sha256": hashlib.sha256(value.tobytes()).hexdigest()}


def test_digests_say_to_pass_the_array():
    document = describe(chunkq.DequantizeLinear(SCALE), 0)
    with pytest.raises(chunkq.SpecError, match=r"scale.*digest.*pass the array") as caught:
        chunkq.from_json(json.dumps(document))
    assert caught.value.reason == "metadata"


def test_attributes_of_a_target_are_such_a_document(tmp_path):
    x = zarr.create_array(str(tmp_path / "x"), data=I8)
    op = chunkq.DequantizeLinear([0.1, 2], [1, 2], axis=0)
    chunkq.plan(op, x, tmp_path / "y").run()
    text = json.dumps(zarr.open_array(str(tmp_path / "y")).attrs["chunkq.operator"])
    assert reference.same_bits(chunkq.from_json(text)(I8), op(I8))
    assert open_quantized(tmp_path / "y") is None


# ---- damaged documents

VALID = {
    "operator": "QuantizeLinear",
    "attributes": {"axis": 0, "block_size": 0, "saturate": True},
    "inputs": {
        "scale": {"dtype": "float32", "shape": [2], "values": [0.5, 2.0]},
        "zero_point": {"dtype": "int8", "shape": [2], "values": [1, 2]},
    },
}
FAKE = {
    "operator": "FakeQuantize",
    "attributes": {"levels": 4, "auto_broadcast": "numpy", "broadcast_axis": -1},
    "inputs": {"input_low": 0, "input_high": ["inf", 1.5], "output_low": [[0]], "output_high": "nan"},
}
ABSENT = object()


def changed(document, place, value):
    document = copy.deepcopy(document)
    *folders, last = place.split("/")
    at = document
    for name in folders:
        at = at[name]
    if value is ABSENT:
        del at[last]
    else:
        at[last] = value
    return document


def refused(text, reasons=("metadata",)):
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.from_json(text)
    assert caught.value.reason in reasons, caught.value
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_documents_below_are_valid_before_they_are_damaged():
    chunkq.from_json(json.dumps(VALID))
    chunkq.from_json(json.dumps(FAKE))


@pytest.mark.parametrize(
    "text", ["", " ", "{", "nul", "{}", "[]", "null", "1", '"x"', "[1, 2]", "{'a': 1}", '{"a": 1} x']
)
def test_text_that_is_no_document(text):
    assert "not the JSON of an operator" in refused(text)


@pytest.mark.parametrize("text", [None, 5, b"\xff", object(), ["x"], VALID], ids=lambda t: type(t).__name__)
def test_what_is_no_text(text):
    refused(text)


def test_bytes_are_read_like_text():
    assert chunkq.from_json(json.dumps(VALID).encode()).to_json() == chunkq.from_json(json.dumps(VALID)).to_json()


@pytest.mark.parametrize("depth", [100, 5_000, 200_000])
def test_deep_documents(depth):
    refused("[" * depth)
    refused("[" * depth + "]" * depth)
    deep = "[" * depth + "]" * depth
    refused(json.dumps(changed(VALID, "inputs/scale/values", "DEEP")).replace('"DEEP"', deep))


@pytest.mark.parametrize("place", ["operator", "attributes", "inputs", "inputs/scale/dtype"])
@pytest.mark.parametrize("word", ["a\nb", "a\rb", "\ud800"], ids=ascii)
def test_errors_stay_one_line_that_can_be_printed(place, word):
    value = {word: 1} if place.endswith("s") else word
    message = refused(json.dumps(changed(VALID, place, value)), ("metadata", "dtype"))
    assert len(message.splitlines()) == 1
    message.encode()


def test_a_number_of_too_many_digits():
    refused(json.dumps(changed(VALID, "inputs/scale/values", "MANY")).replace('"MANY"', f"[{'1' * 10_000}, 2]"))


DAMAGE = {
    "no operator": ("operator", ABSENT),
    "unknown operator": ("operator", "Quantize"),
    "operator in another case": ("operator", "quantizelinear"),
    "operator is null": ("operator", None),
    "operator is a list": ("operator", ["QuantizeLinear"]),
    "operator is a dunder": ("operator", "__class__"),
    "no inputs": ("inputs", ABSENT),
    "inputs are null": ("inputs", None),
    "inputs are a list": ("inputs", [1, 2]),
    "inputs are a number": ("inputs", 3),
    "no scale": ("inputs/scale", ABSENT),
    "another input": ("inputs/x", {"dtype": "float32", "shape": [], "values": [1]}),
    "an input of another operator": ("inputs/input_low", 1),
    "no attributes": ("attributes", ABSENT),
    "attributes are null": ("attributes", None),
    "attributes are a number": ("attributes", 3),
    "attributes are an empty list": ("attributes", []),
    "attributes are an empty string": ("attributes", ""),
    "attributes are pairs": ("attributes", [["axis", 0]]),
    "another attribute": ("attributes/levels", 4),
    "an attribute named self": ("attributes/self", 4),
    "an attribute that is an input": ("attributes/scale", 4),
    "input is an empty object": ("inputs/scale", {}),
    "no dtype": ("inputs/scale/dtype", ABSENT),
    "no shape": ("inputs/scale/shape", ABSENT),
    "no values": ("inputs/scale/values", ABSENT),
    "word": ("inputs/scale", "half"),
    "word in a list": ("inputs/scale", [0.5, "half"]),
    "object in a list": ("inputs/scale", [0.5, {}]),
    "values are null": ("inputs/scale/values", None),
    "values are an object": ("inputs/scale/values", {}),
    "values are a word": ("inputs/scale/values", "ab"),
    "a value is null": ("inputs/scale/values", [0.5, None]),
    "a value is a word": ("inputs/scale/values", [0.5, "half"]),
    "a value is an object": ("inputs/scale/values", [0.5, {}]),
    "ragged values": ("inputs/scale/values", [[0.5], [1, 2]]),
    "an integer is null": ("inputs/zero_point/values", [1, None]),
    "an integer has a fraction": ("inputs/zero_point/values", [1, 2.5]),
    "an integer is NaN": ("inputs/zero_point/values", [1, "nan"]),
    "an integer is true": ("inputs/zero_point/values", [1, True]),
    "a number is true": ("inputs/scale/values", [1, True]),
    "too many values": ("inputs/scale/values", [1, 2, 3]),
    "too few values": ("inputs/scale/values", [1]),
    "an integer too large": ("inputs/zero_point/values", [1, 128]),
    "an integer too small": ("inputs/zero_point/values", [1, -129]),
    "an integer of 70 bits": ("inputs/zero_point/values", [1, 2**70]),
    "an integer of 1e30": ("inputs/zero_point/values", [1, 1e30]),
    "a number of 400 digits": ("inputs/scale/values", [1, 10**400]),
    "too large for float32": ("inputs/scale/values", [1, 1e39]),
    "too small for float32": ("inputs/scale/values", [1, -1e39]),
    "shape is null": ("inputs/scale/shape", None),
    "shape is a number": ("inputs/scale/shape", 2),
    "shape is a word": ("inputs/scale/shape", "2"),
    "shape of fractions": ("inputs/scale/shape", [2.0]),
    "shape of words": ("inputs/scale/shape", ["2"]),
    "shape of shapes": ("inputs/scale/shape", [[2]]),
    "shape of null": ("inputs/scale/shape", [None]),
    "shape of truths": ("inputs/scale/shape", [2, True]),
    "shape to be found out": ("inputs/scale/shape", [-1]),
    "negative shape": ("inputs/scale/shape", [-2, -1]),
    "shape that does not fit": ("inputs/scale/shape", [3]),
    "shape of another rank that does not fit": ("inputs/scale/shape", [2, 2]),
    "absurd shape": ("inputs/scale/shape", [2**60]),
    "absurd shape that overflows": ("inputs/scale/shape", [2**62, 2**62]),
    "absurd shape of 80 bits": ("inputs/scale/shape", [2**80]),
    "absurd rank": ("inputs/scale/shape", [1] * 100 + [2]),
    "a type that is none": ("inputs/scale/dtype", "float33"),
    "type is null": ("inputs/scale/dtype", None),
    "type is a number": ("inputs/scale/dtype", 3),
    "type is a list": ("inputs/scale/dtype", ["float32"]),
    "a type of NumPy's only": ("inputs/scale/dtype", "int64"),
    "an object type": ("inputs/scale/dtype", "O"),
}
#: What the operator itself refuses has the operator's reason.
OTHER_REASONS = dict.fromkeys((name for name in DAMAGE if "type" in name), ("metadata", "dtype"))
OTHER_REASONS["object in a list"] = ("metadata", "value")


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(name):
    refused(json.dumps(changed(VALID, *DAMAGE[name])), OTHER_REASONS.get(name, ("metadata",)))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float16", 1e6),
        ("float16", -65520),
        ("bfloat16", 3.4e38),
        ("float8_e4m3fn", 500),
        ("float8_e4m3fn", "inf"),
        ("float8_e5m2", 1e5),
        ("float8_e8m0fnu", -1),
        ("float8_e8m0fnu", 0),
        ("float6_e2m3fn", 8),
        ("float4_e2m1fn", 7),
        ("float4_e2m1fn", "nan"),
        ("uint8", -1),
        ("uint8", 256),
        ("uint4", 16),
        ("int4", 8),
        ("int4", -9),
        ("int2", 2),
        ("uint2", -1),
        ("int32", 2**31),
    ],
)
def test_values_outside_the_type(dtype, value):
    refused(json.dumps(changed(VALID, "inputs/scale", {"dtype": dtype, "shape": [1], "values": [value]})))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float8_e4m3fn", 0.1), ("float8_e5m2", 1.1), ("float8_e8m0fnu", 3), ("float6_e3m2fn", 1.1), ("float4_e2m1fn", 5)],
)
def test_values_that_a_narrow_type_does_not_have(dtype, value):
    """As for Python numbers: rounding such a one would be another parameter."""
    refused(json.dumps(changed(VALID, "inputs/scale", {"dtype": dtype, "shape": [1], "values": [value]})))


FAKE_DAMAGE = {
    "no levels": ("attributes/levels", ABSENT),
    "no range": ("inputs/output_low", ABSENT),
    "range is null": ("inputs/output_low", None),
    "range is a word": ("inputs/output_low", "low"),
    "null in a list": ("inputs/output_low", [0, None]),
    "word in a deep list": ("inputs/output_low", [[0], ["x"]]),
    "an attribute of another operator": ("attributes/axis", 1),
}


@pytest.mark.parametrize("damage", FAKE_DAMAGE.values(), ids=FAKE_DAMAGE)
def test_damage_of_fake_quantize(damage):
    refused(json.dumps(changed(FAKE, *damage)))


@pytest.mark.parametrize(
    ("document", "place", "value", "reason"),
    [
        (VALID, "attributes/axis", "0", "axis"),
        (VALID, "attributes/axis", 1.5, "axis"),
        (VALID, "attributes/axis", None, "axis"),
        (VALID, "attributes/axis", True, "axis"),
        (VALID, "attributes/block_size", "2", "block_size"),
        (VALID, "attributes/block_size", [1, 2.5], "block_size"),
        (VALID, "attributes/block_size", [[1], 2], "block_size"),
        (VALID, "attributes/saturate", "yes", "argument"),
        (VALID, "attributes/saturate", 2, "argument"),
        (VALID, "attributes/saturate", None, "argument"),
        (VALID, "attributes/precision", "float33", "dtype"),
        (VALID, "attributes/output_dtype", 7, "dtype"),
        (VALID, "attributes/output_dtype", ["int8"], "dtype"),
        (FAKE, "attributes/levels", 4.0, "levels"),
        (FAKE, "attributes/levels", "4", "levels"),
        (FAKE, "attributes/auto_broadcast", 1, "broadcast"),
        (FAKE, "attributes/broadcast_axis", "0", "axis"),
    ],
)
def test_attributes_have_the_operators_reasons(document, place, value, reason):
    assert reason in place or reason in ("argument", "dtype", "broadcast", "axis")
    refused(json.dumps(changed(document, place, value)), (reason, "metadata"))


@pytest.mark.parametrize("place", [5, None, "", [], {}, True, "nowhere", "a\0b", "/dev/null", "http//x"], ids=repr)
def test_zarr_entries_that_lead_nowhere(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = {"dtype": "float32", "shape": [2], "zarr": place}
    refused(json.dumps(changed(VALID, "inputs/scale", entry)), ("source", "metadata"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
@pytest.mark.parametrize("shape", [[2**60], [2**31, 2**31], [2**40, 1]])
def test_absurd_shapes_take_no_memory(shape, dtype):
    text = json.dumps(changed(VALID, "inputs/scale", {"dtype": dtype, "shape": shape, "values": [1]}))
    tracemalloc.start()
    refused(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_absurd_shapes_of_nothing():
    """No values and a shape of no elements is a right array, however long the other axis."""
    entry = {"dtype": "float32", "shape": [0, 2**20], "values": []}
    assert chunkq.from_json(json.dumps(changed(VALID, "inputs/scale", entry))).scale.shape == (0, 2**20)


# ---- random damage

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.integers(),
    st.sampled_from(
        [2**60, -(2**63), 2**64, 10**400, 1e39, 1e300, "nan", "-inf", "Infinity", "1e999", "\ud800", "0x1"]
    ),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(sorted(ELEMENT_TYPES)),
)
keys = st.one_of(
    st.sampled_from(["operator", "attributes", "inputs", "scale", "zero_point", "dtype", "shape", "values", "sha256"]),
    st.sampled_from(["axis", "block_size", "saturate", "precision", "levels", "self", "input_low", "scale_dtype"]),
    st.text(max_size=3),
)
junk = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)
DOCUMENTS = [
    VALID,
    FAKE,
    *(json.loads(OPERATORS[n][0]().to_json()) for n in ("dq all", "q all", "qdq tuple", "fq lists")),
]


def places(node, at=()):
    """Every place of a document."""
    yield at
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(value, (*at, key))


def mutated(data, document):
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        everywhere = list(places(document))
        where = everywhere[data.draw(st.integers(0, len(everywhere) - 1))]
        if not where:
            if data.draw(st.integers(0, 9)) == 0:
                return data.draw(junk)
            continue
        node = document
        for key in where[:-1]:
            node = node[key]
        what = data.draw(st.sampled_from(["replace", "replace", "delete", "add"]))
        if what == "replace":
            node[where[-1]] = data.draw(junk)
        elif what == "delete":
            del node[where[-1]]
        elif isinstance(node, dict):
            node[data.draw(keys)] = data.draw(junk)
        else:
            node.insert(where[-1], data.draw(junk))
    return document


def taken(function, *arguments):
    """What a function gives; None where it refuses with a SpecError."""
    try:
        return function(*arguments)
    except chunkq.SpecError:
        return None


def survives(text):
    """Refused, or taken: then the operator works or refuses, and its JSON is right again."""
    op = taken(chunkq.from_json, text)
    if op is not None:
        written = op.to_json()
        strict(written)
        assert chunkq.from_json(written).to_json() == written
        taken(op, F32)
        taken(op, I8)


@settings(max_examples=200)
@given(st.data())
def test_mutated_documents(data):
    survives(json.dumps(mutated(data, data.draw(st.sampled_from(DOCUMENTS)))))


@settings(max_examples=200)
@given(st.sampled_from(DOCUMENTS), st.data())
def test_mutated_text(document, data):
    text = json.dumps(document)
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 4))
    survives(text[:at] + data.draw(st.text('{}[]",:0123456789.eE-+naNull \\u', max_size=3)) + text[at + cut :])


@settings(max_examples=100)
@given(st.text(max_size=40) | st.binary(max_size=40) | junk.map(json.dumps))
def test_random_text(text):
    survives(text)


def test_errors_are_named_by_the_class_of_what_went_wrong():
    assert re.search("KeyError: 'Quantize'", refused(json.dumps(changed(VALID, "operator", "Quantize"))))
