"""Every code of every element type, both ways, against ml_dtypes and NumPy."""

import ml_dtypes
import numpy as np
import pytest
import reference

import chunkq

NARROW = ("int4", "uint4", "int2", "uint2")
INTEGERS = ("uint8", "int8", "uint16", "int16", *NARROW)
FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
FLOAT6 = ("float6_e2m3fn", "float6_e3m2fn")
FINITE = ("float4_e2m1fn", *FLOAT6)  # neither NaN nor infinities
HALVES = ("float16", "bfloat16")
ONNX_NAMES = {
    "float8_e4m3fn": "float8e4m3fn",
    "float8_e4m3fnuz": "float8e4m3fnuz",
    "float8_e5m2": "float8e5m2",
    "float8_e5m2fnuz": "float8e5m2fnuz",
    "float4_e2m1fn": "float4e2m1",
    "float6_e2m3fn": "float6e2m3",
    "float6_e3m2fn": "float6e3m2",
    "float8_e8m0fnu": "float8e8m0",
}


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def every_code(name):
    """All 16, 64, 256 or 65,536 codes; of the sub-byte integers all 256 bytes, as ml_dtypes reads only the low bits."""
    dtype = dtype_of(name)
    width = 6 if name in FLOAT6 else 4 if name == "float4_e2m1fn" else 8 * dtype.itemsize
    return np.arange(2**width, dtype=f"u{dtype.itemsize}").view(dtype)


def values_of(name):
    """The finite values of a float type, in order."""
    values = every_code(name).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def around(values):
    """Float32 numbers, and one unit in the last place to both sides of each."""
    values = np.float32(values)
    return np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(-np.inf))])


def random_float32(n, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, n, np.uint32).view(np.float32)


def one_nan(found):
    """However many NaNs, one bit pattern."""
    nans = np.ascontiguousarray(found)[np.isnan(found.astype(np.float32))]
    return len(np.unique(nans.view(f"u{found.dtype.itemsize}"))) <= 1


def encoded(x, name, saturate):
    """A float32 tensor in a float8, float6 or float4 type, by ml_dtypes; the SPEC's word on overflow and NaN."""
    dtype = dtype_of(name)
    limits = ml_dtypes.finfo(dtype)
    if name in FINITE:
        x = np.where(np.isnan(x), np.float32(limits.min), x)
    if saturate or name in FINITE:
        x = np.clip(x, np.float32(limits.min), np.float32(limits.max))
    with np.errstate(all="ignore"):
        return x.astype(dtype)


# DequantizeLinear


@pytest.mark.parametrize("y", ["float32", *HALVES])
@pytest.mark.parametrize("name", [*INTEGERS, *FLOAT8, *FINITE])
def test_dequantize_every_code(name, y, isa):
    x, dtype = every_code(name), dtype_of(y)
    with np.errstate(over="ignore"):  # uint16 beyond float16
        expected = x.astype(np.float32).astype(dtype)
    for found in (
        chunkq.dequantize_linear(x, np.ones((), dtype)),
        chunkq.dequantize_linear(x, np.float32(1), output_dtype=y),
        chunkq.dequantize_linear(x, dtype_of("float8_e8m0fnu").type(1), output_dtype=y),
    ):
        assert reference.same_bits(found, expected)
        assert y == "float32" or one_nan(found)


@pytest.mark.parametrize("y", ["float32", *HALVES])
@pytest.mark.parametrize("name", [*INTEGERS, *FLOAT8, *FINITE])
def test_every_code_at_scales_that_overflow_vanish_or_are_no_numbers(name, y, isa):
    """In runs long enough for every loop: a scale that takes a power of two along must round and overflow as without."""
    finfo = np.finfo(np.float32)
    ends = [np.float32(2.0) ** e for e in (-149, -140, -127, -126, -120, -10, 100, 119, 120, 127)]
    scales = np.float32([*ends, 1.1, 3e-39, finfo.max, finfo.tiny, 0.0, -0.0, -1.7, np.inf, -np.inf, np.nan])
    x = np.broadcast_to(np.tile(every_code(name), 2), (len(scales), 2 * len(every_code(name))))
    expected = reference.dequantize_linear(x, scales, axis=0, output_dtype=dtype_of(y))
    found = chunkq.dequantize_linear(x, scales, axis=0, output_dtype=y)
    assert reference.same_bits(found, expected)
    assert y == "float32" or one_nan(found)


