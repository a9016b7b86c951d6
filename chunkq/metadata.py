"""Operators as JSON, for the attributes of what chunkq writes, for the command line and for test vectors.

A document has the keys ``operator``, ``attributes`` and ``inputs``. An input is a number or list, an array written out
(``dtype``, ``shape``, ``values``), a zarr array by its place (``zarr``), or, in attributes only, a large array's digest.
Imports ops and linear; store (zarr) when an input is a zarr array.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from chunkq.dtypes import ELEMENT_TYPES, FLOATS, element_name, element_type
from chunkq.errors import SpecError
from chunkq.linear import DequantizeLinear, QuantizeDequantize, QuantizeLinear
from chunkq.operands import dashed, element_of, kind, load_npy, parameter, weak
from chunkq.ops import FakeQuantize, Operator
from chunkq.run import Array
from chunkq.spec import as_integer

#: Storage options for a place that a document names, which is not the user's own word.
OptionsOf = Callable[[Any], dict[str, Any] | None]

OPERATORS: dict[str, type[Operator]] = {
    cls.__name__: cls for cls in (DequantizeLinear, QuantizeLinear, QuantizeDequantize, FakeQuantize)
}

#: Attributes of what chunkq writes hold larger NumPy parameters by their digest.
WRITTEN_OUT = 1024


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinities."""
    return value if isinstance(value, int) or math.isfinite(value) else str(value)


def _array(value: Array) -> dict[str, Any]:
    name = element_name(value.dtype, "a parameter", tuple(ELEMENT_TYPES))
    with np.errstate(invalid="ignore"):  # a signalling NaN
        exact = value.astype(np.int64 if ELEMENT_TYPES[name].limits else np.float64)
    return {"dtype": name, "shape": list(value.shape), "values": [_number(v) for v in exact.reshape(-1).tolist()]}


def digest(value: Array) -> dict[str, Any]:
    """An array by its element type, shape and sha256 (of the little-endian bytes)."""
    name = element_name(value.dtype, "a parameter", tuple(ELEMENT_TYPES))
    little = np.ascontiguousarray(value, value.dtype.newbyteorder("<") if value.dtype.kind != "V" else None)
    sha256 = hashlib.sha256(little.reshape(-1).view(np.uint8).data).hexdigest()
    return {"dtype": name, "shape": list(value.shape), "sha256": sha256}


def _input(name: str, value: Any, written_out: int | None) -> Any:
    found = kind(value)
    if found == "dask":
        raise SpecError("argument", f"{name} is a Dask array, which JSON cannot name; compute it, or store it as zarr")
    if found == "zarr":
        from chunkq.store import location

        element = element_of(name, value, None, tuple(ELEMENT_TYPES))
        return {"dtype": element, "shape": [int(n) for n in value.shape], "zarr": location(value)}
    if found == "numpy":
        file = getattr(value, "file", None)
        value = np.asarray(value)
        if written_out is None or value.size <= written_out:
            return _array(value)
        return digest(value) | ({} if file is None else {"npy": file})
    return _plain(value)


