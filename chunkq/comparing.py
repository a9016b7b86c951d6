"""`compare`: reads two tensors of any size once and says what they differ by. What it gives is in comparison.py.

Imports comparison, statistics, survey, metadata and store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chunkq.comparison import NAMED, Comparison, Worst, in_all, measures, worst_places
from chunkq.dtypes import ELEMENT_TYPES, FAKE_QUANTIZE_X, to_float32
from chunkq.errors import SpecError
from chunkq.groups import Groups, groups_of
from chunkq.interrupts import held_interrupts
from chunkq.memory import parse_size
from chunkq.metadata import open_quantized
from chunkq.operands import declare, described, kind
from chunkq.ops import Operator
from chunkq.places import options_for
from chunkq.planning import bind_zarr, check_work
from chunkq.report import Progress
from chunkq.run import Array, refuse_masked
from chunkq.spec import QuantSpec
from chunkq.statistics import Errors, Extremes, Saturated, Several, State, Statistic
from chunkq.store import location, open_source
from chunkq.survey import How, Tensors, plain_spec, refuse_scheduler, survey_dask, survey_numpy, survey_zarr


def compare(
    a: Any,
    b: Any = None,
    *,
    op: Operator | None = None,
    axis: int | tuple[int, ...] | None = None,
    max_mem: int | str | None = None,
    scheduler: Any = None,
    workers: int | None = None,
    missing: str = "error",
    retries: int = 3,
    storage_options: dict[str, Any] | None = None,
    n_threads: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Say what was lost between two tensors, channel by channel and in all, in one pass over both.

    Sums are exact and rounded once, so that no layout, chunks, threads, workers or scheduler change a bit.

    Parameters
    ----------
    a : NumPy, Dask or zarr array; or str, path, URL or zarr store
        The original: float32, float16, bfloat16 or float64.
    b : the same kind as a, optional
        What it is compared with, of the same shape: floats, or what `op` makes floats of. In zarr also the group that a
        QuantizeLinear run wrote, which brings its operator. Without it, `op` is applied to a.
    op : DequantizeLinear, QuantizeDequantize or FakeQuantize, optional
        Applied to b (or a) on the way.
    axis : int, optional
        Of the channels; by default the one that the operator's parameters lie along, if any.
    max_mem, scheduler, workers, missing, retries, storage_options
        See `plan`; for zarr. A scheduler is also taken for Dask arrays.
    n_threads : int, optional
        For NumPy arrays; as many as there are CPUs by default.
    progress : callable, optional
        Called with the number of units done so far, and of all (zarr).

    Returns
    -------
    Comparison

    Raises
    ------
    SpecError
        Reasons ``argument``, ``axis``, ``dtype``, ``masked``, ``max_mem``, ``shape``, ``source``, and the operator's.
    RunError
        Objects are missing, cannot be read, or were rewritten meanwhile.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> x = np.float32([[0.5, -2.0], [0.25, 1.0]])
    >>> found = chunkq.compare(x, np.float32([[0.5, -2.0], [0.5, 1.0]]), axis=0)
    >>> float(found.overall.max_abs_error), found.channels.mse
    (0.25, array([0.     , 0.03125]))
    >>> q = chunkq.QuantizeLinear(0.5, output_dtype="int8")
    >>> print(chunkq.compare(x, q(x), op=chunkq.DequantizeLinear(0.5)).overall.max_abs_error)
    0.25
    """
    check_work(missing, workers, retries)
    how = How(
        None if max_mem is None else parse_size(max_mem), scheduler, workers, missing, retries, n_threads, progress
    )
    if b is None and op is None:
        raise SpecError("argument", "b is missing; pass it, or an operator to apply to a")
    if op is not None and not isinstance(op, Operator):
        raise SpecError("argument", f"op is a {type(op).__name__}; expected an operator")
    if kind(a) in ("numpy", "dask", "number"):
        return _in_memory(a, b, op, axis, how)
    return _in_zarr(a, b, op, axis, how, storage_options)


