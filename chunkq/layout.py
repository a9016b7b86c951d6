"""The chunk and shard shape of a target: the source's, a shape in elements, or a size in bytes.

Integers only, no zarr. Imports errors, grid, memory and spec's names.
"""

from __future__ import annotations

import re
from math import isqrt, prod
from typing import Any

from chunkq import grid
from chunkq.errors import SpecError
from chunkq.memory import format_size, parse_size
from chunkq.spec import Shape, as_integer

#: More stored objects than this are refused: listing them would take a quarter of an hour.
MOST_OBJECTS = 10**8
#: Divisors are looked for this far from both ends; a chunk with none in reach is cut without regard to them.
_DIVISORS_TRIED = 10_000


def parse_shape(option: str, text: str | None) -> Shape | str | None:
    """A shape from the command line: integers, or a size in bytes, which stays text.

    Raises
    ------
    SpecError
        Reason ``chunks``.

    Examples
    --------
    >>> parse_shape("--chunks", "4,1024"), parse_shape("--chunks", "64MiB")
    ((4, 1024), '64MiB')
    """
    if text is None:
        return None
    if re.fullmatch(r"\s*[0-9.]+\s*[a-zA-Z]+\s*", text):
        _bytes(option, text)
        return text.strip()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SpecError(
            "chunks", f"{option} {text!r}: expected integers such as 4,1024,1024, or a size such as 64MiB"
        ) from error


def target_layout(
    shape: Shape,
    itemsize: int,
    source_chunks: Shape,
    source_shards: Shape | None,
    chunks: Any = None,
    shards: Any = None,
) -> tuple[Shape, Shape | None]:
    """Chunk and shard shape of the target: the source's unless given.

    Parameters
    ----------
    shape : tuple of int
        The tensor's.
    itemsize : int
        Bytes of an element of the target.
    source_chunks, source_shards : tuple of int
        Layout of the source.
    chunks, shards : tuple of int or str, optional
        Elements along each axis; or a size such as "64MiB", which a chunk or shard does not exceed uncompressed.

    Raises
    ------
    SpecError
        Reason ``chunks``.

    Examples
    --------
    >>> target_layout((4096, 4096), 4, (64, 4096), None)
    ((64, 4096), None)
    >>> target_layout((4096, 4096), 4, (64, 4096), None, "256KiB", "8MiB")
    ((16, 4096), (512, 4096))
    """
    chosen = _as_given("target_chunks", chunks, len(shape))
    if isinstance(chosen, int):
        chosen = chunks_within(
            _elements("target_chunks", chunks, chosen, itemsize), shape, source_chunks, source_shards
        )
    if shards is None and chunks is None:
        shards = source_shards
    chosen = chosen or source_chunks
    chosen_shards = _as_given("target_shards", shards, len(shape))
    if isinstance(chosen_shards, int):
        if prod(chosen) * itemsize > chosen_shards:
            raise SpecError(
                "chunks",
                f"target_shards={shards!r}: one chunk {chosen} takes {format_size(prod(chosen) * itemsize)}; "
                "expected at least that, or smaller target_chunks",
            )
        chosen_shards = grid.grow(chosen, shape, chosen_shards // itemsize)
    if chosen_shards and any(s % c for s, c in zip(chosen_shards, chosen, strict=True)):
        raise SpecError(
            "chunks",
            f"target_shards={chosen_shards}: expected multiples of the chunks {chosen} on every axis",
        )
    _refuse_too_many(shape, chosen, chosen_shards)
    return chosen, chosen_shards


def _as_given(name: str, value: Any, rank: int) -> Shape | int | None:
    """A shape in elements, or a number of bytes, None where nothing was said."""
    if isinstance(value, str):
        value = parse_shape(name, value)
        if isinstance(value, str):
            return _bytes(name, value)
    if value is None:
        return None
    entries = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    plain = tuple(as_integer(n) or 0 for n in entries)
    if len(plain) != rank or any(n < 1 for n in plain):
        raise SpecError(
            "chunks",
            f"{name}={value!r}: expected {rank} positive integers, one for each axis, or a size such as '64MiB'",
        )
    return plain


def _bytes(name: str, text: str) -> int:
    try:
        return parse_size(text, name)
    except SpecError as error:
        raise SpecError("chunks", f"{name} {text!r}: expected a size such as 64MiB or 1GB") from error


def _elements(name: str, value: Any, size: int, itemsize: int) -> int:
    if size < itemsize:
        raise SpecError("chunks", f"{name}={value!r}: an element takes {itemsize} bytes; expected at least that")
    return size // itemsize


def _refuse_too_many(shape: Shape, chunks: Shape, shards: Shape | None) -> None:
    objects = grid.count(shape, shards or chunks)
    if objects > MOST_OBJECTS:
        name = "target_shards" if shards else "target_chunks"
        raise SpecError(
            "chunks",
            f"{name}={shards or chunks} cut the tensor {shape} into {objects} stored objects; expected at most "
            f"{MOST_OBJECTS}; choose larger target chunks or shards, such as '64MiB'",
        )


# ---- a chunk of about so many elements


def chunks_within(elements: int, shape: Shape, source_chunks: Shape, source_shards: Shape | None) -> Shape:
    """A chunk of at most so many elements that fits the source's grid.

    Whole objects of the source where one fits, else a part of a shard in whole chunks, else a part of a chunk, cut along
    the slowest axes first. Never larger than the tensor.

    >>> chunks_within(1000, (100, 100), (10, 10), None)
    (10, 100)
    >>> chunks_within(400, (100, 100), (10, 10), (60, 60))
    (10, 30)
    >>> chunks_within(30, (100, 100), (10, 10), None)
    (2, 10)
    """
    chunk = _clipped(source_chunks, shape)
    if prod(chunk) > elements:
        return _split(chunk, elements)
    shard = _clipped(source_shards or source_chunks, shape)
    if prod(shard) <= elements:
        return _clipped(grid.grow(source_shards or source_chunks, shape, elements), shape)
    grown = list(chunk)
    for axis in reversed(range(len(grown))):
        # a shard past the edge of the tensor is as long as the tensor
        factor = _divisor(-(-shard[axis] // chunk[axis]), elements // prod(grown))
        grown[axis] = min(grown[axis] * factor, shard[axis])
    return tuple(grown)


def _clipped(object_shape: Shape, shape: Shape) -> Shape:
    return tuple(max(1, min(k, n)) for k, n in zip(object_shape, shape, strict=True))


def _split(chunk: Shape, elements: int) -> Shape:
    cut = list(chunk)
    for axis, length in enumerate(chunk):
        rest = prod(cut[axis + 1 :])  # all before are 1
        if length * rest <= elements:
            break
        room = max(1, elements // rest)
        divisor = _divisor(length, room)
        # a length with no divisor near, a prime say, is cut where the room ends
        cut[axis] = divisor if 2 * divisor > room else room
    return tuple(cut)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number up to `most`, as far as divisors are looked for."""
    tried = range(1, min(isqrt(number), _DIVISORS_TRIED) + 1)
    pairs = [d for low in tried if number % low == 0 for d in (low, number // low)]
    return max((d for d in pairs if d <= most), default=1)
