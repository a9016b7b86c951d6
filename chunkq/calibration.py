"""What a calibration found, and what follows from it: scales and zero points, ranges. calibrating.py makes it.

Everything here is float64 arithmetic on a few numbers for each group, in an order that depends on nothing. Imports
groups, dtypes and linear's block sizes.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from chunkq.dtypes import ELEMENT_TYPES, QUANTIZED, element_type, to_float32
from chunkq.errors import SpecError
from chunkq.groups import Groups
from chunkq.ops import FakeQuantize
from chunkq.run import Array
from chunkq.spec import check_levels, integer_argument
from chunkq.statistics import LARGEST_LIMIT

METHODS = ("minmax", "absmax", "percentile", "mse")

#: Shares of the whole range that ``mse`` tries to clip to, the largest first: of equals the first is taken.
CLIP_RATIOS = np.arange(100, 9, -1) / 100

#: How often output_low is moved by a rounding at most.
SETTLING = 8

#: The smallest scale that is given, where all values are 0 or next to it: the smallest normal float32.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


class ZeroIsNoLevel(UserWarning):
    """FakeQuantize with these ranges does not give 0 for 0."""


@dataclass(frozen=True)
class Grid:
    """Equally spaced codes: the first, the last, and the one that stands for 0 where that is fixed."""

    low: int
    high: int
    zero: int | None

    @property
    def levels(self) -> int:
        return self.high - self.low + 1


def grid_of(dtype: str, symmetric: bool, narrow_range: bool) -> Grid:
    """The codes of an integer type that a convention uses, see `Calibration.parameters`."""
    limits = ELEMENT_TYPES[dtype].limits
    assert limits is not None
    low, high = limits
    if low < 0 and (symmetric or narrow_range):
        low = -high
    elif narrow_range:
        low += 1
    # half to even: 0 where the type is signed, 128 of uint8
    return Grid(low, high, round((low + high) / 2) if symmetric else None)


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a tensor's groups hold, and the rule that makes a range of it. Made by `calibrate`, read by `open_calibration`.

    Attributes
    ----------
    shape, x_dtype : tuple of int, str
        Of the tensor.
    steps : tuple of int
        For each axis of it, the elements that a group covers: 0 for all, 1 for each index, more for blocks.
    method : str
        "minmax", "absmax", "percentile", "mse".
    percentile : float
        In percent; what ``percentile`` leaves inside the range.
    minimum, maximum : numpy.ndarray of float64
        Of the finite values, exact; 0 where there is none. Of shape () per tensor, (n,) for one axis, else with as many
        axes as the tensor. -0 is 0.
    count, nan, positive_infinite, negative_infinite : numpy.ndarray of int64
        Finite values, and the others, of the same shape.
    histogram : numpy.ndarray of int64, or None
        Of ``percentile`` and ``mse``: one axis more, the bins, all of one width from -limit to limit, the larger of
        abs(minimum) and abs(maximum).
    peak_memory, projected_memory : int
        Measured while it was made from zarr, and foretold, in bytes; 0 else.
    """

    shape: tuple[int, ...]
    x_dtype: str
    steps: tuple[int, ...]
    method: str
    percentile: float
    minimum: Array
    maximum: Array
    count: Array
    nan: Array
    positive_infinite: Array
    negative_infinite: Array
    histogram: Array | None = None
    peak_memory: int = 0
    projected_memory: int = 0

    # ---- where

    @property
    def groups(self) -> Groups:
        """The groups that were looked at."""
        return Groups(self.shape, self.steps)

    @property
    def axis(self) -> int | None:
        """The axis, where there is a group for each index of exactly one."""
        return self.groups.axis

    @property
    def limit(self) -> Array:
        """The largest magnitude."""
        return np.maximum(np.abs(self.minimum), np.abs(self.maximum))

    def edges(self) -> Array:
        """The histogram's edges, float64; one more than there are bins."""
        counts = self.counts()
        limit = self.limit[..., np.newaxis]
        factor = np.where(limit > LARGEST_LIMIT, 0.5, 1.0)  # as it was counted
        half = limit * factor
        edges: Array = (np.arange(counts.shape[-1] + 1) * (2 * half / counts.shape[-1]) - half) / factor
        edges[..., -1:] = limit
        return edges

    def counts(self) -> Array:
        """The histogram, which ``percentile`` and ``mse`` make."""
        if self.histogram is None:
            raise SpecError(
                "argument", f"method {self.method!r} makes no histogram; calibrate with 'percentile' or 'mse'"
            )
        return self.histogram

    # ---- the range

    def range(self, grid: Grid, narrow: bool = True) -> tuple[Array, Array]:
        """Lowest and highest value that the method lets count, for codes on this grid; float64.

        `narrow` says that the scale between the codes will be float32, which ``mse`` heeds.
        """
        symmetric = grid.zero is not None
        if self.method == "percentile":
            return self._percentiles(symmetric)
        if self.method == "mse":
            return self._least_error(grid, narrow)
        if self.method == "absmax" or symmetric:
            return -self.limit, self.limit
        return self.minimum, self.maximum

    def _percentiles(self, symmetric: bool) -> tuple[Array, Array]:
        """The outer edges of the bins in which the shares are reached, no further out than the values are."""
        counts, edges = self.counts(), self.edges()
        total = np.maximum(counts.sum(axis=-1), 1)[..., np.newaxis]
        if symmetric:
            half = counts.shape[-1] // 2
            folded = counts[..., half:] + counts[..., half - 1 :: -1]
            high = _at_share(np.cumsum(folded, axis=-1) / total, self.percentile / 100, edges[..., half + 1 :])
            high = np.minimum(high, self.limit)
            return -high, high
        cut = (100 - self.percentile) / 200
        share = np.cumsum(counts, axis=-1) / total
        low, high = _at_share(share, cut, edges[..., :-1]), _at_share(share, 1 - cut, edges[..., 1:])
        return np.maximum(low, self.minimum), np.minimum(high, self.maximum)

    def _least_error(self, grid: Grid, narrow: bool) -> tuple[Array, Array]:
        """The clipped range with the least squared error of the histogram's bins, each at its middle."""
        counts, edges = self.counts(), self.edges()
        symmetric = grid.zero is not None
        low = (-self.limit if symmetric else np.minimum(self.minimum, 0)).reshape(-1)
        high = (self.limit if symmetric else np.maximum(self.maximum, 0)).reshape(-1)
        middles = (edges[..., :-1] + edges[..., 1:]) / 2
        best = np.empty(low.size)
        bins = counts.shape[-1]
        rows = zip(counts.reshape(low.size, bins), middles.reshape(low.size, bins), low, high, strict=True)
        for i, (count, middle, first, last) in enumerate(rows):
            best[i] = _best_ratio(count, middle, first, last, grid, narrow)
        shape = self.limit.shape
        return (low * best).reshape(shape), (high * best).reshape(shape)

    # ---- parameters

    def parameters(
        self, dtype: Any = "int8", *, symmetric: bool = True, narrow_range: bool = False
    ) -> tuple[Array, Any]:
        """Scale and zero point of QuantizeLinear for a quantized type.

        With low and high the range that the method gives, widened to hold 0, and qmin .. qmax the codes:

        - ``symmetric=False``, as ONNX DynamicQuantizeLinear: ``scale = (high - low) / (qmax - qmin)``,
          ``zero_point = saturate(round(qmin - low / scale))``. ``narrow_range`` leaves the lowest code out.
        - ``symmetric=True``: low = -high, and ``zero_point = round((qmin + qmax) / 2)``, half to even. A signed type uses
          -qmax .. qmax (so with ``narrow_range`` and without), which makes the zero point 0 and the scale high / qmax.
        - float8, float6 and float4: ``scale = high / largest finite value``, no zero point.

        A scale is never below the smallest normal float32 (all values 0).

        Parameters
        ----------
        dtype : dtype or str
            One of the quantized types.
        symmetric, narrow_range : bool
            See above.

        Returns
        -------
        scale : numpy.ndarray of float32
        zero_point : numpy.ndarray of `dtype`, or None for a float type
            Both of the shape of `minimum`.

        Raises
        ------
        SpecError
            Reasons ``dtype``, ``argument``.

        Examples
        --------
        >>> import numpy as np, chunkq
        >>> found = chunkq.calibrate(np.float32([[-1, 3], [-8, 2]]), axis=0)
        >>> scale, zero_point = found.parameters("uint8", symmetric=False)
        >>> scale * 255, zero_point
        (array([ 4., 10.], dtype=float32), array([ 64, 204], dtype=uint8))
        """
        name = element_type("dtype", dtype, QUANTIZED)
        row = ELEMENT_TYPES[name]
        if row.mini is not None:
            return self._float_scale(name, symmetric, narrow_range), None
        grid = grid_of(name, symmetric, narrow_range)
        low, high = self.range(grid)
        scale, zero = scale_and_zero(low, high, grid)
        return scale, zero.astype(np.int64).astype(row.dtype)

    def _float_scale(self, name: str, symmetric: bool, narrow_range: bool) -> Array:
        if narrow_range or not symmetric:
            raise SpecError("argument", f"{name} has no zero point and no codes to leave out: pass neither option")
        if self.method == "mse":
            raise SpecError(
                "argument", f"method 'mse' is for equally spaced levels, which {name} has not; calibrate by another"
            )
        row = ELEMENT_TYPES[name]
        assert row.mini is not None
        largest = float(to_float32(np.array([row.mini.max], np.uint8).view(row.dtype))[0])
        _, high = self.range(Grid(-1, 1, 0))
        return _narrowed(np.maximum(high / largest, SMALLEST_SCALE))

    def arguments(self, dtype: Any = "int8", *, symmetric: bool = True, narrow_range: bool = False) -> dict[str, Any]:
        """What `QuantizeLinear` takes: scale, zero_point, axis, block_size, output_dtype; see `parameters`.

        Examples
        --------
        >>> import numpy as np, chunkq
        >>> x = np.float32([[-1, 3], [-8, 2]])
        >>> op = chunkq.QuantizeLinear(**chunkq.calibrate(x, axis=0).arguments("int8"))
        >>> op(x)
        array([[ -42,  127],
               [-127,   32]], dtype=int8)
        """
        scale, zero_point = self.parameters(dtype, symmetric=symmetric, narrow_range=narrow_range)
        name = element_type("dtype", dtype, QUANTIZED)
        where: dict[str, Any] = {}
        if self.axis is not None:
            where = {"axis": self.axis}
        elif any(self.steps):
            where = {"block_size": tuple(max(k or n, 1) for k, n in zip(self.steps, self.shape, strict=True))}
        return {"scale": scale, "zero_point": zero_point, "output_dtype": name} | where

    def ranges(self, levels: int = 256, *, symmetric: bool = False, keep_zero: bool = True) -> tuple[Array, ...]:
        """The four ranges of FakeQuantize: input_low, input_high, and (but for a rounding) the same for the output.

        The range that the method gives, widened to hold 0. ``symmetric=True``: high = limit, and low such that 0 is a
        level: -limit with odd levels, ``-limit * levels / (levels - 2)`` with even ones. Else ``keep_zero`` widens one end
        until 0 is a level. Then output_low is moved by a rounding where FakeQuantize would not give 0 for 0. A
        `ZeroIsNoLevel` warning says where it does not (16-bit types cannot always hold such a range).

        Parameters
        ----------
        levels : int
            2 and more; 3 and more where 0 is to lie inside.
        symmetric, keep_zero : bool
            See above.

        Returns
        -------
        tuple of numpy.ndarray
            Of x's type and as many axes, so that they broadcast to it.

        Raises
        ------
        SpecError
            Reasons ``levels``, and ``block_size`` for blocks, which FakeQuantize does not have.

        Examples
        --------
        >>> import numpy as np, chunkq
        >>> x = np.float32([[-1, 3], [-8, 2]])
        >>> ranges = chunkq.calibrate(x).ranges(levels=12)
        >>> [float(r[0, 0]) for r in ranges[:2]], chunkq.fake_quantize(x, *ranges, levels=12)
        ([-8.0, 3.0], array([[-1.,  3.],
               [-8.,  2.]], dtype=float32))
        """
        name = self.x_dtype
        count = check_levels(integer_argument("levels", levels, "levels"), ELEMENT_TYPES[name].compute or "float32")
        if any(k > 1 for k in self.steps):
            raise SpecError("block_size", "FakeQuantize has no blocks; calibrate per tensor or along axes")
        low, high = self._range_of_levels(count, symmetric, keep_zero)
        dtype = ELEMENT_TYPES[name].dtype
        shape = self.groups.grid
        with np.errstate(over="ignore"):
            first, last = (value.astype(dtype).reshape(shape) for value in (low, high))
        for value in (first, last):
            if not np.isfinite(value.astype(np.float64)).all():
                raise SpecError("value", f"the range does not fit into {name}; calibrate with 'percentile'")
        lowest = self._settled(first, last, count) if symmetric or keep_zero else first.copy()
        off = int(np.count_nonzero(_of_zero(first, last, lowest, count)))
        if off:
            warnings.warn(
                f"0 is no level in {off} of {first.size} groups with levels={count}", ZeroIsNoLevel, stacklevel=2
            )
        return first, last, lowest, last.copy()

    def _range_of_levels(self, levels: int, symmetric: bool, keep_zero: bool) -> tuple[Array, Array]:
        if levels < 3 and (symmetric or keep_zero):
            raise SpecError("levels", f"levels={levels}: 0 and both ends need 3; pass keep_zero=False")
        grid = Grid(0, levels - 1, levels // 2 if symmetric else None)
        low, high = self.range(grid, narrow=False)
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        high = np.where(high > low, high, SMALLEST_SCALE * (levels - 1))  # all values 0
        if not (symmetric or keep_zero):
            return low, high
        last = levels - 1
        if symmetric:
            below = np.full(low.shape, float(levels // 2))
            low, high = -np.maximum(-low, high), np.maximum(-low, high)
            step = high / (last - below)
        else:
            width = np.maximum(high / last - low / last, np.finfo(np.float64).tiny)
            below = np.clip(np.rint(-low / width), np.where(low < 0, 1, 0), np.where(high > 0, last - 1, last))
            step = np.maximum(-low / np.maximum(below, 1), high / np.maximum(last - below, 1))
        return 0.0 - step * below, step * (last - below)

    def _settled(self, low: Array, high: Array, levels: int) -> Array:
        """output_low, moved by what FakeQuantize's roundings make of 0, until that is 0."""
        moved = low.copy()
        for _ in range(SETTLING):
            made = _of_zero(low, high, moved, levels)
            if not made.any():
                break
            moved -= made
        return moved

    # ---- kept

    def to_zarr(self, target: Any, *, overwrite: bool = False, storage_options: dict[str, Any] | None = None) -> None:
        """Keep everything in a zarr group, for `open_calibration` and the command line's ``--params``.

        Parameters
        ----------
        target : str, path, URL or zarr store
            Where; an empty place, or with `overwrite` another calibration.
        overwrite : bool
            Replace it.
        storage_options : dict, optional
            What fsspec needs to know for a URL.

        Raises
        ------
        SpecError
            Reasons ``target``, ``target_exists``.
        """
        from chunkq.kept import keep

        keep(self, target, overwrite, storage_options)

    def to_json(self) -> str:
        """All but the histogram, as one JSON document."""
        fields = {
            name: np.asarray(getattr(self, name)).tolist()
            for name in ("minimum", "maximum", "count", "nan", "positive_infinite", "negative_infinite")
        }
        head = {"shape": list(self.shape), "x_dtype": self.x_dtype, "steps": list(self.steps), "method": self.method}
        memory = {"peak_memory": self.peak_memory, "projected_memory": self.projected_memory}
        more = {"percentile": self.percentile, "axis": self.axis} | memory
        return json.dumps(head | more | fields)


def _of_zero(low: Array, high: Array, output_low: Array, levels: int) -> Array:
    """What FakeQuantize itself makes of 0 in each group."""
    zeros = np.zeros(low.shape, low.dtype)
    made: Array = FakeQuantize(low, high, output_low, high, levels)(zeros) if zeros.size else zeros
    return made


def _narrowed(scale: Array) -> Array:
    """A scale as float32."""
    with np.errstate(over="ignore"):
        narrow = scale.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise SpecError("value", "the range is too large for a float32 scale; calibrate with 'percentile'")
    return narrow


def scale_and_zero(low: Array, high: Array, grid: Grid) -> tuple[Array, Array]:
    """Scale in float32, and zero point in float64, for a range and codes."""
    low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    if grid.zero is not None:
        high = np.maximum(-low, high)
        low = -high
    steps = grid.high - grid.low
    with np.errstate(over="ignore"):
        width = high - low
        # the difference of float64 limits may be too large
        exact = np.maximum(np.where(np.isfinite(width), width / steps, high / steps - low / steps), SMALLEST_SCALE)
    scale = _narrowed(exact)
    if grid.zero is not None:
        return scale, np.full(np.shape(scale), float(grid.zero))
    # by the scale as it was: of a range around 0 in the middle, its rounding would decide
    return scale, np.clip(np.rint(grid.low - low / exact), grid.low, grid.high)


def _at_share(share: Array, wanted: float, edges: Array) -> Array:
    """An edge of the first bin up to whose end a share of the values lies."""
    first = np.argmax(share >= wanted, axis=-1)
    first = np.where((share >= wanted).any(axis=-1), first, share.shape[-1] - 1)
    found: Array = np.take_along_axis(edges, first[..., np.newaxis], axis=-1)[..., 0]
    return found


def _best_ratio(count: Array, middle: Array, low: float, high: float, grid: Grid, narrow: bool) -> float:
    """The clip ratio with the least squared error; sums are made from left to right, whatever the machine."""
    some = count > 0
    count, middle = count[some].astype(np.float64), middle[some]
    if not count.size or low == high:
        return 1.0
    lows, highs = low * CLIP_RATIOS, high * CLIP_RATIOS
    if narrow:
        scale, zero = scale_and_zero(lows, highs, grid)
    else:
        scale = np.maximum(highs / (grid.levels - 1) - lows / (grid.levels - 1), np.finfo(np.float64).tiny)
        zero = np.full(scale.shape, float(grid.zero)) if grid.zero is not None else np.rint(grid.low - lows / scale)
    scale, zero = scale.astype(np.float64)[:, np.newaxis], zero[:, np.newaxis]
    codes = np.clip(np.rint(middle / scale) + zero, grid.low, grid.high)
    # in units of the range: the square of a float64 may be too large
    unit = max(-low, high)
    error = (codes - zero) * (scale / unit) - middle / unit
    total = np.cumsum(error * error * count, axis=-1)[:, -1]
    return float(CLIP_RATIOS[np.argmin(total)])
