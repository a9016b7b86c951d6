"""From a zarr array on disk to another: chunkq.plan against dask.array and a plain loop over chunks.

Same source, same chunks, same codecs for everyone, in a temporary folder; in memory where there is room, so that the disk
does not decide.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import isqrt
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

import chunkq
from benchmarks.frame import SUBJECT, Array, Case, Contender, Maker, WrongAnswer
from chunkq import units, workers
from chunkq.memory import peak_of_tree, reset_peak
from chunkq.threads import DEFAULT_THREADS

ELEMENTS = 1 << 28
QUICK_ELEMENTS = 1 << 24

LEGEND = """\
- DequantizeLinear uint8 to float32, a scale and zero point for each index of axis 0; 8 x 8 chunks, the target's like the
  source's; every chunk ends in a crc32c checksum. GB/s are bytes read and written, before compression.
- chunkq: what `scheduler="auto"` chooses, one stored object a unit, zarr working on one object at a time; the rows below it
  change one of these each. Times include listing the source twice, the lock, making the target, and starting processes.
- dask.array: aligned blocks of one chunk, threads. Neither it nor the loop checks, locks or lists anything.
- The peak is resident memory of the process tree, what the benchmark itself imports included."""

CODECS = {"none": (Crc32cCodec(),), "zstd": (ZstdCodec(), Crc32cCodec())}

Regions = Iterator[tuple[slice, slice]]


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: the target's folder and the peak of resident memory."""

    target: str
    peak: int


class Work:
    """The source, the parameters and a folder for targets; the folder goes when the work does."""

    def __init__(self, elements: int, codec: str) -> None:
        side = max(8, isqrt(elements))
        self.codec = codec
        self.shape = (side, side)
        self.chunk = -(-side // 8)
        # 5 bytes an element for source and target, and as much again to be safe
        self.folder = tempfile.mkdtemp(prefix="chunkq-bench-", dir=roomy(10 * side * side))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.folder, True)
        self.source = os.path.join(self.folder, "source.zarr")
        self.target = os.path.join(self.folder, "target.zarr")
        rng = np.random.default_rng(0)
        self.scale = rng.uniform(0.001, 0.1, side).astype(np.float32)
        self.zero_point = rng.integers(100, 156, side, np.uint8)
        self.fill(rng)

    def fill(self, rng: np.random.Generator) -> None:
        """Codes as weights have them, round the middle: unlike uniform noise, a codec can do something with them."""
        array = self.create(self.source, "uint8", 0)
        for region in self.regions():
            rows, columns = (part.stop - part.start for part in region)
            values = rng.standard_normal((rows, columns), np.float32) * 24 + 128
            array[region] = np.clip(np.rint(values), 0, 255).astype(np.uint8)

    def create(self, path: str, dtype: str, fill: float) -> Any:
        return zarr.create_array(
            path,
            shape=self.shape,
            chunks=(self.chunk, self.chunk),
            dtype=dtype,
            compressors=CODECS[self.codec],
            fill_value=fill,
        )

    def create_target(self) -> Any:
        return self.create(self.target, "float32", float("nan"))

    def regions(self) -> Regions:
        """The chunks, one after the other."""
        starts = [range(0, n, self.chunk) for n in self.shape]
        for at in product(*starts):
            yield tuple(slice(a, min(a + self.chunk, n)) for a, n in zip(at, self.shape, strict=True))

    def formula(self, x: Array, rows: slice) -> Array:
        zero_point = self.zero_point[rows, None].astype(np.float32)
        return (x.astype(np.float32) - zero_point) * self.scale[rows, None]

    def clear(self) -> None:
        """Remove the last contender's target, and its peak with it."""
        shutil.rmtree(self.target, ignore_errors=True)
        reset_peak()

    def check(self, outcome: Outcome) -> str:
        """Compare the target with the formula, bit by bit, a chunk at a time."""
        source, target = zarr.open_array(self.source, mode="r"), zarr.open_array(outcome.target, mode="r")
        if target.shape != self.shape or target.dtype != np.float32:
            raise WrongAnswer(f"wrote {target.dtype} {target.shape}, expected float32 {self.shape}")
        if (target.chunks, target.compressors) != ((self.chunk, self.chunk), CODECS[self.codec]):
            raise WrongAnswer(f"wrote chunks {target.chunks} and codecs {target.compressors}: not the same work")
        for region in self.regions():
            expected = self.formula(source[region], region[0])
            if not np.array_equal(target[region].view(np.uint32), expected.view(np.uint32)):
                raise WrongAnswer(f"differs in region {region}")
        return ""


