"""Packed bytes against onnx's own packing: every length to 17, every code, shapes and layouts; and what is refused."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import chunkq

TYPES = {
    "int4": onnx.TensorProto.INT4,
    "uint4": onnx.TensorProto.UINT4,
    "float4_e2m1fn": onnx.TensorProto.FLOAT4E2M1,
    "int2": onnx.TensorProto.INT2,
    "uint2": onnx.TensorProto.UINT2,
}
BITS = {name: int(name.strip("uintfloa")[0]) for name in TYPES}
every_type = pytest.mark.parametrize("name", TYPES)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name))


def tensor(name, codes):
    """Values of a type by their codes; ml_dtypes leaves the unused bits of a byte 0, negative numbers too."""
    return np.asarray(codes, np.uint8).view(dtype_of(name))


def random_tensor(name, shape, seed=0):
    return tensor(name, np.random.default_rng(seed).integers(0, 1 << BITS[name], shape, np.uint8))


def integers(x):
    """The same values as plain integers: numbers of an integer type, codes of float4."""
    if x.dtype == ml_dtypes.float4_e2m1fn:
        return x.view(np.uint8)
    return x.astype(np.int8 if x.dtype.name.startswith("int") else np.uint8)


def packed_by_onnx(x):
    """What onnx writes for a tensor, in the two ways it has: from an array, and from values one by one."""
    raw = np.frombuffer(numpy_helper.from_array(x).raw_data, np.uint8)
    values = x.reshape(-1).astype(np.float32).tolist()
    field = helper.make_tensor("x", TYPES[x.dtype.name], x.shape, values).int32_data
    assert [v & 0xFF for v in field] == raw.tolist()
    return raw


def unpacked_by_onnx(packed, name, shape):
    return numpy_helper.to_array(helper.make_tensor("x", TYPES[name], shape, packed.tobytes(), raw=True))


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def refused(reason, function, *arguments):
    with pytest.raises(chunkq.SpecError) as caught:
        function(*arguments)
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)


# ---- against onnx


@every_type
@pytest.mark.parametrize("length", range(18))
def test_every_length(name, length):
    for seed in range(3):
        x = random_tensor(name, (length,), seed)
        found = chunkq.pack(x, name)
        assert found.dtype == np.uint8
        assert same(found, packed_by_onnx(x))
        assert same(chunkq.pack(integers(x), name), found)
        back = chunkq.unpack(found, name, length)
        assert same(back, unpacked_by_onnx(found, name, (length,)))
        assert same(back, x)


@every_type
def test_every_code_at_every_place(name):
    codes, in_a_byte = np.arange(1 << BITS[name], dtype=np.uint8), 8 // BITS[name]
    x = tensor(name, np.stack(np.meshgrid(*[codes] * in_a_byte), -1))
    packed = chunkq.pack(x, name)
    assert same(packed, packed_by_onnx(x))
    assert sorted(packed.tolist()) == list(range(256))
    assert same(chunkq.unpack(packed, name, x.shape), x)


@every_type
def test_every_byte(name):
    packed = np.arange(256, dtype=np.uint8)
    found = chunkq.unpack(packed, name, 256 * 8 // BITS[name])
    assert same(found, unpacked_by_onnx(packed, name, found.shape))
    assert same(chunkq.pack(found, name), packed)


@every_type
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (3, 5), (1, 1, 1), (2, 3, 5), (3, 1, 2, 7), (1,) * 9])
def test_shapes(name, shape):
    x = random_tensor(name, shape)
    packed = chunkq.pack(x, name)
    assert same(packed, packed_by_onnx(x))
    assert packed.shape == (-(-x.size * BITS[name] // 8),)
    assert same(chunkq.unpack(packed, name, shape), x)
    assert same(chunkq.unpack(packed, name, list(shape)), x)


LAYOUTS = {
    "F": np.asfortranarray,
    "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 2)[::2, :, ::3],
    "backwards": lambda x: x[::-1, :, ::-1].copy()[::-1, :, ::-1],
    "transposed": lambda x: x.transpose(2, 0, 1).copy().transpose(1, 2, 0),
    "broadcast": lambda x: np.broadcast_to(x[:, :1], x.shape),
}


@every_type
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(name, layout):
    view = layout(random_tensor(name, (3, 4, 5)))
    for x in (view, layout(integers(random_tensor(name, (3, 4, 5))))):
        x.flags.writeable = False
        before = x.tobytes()
        assert same(chunkq.pack(x, name), packed_by_onnx(np.ascontiguousarray(view)))
        assert x.tobytes() == before
    packed = packed_by_onnx(np.ascontiguousarray(view))
    for odd in (np.repeat(packed, 2)[::2], packed[::-1].copy()[::-1], packed.view(np.int8)):
        odd.flags.writeable = False
        assert same(chunkq.unpack(odd, name, (3, 4, 5)), tensor(name, unpacked_codes(packed, name, (3, 4, 5))))


@every_type
def test_unused_bits_do_not_matter(name):
    """int8 -2 viewed as int4 is -2 too, with all its bits set."""
    codes = np.arange(1 << BITS[name], dtype=np.uint8)
    for unused in range(0, 256, 1 << BITS[name]):
        assert same(chunkq.pack(tensor(name, codes | unused), name), packed_by_onnx(tensor(name, codes)))


def unpacked_codes(packed, name, shape):
    """By hand: value i lies in byte i // n, i % n places up."""
    bits = BITS[name]
    codes = [(int(b) >> place) & ((1 << bits) - 1) for b in packed for place in range(0, 8, bits)]
    return np.reshape(codes[: int(np.prod(shape))], shape).astype(np.uint8)


