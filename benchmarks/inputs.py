"""Inputs of the kernel benchmarks, and the formulas as NumPy has them. Imports no peer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.frame import SUBJECT, Array, Contender, exact

LEVELS = 256

Shape = tuple[int, ...]
Block = int | Shape


def up(elements: int, row: int) -> int:
    """How many rows of that many elements make up the tensor; at least one."""
    return max(1, elements // row)


def blank(shape: Shape, dtype: Any = np.float32) -> Array:
    """An output whose pages are there already, and whose content (NaN, -1) no contender can be credited with."""
    y = np.empty(shape, dtype)
    y.view(np.uint8).fill(0xFF)
    return y


def blocks(shape: Shape, axis: int | None, block: Block) -> Shape:
    """The elements of x for one of a blocked parameter, along each axis."""
    return block if isinstance(block, tuple) else tuple(block if a == axis else 1 for a in range(len(shape)))


def parameter_shape(shape: Shape, axis: int | None, block: Block) -> Shape:
    if block:
        return tuple(-(-n // b) for n, b in zip(shape, blocks(shape, axis, block), strict=True))
    return () if axis is None else (shape[axis],)


def broadcast(p: Array, shape: Shape, axis: int | None, block: Block) -> Array:
    """The parameter in a shape that NumPy broadcasts to x's."""
    if block:
        for a, b in enumerate(blocks(shape, axis, block)):
            p = np.repeat(p, b, a)
        return p[tuple(slice(n) for n in shape)]
    return p if axis is None else p.reshape(tuple(n if a == axis else 1 for a, n in enumerate(shape)))


@dataclass(frozen=True)
class Parameters:
    """Scale and zero point, as the operators take them and (`wide_`) as NumPy broadcasts them; NumPy's formulas.

    Those that end in `_into` give the same bits without temporaries: `wide` is float32 to compute in, `y` the answer.
    """

    axis: int
    block: Block
    scale: Array
    zero_point: Array
    wide_scale: Array
    wide_zero: Array

    @classmethod
    def random(cls, shape: Shape, axis: int | None, block: Block, dtype: Any) -> Parameters:
        rng = np.random.default_rng(1)
        of = parameter_shape(shape, axis, block)
        scale = rng.uniform(0.001, 0.1, of).astype(np.float32)
        zero_point = np.asarray(integers(rng, of, dtype))
        wide = (broadcast(p, shape, axis, block) for p in (scale, zero_point.astype(np.float32)))
        return cls(axis or 0, block, scale, zero_point, *wide)

    @property
    def limits(self) -> np.iinfo:
        return np.iinfo(self.zero_point.dtype)

    def bound(self, operator: Any, **options: Any) -> Any:
        return operator(self.scale, self.zero_point, axis=self.axis, block_size=self.block, **options)

    def dequantize(self, x: Array) -> Array:
        return (x.astype(np.float32) - self.wide_zero) * self.wide_scale

    def dequantize_into(self, x: Array, wide: Array, y: Array) -> Array:
        np.subtract(x, self.wide_zero, out=wide, dtype=np.float32)
        return np.multiply(wide, self.wide_scale, out=y, dtype=np.float32, casting="unsafe")

    def quantize(self, x: Array) -> Array:
        codes = np.rint(x / self.wide_scale) + self.wide_zero
        return np.clip(codes, self.limits.min, self.limits.max).astype(self.zero_point.dtype)

    def quantize_into(self, x: Array, wide: Array, y: Array) -> Array:
        np.divide(x, self.wide_scale, out=wide)
        np.rint(wide, out=wide)
        np.add(wide, self.wide_zero, out=wide)
        np.clip(wide, self.limits.min, self.limits.max, out=wide)
        np.copyto(y, wide, casting="unsafe")
        return y


def integers(rng: np.random.Generator, shape: Shape, dtype: Any) -> Array:
    """All values of the type, equally often."""
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def weights(p: Parameters, shape: Shape) -> Array:
    """float32 that fills int8 as calibrated scales let it: about one value in a thousand is beyond the ends."""
    codes = np.random.default_rng(0).standard_normal(shape, np.float32) * 40
    return (codes - p.wide_zero) * p.wide_scale


def float8_values() -> Array:
    """What the codes of float8_e4m3fn stand for, by its definition and not by a peer's conversion; NaN as 480."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, (code & 7) / 8
    magnitude = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - 7)
    return np.copysign(magnitude, np.where(code < 128, 1, -1)).astype(np.float32)


def fake_quantize_numpy(x: Array, il: Array, ih: Array, ol: Array, oh: Array) -> Array:
    """OpenVINO FakeQuantize-1 as its specification writes it."""
    top = np.float32(LEVELS - 1)
    y = np.round((x - il) / (ih - il) * top) / top * (oh - ol) + ol
    return np.where(x <= np.minimum(il, ih), ol, np.where(x > np.maximum(il, ih), oh, y))


def own(op: Any, x: Array, expected: Array) -> dict[str, Contender]:
    """chunkq on all cores, and on one."""

    def contender(**options: int) -> Contender:
        return Contender(partial(op, x, out=blank(x.shape, expected.dtype), **options), exact(expected))

    return {SUBJECT: contender(), "chunkq, 1 thread": contender(n_threads=1)}