@pytest.mark.parametrize("y", ["float32", *HALVES])
@pytest.mark.parametrize("name", [*HALVES, "float8_e8m0fnu"])
def test_every_scale(name, y, isa):
    scale = every_code(name)
    with np.errstate(all="ignore"):
        expected = scale.astype(np.float32).astype(dtype_of(y))
    found = chunkq.dequantize_linear(np.ones(len(scale), np.int8), scale, axis=0, output_dtype=y)
    assert reference.same_bits(found, expected)
    assert y == "float32" or one_nan(found)


@pytest.mark.parametrize("y", HALVES)
def test_rounding_of_the_result(y, isa):
    """Between all neighbours of both types: the middle, beside it, and random bits."""
    every = np.arange(2**16, dtype=np.uint32) << 16
    bits = [(every | low).view(np.float32) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    halves = values_of("float16")
    middles = around((halves[1:] + halves[:-1]) / 2)
    scale = np.concatenate([*bits, middles, around([65504, 65520, -65520, 65536]), random_float32(100_000)])
    with np.errstate(all="ignore"):
        expected = scale.astype(dtype_of(y))
    found = chunkq.dequantize_linear(np.ones(len(scale), np.uint8), scale, axis=0, output_dtype=y)
    assert reference.same_bits(found, expected)
    assert one_nan(found)


# QuantizeLinear to floats


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("x_name", HALVES)
@pytest.mark.parametrize("name", [*FLOAT8, *FINITE])
def test_quantize_every_half(name, x_name, saturate, isa):
    x = every_code(x_name)
    wide = x.astype(np.float32)
    expected = encoded(wide, name, saturate)
    for value, scale in ((x, np.ones((), x.dtype)), (x, np.float32(1)), (wide, np.float32(1))):
        found = chunkq.quantize_linear(value, scale, output_dtype=name, saturate=saturate)
        assert reference.same_bits(found, expected)
        assert one_nan(found)


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("name", [*FLOAT8, *FINITE])
def test_quantize_at_every_rounding_boundary(name, saturate, isa):
    values = values_of(name)
    last = values[-1] + (values[-1] - values[-2]) / 2 * np.arange(-3, 6)  # over the maximum and back
    boundaries = np.concatenate([values, (values[1:] + values[:-1]) / 2, last, -last])
    x = np.concatenate([around(boundaries), around([0, 1e-40, -1e-40, 3e38, -3e38]), random_float32(50_000, 1)])
    found = chunkq.quantize_linear(x, 1.0, output_dtype=name, saturate=saturate)
    assert reference.same_bits(found, encoded(x, name, saturate))
    assert one_nan(found)


@pytest.mark.parametrize("name", [*FLOAT8, *FINITE])
def test_quantize_gives_back_every_code(name, isa):
    codes = every_code(name)
    found = chunkq.quantize_linear(codes.astype(np.float32), 1.0, output_dtype=name, saturate=False)  # e5m2 has inf
    assert reference.same_bits(found, codes)


@pytest.mark.parametrize(
    ("name", "largest", "first_over", "overflow"),
    [
        ("float8_e4m3fn", 448.0, np.nextafter(np.float32(464), np.float32(1e9)), np.nan),
        ("float8_e4m3fnuz", 240.0, np.float32(248), np.nan),
        ("float8_e5m2", 57344.0, np.float32(61440), np.inf),
        ("float8_e5m2fnuz", 57344.0, np.float32(61440), np.nan),
    ],
)
def test_overflow_and_infinity(name, largest, first_over, overflow, isa):
    """The SPEC's table in numbers, so that ml_dtypes is not the only witness."""
    below = np.nextafter(first_over, np.float32(0))
    x = np.float32([below, first_over, 1e30, np.inf])
    for sign in (np.float32(1), np.float32(-1)):
        for saturate, over in ((True, largest), (False, overflow)):
            found = chunkq.quantize_linear(sign * x, 1.0, output_dtype=name, saturate=saturate).astype(np.float32)
            np.testing.assert_array_equal(found, sign * np.float32([largest, over, over, over]))


@pytest.mark.parametrize(
    ("name", "nan_code", "minus_zero"),
    [
        ("float8_e4m3fn", 0x7F, 0x80),
        ("float8_e4m3fnuz", 0x80, 0x00),
        ("float8_e5m2", None, 0x80),
        ("float8_e5m2fnuz", 0x80, 0x00),
        ("float4_e2m1fn", 0x0F, 0x08),
        ("float6_e2m3fn", 0x3F, 0x20),
        ("float6_e3m2fn", 0x3F, 0x20),
    ],
)
def test_nan_and_minus_zero(name, nan_code, minus_zero, isa):
    negative_nan = np.uint32([0xFFC12345]).view(np.float32)
    for saturate in (True, False):
        found = chunkq.quantize_linear(np.float32([np.nan, -0.0]), 1.0, output_dtype=name, saturate=saturate)
        negative = chunkq.quantize_linear(negative_nan, 1.0, output_dtype=name, saturate=saturate)
        assert found.view(np.uint8)[1] == minus_zero
        assert found.view(np.uint8)[0] == negative.view(np.uint8)[0]
        if nan_code is None:
            assert np.isnan(found.astype(np.float32)[0])
        else:
            assert found.view(np.uint8)[0] == nan_code


@pytest.mark.parametrize("name", FINITE)
def test_a_zero_point_of_zero_is_added(name, isa):
    """As in onnx's reference: -0 + 0 is +0; without a zero point -0 stays."""
    x = np.float32([-0.0, 0.0, -1e-9, 1.0])
    zero_point = np.zeros((), dtype_of(name))
    plain = chunkq.quantize_linear(x, 1.0, output_dtype=name).view(np.uint8)
    added = chunkq.quantize_linear(x, 1.0, zero_point).view(np.uint8)
    sign = 8 if name == "float4_e2m1fn" else 32
    assert plain.tolist()[:3] == [sign, 0, sign]
    assert added.tolist() == [0, 0, sign, plain[3]]


@pytest.mark.parametrize("name", FLOAT6)
def test_every_pair_of_code_and_zero_point_of_float6(name, isa):
    codes = every_code(name)
    for zero_point in codes:
        found = chunkq.dequantize_linear(codes, 1.0, zero_point)
        assert reference.same_bits(found, codes.astype(np.float32) - np.float32(zero_point))
        x = np.float32([-3.3, 0.0, -0.0, 0.7, 30.0])
        expected = encoded(x + np.float32(zero_point), name, True)
        assert reference.same_bits(chunkq.quantize_linear(x, 1.0, zero_point), expected)


# QuantizeLinear to integers


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_come_back_and_ties_go_to_even(name, isa):
    dtype = dtype_of(name)
    limits = ml_dtypes.iinfo(dtype)
    low, high = int(limits.min), int(limits.max)
    codes = np.arange(low, high + 1)
    found = chunkq.quantize_linear(codes.astype(np.float32), 1.0, output_dtype=name)
    assert reference.same_bits(found, codes.astype(dtype))
    found = chunkq.quantize_linear(codes.astype(np.int32), 1.0, output_dtype=name)
    assert reference.same_bits(found, codes.astype(dtype))
    x = around(np.arange(low - 2, high + 3) + 0.5)
    expected = np.clip(np.rint(x), low, high).astype(np.int64)
    assert reference.same_bits(chunkq.quantize_linear(x, 1.0, output_dtype=name), expected.astype(dtype))
    for zero_point in {low, high, 1, low + 1}:
        expected = np.clip(np.rint(x) + zero_point, low, high).astype(np.int64)  # rounded first, then added
        found = chunkq.quantize_linear(x, 1.0, np.array(zero_point).astype(dtype))
        assert reference.same_bits(found, expected.astype(dtype))
        assert reference.same_bits(chunkq.quantize_linear(x, 1.0, zero_point, output_dtype=name), found)


@pytest.mark.parametrize("x_name", ["float32", *HALVES])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_saturate_before_the_cast(name, x_name, isa):
    limits = ml_dtypes.iinfo(dtype_of(name))
    low, high = int(limits.min), int(limits.max)
    huge = ml_dtypes.finfo(dtype_of(x_name)).max
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, huge, -huge], np.float32).astype(dtype_of(x_name))
    for zero_point in (None, low, high):
        zero = None if zero_point is None else np.array(zero_point).astype(dtype_of(name))
        for scale in (1e-3, 1e-30, 1e-45):  # the quotient is large, then infinite in float32
            found = chunkq.quantize_linear(x, np.float32(scale), zero, output_dtype=name).astype(np.int64)
            assert found.tolist() == [high, low, low, low, high, low]
    one = np.array([1, -1, 0, np.inf], np.float32).astype(dtype_of(x_name))
    found = chunkq.quantize_linear(one, np.zeros((), dtype_of(x_name)), output_dtype=name).astype(np.int64)
    assert found.tolist() == [high, low, low, high]  # 0 / 0 is NaN
    found = chunkq.quantize_linear(np.float32([1e30, -1e30]), 1e-30, output_dtype=name).astype(np.int64)
    assert found.tolist() == [high, low]