# ---- what both ways share


@dataclass(frozen=True)
class _Pair:
    """What is compared: names and types, the operator on this tensor, where it has its channels."""

    a: dict[str, Any]
    b: dict[str, Any]
    groups: Groups
    codes: str | None
    scale: Array | None
    zero_point: Array | None

    def statistic(self) -> Several:
        """All that is asked, of the original, of what it is compared with, and of the codes of that."""
        parts: list[tuple[Statistic, tuple[int, ...]]] = [(Errors(self.groups), (0, 1)), (Extremes(self.groups), (0,))]
        if self.codes is not None:
            parts.append((Saturated(self.groups, *_ends(self.codes)), (2,)))
        return Several(self.groups, tuple(parts))


def _ends(codes: str) -> tuple[float, float]:
    """The lowest and the highest value of a quantized type, infinities aside."""
    row = ELEMENT_TYPES[codes]
    if row.limits is not None:
        return row.limits
    assert row.mini is not None
    highest = float(to_float32(np.array([row.mini.max], np.uint8).view(row.dtype))[0])
    return -highest, highest


def _pair(a: dict[str, Any], b: dict[str, Any], bound: tuple[QuantSpec, Any] | None, axis: Any) -> _Pair:
    shape = tuple(a["shape"])
    if tuple(b["shape"]) != shape:
        raise SpecError("shape", f"a has the shape {shape} and b {tuple(b['shape'])}; pass tensors of one shape")
    spec, params = bound if bound is not None else (None, ())
    for name, dtype in (("a", a["dtype"]), ("b", b["dtype"] if spec is None else spec.y_dtype)):
        if dtype not in FAKE_QUANTIZE_X:
            way = (
                "; with codes goes op=chunkq.DequantizeLinear(...), or pass the group they lie in"
                if name == "b"
                else ""
            )
            raise SpecError("dtype", f"{name} is {dtype}; expected one of {', '.join(FAKE_QUANTIZE_X)}{way}")
    own = spec.axis if spec is not None and axis is None and _has_no_blocks(spec) else axis
    groups = groups_of(shape, own)
    fits = spec is not None and all(p.steps == groups.steps for p in spec.params)
    along = _per_channel(spec, params, groups) if spec is not None and fits else {}
    codes = spec.x_dtype if spec is not None and spec.op == "DequantizeLinear" and spec.x_dtype != "int32" else None
    return _Pair(a, b, groups, codes, along.get("scale"), along.get("zero_point"))


def _has_no_blocks(spec: QuantSpec) -> bool:
    return all(k < 2 for p in spec.params for k in p.steps)


def _per_channel(spec: QuantSpec, params: Any, groups: Groups) -> dict[str, Array]:
    """The operator's parameters, where there is one for each channel."""
    found = {}
    for param, value in zip(spec.params, params, strict=True):
        if param.name in ("scale", "zero_point") and kind(value) != "dask":
            wide = to_float32(np.asarray(value[...])).astype(np.float64)
            found[param.name] = wide.reshape(groups.result_shape)
    return found


def _made(pair: _Pair, state: State, values: Callable[[tuple[int, ...]], tuple[float, float]], peak: int) -> Comparison:
    groups, shape = pair.groups, pair.groups.result_shape
    total = in_all(state)
    flat = {name: array.reshape((*shape, *array.shape[len(groups.shape) :])) for name, array in state.items()}
    some = flat["minimum"] <= flat["maximum"]
    low, high = (np.where(some, flat[which], 0.0) + 0.0 for which in ("minimum", "maximum"))
    rows = worst_places(groups, flat["where"])
    errors = flat["worst"].reshape(-1)
    largest = [int(i) for i in np.argsort(-errors, kind="stable")[:NAMED] if errors[i] > 0]
    places = [tuple(int(i) for i in rows[channel]) for channel in largest]
    worst = tuple(
        Worst(at, *values(at), float(errors[channel]), None if groups.axis is None else channel)
        for channel, at in zip(largest, places, strict=True)
    )
    return Comparison(
        a=pair.a,
        b=pair.b,
        axis=groups.axis,
        overall=measures(total, max(int(np.prod(groups.shape, dtype=np.int64)), 1)),
        channels=measures(flat, np.maximum(flat["elements"], 1)),
        minimum=low,
        maximum=high,
        worst_index=rows.reshape((*shape, len(groups.shape))),
        worst=worst,
        scale=pair.scale,
        zero_point=pair.zero_point,
        peak_memory=peak,
    )


