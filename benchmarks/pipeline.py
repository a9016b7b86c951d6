"""From a zarr array on disk to another: chunkq.plan against dask.array, cubed, tensorstore and a plain loop over chunks.

Same source, same chunks, same codecs for everyone, in a temporary folder; in memory where there is room, so that the disk
does not decide. Beside them floors: the part of the work that nobody can leave out.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from itertools import product
from math import isqrt
from pathlib import Path
from typing import Any
from unittest import mock

import dask.array as da
import numpy as np
import zarr
from dask.multiprocessing import get_context, initialize_worker_process
from numcodecs.zstd import Zstd
from zarr.codecs import Crc32cCodec, ZstdCodec

import chunkq
from benchmarks.frame import SUBJECT, Array, Case, Contender, Maker, WrongAnswer, absent, aiming
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
  "1 process" and "2 processes": that many worker processes, whatever the machine has.
- Peers: one chunk at a time on each of as many threads as there are cores, codecs included. None lists the source or locks
  the target. Making the target counts. Nobody, chunkq neither, compares chunks with the fill value to leave them out.
  - dask.array: map_blocks, threads. "processes": the same on as many worker processes; starting and ending them counts.
  - cubed: from_zarr, map_blocks, store into an array made before, its threads; fused into one task for each chunk.
  - tensorstore: a loop over the chunks with NumPy's formula, in one thread; reads ahead and writes behind it, of each at
    most two chunks a core; no fsync.
  - NumPy loop: read, formula and write one after the other.
- Floors, no peers: a part of the work by itself, done for every object on as many threads as there are cores, with bytes of
  the first chunk that are made ready before and may come from a cache. "plain write": the result's bytes, a file for each
  chunk; GB/s are those. "zstd only": numcodecs' zstd at the target's level decodes an object of the source and encodes one
  of the result; nothing is read, computed or written. It is one process: several can be faster than its threads.
- The peak is resident memory of the process tree, what the benchmark itself and its peers import included."""

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
            # as chunkq does: else zarr compares every chunk with the fill value before it writes it
            config={"write_empty_chunks": True},
        )

    def create_target(self) -> Any:
        return self.create(self.target, "float32", float("nan"))

    def regions(self) -> Regions:
        """The chunks, one after the other."""
        starts = [range(0, n, self.chunk) for n in self.shape]
        for at in product(*starts):
            yield tuple(slice(a, min(a + self.chunk, n)) for a, n in zip(at, self.shape, strict=True))

    @property
    def objects(self) -> int:
        """Stored objects of the source, and as many of the target."""
        return sum(1 for _ in self.regions())

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
    }
    if codec == "zstd":  # the encoder decides, and what a second process is worth
        contenders |= {
            "chunkq, 1 process": contender(partial(run_chunkq, "processes", processes=1)),
            "chunkq, 2 processes": contender(partial(run_chunkq, "processes", processes=2)),
        }
    contenders |= {
        "dask.array": contender(run_dask),
        "dask.array, processes": contender(run_dask_processes),
        "cubed": optional("cubed", contender(run_cubed)),
        "tensorstore": optional("tensorstore", contender(run_tensorstore)),
        "NumPy loop": contender(run_numpy),
    } | floors(work)
    size = work.shape[0] * work.shape[1]
    peers = ("dask.array", "dask.array, processes", "cubed", "tensorstore", "NumPy loop")
    aims = dict.fromkeys(peers, 1.3) | {next(iter(floors(work))): 1 / 1.5 if codec == "none" else 1 / 1.2}
    return Case(name, size, aiming(contenders, **aims), moved=5 * size)


def floors(work: Work) -> dict[str, Contender]:
    """What of the work is timed by itself: writing where there is no codec, else the codec."""
    floor = Floor(work)
    if work.codec == "none":
        moved = 4 * work.chunk**2 * work.objects
        return {"floor: plain write": Contender(floor.write, floor.check_written, floor.prepare, facts, moved=moved)}
    return {"floor: zstd only": Contender(floor.code, floor.check_coded, floor.prepare, facts)}


