"""`calibrate`: what a tensor of any size holds, group by group. What follows from it is in calibration.py.

Imports calibration, statistics, survey and store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from chunkq.calibration import METHODS, Calibration
from chunkq.dtypes import FAKE_QUANTIZE_X
from chunkq.errors import SpecError
from chunkq.groups import Groups, groups_of
from chunkq.interrupts import held_interrupts
from chunkq.memory import parse_size
from chunkq.operands import described, kind
from chunkq.places import options_for
from chunkq.planning import check_work
from chunkq.report import Progress
from chunkq.run import Array, refuse_masked
from chunkq.spec import integer_argument
from chunkq.statistics import Extremes, Histogram, State, Statistic
from chunkq.store import open_source
from chunkq.survey import How, Tensors, plain_spec, refuse_scheduler, survey_dask, survey_numpy, survey_zarr

#: A pass over a tensor: the state of a statistic, and the measured peak of memory.
_Take = Callable[[Statistic], tuple[State, int]]


def calibrate(
    x: Any,
    *,
    axis: int | tuple[int, ...] | None = None,
    block_size: int | tuple[int, ...] = 0,
    method: str = "minmax",
    percentile: float = 99.99,
    bins: int = 2048,
    max_mem: int | str | None = None,
    scheduler: Any = None,
    workers: int | None = None,
    missing: str = "error",
    retries: int = 3,
    storage_options: dict[str, Any] | None = None,
    n_threads: int | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Find what a tensor holds, group by group, and with it the parameters to quantize it with.

    The same bits for any layout, chunks, number of threads or workers, and any scheduler.

    Parameters
    ----------
    x : NumPy, Dask or zarr array; or str, path, URL or zarr store
        float32, float16, bfloat16 or float64. Values that are not finite are counted, and skipped.
    axis : int or tuple of int, optional
        A group for each index along it; one for the whole tensor by default.
    block_size : int or tuple of int
        As the operators': blocks along the one axis, or a size for each axis.
    method : {"minmax", "absmax", "percentile", "mse"}
        What the range is: lowest to highest value; plus and minus the largest magnitude; between the values that
        (100 - percentile) / 2 percent lie below and above, by a histogram; of clipped ranges the one with the least mean
        squared error when it is quantized, by a histogram. The last two read x twice.
    percentile : float
        Above 50 and up to 100.
    bins : int
        Of the histogram, from minus to plus the largest magnitude of each group; even.
    max_mem, scheduler, workers, missing, retries, storage_options
        See `plan`; for zarr. A scheduler is also taken for Dask arrays.
    n_threads : int, optional
        For NumPy arrays; as many as there are CPUs by default.
    progress : callable, optional
        Called with the number of units done so far, and of all, both passes counted (zarr).

    Returns
    -------
    Calibration

    Raises
    ------
    SpecError
        Reasons ``argument``, ``axis``, ``block_size``, ``dtype``, ``masked``, ``max_mem``, ``scheduler``, ``source``.
    RunError
        Objects of x are missing, cannot be read, or were rewritten between the passes.

    Examples
    --------
    >>> import numpy as np, chunkq
    >>> x = np.float32([[0.5, -2.0, np.nan], [0.0, 1.0, 3.0]])
    >>> found = chunkq.calibrate(x, axis=0)
    >>> found.minimum, found.maximum, found.count, found.nan
    (array([-2.,  0.]), array([0.5, 3. ]), array([2, 3]), array([1, 0]))
    >>> scale, zero_point = found.parameters("int8")
    >>> scale * 127, zero_point
    (array([2., 3.], dtype=float32), array([0, 0], dtype=int8))
    """
    share, count = _share_and_bins(method, percentile, bins)
    check_work(missing, workers, retries)
    how = How(
        None if max_mem is None else parse_size(max_mem), scheduler, workers, missing, retries, n_threads, progress
    )
    found = kind(x)
    if found == "number":
        raise SpecError("argument", "x is a list or number; pass a NumPy array of floats")
    if found in ("numpy", "dask"):
        refuse_masked("x", x)
        refuse_scheduler(scheduler)
        shape, name = described("x", np.asarray(x) if found == "numpy" else x)
        _refuse_type(name)
        groups = groups_of(shape, axis, block_size)
        take: _Take = _taking_dask(x, how) if found == "dask" else _taking_numpy(np.asarray(x), how)
        return _calibration(groups, name, method, share, count, take)
    array = open_source(x, "x", storage_options=options_for(x, storage_options))
    return _calibrate_zarr(array, groups_of(tuple(array.shape), axis, block_size), method, share, count, how)


