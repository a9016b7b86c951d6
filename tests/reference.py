"""The slow oracle: the standards' formulas in NumPy, written independently of chunkq."""

import numpy as np


def same_bits(a, b):
    """Equal shape, type and bits; a NaN matches any NaN."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype.newbyteorder("=") != b.dtype.newbyteorder("="):
        return False
    a, b = (np.ascontiguousarray(v, v.dtype.newbyteorder("=")).reshape(-1) for v in (a, b))
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return bool(np.all((a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))))


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


def dequantize_linear(x, scale, zero_point=None, axis=1, block_size=0):
    """ONNX: (x - zero_point) * scale; the difference exact, one float32 multiplication."""
    scale = full(np.asarray(scale, np.float32), x.shape, axis, block_size)
    difference = x.astype(np.int64)
    if zero_point is not None:
        difference = difference - full(zero_point, x.shape, axis, block_size).astype(np.int64)
    with np.errstate(all="ignore"):
        return np.asarray(difference.astype(np.float32) * scale, np.float32)


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
