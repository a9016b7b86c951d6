"""Exact linear-quantization operators for tensors of any size.

`dequantize_linear` (ONNX DequantizeLinear) and `fake_quantize` (OpenVINO FakeQuantize-1) take NumPy, Dask and zarr arrays
and give the same bits for all three; `plan` runs an operator from one zarr array to another within a memory limit.

The map of the package: errors, dtypes <- spec <- grid <- run (kernels, threads), store <- graph, job <- ops <- cli.
dask and zarr are imported when they are first used.
"""

from chunkq.errors import ChunkqError, RunError, SpecError
from chunkq.ops import DequantizeLinear, FakeQuantize, dequantize_linear, fake_quantize

__version__ = "0.1.0"

__all__ = [
    "ChunkqError",
    "DequantizeLinear",
    "FakeQuantize",
    "RunError",
    "SpecError",
    "dequantize_linear",
    "fake_quantize",
]