@pytest.mark.parametrize("x_name", HALVES)
@pytest.mark.parametrize("name", ["uint8", "int16", "uint16", "int4", "uint2"])
def test_integers_of_every_half(name, x_name, isa):
    x = every_code(x_name)
    for scale in (np.ones((), x.dtype), np.array(0.3, x.dtype), np.float32(0.3)):
        found = chunkq.quantize_linear(x, scale, output_dtype=name)
        assert reference.same_bits(found, reference.quantize_linear(x, scale, output_dtype=dtype_of(name)))


def test_int32_is_rounded_to_float32(isa):
    x = np.int32([2**31 - 1, -(2**31), 2**24 + 1, 2**24 + 3, -(2**24) - 1, 0, 7])
    for scale in (0.5, 2.0**12, 2.0**24, 1e-30, 3.0):
        found = chunkq.quantize_linear(x, scale, output_dtype="int16")
        assert reference.same_bits(found, reference.quantize_linear(x, np.float32(scale), output_dtype=np.int16))


# Declared types and their spellings


@pytest.mark.parametrize("name", [*NARROW, *FLOAT8, *FINITE])
def test_declared_codes(name):
    """Integers of the same width hold them: int8 the signed ones, sign-extended, uint8 all others."""
    x = every_code(name)
    held = x.astype(np.int8) if name in ("int4", "int2") else x.astype(np.uint8) if "int" in name else x.view(np.uint8)
    expected = chunkq.dequantize_linear(x, 0.3)
    assert reference.same_bits(chunkq.dequantize_linear(held, 0.3, x_dtype=name), expected)
    assert reference.same_bits(chunkq.dequantize_linear(x, 0.3, x_dtype=name), expected)  # said twice, no contradiction