def roomy(size: int) -> str | None:
    """A folder in memory that has room for that many bytes, else None for the usual temporary one."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > size:
        return str(memory)
    return None


def cases(elements: int) -> dict[str, Maker]:
    """One case for each codec; its files are made when it is its turn."""
    return {
        f"zarr to zarr, {codec}": partial(pipeline_case, f"zarr to zarr, {codec}", elements, codec) for codec in CODECS
    }


def pipeline_case(name: str, elements: int, codec: str) -> Case:
    work = Work(elements, codec)

    def contender(run: Callable[[Work], Outcome]) -> Contender:
        return Contender(partial(run, work), work.check, work.clear, facts)

    objects = 4 * work.chunk**2
    contenders = {
        SUBJECT: contender(partial(run_chunkq, "auto")),
        "chunkq, threads": contender(partial(run_chunkq, "threads")),
        "chunkq, processes": contender(partial(run_chunkq, "processes")),
        "chunkq, one worker": contender(partial(run_chunkq, "sync")),
        "chunkq, threads, zarr's concurrency": contender(partial(run_chunkq, "threads", concurrent=True)),
        "chunkq, one worker, 8 objects a unit, zarr's concurrency": contender(
            partial(run_chunkq, "sync", unit_bytes=8 * objects, concurrent=True)
        ),
        "chunkq, threads, 4 objects a unit": contender(partial(run_chunkq, "threads", unit_bytes=4 * objects)),
        "dask.array": contender(run_dask),
        "NumPy loop": contender(run_numpy),
    }
    size = work.shape[0] * work.shape[1]
    return Case(name, size, contenders, moved=5 * size)


def facts(outcome: Outcome) -> dict[str, Any]:
    """For the JSON and the table."""
    return {"peak_memory": outcome.peak}


# ---- the contenders


def run_chunkq(scheduler: str, work: Work, unit_bytes: int | None = None, concurrent: bool = False) -> Outcome:
    """As it is; or, to see what that is worth, with other units, or with zarr working on several objects at once."""
    op = chunkq.DequantizeLinear(work.scale, work.zero_point, axis=0)
    with replaced(workers, "UNIT_BYTES", unit_bytes or workers.UNIT_BYTES):
        plan = chunkq.plan(op, work.source, work.target, compressors=work.codec, scheduler=scheduler)
    with replaced(units, "_ZARR_CONFIG", {} if concurrent else units._ZARR_CONFIG):
        return Outcome(work.target, plan.run().peak_memory)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Give a constant of a module another value for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def run_dask(work: Work) -> Outcome:
    x = da.from_zarr(work.source)
    scale, zero_point = (da.from_array(p[:, None], (work.chunk, 1)) for p in (work.scale, work.zero_point))
    y = da.map_blocks(numpy_formula, x, scale, zero_point, dtype=np.float32)
    da.store(y, work.create_target(), lock=False, scheduler="threads", num_workers=DEFAULT_THREADS)
    return Outcome(work.target, sum(peak_of_tree().values()))


def numpy_formula(x: Array, scale: Array, zero_point: Array) -> Array:
    return (x.astype(np.float32) - zero_point.astype(np.float32)) * scale


def run_numpy(work: Work) -> Outcome:
    source, target = zarr.open_array(work.source, mode="r"), work.create_target()
    for region in work.regions():
        target[region] = work.formula(source[region], region[0])
    return Outcome(work.target, sum(peak_of_tree().values()))