def _plain(value: Any) -> Any:
    """A number or a list of numbers that JSON can hold."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    return _number(value)


def _number_or_list(entry: Any) -> Any:
    """What `_plain` made of it, back again."""
    if isinstance(entry, list):
        return [_number_or_list(v) for v in entry]
    if isinstance(entry, str):
        if entry.lower().lstrip("-") not in ("nan", "inf", "infinity"):
            raise _wrong(f"{entry!r} is no number")
        return float(entry)
    if isinstance(entry, bool) or not isinstance(entry, (int, float)):
        raise _wrong(f"{entry!r} is no number")
    return entry


def describe(op: Operator, written_out: int | None = None) -> dict[str, Any]:
    """An operator as JSON has it; NumPy parameters of more than `written_out` elements by their digest."""
    inputs = {n: getattr(op, n) for n in op.INPUTS}
    attributes = {n: getattr(op, n) for n in op.ATTRIBUTES}
    return {
        "operator": type(op).__name__,
        "attributes": {n: list(v) if isinstance(v, tuple) else v for n, v in attributes.items() if v is not None},
        "inputs": {n: _input(n, v, written_out) for n, v in inputs.items() if v is not None},
    }


def _wrong(what: str) -> SpecError:
    line = " ".join(what.split()).encode("ascii", "backslashreplace").decode()
    return SpecError("metadata", f"this is not the JSON of an operator: {line[:300]}")


def read_array(entry: dict[str, Any]) -> Array:
    """An array written out: ``dtype``, ``shape`` and ``values``, flat or nested."""
    name = element_type("dtype", entry["dtype"], tuple(ELEMENT_TYPES))
    shape = _read_shape(entry["shape"])
    flat = _flat(entry["values"])
    if len(flat) != prod(shape):
        raise _wrong(f"{len(flat)} values for the shape {shape}")
    try:
        return weak("values", flat, name).reshape(shape)
    except SpecError as error:
        raise _wrong(str(error)) from error


def _read_shape(shape: Any) -> tuple[int, ...]:
    lengths = tuple(as_integer(n) for n in shape) if isinstance(shape, list) else (None,)
    plain = tuple(n for n in lengths if n is not None and n >= 0)
    if len(plain) != len(lengths):
        raise _wrong(f"{shape!r} is no shape")
    return plain


def _flat(values: Any) -> list[Any]:
    if not isinstance(values, list):
        return [_number_or_list(values)]
    return [v for entry in values for v in _flat(entry)]


def _child(group: Any, name: str) -> Any:
    """An array of a group."""
    from chunkq.store import first_line, open_source

    try:
        node = group[name]
    except Exception as error:  # zarr has an error class for each way to be damaged
        raise SpecError("source", f"the group lacks a readable array {name!r}: {first_line(error)}") from error
    if hasattr(node, "members"):
        raise SpecError("source", f"{name!r} in the group is a group itself")
    return open_source(node, name)


def _read_input(name: str, entry: Any, group: Any, given: dict[str, Any], options_of: OptionsOf | None = None) -> Any:
    if name in given:
        return _as_recorded(name, entry, given[name], group)
    if not isinstance(entry, dict):
        return _number_or_list(entry)
    if "zarr" in entry:
        return _read_place(name, entry, group, options_of)
    if "values" in entry:
        return read_array(entry)
    if isinstance(entry.get("npy"), str):
        return _as_recorded(name, entry, load_npy(name, entry["npy"]))
    raise SpecError("metadata", f"{name} is recorded by its digest only; pass the array itself (--{dashed(name)})")


def _as_recorded(name: str, entry: Any, value: Any, group: Any = None) -> Any:
    """An array that was passed, if it is the one that the document records by its digest, or by a place it has left."""
    if isinstance(entry, dict) and "zarr" in entry and group is None and kind(value) == "zarr":
        return _of_that_kind(name, entry, value)
    if not isinstance(entry, dict) or "sha256" not in entry:
        raise SpecError("argument", f"{name} is recorded with the operator; leave it out (--{dashed(name)})")
    array = parameter(name, value, entry["dtype"])
    shape = _read_shape(entry["shape"])
    if kind(array) != "numpy" or array.size != prod(shape) or digest(np.asarray(array))["sha256"] != entry["sha256"]:
        raise SpecError("metadata", f"{name} is not the array that was recorded; pass that one (--{dashed(name)})")
    return np.asarray(array).reshape(shape)


def _read_place(name: str, entry: dict[str, Any], group: Any, options_of: OptionsOf | None = None) -> Any:
    """A zarr array, if it is still what the document says of it."""
    from chunkq.store import open_source

    if group is None:
        place = entry["zarr"]
        array = open_source(place, name, storage_options=options_of(place) if options_of else None)
    elif entry["zarr"] == name:
        array = _child(group, name)
    else:
        raise _wrong(f"{name} is {entry['zarr']!r}, not an array of this group")
    return _of_that_kind(name, entry, array)


def _of_that_kind(name: str, entry: dict[str, Any], array: Any) -> Any:
    """A zarr array that has the recorded type and shape."""
    found = element_of(name, array, None, tuple(ELEMENT_TYPES)), [int(n) for n in array.shape]
    if found != (entry["dtype"], entry["shape"]):
        raise _wrong(f"{name} is {found[0]} {found[1]}, recorded as {entry['dtype']} {entry['shape']}")
    return array


def read(
    document: Any,
    group: Any = None,
    given: dict[str, Any] | None = None,
    options_of: OptionsOf | None = None,
) -> Operator:
    """Make an operator of its JSON document, parsed.

    Its zarr arrays are those of `group` where one is given; `given` are arrays that it records by their digest only, or
    that are no longer where it says.
    """
    try:
        cls = OPERATORS[document["operator"]]
        if not isinstance(document["inputs"], dict) or not isinstance(document["attributes"], dict):
            raise _wrong("inputs and attributes are not objects")
        inputs = {n: _read_input(n, v, group, given or {}, options_of) for n, v in document["inputs"].items()}
        unknown = (given or {}).keys() - inputs.keys()
        if unknown:
            raise SpecError("argument", f"{', '.join(sorted(unknown))}: this {cls.__name__} has no such parameter")
        attributes = dict(document["attributes"])
        if isinstance(attributes.get("block_size"), list):
            attributes["block_size"] = tuple(attributes["block_size"])
        return cls(**inputs, **attributes)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _wrong(f"{type(error).__name__}: {error}") from error
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise _wrong(str(error)) from error


def from_json(text: str) -> Operator:
    """Make an operator of what its method `to_json` gave.

    Parameters
    ----------
    text : str
        One JSON document.

    Raises
    ------
    SpecError
        Reason ``metadata`` for what is no such document, and the reasons of the operator.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> op = chunkq.from_json(chunkq.DequantizeLinear(np.float32([0.5, 2]), axis=0).to_json())
    >>> op(np.int8([[1, 2], [3, 4]]))
    array([[0.5, 1. ],
           [6. , 8. ]], dtype=float32)
    """
    try:
        document = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(str(error)) from error
    return read(document)


#: Parameters of a group up to this many bytes are read at once; larger ones stay zarr arrays, read in part.
AT_ONCE = 1 << 20


def recorded_operator(node: Any, given: dict[str, Any], options_of: OptionsOf | None = None) -> Operator:
    """The operator that wrote a target, by the attributes of its array or group.

    `given` see `read`; names of parameters that it records with their values are refused there.

    Raises
    ------
    SpecError
        Reasons ``target`` (not of chunkq) and ``metadata`` (damaged, or a parameter is known by its digest only).
    """
    from chunkq.store import OPERATOR

    if OPERATOR not in node.attrs:
        raise SpecError("target", f"target {node.store_path} was not written by chunkq: it has no attribute {OPERATOR}")
    document = node.attrs[OPERATOR]
    return read(document, node if hasattr(node, "members") else None, given, options_of)


def open_quantized(
    source: Any, output_dtype: Any = None, *, storage_options: dict[str, Any] | None = None
) -> tuple[Any, DequantizeLinear] | None:
    """Open the group that a QuantizeLinear run wrote.

    Parameters
    ----------
    source : str, path, URL, zarr store or zarr.Group
        The group.
    output_dtype : dtype or str, optional
        That of the operator; the type of the scale by default.
    storage_options : dict, optional
        What fsspec needs to know for a URL.

    Returns
    -------
    zarr.Array, DequantizeLinear
        The quantized tensor, and the operator that undoes it (to float32 where the scale is float8_e8m0fnu); None where
        `source` is no such group.

    Raises
    ------
    SpecError
        Reason ``metadata`` for damaged attributes, ``source`` for an unfinished or damaged group.

    Examples
    --------
    >>> import tempfile, numpy as np, zarr, chunkq
    >>> folder = tempfile.mkdtemp()
    >>> x = zarr.create_array(f"{folder}/x.zarr", data=np.float32([[0.5, 1.25], [-3.0, 9.0]]))
    >>> quantize = chunkq.QuantizeLinear(0.5, output_dtype="int4")
    >>> report = chunkq.plan(quantize, x, f"{folder}/q.zarr").run()
    >>> q, dequantize = chunkq.open_quantized(f"{folder}/q.zarr")
    >>> dequantize(q).compute()
    array([[ 0.5,  1. ],
           [-3. ,  3.5]], dtype=float32)
    """
    from chunkq.store import OPERATOR, open_quantized_group

    group = open_quantized_group(source, storage_options)
    if group is None:
        return None
    data = _child(group, "data")
    quantize = read(group.attrs[OPERATOR], group)
    if not isinstance(quantize, QuantizeLinear):
        raise _wrong(f"{OPERATOR} of {source!r} is {type(quantize).__name__}, expected QuantizeLinear")
    _check_data(data, quantize)
    scale, zero_point = _at_once("scale", quantize.scale), _at_once("zero_point", quantize.zero_point)
    if output_dtype is None and element_of("scale", quantize.scale, None, tuple(ELEMENT_TYPES)) not in FLOATS:
        output_dtype = "float32"
    op = DequantizeLinear(
        scale,
        zero_point,
        axis=quantize.axis,
        block_size=quantize.block_size,
        output_dtype=output_dtype,
    )
    op.bind_array(data)
    return data, op


def _check_data(data: Any, quantize: QuantizeLinear) -> None:
    """Refuse data of another type than the operator gives."""
    zero_point = quantize.zero_point
    of_zero_point = None if zero_point is None else element_of("zero_point", zero_point, None, tuple(ELEMENT_TYPES))
    found = element_of("data", data, None, tuple(ELEMENT_TYPES))
    for expected in (of_zero_point, quantize.output_dtype or of_zero_point or "uint8"):
        if expected not in (None, found):
            raise SpecError("metadata", f"data is {found}, but the operator recorded with it gives {expected}")


def _at_once(name: str, value: Any) -> Any:
    """A small parameter as a NumPy array."""
    if kind(value) != "zarr":
        return value
    from chunkq.listing import read_parameter
    from chunkq.store import object_shape

    if max(value.nbytes, prod(object_shape(value)) * value.dtype.itemsize) > AT_ONCE:
        return value
    return read_parameter(name, value, element_of(name, value, None, tuple(ELEMENT_TYPES)))