@every_type
def test_packed_bytes_may_have_any_shape(name):
    packed = np.arange(12, dtype=np.uint8)
    n = 12 * 8 // BITS[name]
    for shape in ((3, 4), (12, 1), (2, 2, 3)):
        assert same(chunkq.unpack(packed.reshape(shape), name, (2, n // 2)), chunkq.unpack(packed, name, (2, n // 2)))
    fortran = np.asfortranarray(packed.reshape(3, 4))
    assert same(chunkq.unpack(fortran, name, n), chunkq.unpack(packed, name, n))


@every_type
def test_results_are_new_and_writable(name):
    x = random_tensor(name, (9,))
    packed = chunkq.pack(x, name)
    back = chunkq.unpack(packed, name, 9)
    assert packed.flags.writeable
    assert back.flags.writeable
    assert not np.shares_memory(packed, x)
    assert not np.shares_memory(back, packed)
    back.view(np.uint8)[...] = 0
    assert same(chunkq.pack(x, name), packed)


@every_type
def test_the_last_byte_is_filled_with_zeros(name):
    in_a_byte = 8 // BITS[name]
    highest = tensor(name, np.full(in_a_byte + 1, (1 << BITS[name]) - 1))
    assert chunkq.pack(highest, name).tolist() == [255, (1 << BITS[name]) - 1]


@every_type
def test_what_fills_the_last_byte_does_not_matter(name):
    assert same(chunkq.unpack(np.uint8([0xFF]), name, 1), tensor(name, [(1 << BITS[name]) - 1]))


def test_by_hand():
    """SPEC: int4 [1, -2, 3] -> e1 03, int2 [1, -2, 0, -1, 1] -> c9 01."""
    assert chunkq.pack(np.int8([1, -2, 3]), "int4").tolist() == [0xE1, 0x03]
    assert chunkq.pack(np.int8([1, -2, 0, -1, 1]), "int2").tolist() == [0xC9, 0x01]
    assert chunkq.unpack(np.uint8([0x9F]), "float4_e2m1fn", 2).astype(np.float32).tolist() == [-6.0, -0.5]


@pytest.mark.parametrize("spelling", ["float4e2m1", "float4_e2m1fn", "FLOAT4E2M1", ml_dtypes.float4_e2m1fn])
def test_the_type_by_any_of_its_names(spelling):
    assert chunkq.unpack(np.uint8([0x21]), spelling, 2).dtype == ml_dtypes.float4_e2m1fn
    assert chunkq.pack(np.uint8([1, 2]), spelling).tolist() == [0x21]


@pytest.mark.parametrize("holder", [np.int8, np.uint8])
def test_integers_of_either_sign(holder):
    assert chunkq.pack(np.array([0, 7], holder), "int4").tolist() == [0x70]
    assert chunkq.pack(np.array([0, 7], holder), "uint4").tolist() == [0x70]


def test_values_packed_and_unpacked_reach_the_operators():
    x = random_tensor("int4", (3, 7))
    again = chunkq.unpack(chunkq.pack(x, "int4"), "int4", x.shape)
    np.testing.assert_array_equal(chunkq.dequantize_linear(again, 0.5), x.astype(np.float32) * np.float32(0.5))


# ---- what is refused

OUTSIDE = {"int4": (-9, 8), "uint4": (-1, 16), "float4_e2m1fn": (-1, 16), "int2": (-3, 2), "uint2": (-1, 4)}


@every_type
def test_values_out_of_range(name):
    for wrong in OUTSIDE[name]:
        refused("value", chunkq.pack, np.int8([0, 1, wrong]), name)
    refused("value", chunkq.pack, np.uint8([200]), name)


def test_packed_bytes_are_not_packed_again():
    with pytest.raises(chunkq.SpecError, match="unpack") as caught:
        chunkq.pack(np.uint8([0xE1, 0x03]), "int4")
    assert caught.value.reason == "value"


@pytest.mark.parametrize(
    "x",
    [
        np.float32([1]),
        np.int16([1]),
        np.int64([1]),
        np.uint16([1]),
        np.array([True]),
        np.array(["1"]),
        np.array([None]),
        np.array([1], ml_dtypes.float8_e4m3fn),
        np.array([1], ml_dtypes.bfloat16),
    ],
    ids=lambda x: x.dtype.name,
)
@every_type
def test_other_types_of_x(name, x):
    refused("dtype", chunkq.pack, x, name)


@every_type
def test_another_narrow_type_than_named(name):
    for other in TYPES:
        if other != name:
            refused("dtype", chunkq.pack, np.zeros(2, dtype_of(other)), name)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "float6_e2m3fn", "float32", "int3", "", None, 4])
def test_types_that_are_not_packed(dtype):
    refused("dtype", chunkq.pack, np.int8([1]), dtype)
    refused("dtype", chunkq.unpack, np.uint8([1]), dtype, 1)


@pytest.mark.parametrize("x", [[1, 2], 1, (1,), None, "12", b"12", np.ma.masked_array([1, 2], [True, False], np.int8)])
def test_what_is_no_plain_array(x):
    refused("argument", chunkq.pack, x, "int4")


def test_masked_arrays_are_refused_both_ways():
    for function, arguments in ((chunkq.pack, ()), (chunkq.unpack, (4,))):
        with pytest.raises(chunkq.SpecError) as caught:
            function(np.ma.masked_array(np.uint8([1, 2]), [True, False]), "uint4", *arguments)
        assert caught.value.reason in ("argument", "masked")


@pytest.mark.parametrize("packed", [np.uint16([1]), np.float32([1]), np.int64([1]), np.array([True])])
def test_packed_of_another_type(packed):
    refused("dtype", chunkq.unpack, packed, "int4", 1)


@pytest.mark.parametrize("packed", [[1], 1, b"\x01", None])
def test_packed_that_is_no_array(packed):
    refused("dtype", chunkq.unpack, packed, "int4", 1)


@every_type
def test_the_wrong_number_of_bytes(name):
    in_a_byte = 8 // BITS[name]
    for n in (0, 1, in_a_byte, in_a_byte + 1, 17):
        size = -(-n // in_a_byte)
        for wrong in {size - 1, size + 1, size + 2, n * 2 + 3} - {size, -1}:
            refused("shape", chunkq.unpack, np.zeros(wrong, np.uint8), name, n)
    refused("shape", chunkq.unpack, np.zeros(0, np.uint8), name, ())


@pytest.mark.parametrize("shape", [-1, (-1,), (-2, -2), (2, -1), (0, -1), (-4, 0)])
def test_negative_shapes(shape):
    for size in (0, 1, 2):
        refused("shape", chunkq.unpack, np.zeros(size, np.uint8), "int4", shape)


@pytest.mark.parametrize("shape", [2**62, (2**40, 2**40), (2**62, 2**62, 4)])
def test_absurd_shapes_are_refused_before_anything_is_made(shape):
    refused("shape", chunkq.unpack, np.zeros(1, np.uint8), "int4", shape)


@pytest.mark.parametrize("shape", [np.int64(3), (np.int64(3),), [np.int32(3)], np.array([3]), np.uint8(3)], ids=repr)
def test_shapes_of_numpy_integers(shape):
    assert same(chunkq.unpack(np.uint8([0xE1, 0x03]), "int4", shape), tensor("int4", [1, 14, 3]))


@pytest.mark.parametrize("shape", [True, (True,), 1.0, (1.0,), "1", None, (None,), [[1]], np.array(1.0)], ids=repr)
def test_shapes_that_are_no_integers(shape):
    refused("shape", chunkq.unpack, np.uint8([0x01]), "int4", shape)
