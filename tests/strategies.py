"""What hypothesis draws: shapes, tensors, parameters, chunkings."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

settings.register_profile("chunkq", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("chunkq")

INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.int32)
SPECIAL = np.float32([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-45, 3.4e38, 1e-38, 0.1])

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=5).map(tuple)
solid_shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)


def _with_specials(rng, values, share, dtype):
    with np.errstate(over="ignore"):  # 3.4e38 is infinite in float16
        return np.where(rng.random(np.shape(values)) < share, rng.choice(SPECIAL, np.shape(values)), values).astype(
            dtype
        )


def integers(rng, shape, dtype):
    """Codes from the whole range of an integer type."""
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def scales(rng, shape):
    """Scales of every size and sign, some of them special values."""
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-5, 5, shape)).astype(np.float32)
    return _with_specials(rng, values, 0.1, np.float32)


def floats(rng, shape, dtype):
    """Numbers around the ranges that `ranges` makes, with ties, NaN and infinities among them."""
    values = rng.standard_normal(shape) * 3
    ties = rng.integers(-8, 8, shape) / 2
    values = np.where(rng.random(shape) < 0.3, ties, values)
    return _with_specials(rng, values, 0.05, dtype)


def ranges(rng, shape, dtype):
    """A range of a FakeQuantize: ordinary numbers, integers that make ties and equal limits, special values."""
    values = np.where(rng.random(shape) < 0.5, rng.integers(-3, 4, shape), rng.standard_normal(shape) * 3)
    return _with_specials(rng, values, 0.05, dtype)


def region(rng, shape):
    """A random part of a tensor, an empty one now and then."""
    return tuple(slice(*(int(v) for v in np.sort(rng.integers(0, n + 1, 2)))) for n in shape)


def cut(rng, n):
    """Split a length into random chunks, an empty one now and then."""
    edges = np.sort(rng.integers(0, n + 1, rng.integers(0, 4)))
    return tuple(int(v) for v in np.diff([0, *edges, n]))