def test_declared_bfloat16_and_e8m0():
    x = every_code("bfloat16")
    scale = np.full(256, 3, np.float32).astype(ml_dtypes.bfloat16)
    for held in (np.uint16,):
        found = chunkq.quantize_linear(
            x.view(held), scale[0], output_dtype="float8_e5m2", x_dtype="bfloat16", saturate=False
        )
        assert reference.same_bits(
            found, chunkq.quantize_linear(x, scale[0], output_dtype="float8_e5m2", saturate=False)
        )
    codes = every_code("int8")
    found = chunkq.dequantize_linear(codes, scale.view(np.uint16), axis=0, scale_dtype="bfloat16")
    assert reference.same_bits(found, chunkq.dequantize_linear(codes, scale, axis=0))
    assert found.dtype == ml_dtypes.bfloat16
    scale = every_code("float8_e8m0fnu")
    declared = {"scale_dtype": "float8_e8m0fnu", "output_dtype": "float32", "axis": 0}
    found = chunkq.dequantize_linear(codes, scale.view(np.uint8), **declared)
    assert reference.same_bits(found, chunkq.dequantize_linear(codes, scale, axis=0, output_dtype="float32"))
    x = codes.astype(np.float32)
    found = chunkq.quantize_linear(x, scale.view(np.uint8), axis=0, output_dtype="int8", scale_dtype="float8_e8m0fnu")
    assert reference.same_bits(found, chunkq.quantize_linear(x, scale, axis=0, output_dtype="int8"))
    assert reference.same_bits(found, reference.quantize_linear(x, scale, axis=0, output_dtype=np.int8))


