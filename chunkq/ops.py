"""What the operators share, and FakeQuantize: what the user calls, and which way the input goes.

Imports spec, run and operands; graph (dask) is imported when a Dask or zarr array arrives, never before.
"""

from __future__ import annotations

import json
from functools import lru_cache
from math import copysign
from typing import Any, ClassVar

import numpy as np

from chunkq.dtypes import ELEMENT_TYPES, FAKE_QUANTIZE_X, from_holder
from chunkq.errors import SpecError
from chunkq.operands import described, element_of, kind, parameter
from chunkq.run import Array, check_out, make_call, refuse_masked, run_chunk
from chunkq.spec import ParamSpec, QuantSpec, Shape, fake_quantize_spec, integer_argument
from chunkq.threads import thread_count

#: Quantized types whose parameters are more than cast: values are checked, NaN made the same.
CHECKED = ("int32", *(row.name for row in ELEMENT_TYPES.values() if row.mini is not None))

#: Shapes and types of x that an operator keeps a call for.
MOST_CALLS = 64


def _casts(given: Any, prepared: Array, spec: QuantSpec, param: ParamSpec) -> list[tuple[Array, Array]] | None:
    """What to copy before each call so that a prepared parameter is right; None where that is not all there is to do.

    A number does not change, an array that is read where it lies changes with it, and where preparing is nothing but a cast
    it is done again.
    """
    if isinstance(given, (int, float, np.generic)) and not isinstance(given, np.void):
        return []
    if not isinstance(given, np.ndarray) or given.size != prepared.size:
        return None
    if np.may_share_memory(given, prepared):
        return []
    cast = given.dtype == ELEMENT_TYPES[param.dtype].dtype and spec.q_dtype not in CHECKED
    return [(prepared.reshape(given.shape), given)] if cast else None


class Operator:
    """What the operators share: calling one takes the way that fits the input."""

    __slots__ = ("_calls",)

    #: The arrays and the attributes an operator is made of, by the standard's names.
    INPUTS: ClassVar[tuple[str, ...]] = ()
    ATTRIBUTES: ClassVar[tuple[str, ...]] = ()

    #: The declared element type of x, for x that is held as integers.
    x_dtype: str | None

    #: Calls that are ready, by shape and dtype of x.
    _calls: dict[tuple[Shape, np.dtype[Any]], tuple[Any, tuple[tuple[Array, Array], ...]]]

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        object.__setattr__(self, "_calls", {})  # they were made of the old value

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {name: getattr(self, name) for name in (*self.INPUTS, *self.ATTRIBUTES)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self.ATTRIBUTES)})"

    def bind(self, shape: Shape, x_dtype: str) -> tuple[QuantSpec, tuple[Any, ...]]:
        """Validate the operator for a tensor.

        Parameters
        ----------
        shape : tuple of int
            The tensor's.
        x_dtype : str
            Its element type.

        Returns
        -------
        QuantSpec, tuple
            The operation, and its parameters as arrays of any kind, of the rank they were given in.

        Raises
        ------
        SpecError
            With the reason why the two do not fit.
        """
        raise AssertionError("each operator has its own")

    def x_types(self) -> tuple[str, ...]:
        """Name the element types this operator takes."""
        raise AssertionError("each operator has its own")

    def to_json(self) -> str:
        """Give the operator as one JSON document, from which `from_json` makes it again.

        Numbers and lists stay what they are, NumPy parameters are written out to the last bit (every NaN alike), zarr
        arrays are named by their place.

        Raises
        ------
        SpecError
            Reason ``argument``: a parameter is a Dask array.

        Examples
        --------
        >>> import chunkq
        >>> chunkq.FakeQuantize(0, 1, 0, 1, levels=4).to_json()  # doctest: +ELLIPSIS
        '{"operator": "FakeQuantize", "attributes": {"levels": 4, ...}, "inputs": {"input_low": 0, ...}}'
        """
        from chunkq.metadata import describe

        return json.dumps(describe(self))

    def bind_array(self, x: Any) -> tuple[QuantSpec, tuple[Any, ...]]:
        """Validate the operator for a NumPy, Dask or zarr array."""
        shape = tuple(int(n) for n in x.shape)
        return self.bind(shape, element_of("x", x, self.x_dtype, self.x_types()))

    def __call__(self, x: Any, *, out: Array | None = None, n_threads: int | None = None) -> Any:
        """Apply the operator: NumPy gives NumPy, a Dask or zarr array gives a lazy Dask array.

        Parameters
        ----------
        x : numpy.ndarray, dask.array.Array, zarr.Array, or a NumPy scalar
            The tensor.
        out : numpy.ndarray, optional
            Where the result goes; NumPy input only.
        n_threads : int, optional
            Threads for NumPy input; all available CPUs by default, one for small arrays.
        """
        if type(x) is np.ndarray:
            ready = self._calls.get((x.shape, x.dtype))
            if ready is not None:
                call, casts = ready
                for prepared, given in casts:
                    np.copyto(prepared, given, casting="unsafe")
                y = call(x, out, thread_count(n_threads, call.size))
                if y is not None:
                    return y
            return self._in_memory(x, out, n_threads)
        found = kind(x)
        if found == "number" and not isinstance(x, bool):
            x, found = _weak_x(x), "numpy"
        if found not in ("numpy", "dask", "zarr"):
            raise SpecError(
                "argument",
                f"x is a {type(x).__name__}; expected a NumPy, Dask or zarr array (of an xarray.DataArray its .data, "
                "of anything else numpy.asarray(x))",
            )
        refuse_masked("x", x)
        if found == "numpy":
            return self._in_memory(np.asarray(x), out, n_threads)
        if out is not None or n_threads is not None:
            raise SpecError("argument", f"out and n_threads are for NumPy input; x is a {found} array, the result lazy")
        from chunkq import graph

        return graph.from_dask(self, x) if found == "dask" else graph.from_zarr(self, x)

    def _in_memory(self, x: Array, out: Array | None, n_threads: int | None) -> Array:
        spec, params = self.bind_array(x)
        values = tuple(
            p if isinstance(p, np.ndarray) else _gathered(param, p)
            for param, p in zip(spec.params, params, strict=True)
        )
        held, x = x, from_holder("x", x, spec.x_dtype)
        if out is not None:
            check_out(spec, x.shape, out, x, values)
        if x is not held or x.size == 0 or not x.dtype.isnative:
            return run_chunk(spec, x, values, out=out, n_threads=n_threads)
        call, used = make_call(spec, x.shape, values)
        self._keep(spec, x, call, used)
        y = call(x, out, thread_count(n_threads, x.size))
        return run_chunk(spec, x, values, out=out, n_threads=n_threads) if y is None else y

    def _keep(self, spec: QuantSpec, x: Array, call: Any, used: tuple[Array, ...]) -> None:
        """Have a call ready for the next such x, with what to copy into the parameters first."""
        casts: list[tuple[Array, Array]] = []
        for param, prepared in zip(spec.params, used, strict=False):
            found = _casts(getattr(self, param.name), prepared, spec, param)
            if found is None:
                return
            casts += found
        if len(self._calls) >= MOST_CALLS:
            self._calls.clear()
        self._calls[x.shape, x.dtype] = call, tuple(casts)


