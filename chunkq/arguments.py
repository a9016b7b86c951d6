"""The operators' parameters from the command line: from text to arrays, the axis that is meant, what SRC itself says.

Imports linear, operands and errors; store (zarr) when an option names a zarr array.
"""

from __future__ import annotations

from typing import Any

import click
import numpy as np

from chunkq.dtypes import ELEMENT_TYPES, from_holder, to_float32
from chunkq.errors import SpecError
from chunkq.linear import DequantizeLinear
from chunkq.operands import dashed, element_of, kind, load_npy, optional_type, parameter
from chunkq.spec import normalize_axis

#: Every operator's parameters.
PARAMETER_NAMES = ("scale", "zero_point", "input_low", "input_high", "output_low", "output_high")

#: Options of every ONNX operator.
LINEAR_NAMES = ("scale", "zero_point", "axis", "block_size", "x_dtype", "scale_dtype")


def option(name: str) -> str:
    """What the command line calls an argument."""
    return f"--{dashed(name)}"


def open_at(location: str, storage_options: dict[str, Any] | None, argument: str = "source") -> Any:
    """A zarr array of the command line; storage options go with URLs."""
    from chunkq.places import options_for
    from chunkq.store import open_source

    return open_source(location, argument, storage_options=options_for(location, storage_options))


def read_parameter(name: str, text: str | None, storage_options: dict[str, Any] | None = None) -> Any:
    """A parameter from the command line: number, list, .npy file or zarr array."""
    if text is None:
        return None
    try:
        values = [_number(part) for part in text.split(",")]
    except ValueError:
        return load_npy(name, text) if text.endswith(".npy") else open_at(text, storage_options, name)
    return values if "," in text else values[0]


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _lying_on_one_axis(source: Any, scale: Any, zero_point: Any) -> tuple[int | None, Any, Any]:
    """A scale kept at x's rank, (N, 1) for x of (N, K), says itself which axis it lies on; ONNX wants it 1-D."""
    shape = getattr(scale, "shape", ())
    long = [a for a, n in enumerate(shape) if n != 1]
    if not hasattr(scale, "reshape") or len(shape) != len(source.shape) or len(shape) < 2 or len(long) != 1:
        return None, scale, zero_point
    click.echo(f"axis {long[0]}: scale has the shape {shape}", err=True)
    same = hasattr(zero_point, "reshape") and zero_point.shape == shape
    return long[0], scale.reshape(-1), zero_point.reshape(-1) if same else zero_point


