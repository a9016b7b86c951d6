"""What a codec of the target costs and what it saves, by kind of result: the ratio, and the speed of both directions.

numcodecs' codecs by themselves, as zarr's classes of the same names call them: no zarr, no store, one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

import numpy as np
from numcodecs import Blosc, Shuffle, Zstd, blosc

import chunkq
from benchmarks.frame import NOISE, Array, Case, Contender, Maker, Row, WrongAnswer

ELEMENTS = 1 << 24
QUICK_ELEMENTS = 1 << 22

#: Rows and columns of a chunk at most: 16 MiB of float32.
SIDE = 2048

LEGEND = """\
- dequantized: DequantizeLinear of int8 codes, normally distributed with a deviation of 24, a scale for each row.
  fake-quantized: FakeQuantize of normally distributed float32, 255 levels, a range of four deviations for each row.
- Chunks of 16 MiB (of few elements one smaller chunk), one after the other, on one thread. MB/s are bytes of the result,
  10^6 a second; the ratio is those bytes over the encoded ones. The spread is the larger one of both directions.
- What each codec encoded was decoded and compared, bit by bit, before anything was timed. chunkq's targets end in a crc32c
  checksum as well, which is not timed here. none: the bytes are copied.
- zstd of level 0, chunkq's default, means zstd's own default, which is 3. blosc: level 5 and 4 bytes an element, as zarr's
  BloscCodec has them for float32. "shuffle, zstd": zarr.codecs.numcodecs.Shuffle comes first; it is not in zarr's
  specification, and zarr warns that other readers may not know it."""

#: One after the other as they encode; numcodecs' options are what zarr passes on.
CODECS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "zstd, level 0": (Zstd(level=0),),
    "zstd, level 1": (Zstd(level=1),),
    "zstd, level 3": (Zstd(level=3),),
    "blosc, lz4, shuffle": (Blosc("lz4", 5, Blosc.SHUFFLE, typesize=4),),
    "blosc, lz4, bitshuffle": (Blosc("lz4", 5, Blosc.BITSHUFFLE, typesize=4),),
    "blosc, zstd, shuffle": (Blosc("zstd", 5, Blosc.SHUFFLE, typesize=4),),
    "blosc, zstd, bitshuffle": (Blosc("zstd", 5, Blosc.BITSHUFFLE, typesize=4),),
    "shuffle, zstd, level 0": (Shuffle(4), Zstd(level=0)),
}

DIRECTIONS = ("encode", "decode")


class Trial:
    """One choice of codecs on the chunks of one kind of result."""

    def __init__(self, codecs: tuple[Any, ...], chunks: list[Array]) -> None:
        self.codecs = codecs
        self.chunks = chunks
        self.stored: list[bytes] = []

    def encoded(self, chunk: Array) -> bytes:
        data: Any = chunk.reshape(-1).view(np.uint8)  # codecs of bytes get bytes from zarr
        for codec in self.codecs:
            data = codec.encode(data)
        return data if self.codecs else bytes(data)

    def decoded(self, data: Any) -> Any:
        for codec in reversed(self.codecs):
            data = codec.decode(data)
        return data if self.codecs else bytearray(data)  # bytes of bytes would be no copy

    def encode(self) -> int:
        """Give the number of encoded bytes; the bytes themselves are dropped chunk by chunk."""
        return sum(len(self.encoded(chunk)) for chunk in self.chunks)

    def prepare(self) -> None:
        self.stored = [self.encoded(chunk) for chunk in self.chunks]

    def decode(self) -> int:
        """As `encode`; what `prepare` made goes with it, so that only one contender's is in memory."""
        stored, self.stored = self.stored, []
        for data in stored:
            self.decoded(data)
        return sum(map(len, stored))

    def check(self, _: int) -> str:
        """The way there and back, whichever of them is timed."""
        for i, chunk in enumerate(self.chunks):
            if not np.array_equal(
                np.frombuffer(self.decoded(self.encoded(chunk)), np.uint8), chunk.reshape(-1).view("u1")
            ):
                raise WrongAnswer(f"chunk {i} does not come back as it was")
        return ""

    def facts(self, size: int) -> dict[str, Any]:
        return {"compression_ratio": sum(chunk.nbytes for chunk in self.chunks) / size}