def spellings(name):
    dtype = dtype_of(name)
    return [name, dtype, dtype.type, *([ONNX_NAMES[name]] if name in ONNX_NAMES else [])]


@pytest.mark.parametrize("name", [*INTEGERS, *FLOAT8, *FINITE])
def test_spellings_of_quantized_types(name):
    x = np.float32([-3.2, 0, 1.5, 1000])
    for spelling in spellings(name):
        found = chunkq.quantize_linear(x, 1.0, output_dtype=spelling)
        assert found.dtype == dtype_of(name)
        assert reference.same_bits(found, reference.quantize_linear(x, np.float32(1), output_dtype=dtype_of(name)))
        both = chunkq.quantize_dequantize(x, 1.0, quantized_dtype=spelling)
        assert reference.same_bits(both, chunkq.dequantize_linear(found, 1.0))
        if name not in INTEGERS:
            bits = found.view(np.uint8)
            assert reference.same_bits(chunkq.dequantize_linear(bits, 1.0, x_dtype=spelling), both)
        assert reference.same_bits(chunkq.dequantize_linear(found, 1.0, x_dtype=spelling), both)


@pytest.mark.parametrize("name", ["float32", *HALVES])
def test_spellings_of_real_types(name):
    x, dtype = np.int8([-7, 0, 3, 100]), dtype_of(name)
    for spelling in spellings(name):
        found = chunkq.dequantize_linear(x, 0.3, output_dtype=spelling)
        assert reference.same_bits(found, reference.dequantize_linear(x, np.float32(0.3), output_dtype=dtype))
        wide = np.float32([-0.77, 0.1, 30, 5])
        found = chunkq.quantize_linear(wide, 0.3, precision=spelling)
        assert reference.same_bits(found, reference.quantize_linear(wide, np.float32(0.3), precision=dtype))
        found = chunkq.quantize_dequantize(wide, 0.3, quantized_dtype="int8", output_dtype=spelling)
        assert found.dtype == dtype


@pytest.mark.parametrize("spelling", ONNX_NAMES["float8_e8m0fnu"].split() + spellings("float8_e8m0fnu")[:3])
def test_spellings_of_the_scales_type(spelling):
    codes = np.uint8([126, 127, 128])
    found = chunkq.dequantize_linear(np.int8([1, 1, 1]), codes, axis=0, scale_dtype=spelling, output_dtype="float32")
    assert found.tolist() == [0.5, 1.0, 2.0]
