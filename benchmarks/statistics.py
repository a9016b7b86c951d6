"""`calibrate` and `compare` in memory, against what people write in NumPy, math.fsum and memcpy; parameters beside
onnxruntime's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from itertools import product
from typing import Any

import numpy as np

import chunkq
from benchmarks import frame
from benchmarks.calls import IN_CACHE
from benchmarks.frame import SUBJECT, Array, Case, Contender, Maker, Row, WrongAnswer, aiming, exact
from benchmarks.inputs import Shape, up
from benchmarks.peers import memcpy

ELEMENTS = 1 << 26
QUICK_ELEMENTS = 1 << 24

BINS = 2048

LEGEND = """\
- float32, normally distributed. chunkq is given all cores; memcpy, NumPy and math.fsum use one.
- calibrate also counts NaN and infinities and leaves them out of the range. NumPy: `(x.min(axes), x.max(axes))`, which
  does not. "NumPy, finite": the same with `where=np.isfinite(x)`.
- memcpy: np.copyto of a float32 array of as many elements, one thread. GB/s are the bytes of x (and of y) read once, of
  memcpy the bytes that it reads, so that "of its bytes/s" is what calibrate reads a second over what memcpy reads.
- percentile: chunkq reads x twice. NumPy: minimum, maximum and np.histogram of 2048 bins, channel by channel. chunkq's
  histogram is np.histogram's of the channel in float64; of float32 it has float32 edges, and the remark says how many
  values lie in another bin.
- compare: NumPy's numbers are the largest and the mean absolute error, the mean squared error, SQNR and the cosine, in
  float64. chunkq's sums are exact, as those of math.fsum: its six sums are compared by their bits."""

SHAPES: dict[str, Callable[[int], tuple[Shape, int | None]]] = {
    "per tensor": lambda n: ((n,), None),
    "first axis": lambda n: ((64, up(n, 64)), 0),
    "middle axis": lambda n: ((16, 64, up(n, 1024)), 1),
    "last axis": lambda n: ((up(n, 4096), 4096), 1),
}


def cases(elements: int) -> dict[str, Maker]:
    """Name to maker; a case's arrays are allocated when it is its turn and freed after it."""
    made: dict[str, Maker] = {}

    def add(make: Any, work: str, *which: str) -> None:
        for what in which:
            name = f"{work}, {what}"
            made[name] = partial(make, name, *SHAPES[what](elements))

    add(minmax_case, "calibrate minmax", *SHAPES)
    add(percentile_case, "calibrate percentile", "first axis", "last axis")
    add(compare_case, "compare", "per tensor", "first axis", "last axis")
    name = "compare, in cache"
    made[name] = partial(sums_case, name)
    return made


def normal(shape: Shape) -> Array:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def others(shape: Shape, axis: int | None) -> tuple[int, ...]:
    """The axes to reduce over."""
    return tuple(a for a in range(len(shape)) if a != axis)


def own(run: Callable[..., Any], check: frame.Check) -> dict[str, Contender]:
    """chunkq on all cores, and on one."""
    return {SUBJECT: Contender(run, check), "chunkq, 1 thread": Contender(partial(run, n_threads=1), check)}


# ---- calibrate


def minmax_case(name: str, shape: Shape, axis: int | None) -> Case:
    x = normal(shape)
    over = others(shape, axis)
    expected = np.stack([np.minimum.reduce(x, over), np.maximum.reduce(x, over)])
    check = exact(expected)

    def check_own(found: chunkq.Calibration) -> str:
        if int(found.count.sum()) != x.size:
            raise WrongAnswer(f"counts {int(found.count.sum())} finite values of {x.size}")
        return exact(expected.astype(np.float64))(np.stack([found.minimum, found.maximum]))

    def as_written() -> tuple[Array, Array]:
        return x.min(over), x.max(over)

    def finite() -> tuple[Array, Array]:
        some = np.isfinite(x)
        return x.min(over, initial=np.inf, where=some), x.max(over, initial=-np.inf, where=some)

    contenders = own(partial(chunkq.calibrate, x, axis=axis), check_own) | {
        "NumPy": Contender(as_written, lambda both: check(np.stack(both))),
        "NumPy, finite": Contender(finite, lambda both: check(np.stack(both))),
        "memcpy": replace(memcpy(x), moved=x.nbytes),  # what it reads
    }
    return Case(name, x.size, aiming(contenders, share=0.8, NumPy=5), moved=x.nbytes)