def _axis_of_blocks(source: Any, scale: Any, block_size: int) -> int:
    """The axis along which blocks run: the only one for which the scale has the right shape."""
    shape = tuple(source.shape)
    if block_size < 0 or len(getattr(scale, "shape", ())) != len(shape):
        return 1  # not a matter of the axis: the operator says what is wrong
    blocks = [tuple(-(-n // block_size) if a == axis else n for a, n in enumerate(shape)) for axis in range(len(shape))]
    fits = [axis for axis, expected in enumerate(blocks) if getattr(scale, "shape", ()) == expected]
    if len(fits) != 1:
        which = f"axes {' and '.join(map(str, fits))} fit" if fits else "no axis fits"
        found = f"a scale of shape {getattr(scale, 'shape', ())} and x of shape {shape}"
        everywhere = ",".join([str(block_size)] * len(shape))
        way = "pass --axis" if fits else f"for blocks along every axis pass --block-size {everywhere}"
        raise SpecError("axis", f"--block-size {block_size}, {found}: {which}; {way}")
    click.echo(f"axis {fits[0]}: the only one that fits the shape of scale", err=True)
    return fits[0]


def _axis_for(source: Any, scale: Any, axis: int | None, block_size: Any) -> int:
    """The axis of a 1-D scale, or of its blocks: as given, or the only one it can be. Never a guess."""
    if axis is not None:
        return axis
    if isinstance(block_size, tuple):
        return 1  # a size for each axis: ONNX's axis has no meaning
    if block_size:
        return _axis_of_blocks(source, scale, block_size)
    length = len(scale) if isinstance(scale, list) else (scale.shape[0] if getattr(scale, "ndim", 0) == 1 else 1)
    if length == 1:
        return 1  # per-tensor: ONNX ignores it
    shape = tuple(source.shape)
    fits = [a for a, n in enumerate(shape) if n == length]
    if len(fits) != 1:
        which = (
            f"axes {' and '.join(map(str, fits))} have that length; pass --axis" if fits else "no axis has that length"
        )
        raise SpecError("axis", f"scale has {length} elements and x the shape {shape}: {which}")
    click.echo(f"axis {fits[0]}: the only one with as many elements as scale ({length})", err=True)
    return fits[0]


def linear_arguments(src: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The source, and the arguments that the ONNX operators share; their options are taken out."""
    given = {name: options.pop(name) for name in LINEAR_NAMES}
    if given["scale"] is None:
        raise SpecError(
            "argument",
            "--scale is missing (only a group that chunkq quantize wrote brings its own; quantize also takes --params or "
            "--calibrate)",
        )
    storage_options = options["storage_options"]
    source = open_at(src, storage_options)
    scale = read_parameter("--scale", given["scale"], storage_options)
    zero_point = read_parameter("--zero-point", given["zero_point"], storage_options)
    axis, block_size = given["axis"], _block_size(given["block_size"])
    if axis is None and not block_size:
        axis, scale, zero_point = _lying_on_one_axis(source, scale, zero_point)
    return source, {
        "scale": scale,
        "zero_point": zero_point,
        "axis": _axis_for(source, scale, axis, block_size),
        "block_size": block_size,
        "x_dtype": given["x_dtype"],
        "scale_dtype": given["scale_dtype"],
    }


def _block_size(text: str | None) -> int | tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in (text or "0").split(","))
    except ValueError as error:
        raise SpecError("block_size", f"--block-size {text!r}: expected integers such as 32 or 128,128") from error
    return sizes[0] if len(sizes) == 1 else sizes


def agreeing(source: Any, stored: DequantizeLinear, options: dict[str, Any]) -> None:
    """Take the parameters' options out, and refuse what disagrees with the operator of a quantized group."""
    given = {name: options.pop(name) for name in LINEAR_NAMES}
    rank = len(source.shape)
    said: dict[str, tuple[Any, Any]] = {}
    for name in ("scale", "zero_point"):
        if given[name] is not None and not _is_stored(name, getattr(stored, name), given[name]):
            raise SpecError("metadata", f"{option(name)} {given[name]} is not what SRC brings along; leave it out")
    if given["axis"] is not None and not isinstance(stored.block_size, tuple) and rank:
        said["axis"] = (stored.axis % rank, normalize_axis(given["axis"], rank))
    if given["block_size"] is not None:
        said["block_size"] = (stored.block_size, _block_size(given["block_size"]))
    for name, array in (("x_dtype", source), ("scale_dtype", stored.scale)):
        if given[name] is not None:
            said[name] = (element_of(name, array, None, tuple(ELEMENT_TYPES)), optional_type(name, given[name]))
    for name, (own, asked) in said.items():
        if own != asked:
            raise SpecError("metadata", f"{option(name)} {asked} disagrees with SRC, which says {own}; leave it out")


def _is_stored(name: str, own: Any, text: str) -> bool:
    """Whether a parameter given as well is the stored one (a large one is not read for that)."""
    if own is None or kind(own) == "zarr":
        return False
    asked = parameter(name, read_parameter(option(name), text), str(own.dtype))
    try:
        asked = from_holder(name, np.asarray(asked[...]), str(own.dtype))
    except SpecError:
        return False
    return bool(asked.shape == own.shape and np.array_equal(to_float32(asked), to_float32(own), equal_nan=True))
