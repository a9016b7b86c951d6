"""Exact linear-quantization operators for tensors of any size.

`dequantize_linear` (ONNX DequantizeLinear) and `fake_quantize` (OpenVINO FakeQuantize-1) take NumPy, Dask and zarr
arrays and give the same bits for all three; `plan` runs an operator from one zarr array to another within a memory limit.

The map of the package: errors <- dtypes, memory <- spec, grid, kernels <- threads, store <- run <- graph, execute, ops <-
workers <- job <- demo <- cli; CONTRIBUTING.md says which rule lives where.
dask and zarr are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

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
    "plan",
]

if TYPE_CHECKING:
    from chunkq.job import plan


def __getattr__(name: str) -> Any:
    # `plan` brings in dask and zarr; who only calls kernels need not wait for them.
    if name == "plan":
        from chunkq.job import plan

        return plan
    raise AttributeError(f"module 'chunkq' has no attribute {name!r}")
