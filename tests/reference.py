"""The slow oracle: the standards' formulas in NumPy, written independently of chunkq."""

import ml_dtypes
import numpy as np


def same_bits(a, b):
    """Equal shape, type and bits; a NaN matches any NaN."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype.newbyteorder("=") != b.dtype.newbyteorder("="):
        return False
    a, b = (np.ascontiguousarray(v, v.dtype.newbyteorder("=")).reshape(-1) for v in (a, b))
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return bool(np.all((a.view(bits) == b.view(bits)) | (is_nan(a) & is_nan(b))))


def is_nan(a):
    """Where a is NaN, for ml_dtypes' types too."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.zeros(a.shape, bool) if is_integer(a.dtype) else np.isnan(a.astype(np.float64))


def is_integer(dtype):
    return "int" in np.dtype(dtype).name  # ml_dtypes' int4 has the kind of a structure


def full(param, shape, axis, block_size):
    """A scale or zero point repeated to the shape of x."""
    param = np.asarray(param)
    if block_size:
        if not isinstance(block_size, tuple):
            block_size = [block_size if a == axis % len(shape) else 1 for a in range(len(shape))]
        for a, size in enumerate(block_size):
            param = param.take(np.arange(shape[a]) // size, a)
        return param
    if param.size == 1 and param.ndim <= 1:
        return np.broadcast_to(param.reshape(()), shape)
    return np.broadcast_to(param.reshape([-1 if a == axis % len(shape) else 1 for a in range(len(shape))]), shape)


def dequantize_linear(x, scale, zero_point=None, axis=1, block_size=0, output_dtype=None):
    """ONNX: (x - zero_point) * scale; the difference exact, one float32 multiplication, one rounding to y's type."""
    scale = np.asarray(scale)
    y_dtype = output_dtype or (scale.dtype if scale.dtype.itemsize == 2 else np.float32)
    exact = np.int64 if is_integer(x.dtype) else np.float32
    difference = x.astype(exact)
    with np.errstate(all="ignore"):
        if zero_point is not None:
            difference = difference - full(zero_point, x.shape, axis, block_size).astype(exact)
        y = difference.astype(np.float32) * full(scale, x.shape, axis, block_size).astype(np.float32)
        return np.asarray(y).astype(y_dtype)


def quantize_linear(x, scale, zero_point=None, axis=1, block_size=0, output_dtype=None, saturate=True, precision=None):
    """ONNX: saturate(round_half_even(x / scale) + zero_point), the quotient in `precision` or the type of scale."""
    scale = np.asarray(scale)
    if precision is None:
        precision = np.float32 if x.dtype == np.int32 or scale.dtype.itemsize == 1 else scale.dtype
    y_dtype = np.dtype(output_dtype or (np.uint8 if zero_point is None else zero_point.dtype))
    zero = None if zero_point is None else full(zero_point, x.shape, axis, block_size)
    with np.errstate(all="ignore"):
        quotient = np.asarray(x.astype(precision) / full(scale, x.shape, axis, block_size).astype(precision))
        if is_integer(y_dtype):
            limits = ml_dtypes.iinfo(y_dtype)
            y = np.rint(quotient.astype(np.float64)) + (0 if zero is None else zero.astype(np.float64))
            y = np.where(np.isnan(y), limits.min, np.clip(y, limits.min, limits.max))  # NaN: qmin
            return y.astype(np.int64).astype(y_dtype)
        if zero is not None and "float8" not in y_dtype.name:
            quotient = np.asarray(quotient + zero.astype(precision))
        y = quotient.astype(np.float32)
        limits = ml_dtypes.finfo(y_dtype)
        has_nan = "float8" in y_dtype.name
        if saturate or not has_nan:
            y = np.clip(y, np.float32(limits.min), np.float32(limits.max))
        return (y if has_nan else np.where(np.isnan(y), np.float32(limits.min), y)).astype(y_dtype)


def broadcast(value, shape, mode="numpy", start=-1):
    """A FakeQuantize range at x's shape; OpenVINO's broadcast rules."""
    if mode == "pdpd":
        rank = value.ndim
        start = len(shape) - rank if start == -1 else start
        while value.ndim and value.shape[-1] == 1:
            value = value[..., 0]
        value = value.reshape(value.shape + (1,) * (len(shape) - start - value.ndim))
    return np.broadcast_to(value, shape)


def fake_quantize(x, input_low, input_high, output_low, output_high, levels, mode="numpy", start=-1):
    """OpenVINO FakeQuantize-1, term by term; float16 widened to float32 and rounded once."""
    real = np.float64 if x.dtype == np.float64 else np.float32
    v = np.asarray(x).astype(real)
    il, ih, ol, oh = (
        broadcast(np.asarray(p).astype(real), v.shape, mode, start)
        for p in (input_low, input_high, output_low, output_high)
    )
    top = real(levels - 1)
    with np.errstate(all="ignore"):
        y = np.rint((v - il) / (ih - il) * top) / top * (oh - ol) + ol
        low = np.where(ih < il, ih, il)  # std::min and std::max: the first where the second is NaN
        high = np.where(il < ih, ih, il)
        y = np.where(v > high, oh, y)
        y = np.where(v <= low, ol, y)
        return y.astype(x.dtype)