def _gathered(param: ParamSpec, value: Any) -> Array:
    """A Dask or zarr parameter of a tensor in memory."""
    if kind(value) == "zarr":
        from chunkq.listing import read_parameter
        from chunkq.store import Handle

        if param.name == "scale":  # zeros are no scale, so what is missing was not left out as fill
            return read_parameter(param.name, value, param.dtype)
        return Handle(value, param.dtype).read((slice(None),) * value.ndim)
    block = value.compute()
    refuse_masked(param.name, block)
    return np.asarray(block)


def _weak_x(x: Any) -> Array:
    try:
        return np.asarray(x)
    except ValueError as error:
        raise SpecError("value", f"x is a ragged list: {error}") from error


#: Types of numbers that are the same where type and value are equal; of floats, zeros are not: they have signs.
INTEGERS = frozenset((int, *(np.dtype(code).type for code in "bBhHiI")))
REALS = frozenset((float, np.float16, np.float32, np.float64))


def operator(made: Any, keep: bool, *values: Any) -> Any:
    """The operator of a call in one line, `INPUTS` and `ATTRIBUTES` in their order; kept for the next one if told so."""
    if not keep:
        return _made(made, *values)
    try:
        return _kept(made, *values)
    except TypeError:  # an attribute that has no hash: most likely a wrong one, which the operator's error says
        return _made(made, *values)


def _made(made: Any, *values: Any) -> Any:
    n = len(made.INPUTS)
    return made(*values[:n], **dict(zip(made.ATTRIBUTES, values[n:], strict=True)))


_kept = lru_cache(maxsize=256, typed=True)(_made)