def percentile_case(name: str, shape: Shape, axis: int) -> Case:
    x = normal(shape)
    channels = np.moveaxis(x, axis, 0)

    def histograms(to: type) -> Array:
        counts = np.empty((len(channels), BINS), np.int64)
        for i, channel in enumerate(channels):
            limit = to(max(abs(channel.min()), abs(channel.max())))  # its type is the edges'
            counts[i] = np.histogram(channel.astype(to, copy=False), BINS, range=(-limit, limit))[0]
        return counts

    expected = histograms(np.float64)

    def check_own(found: chunkq.Calibration) -> str:
        assert found.histogram is not None
        return exact(expected)(found.histogram)

    run = partial(chunkq.calibrate, x, axis=axis, method="percentile", bins=BINS)
    contenders = own(run, check_own) | {"NumPy": Contender(partial(histograms, np.float32), near(expected))}
    return Case(name, x.size, aiming(contenders, NumPy=3), moved=x.nbytes, most_rounds=3)


def near(expected: Array) -> frame.Check:
    """For histograms with other edges: as many values, of which few lie in the bin beside."""

    def check(answer: Array) -> str:
        beyond = int(np.abs(np.cumsum(answer - expected, axis=-1)).sum())
        if (answer.sum(axis=-1) != expected.sum(axis=-1)).any() or beyond > max(1, expected.sum() // 1000):
            raise WrongAnswer(f"{beyond} of {expected.sum()} values lie beyond another edge")
        return f"float32 edges: {beyond:,} of {expected.sum():,} values in another bin" if beyond else ""

    return check


# ---- compare


def pair(shape: Shape) -> tuple[Array, Array]:
    """A tensor, and what is left of it in int8."""
    x = normal(shape)
    return x, chunkq.quantize_dequantize(x, np.float32(0.03), np.int8(0))


def compare_case(name: str, shape: Shape, axis: int | None) -> Case:
    x, y = pair(shape)
    over = others(shape, axis)

    def as_written() -> dict[str, Array]:
        a, b = x.astype(np.float64), y.astype(np.float64)
        d = a - b
        dd, aa, bb = ((v * v).sum(over) for v in (d, a, b))
        with np.errstate(divide="ignore", invalid="ignore"):  # a channel may be 0 in int8
            return {
                "max_abs_error": np.abs(d).max(over),
                "mean_abs_error": np.abs(d).mean(over),
                "mse": (d * d).mean(over),
                "sqnr_db": 10 * np.log10(aa / dd),
                "cosine": (a * b).sum(over) / np.sqrt(aa * bb),
            }

    expected = as_written()

    def check_own(found: chunkq.Comparison) -> str:
        for measure, value in expected.items():
            close(measure, value)(getattr(found.channels, measure))
        return ""

    contenders = own(partial(chunkq.compare, x, y, axis=axis), check_own) | {"NumPy": Contender(as_written)}
    return Case(name, x.size, contenders, moved=x.nbytes + y.nbytes)


def close(name: str, expected: Array) -> frame.Check:
    """NumPy's sums are rounded at every step; the largest error is not."""
    tolerance = 0 if name == "max_abs_error" else 1e-11

    def check(answer: Array) -> str:
        if answer.shape != expected.shape or not np.allclose(answer, expected, tolerance, 0, equal_nan=True):
            raise WrongAnswer(f"{name} is {answer!r}, expected {expected!r}")
        return ""

    return check


def sums_case(name: str) -> Case:
    """Exact sums, one thread each, of 64 K elements whatever the size asked for."""
    x, y = pair((IN_CACHE,))

    def by_fsum() -> dict[str, float]:
        a, b = x.astype(np.float64), y.astype(np.float64)
        d = a - b
        terms = {"d": d, "abs_d": np.abs(d), "dd": d * d, "aa": a * a, "bb": b * b, "ab": a * b}
        return {term: math.fsum(values) for term, values in terms.items()}

    expected = by_fsum()

    def check_own(found: chunkq.Comparison) -> str:
        for term, value in expected.items():
            exact(np.array(value))(found.overall.sums[term])
        return ""

    contenders = {
        SUBJECT: Contender(partial(chunkq.compare, x, y, n_threads=1), check_own),
        "math.fsum": Contender(by_fsum, remark="the six sums alone"),
    }
    return Case(name, x.size, contenders, calls=5, moved=x.nbytes + y.nbytes)


# ---- parameters beside onnxruntime's

CHANNELS, LENGTH = 256, 1 << 12
PERCENTILE = 99.9

NO_EDGES = "it takes the left edge of the bin above too, a bin less; of float32 its edges are float32"
UNKNOWN = "for another reason"
NO_BINS = "its histogram is of the magnitudes, 2048 bins from the smallest to the largest"


def channels() -> Array:
    """Each of its own deviation and mean, every second clipped to a limit on both sides as activations are."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((CHANNELS, LENGTH), np.float32) * rng.uniform(0.1, 2, (CHANNELS, 1)).astype(np.float32)
    x += rng.uniform(-1, 1, (CHANNELS, 1)).astype(np.float32)
    limits = rng.uniform(0.1, 1, (CHANNELS // 2, 1)).astype(np.float32)
    x[::2] = np.clip(x[::2], -limits, limits)
    return x


def onnxruntime_range(x: Array, method: str, symmetric: bool) -> tuple[Any, Any]:
    """What onnxruntime's calibrators let count of one tensor."""
    from onnxruntime.quantization.calibrate import HistogramCollector

    if method == "minmax":  # MinMaxCalibrater takes ReduceMin and ReduceMax
        return x.min(), x.max()
    collector = HistogramCollector(method, symmetric, BINS, 128, PERCENTILE, "same")
    with redirect_stdout(StringIO()):  # it tells what it does
        collector.collect({"x": x})
        low, high = collector.compute_collection_result()["x"][:2]
    return low, high


def onnxruntime_parameters(x: Array, method: str, dtype: str, symmetric: bool) -> tuple[Array, Array]:
    """Scale and zero point of each channel."""
    import onnx
    from onnxruntime.quantization.quant_utils import compute_scale_zp, get_qmin_qmax_for_qType

    code = getattr(onnx.TensorProto, dtype.upper())
    ends = get_qmin_qmax_for_qType(code, symmetric=symmetric)
    found = [compute_scale_zp(*onnxruntime_range(row, method, symmetric), *ends, symmetric) for row in x]
    return np.array([s for _, s in found], np.float32), np.array([z for z, _ in found], dtype)


def own_parameters(x: Array, method: str, dtype: str, symmetric: bool) -> tuple[Array, Any]:
    found = chunkq.calibrate(x, axis=0, method=method, percentile=PERCENTILE, bins=BINS)
    return found.parameters(dtype, symmetric=symmetric)


def why_not(x: Array, method: str, dtype: str, symmetric: bool, scales: bool, zeros: bool) -> str:
    """Where some are not equal."""
    if scales and zeros:
        return ""
    if scales:
        return UNKNOWN
    if symmetric:
        return NO_BINS
    return NO_EDGES


@cache
def differences() -> str:
    """The table of scales and zero points: chunkq's, onnxruntime's, and how many are equal."""
    head = ("codes", "method", "chunkq", "onnxruntime", "equal scales", "equal zero points", "why not all")
    title = (
        f"## Parameters beside onnxruntime's\n\n{CHANNELS} channels of {LENGTH} float32 each, every second clipped on\n"
        f"both sides; percentile {PERCENTILE}, {BINS} bins. Scale and zero point are those of channel 0.\n\n"
    )
    try:
        import onnx  # noqa: F401
        import onnxruntime.quantization  # noqa: F401
    except ImportError as error:
        return title + frame.absent("onnx onnxruntime", error).remark
    x = channels()
    table = [head, tuple("-" * len(h) for h in head)]
    for method, dtype, symmetric in product(("minmax", "percentile"), ("uint8", "int8"), (False, True)):
        what = method, dtype, symmetric
        scale, zero = own_parameters(x, *what)
        its_scale, its_zero = onnxruntime_parameters(x, *what)
        scales, zeros = int((scale == its_scale).sum()), int((zero == its_zero).sum())
        shown = (f"{s[0]:.9g}, {int(z[0])}" for s, z in ((scale, zero), (its_scale, its_zero)))
        codes = f"{dtype}, symmetric" if symmetric else dtype
        why = why_not(x, *what, scales == CHANNELS, zeros == CHANNELS)
        table.append((codes, method, *shown, str(scales), str(zeros), why))
    return title + "\n".join("| " + " | ".join(cells) + " |" for cells in table)


def markdown(rows: list[Row], about: dict[str, Any], legend: str) -> str:
    """The times, and the parameters."""
    return f"{frame.markdown(rows, about, legend)}\n\n{differences()}"
