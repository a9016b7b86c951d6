"""Exact linear-quantization operators for tensors of any size.

`dequantize_linear`, `quantize_linear` (ONNX) and `fake_quantize` (OpenVINO FakeQuantize-1) take NumPy, Dask and zarr
arrays and give the same bits for all three; `quantize_dequantize` does two in one pass; `plan` runs an operator from one
zarr array to another within a memory limit, `verify` checks what it wrote, `stream` yields results instead; `calibrate`
finds the parameters, `compare` says what was lost; `pack` and `unpack` know ONNX's packed bytes.

The map of the package, each part importing the ones before: errors, dtypes <- spec, grid, kernels <- run <- ops, linear
(operators) <- graph (Dask); places, store <- listing, target, lock <- statistics, units <- execute, cluster <- workers,
journal <- job <- planning <- checking, streaming, survey <- calibrating, comparing <- cli. CONTRIBUTING.md says which rule
lives where. dask and zarr are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

from chunkq.errors import ChunkqError, RunError, SpecError
from chunkq.linear import (
    DequantizeLinear,
    QuantizeDequantize,
    QuantizeLinear,
    dequantize_linear,
    quantize_dequantize,
    quantize_linear,
)
from chunkq.metadata import from_json, open_quantized
from chunkq.ops import FakeQuantize, fake_quantize
from chunkq.packing import pack, unpack

__version__ = "0.1.0"

__all__ = [
    "ChunkqError",
    "DequantizeLinear",
    "FakeQuantize",
    "QuantizeDequantize",
    "QuantizeLinear",
    "RunError",
    "SpecError",
    "calibrate",
    "compare",
    "dequantize_linear",
    "fake_quantize",
    "from_json",
    "open_calibration",
    "open_quantized",
    "pack",
    "plan",
    "quantize_dequantize",
    "quantize_linear",
    "stream",
    "unpack",
    "verify",
]

if TYPE_CHECKING:
    from chunkq.calibrating import calibrate
    from chunkq.checking import verify
    from chunkq.comparing import compare
    from chunkq.kept import open_calibration
    from chunkq.planning import plan
    from chunkq.streaming import stream

# These bring in dask and zarr; who only calls kernels need not wait for them.
_LATE = {
    "calibrate": "calibrating",
    "compare": "comparing",
    "open_calibration": "kept",
    "plan": "planning",
    "stream": "streaming",
    "verify": "checking",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        from importlib import import_module

        return getattr(import_module(f"chunkq.{_LATE[name]}"), name)
    raise AttributeError(f"module 'chunkq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING"})