def optional(package: str, contender: Contender) -> Contender:
    """A peer whose package may be missing; it is imported here, so that this is not timed."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        return absent(package, error)
    return replace(contender, remark=f"{package} {metadata.version(package)}")


def facts(outcome: Outcome) -> dict[str, Any]:
    """For the JSON and the table."""
    return {"peak_memory": outcome.peak}


# ---- the contenders


def run_chunkq(
    scheduler: str,
    work: Work,
    unit_bytes: int | None = None,
    concurrent: bool = False,
    processes: int | None = None,
) -> Outcome:
    """As it is; or, to see what that is worth, with other units, or with zarr working on several objects at once."""
    op = chunkq.DequantizeLinear(work.scale, work.zero_point, axis=0)
    with replaced(workers, "UNIT_BYTES", unit_bytes or workers.UNIT_BYTES):
        plan = chunkq.plan(op, work.source, work.target, compressors=work.codec, scheduler=scheduler, workers=processes)
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


def tree_peak() -> int:
    """Of this process and those that it started and that still live."""
    return sum(peak_of_tree().values())


def run_dask(work: Work) -> Outcome:
    da.store(dask_result(work), work.create_target(), lock=False, scheduler="threads", num_workers=DEFAULT_THREADS)
    return Outcome(work.target, tree_peak())


def run_dask_processes(work: Work) -> Outcome:
    """On a pool like the one that Dask starts for each call, but for that its memory can be read before it ends."""
    pool = ProcessPoolExecutor(DEFAULT_THREADS, mp_context=get_context(), initializer=initialize_worker_process)
    with pool:
        da.store(dask_result(work), work.create_target(), lock=False, scheduler="processes", pool=pool)
        return Outcome(work.target, tree_peak())


def dask_result(work: Work) -> da.Array:
    x = da.from_zarr(work.source)
    scale, zero_point = (da.from_array(p[:, None], (work.chunk, 1)) for p in (work.scale, work.zero_point))
    return da.map_blocks(numpy_formula, x, scale, zero_point, dtype=np.float32)


def numpy_formula(x: Array, scale: Array, zero_point: Array) -> Array:
    return (x.astype(np.float32) - zero_point.astype(np.float32)) * scale


def run_cubed(work: Work) -> Outcome:
    import cubed
    from cubed.runtime.executors.local import ThreadsExecutor

    # more than it projects for a task; it refuses to plan with less
    spec = cubed.Spec(work_dir=work.folder, allowed_mem=64 * work.chunk**2 + (64 << 20))
    x = cubed.from_zarr(work.source, spec=spec)
    scale, zero_point = (
        cubed.from_array(p[:, None], chunks=(work.chunk, 1), spec=spec) for p in (work.scale, work.zero_point)
    )
    y = cubed.map_blocks(numpy_formula, x, scale, zero_point, dtype=np.float32)
    with mock.patch.dict(os.environ):  # the executor sets OMP_NUM_THREADS and its like: not for the other contenders
        cubed.store(y, work.create_target(), executor=ThreadsExecutor(max_workers=DEFAULT_THREADS))
    return Outcome(work.target, tree_peak())


def run_tensorstore(work: Work) -> Outcome:
    import tensorstore

    limit = {"limit": DEFAULT_THREADS}
    resources = {"data_copy_concurrency": limit, "file_io_concurrency": limit, "file_io_sync": False}
    context = tensorstore.Context(resources)

    def opened(path: str, **options: Any) -> Any:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}} | options
        return tensorstore.open(spec, context=context, open=True).result()

    work.create_target()
    source, target = opened(work.source), opened(work.target, store_data_equal_to_fill_value=True)
    reads: deque[Any] = deque()
    writes: deque[Any] = deque()
    waiting = work.regions()
    for region in work.regions():
        while len(reads) < 2 * DEFAULT_THREADS and (ahead := next(waiting, None)) is not None:
            reads.append(source[ahead].read())
            reads[-1].force()  # else it may begin when the result is asked for
        y = work.formula(reads.popleft().result(), region[0])
        if len(writes) == 2 * DEFAULT_THREADS:
            writes.popleft().result()
        writes.append(target[region].write(y, can_reference_source_data_indefinitely=True))
        writes[-1].commit.force()
    for write in writes:
        write.result()
    return Outcome(work.target, tree_peak())


def run_numpy(work: Work) -> Outcome:
    source, target = zarr.open_array(work.source, mode="r"), work.create_target()
    for region in work.regions():
        target[region] = work.formula(source[region], region[0])
    return Outcome(work.target, tree_peak())


# ---- the floors


class Floor:
    """Parts of the work on its first chunk, once for each stored object: a whole result need not be in memory."""

    codec = Zstd(**ZstdCodec().to_dict()["configuration"])

    def __init__(self, work: Work) -> None:
        self.work = work
        self.ready: list[tuple[bytes, bytes, bytes]] = []

    def first(self) -> tuple[bytes, bytes, bytes]:
        """The first chunk: as it is stored but for its checksum, decoded, and its result."""
        region = next(self.work.regions())
        x = zarr.open_array(self.work.source, mode="r")[region]
        stored = Path(self.work.source, "c", "0", "0").read_bytes()[:-4]
        return stored, x.tobytes(), self.work.formula(x, region[0]).tobytes()

    def prepare(self) -> None:
        """Each run takes what is made ready here, and leaves nothing that others' peaks would count."""
        self.ready = [self.first()]
        self.work.clear()

    def each(self, do: Callable[[int], Any]) -> Outcome:
        """Call `do` once for each object, on all threads."""
        with ThreadPoolExecutor(DEFAULT_THREADS) as pool:
            for _ in pool.map(do, range(self.work.objects)):
                pass  # an exception comes up here
        return Outcome(self.work.target, tree_peak())

    def write(self) -> Outcome:
        _, _, result = self.ready.pop()
        folder = Path(self.work.target)
        folder.mkdir()
        return self.each(lambda i: (folder / str(i)).write_bytes(result))

    def check_written(self, outcome: Outcome) -> str:
        _, _, result = self.first()
        files = list(Path(outcome.target).iterdir())
        if len(files) != self.work.objects or any(file.read_bytes() != result for file in files):
            raise WrongAnswer("wrote other files")
        return ""

    def code(self) -> Outcome:
        stored, _, result = self.ready.pop()

        def both_ways(_: int) -> None:
            self.codec.decode(stored)
            self.codec.encode(result)

        return self.each(both_ways)

    def check_coded(self, _: Outcome) -> str:
        stored, decoded, result = self.first()
        if self.codec.decode(stored) != decoded or self.codec.decode(self.codec.encode(result)) != result:
            raise WrongAnswer("the codec does not give back what went in")
        return ""
