"""Reads the constant tensors of a .tflite file: a flatbuffer, of which these few tables are enough.

Field numbers are those of the TensorFlow Lite schema (schema.fbs): Model.subgraphs 2, Model.buffers 4, SubGraph.tensors 0,
Tensor.shape 0, .type 1, .buffer 2, .name 3, .quantization 4, Buffer.data 0, QuantizationParameters.scale 2, .zero_point 3,
.quantized_dimension 6.
"""

import struct
from typing import NamedTuple

import numpy as np

TYPES = {0: np.float32, 2: np.int32, 3: np.uint8, 4: np.int64, 7: np.int16, 9: np.int8}


class Tensor(NamedTuple):
    """A constant tensor and its quantization; scale is empty where there is none."""

    name: str
    data: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray
    quantized_dimension: int


def _u32(data, at):
    return struct.unpack_from("<I", data, at)[0]


def _field(data, table, number):
    """Where a field's value lies, None where the table leaves it out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, vtable)[0]
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + entry)[0] if entry < size else 0
    return table + offset if offset else None


def _follow(data, table, number):
    at = _field(data, table, number)
    return None if at is None else at + _u32(data, at)


def _numbers(data, table, number, dtype):
    at = _follow(data, table, number)
    return np.zeros(0, dtype) if at is None else np.frombuffer(data, dtype, _u32(data, at), at + 4)


def _tables(data, table, number):
    at = _follow(data, table, number)
    starts = range(0) if at is None else range(at + 4, at + 4 + 4 * _u32(data, at), 4)
    return [start + _u32(data, start) for start in starts]


def _scalar(data, table, number, form):
    at = _field(data, table, number)
    return 0 if at is None else struct.unpack_from(form, data, at)[0]


def constants(path):
    """Yield the constant tensors of a model."""
    with open(path, "rb") as file:
        data = file.read()
    model = _u32(data, 0)
    buffers = _tables(data, model, 4)
    for graph in _tables(data, model, 2):
        for tensor in _tables(data, graph, 0):
            dtype = TYPES.get(_scalar(data, tensor, 1, "<b"))
            raw = _numbers(data, buffers[_scalar(data, tensor, 2, "<I")], 0, np.uint8)
            if dtype is None or not raw.size:
                continue
            quantization = _follow(data, tensor, 4)
            name = _numbers(data, tensor, 3, np.uint8).tobytes().decode()
            shape = _numbers(data, tensor, 0, np.int32)
            scale, zero_point, dimension = np.zeros(0, np.float32), np.zeros(0, np.int64), 0
            if quantization is not None:
                scale = _numbers(data, quantization, 2, np.float32)
                zero_point = _numbers(data, quantization, 3, np.int64)
                dimension = _scalar(data, quantization, 6, "<i")
            yield Tensor(name, raw.view(dtype).reshape(shape), scale, zero_point, dimension)