def dequantized(rng: np.random.Generator, side: int) -> Array:
    """A chunk as from int8 weights."""
    codes = np.clip(np.rint(rng.standard_normal((side, side), np.float32) * 24), -128, 127).astype(np.int8)
    return chunkq.DequantizeLinear(rng.uniform(0.001, 0.1, side).astype(np.float32), axis=0)(codes)


def fake_quantized(rng: np.random.Generator, side: int) -> Array:
    """A chunk of float32 weights, rounded to levels."""
    deviation = rng.uniform(0.01, 1, (side, 1)).astype(np.float32)
    low, high = -4 * deviation, 4 * deviation
    weights = rng.standard_normal((side, side), np.float32) * deviation
    return chunkq.FakeQuantize(low, high, low, high, levels=255)(weights)


DATA: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "dequantized": dequantized,
    "fake-quantized": fake_quantized,
}


def cases(elements: int) -> dict[str, Maker]:
    """One case for each kind of result and direction; the chunks are made when it is its turn."""
    names = {f"{data}, {direction}": (data, direction) for data in DATA for direction in DIRECTIONS}
    return {name: partial(codec_case, name, elements, *what) for name, what in names.items()}


def codec_case(name: str, elements: int, data: str, direction: str) -> Case:
    blosc.use_threads = False  # as zarr sets it
    side = min(SIDE, max(1, isqrt(elements)))
    rng = np.random.default_rng(0)
    chunks = [DATA[data](rng, side) for _ in range(max(1, elements // side**2))]
    contenders = {}
    for codec, codecs in CODECS.items():
        trial = Trial(codecs, chunks)
        if direction == "encode":
            contenders[codec] = Contender(trial.encode, trial.check, facts=trial.facts)
        else:
            contenders[codec] = Contender(trial.decode, trial.check, trial.prepare, trial.facts)
    size = sum(chunk.size for chunk in chunks)
    return Case(name, size, contenders, moved=4 * size)


def markdown(rows: list[Row], about: dict[str, Any], legend: str) -> str:
    """One line for each codec and kind of result, with both directions in it."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        data, direction = row.case.rsplit(", ", 1)
        found.setdefault((data, row.contender), {})[direction] = row
    head = ("data", "codec", "ratio", "encode MB/s", "decode MB/s", "spread", "remark")
    table = [head, tuple("-" * len(h) for h in head), *(_cells(*key, both) for key, both in found.items())]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in table]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("chunkq", "numpy", "zarr", "numcodecs"))
    others = max((row.facts.get("other_cpus") or 0.0 for row in rows), default=0.0)
    noise = f"; other processes kept up to {others:.1f} CPUs busy" if others >= NOISE else ""
    facts = (
        f"{about['cpu']}, commit {about['commit']}, Python {about['python']}, {versions}; {about['elements']:,} elements, "
        f"medians of {about['rounds']} interleaved rounds{noise}."
    )
    return "\n".join([facts, "", *lines, "", legend])


def _cells(data: str, codec: str, both: dict[str, Row]) -> tuple[str, ...]:
    timed = {direction: row for direction, row in both.items() if row.times}
    speeds = [f"{timed[d].moved / timed[d].median / 1e6:,.0f}" if d in timed else "-" for d in DIRECTIONS]
    remark = next((row.remark for row in both.values() if row.remark), "")
    if not timed:
        return data, codec, "-", *speeds, "-", remark
    ratio = next(iter(timed.values())).facts["compression_ratio"]
    return data, codec, f"{ratio:.2f}", *speeds, f"{max(row.spread for row in timed.values()):.0%}", remark