# ---- in memory


def _in_memory(a: Any, b: Any, op: Operator | None, axis: Any, how: How) -> Comparison:
    found = kind(a)
    refuse_scheduler(how.scheduler)
    for name, value in (("a", a), ("b", b)):
        if (value is not None and kind(value) != found) or found == "number":
            raise SpecError(
                "argument",
                f"{name} is a {type(value).__name__}; pass two NumPy arrays, Dask arrays, or tensors in zarr",
            )
        refuse_masked(name, value)
    if found == "numpy":
        a, b = np.asarray(a), None if b is None else np.asarray(b)
    if found == "dask" and 0 in a.shape:  # Dask does not cut empty arrays alike
        found, (a, b) = "numpy", (None if value is None else np.asarray(value.compute()) for value in (a, b))
    x = a if b is None else b
    first, second = _described("a", a), _described("b", x, None if op is None else op.x_dtype)
    bound = None if op is None else op.bind(tuple(x.shape), second["dtype"])
    pair = _pair(first, second, bound, axis)
    y = x if op is None else op(x)
    x = x if op is None else declare("b", x, second["dtype"])
    statistic = pair.statistic()
    if found == "dask":
        arrays = [a, y.rechunk(a.chunks), x.rechunk(a.chunks)]
        state = survey_dask(statistic, arrays, how)
    else:
        state = survey_numpy(statistic, [a, y, x], how)
    return _made(pair, state, lambda at: (_number(a[at]), _number(y[at])), 0)


def _described(name: str, value: Any, declared: str | None = None) -> dict[str, Any]:
    shape, dtype = described(name, value, declared)
    shown = location(value) if kind(value) == "zarr" else name
    return {"name": shown, "dtype": dtype, "shape": list(shape)}


def _number(value: Any) -> float:
    return float(np.asarray(value))


# ---- in zarr


@held_interrupts()
def _in_zarr(a: Any, b: Any, op: Operator | None, axis: Any, how: How, options: dict[str, Any] | None) -> Comparison:
    if kind(b) in ("numpy", "dask", "number"):
        raise SpecError("argument", f"a is in zarr and b a {type(b).__name__}; pass two of one kind")
    original = open_source(a, "a", storage_options=options_for(a, options))
    source = original
    if b is not None:
        opened = None if kind(b) == "zarr" else open_quantized(b, storage_options=options_for(b, options))
        if opened is not None and op is not None:
            raise SpecError("argument", "b is a quantized group, which brings its operator; leave op out")
        if opened is not None:
            op = opened[1]
        source = open_source(
            opened[0] if opened else b, "b", storage_options=None if opened else options_for(b, options)
        )
    first, second = _described("a", original), _described("b", source, None if op is None else op.x_dtype)
    bound = None if op is None else bind_zarr(op, source)
    pair = _pair(first, second, bound, axis)
    spec = bound[0] if bound else plain_spec("compare", tuple(source.shape), second["dtype"])
    tensors = Tensors(spec, source, bound[1] if bound else (), None if b is None else original, first["dtype"])
    statistic = pair.statistic()
    survey = survey_zarr(tensors, [statistic], how)
    progress, units = how.progress, survey.arrangement.units
    state, peak = survey.take(statistic, None if progress is None else lambda done: progress(done, units))
    survey.refuse_rewritten()
    return replace(_made(pair, state, survey.values_at, peak), projected_memory=survey.projected)