def _share_and_bins(method: Any, percentile: Any, bins: Any) -> tuple[float, int]:
    if method not in METHODS:
        raise SpecError("argument", f"method={method!r}: expected one of {', '.join(METHODS)}")
    if isinstance(percentile, bool) or not isinstance(percentile, (int, float)) or not 50 < percentile <= 100:
        raise SpecError("argument", f"percentile={percentile!r}: expected a number above 50 and up to 100")
    count = integer_argument("bins", bins, "argument")
    if not 2 <= count <= 1 << 20 or count % 2:
        raise SpecError("argument", f"bins={bins!r}: expected an even number from 2 to {1 << 20}")
    return float(percentile), count if method in ("percentile", "mse") else 0


def _refuse_type(name: str) -> None:
    if name not in FAKE_QUANTIZE_X:
        raise SpecError("dtype", f"x is {name}; expected one of {', '.join(FAKE_QUANTIZE_X)}")


def _taking_numpy(x: Array, how: How) -> _Take:
    return lambda statistic: (survey_numpy(statistic, [x], how), 0)


def _taking_dask(x: Any, how: How) -> _Take:
    return lambda statistic: (survey_dask(statistic, [x], how), 0)


@held_interrupts()
def _calibrate_zarr(array: Any, groups: Groups, method: str, share: float, bins: int, how: How) -> Calibration:
    _, name = described("x", array)
    _refuse_type(name)
    kept: list[Statistic] = [Extremes(groups)]
    if bins:
        kept.append(Histogram(groups, bins, np.zeros(groups.grid)))
    survey = survey_zarr(Tensors(plain_spec("calibrate", groups.shape, name), array), kept, how)
    units = survey.arrangement.units
    passes = iter(range(len(kept)))

    def take(statistic: Statistic) -> tuple[State, int]:
        before = next(passes) * units
        progress = how.progress
        watch = None if progress is None else lambda done: progress(before + done, len(kept) * units)
        return survey.take(statistic, watch)

    made = _calibration(groups, name, method, share, bins, take)
    survey.refuse_rewritten()
    return replace(made, projected_memory=survey.projected)


def _calibration(groups: Groups, name: str, method: str, share: float, bins: int, take: _Take) -> Calibration:
    state, peak = take(Extremes(groups))
    shape = groups.result_shape
    some = state["minimum"] <= state["maximum"]
    # + 0.0: -0 becomes 0, which of them is the lowest of several depends on their order
    low, high = (np.where(some, state[which], 0.0) + 0.0 for which in ("minimum", "maximum"))
    nan, above, below = (state["odd"][..., i].reshape(shape) for i in range(3))
    histogram = None
    if bins:
        counted, second = take(Histogram(groups, bins, np.maximum(np.abs(low), np.abs(high))))
        peak = max(peak, second)
        histogram = counted["counts"][..., :bins].reshape(*shape, bins)
    elements = state["elements"].reshape(shape)
    return Calibration(
        shape=groups.shape,
        x_dtype=name,
        steps=groups.steps,
        method=method,
        percentile=share,
        minimum=low.reshape(shape),
        maximum=high.reshape(shape),
        count=elements - nan - above - below,
        nan=nan,
        positive_infinite=above,
        negative_infinite=below,
        histogram=histogram,
        peak_memory=peak,
    )
