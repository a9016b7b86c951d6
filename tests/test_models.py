"""Real data: every quantized tensor of the pymicro-wakeword models, in memory and through the command line."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tflite
import zarr
from click.testing import CliRunner

import chunkq
from chunkq.cli import main

MODELS = sorted(Path(find_spec("pymicro_wakeword").submodule_search_locations[0], "models").glob("*.tflite"))


def quantized(model):
    return [t for t in tflite.constants(model) if t.scale.size]


def expected(tensor):
    """The formula in NumPy, parameters put on the quantized dimension by hand."""
    shape = [1] * tensor.data.ndim
    if tensor.scale.size > 1:
        shape[tensor.quantized_dimension] = -1
    else:
        shape = ()
    difference = tensor.data.astype(np.int64) - tensor.zero_point.reshape(shape)
    return difference.astype(np.float32) * tensor.scale.reshape(shape)


def test_the_models_have_what_is_tested():
    found = {
        (t.data.dtype.name, t.scale.size > 1, t.quantized_dimension if t.scale.size > 1 else int(t.zero_point[0]))
        for model in MODELS
        for t in quantized(model)
    }
    assert len(MODELS) >= 3
    wanted = {("int8", True, 0), ("int8", True, 3), ("int32", True, 0), ("int8", False, -128)}
    assert wanted <= found


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_in_memory(model):
    for tensor in quantized(model):
        zero_point = tensor.zero_point.astype(tensor.data.dtype)
        axis = tensor.quantized_dimension
        y = chunkq.dequantize_linear(tensor.data, tensor.scale, zero_point, axis=axis)
        np.testing.assert_array_equal(y.view(np.uint32), np.float32(expected(tensor)).view(np.uint32))


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_through_the_command_line(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for index, tensor in enumerate(quantized(model)):
        chunks = tuple(max(1, n // 2) for n in tensor.data.shape)
        zarr.create_array(f"x{index}.zarr", data=tensor.data, chunks=chunks, config={"write_empty_chunks": True})
        np.save("scale.npy", tensor.scale)
        np.save("zero.npy", tensor.zero_point.astype(tensor.data.dtype))
        command = ["dequantize", f"x{index}.zarr", f"y{index}.zarr", "--scale", "scale.npy", "--zero-point", "zero.npy"]
        command += ["--axis", str(tensor.quantized_dimension), "--missing", "fill"]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.stderr
        y = zarr.open_array(f"y{index}.zarr")[...]
        np.testing.assert_array_equal(y.view(np.uint32), np.float32(expected(tensor)).view(np.uint32))