class FakeQuantize(Operator):
    """OpenVINO FakeQuantize-1 with its ranges.

    ``y = output_low`` where ``x <= min(input_low, input_high)``, ``output_high`` where
    ``x > max(input_low, input_high)``, else ``round((x - input_low) / (input_high - input_low) * (levels - 1)) /
    (levels - 1) * (output_high - output_low) + output_low``, left to right, ties to even, nothing fused.

    Parameters
    ----------
    input_low, input_high, output_low, output_high : float, list, or array of x's type (NumPy, Dask, zarr)
        Four ranges of possibly four shapes; each broadcasts to x, never beyond it.
    levels : int
        From 2 to 2**24 + 1 (2**53 + 1 for float64).
    auto_broadcast : {"numpy", "none", "pdpd"}
        "numpy" aligns a range's dimensions with x's last ones; "none" wants x's shape; "pdpd" drops trailing
        dimensions of 1 and puts the rest on x's from `broadcast_axis` on.
    broadcast_axis : int
        For "pdpd": the first axis, or -1 for rank(x) - rank(range). No meaning otherwise.

    Raises
    ------
    SpecError
        Reasons ``dtype``, ``levels``, ``broadcast``, ``axis``, ``value``, ``masked``, ``out``.

    Notes
    -----
    x is float32, float64, float16 or bfloat16, and y is of x's type. The two 16-bit types are computed in float32 and
    rounded once. A NaN in x gives NaN; every NaN result is the canonical one. Source: OpenVINO operation FakeQuantize-1.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> op = chunkq.FakeQuantize(0.0, 4.0, 0.0, 4.0, levels=5)
    >>> op(np.array([0.5, 1.5, 2.5, 9.0], np.float32))
    array([0., 2., 2., 4.], dtype=float32)
    """

    __slots__ = ("auto_broadcast", "broadcast_axis", "input_high", "input_low", "levels", "output_high", "output_low")

    INPUTS = ("input_low", "input_high", "output_low", "output_high")
    ATTRIBUTES = ("levels", "auto_broadcast", "broadcast_axis")

    x_dtype = None

    def __init__(
        self,
        input_low: Any,
        input_high: Any,
        output_low: Any,
        output_high: Any,
        levels: int,
        *,
        auto_broadcast: str = "numpy",
        broadcast_axis: int = -1,
    ) -> None:
        for name, value in zip(self.INPUTS, (input_low, input_high, output_low, output_high), strict=True):
            parameter(name, value, "float64")  # its type depends on x; whether it is a number does not
        self.input_low, self.input_high = input_low, input_high
        self.output_low, self.output_high = output_low, output_high
        self.levels = integer_argument("levels", levels, "levels")
        if not isinstance(auto_broadcast, str):
            raise SpecError("broadcast", f"auto_broadcast={auto_broadcast!r}: expected 'none', 'numpy' or 'pdpd'")
        self.auto_broadcast = auto_broadcast
        self.broadcast_axis = integer_argument("broadcast_axis", broadcast_axis, "axis")

    def x_types(self) -> tuple[str, ...]:
        return FAKE_QUANTIZE_X

    def bind(self, shape: Shape, x_dtype: str) -> tuple[QuantSpec, tuple[Any, ...]]:
        params = tuple(parameter(n, getattr(self, n), x_dtype) for n in self.INPUTS)
        ranges = tuple((n, *described(n, p)) for n, p in zip(self.INPUTS, params, strict=True))
        spec = fake_quantize_spec(shape, x_dtype, ranges, self.levels, self.auto_broadcast, self.broadcast_axis)
        return spec, params


def fake_quantize(
    x: Any,
    input_low: Any,
    input_high: Any,
    output_low: Any,
    output_high: Any,
    levels: int,
    *,
    auto_broadcast: str = "numpy",
    broadcast_axis: int = -1,
    out: Array | None = None,
    n_threads: int | None = None,
) -> Any:
    """Apply OpenVINO FakeQuantize-1: `FakeQuantize` in one call.

    Parameters
    ----------
    x : array of float32, float64, float16 or bfloat16 (NumPy, Dask or zarr)
        The tensor.
    input_low, input_high, output_low, output_high, levels, auto_broadcast, broadcast_axis
        See `FakeQuantize`.
    out, n_threads
        See `Operator.__call__`; `out` may be x itself.

    Returns
    -------
    numpy.ndarray or dask.array.Array
        Of x's shape and type; lazy where x is.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> x = np.array([[-6, -5, -4], [3, 4, 5]], np.float32)
    >>> chunkq.fake_quantize(x, [-6, -3, -1], [6, 3, 1], [-6, -3, -1], [6, 3, 1], levels=5)
    array([[-6., -3., -1.],
           [ 3.,  3.,  1.]], dtype=float32)
    """
    ranges = input_low, input_high, output_low, output_high
    numbers = all(type(r) in REALS and (r != 0 or copysign(1, r) > 0) for r in ranges)
    op = operator(FakeQuantize, numbers, *ranges, levels, auto_broadcast, broadcast_axis)
    return op(x, out=out, n_threads=n_threads)
