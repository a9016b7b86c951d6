"""The memory model term by term, what zarr really takes, and the choice of units and workers."""

import json
import subprocess
import sys
import time
import tracemalloc
from math import prod

import numpy as np
import pytest
import zarr

import chunkq
from chunkq import workers
from chunkq.journal import Progressed
from chunkq.memory import MIB


def work(shape, source, target, *, x_dtype="uint8", shard=None, encodes=True, held=0, dtype=None):
    """Per-tensor dequantization to float32, or quantization of float32 to `dtype`."""
    if dtype is None:
        spec, _ = chunkq.DequantizeLinear(0.5).bind(shape, x_dtype)
    else:
        spec, _ = chunkq.QuantizeLinear(0.5, output_dtype=dtype).bind(shape, "float32")
    return workers.Work(spec, source, shard or source, target, held=held, encodes=encodes)


@pytest.fixture
def objects_for_nothing(monkeypatch):
    """Leave the number of objects out of a sum."""
    monkeypatch.setattr(workers, "OBJECT_BYTES", 0)


@pytest.fixture(autouse=True)
def a_known_machine(monkeypatch):
    """Four CPUs and an interpreter of 100 MiB: the choice is then a matter of arithmetic."""
    monkeypatch.setattr(workers, "available_cpus", lambda: 4)
    monkeypatch.setattr(workers, "resident", lambda: 100 * MIB)
    monkeypatch.setattr(workers, "creep", lambda: 1.0)


# ---- the sum


def test_memory_is_the_sum_of_its_terms():
    memory = workers.Memory(base=100, worker=10, task=7, workers=3)
    assert memory.total == 100 + 3 * (10 + 7)


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        # writing one whole object: the output, and twice the object in the codecs
        ((4, 4, 16, 16, 0), 16 + 2 * 16),
        # several objects: the part of the output in one piece as well
        ((16, 4, 128, 16, 0), 128 + 3 * 16),
        # half an object at the edge of the tensor is stored as a whole one
        ((2, 4, 8, 16, 0), 8 + 3 * 16),
        # zarr holds it in another type
        ((16, 8, 16, 16, 0, 3, 16), 16 + 16 + 2 * 16),
        # reading: the region, a source object encoded, decoded, copied, and the memory of the last output
        ((4, 64, 16, 16, 0), 4 + 3 * 64 + 16),
        ((4, 64, 16, 16, 0, 4), 4 + 4 * 64 + 16),
        # computing: the input, a plain copy of it, the output
        ((64, 1, 64, 1, 0), 2 * 64 + 64),
        ((64, 1, 64, 1, 5), 2 * 64 + 64 + 5),
    ],
)
def test_a_unit_is_the_largest_of_its_steps(terms, expected):
    unit_in, fetched, unit_out, object_out, params, *rest = (n * MIB for n in terms)
    copies = rest[0] // MIB if rest else 3
    found = workers.unit_bytes(unit_in, fetched, unit_out, object_out, params, copies, *rest[1:])
    assert found == (expected + 1) * MIB


def test_each_object_of_a_unit_counts():
    few = work((1 << 20,), (1 << 20,), (1 << 10,))
    assert few.task((1 << 20,)) == MIB + 3 * MIB + 4 * MIB + 8 + MIB + (1024 + 1) * workers.OBJECT_BYTES
    many = workers.arrange(work((1 << 22,), (1,), (1,)), "threads", 1, 8 << 30)
    assert many.unit_shape == (workers.GATHERED_AT_MOST,)


@pytest.mark.usefixtures("objects_for_nothing")
def test_a_task_in_terms_of_shapes():
    # source objects of 1 MiB, target objects of 4 MiB; 16 to a unit: computing 2 * 16 + 64, writing 64 + 3 * 4
    scale = 4 + 4  # one float32, as cut and as computed with
    whole = work((8192, 8192), (1024, 1024), (1024, 1024))
    assert whole.task((4096, 4096)) == 2 * 16 * MIB + 64 * MIB + scale + MIB
    assert whole.task((1024, 1024)) == 3 * 4 * MIB + scale + MIB
    # clipped at the edge: 3 MiB of output in objects of 4 MiB
    assert work((768, 8192), (1024, 1024), (1024, 1024)).task((1024, 1024)) == 3 * MIB + 3 * 4 * MIB + scale + MIB
    # a unit inside a large source object; in a shard only the inner chunks it touches are fetched
    part = work((8192, 8192), (8192, 8192), (1024, 1024))
    assert part.task((1024, 1024)) == MIB + 3 * 64 * MIB + 4 * MIB + scale + MIB
    part = work((8192, 8192), (512, 512), (1024, 1024), shard=(8192, 8192))
    assert part.task((1024, 1024)) == 3 * 4 * MIB + scale + MIB
    part = work((8192, 8192), (4096, 512), (1024, 1024), shard=(8192, 8192))
    assert part.task((1024, 1024)) == MIB + 3 * 4 * MIB + 4 * MIB + scale + MIB
    # int4 becomes int8 on its way to zarr; here a quarter of one large object
    narrow = work((256, 1024), (64, 1024), (1024, 1024), dtype="int4")
    assert narrow.task((1024, 1024)) == MIB // 4 + MIB // 4 + 3 * MIB + scale + MIB


@pytest.mark.usefixtures("objects_for_nothing")
def test_parameters_and_bookkeeping_are_in_it():
    spec, _ = chunkq.DequantizeLinear(np.ones(64, np.float32), axis=0).bind((64, 4096), "uint8")
    given = workers.Work(spec, (64, 4096), (64, 4096), (64, 4096), stored=(100,), held=256)
    assert given.task((64, 4096)) == 3 * MIB + 3 * 100 + 64 * (4 + 4) + MIB
    assert workers.bookkeeping_bytes(1000, 4001) == 32 * 1000 + 501
    found = workers.arrange(given, "processes", 1, 1 << 30)
    memory = found.memory
    assert memory.worker == workers.WORKER_BYTES + 256
    assert memory.base == 100 * MIB + workers.RUN_BYTES + workers.TRACKER_BYTES + 32 * 1 + 1
    assert memory.total == memory.base + memory.worker + memory.task


# ---- what zarr takes

MEASURE = """
import json, sys, tempfile
import numpy as np, zarr
from chunkq.memory import _status, keep_memory_flat, reset_peak
from chunkq.target import resolve_compressors, writable

keep_memory_flat()
codecs, inner, factors, part = resolve_compressors(sys.argv[1]), *map(json.loads, sys.argv[2:])
stored = (2048, 2048)
chunk = tuple(k // d for k, d in zip(stored, inner)) if inner else stored
unit = (int(stored[0] * factors[0] * part), stored[1] * factors[1])

def peak(action):
    reset_peak()
    before = _status("self", "VmRSS")
    kept = action()
    return _status("self", "VmHWM") - before

with zarr.config.set({"async.concurrency": 1, "threading.max_workers": 1}), tempfile.TemporaryDirectory() as folder:
    def make(name, shape):
        how = dict(chunks=chunk, shards=stored if inner else None, compressors=codecs, filters=None)
        return writable(zarr.create_array(f"{folder}/{name}", shape=shape, dtype="float32", **how))
    small = make("small", (8, 8))
    small[:] = 1
    small[:]
    array = make("array", unit)
    y = np.random.default_rng(0).integers(0, 256, 4 * unit[0] * unit[1], np.uint8).view(np.float32).reshape(unit)
    def write():
        array[:] = y
    written = peak(write) + y.nbytes
    size = y.nbytes
    del y
    quarter = peak(lambda: array[: unit[0] // 4, : stored[1]])
    print(json.dumps([size, peak(lambda: array[:]), quarter, written]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize(
    ("codec", "inner", "factors", "part"),
    [
        ("none", None, [1, 1], 1),
        ("zstd", None, [1, 1], 1),
        ("zstd", None, [2, 4], 1),
        ("zstd", None, [1, 1], 0.9),
        ("zstd", [1, 1], [1, 1], 1),
        ("zstd", [4, 4], [2, 4], 1),
        ("blosc", None, [2, 4], 1),
        ("gzip", None, [1, 2], 0.9),
        ("gzip", None, [1, 8], 1),
    ],
)
def test_the_factors_against_zarr(codec, inner, factors, part):
    """Incompressible objects of 16 MiB in a fresh interpreter: the model is not passed, and not far above."""
    command = [sys.executable, "-c", MEASURE, codec, json.dumps(inner), json.dumps(factors), json.dumps(part)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    unit, read, quarter, written = json.loads(done.stdout)
    stored = 16 * MIB
    copies = workers.decoding_copies(["bytes", codec, "crc32c"] if codec != "none" else ["bytes", "crc32c"])
    # the step in question alone: the others are made too small to matter
    reading = workers.unit_bytes(unit, stored, 0, 0, 0, copies)
    writing = workers.unit_bytes(0, 0, unit, stored, 0)
    assert read <= reading
    assert quarter <= workers.unit_bytes(unit // 4 // factors[1], stored, 0, 0, 0, copies)
    assert written <= writing
    assert writing <= (1.55 if codec == "none" else 1.35) * written


# ---- the choice


def test_aligned_grids_take_one_large_object_a_unit_and_a_thread_a_cpu():
    given = work((64 * 1024, 4096), (1024, 4096), (1024, 4096))
    found = workers.arrange(given, "auto", None, 4 << 30)
    assert (found.unit_shape, found.units, found.kind, found.source_reads) == ((1024, 4096), 64, "threads", 1.0)
    assert found.memory.workers == 4
    assert found.memory.total <= found.limit == 4 << 30


def test_small_objects_with_a_codec_take_a_process_a_cpu_and_so_do_many_cpus(monkeypatch):
    small = work((64 * 1024, 4096), (64, 4096), (64, 4096))
    assert workers.arrange(small, "auto", None, 4 << 30).kind == "processes"
    large = work((64 * 1024, 4096), (1024, 4096), (1024, 4096))
    monkeypatch.setattr(workers, "available_cpus", lambda: 32)
    assert workers.arrange(large, "auto", None, 16 << 30).kind == "processes"
    plain = work((64 * 1024, 4096), (1024, 4096), (1024, 4096), encodes=False)
    assert workers.arrange(plain, "auto", None, 4 << 30).kind == "threads"
    little = work((8 * 1024, 4096), (1024, 4096), (1024, 4096))
    assert workers.arrange(little, "auto", None, 4 << 30).kind == "threads"


def test_small_objects_are_gathered_but_a_unit_is_left_for_each_worker():
    large = workers.arrange(work((65536, 1024), (16, 1024), (16, 1024)), "threads", None, 4 << 30)
    assert large.unit_shape == (1024, 1024)  # 4 MiB
    small = workers.arrange(work((128, 1024), (16, 1024), (16, 1024)), "threads", None, 4 << 30)
    assert (small.unit_shape, small.units, small.memory.workers) == ((32, 1024), 4, 4)
    assert workers.arrange(work((128, 1024), (16, 1024), (16, 1024)), "sync", None, 4 << 30).units == 1
    # here there is no room for four times 4 MiB, but for smaller units there is
    tight = workers.arrange(work((65536, 1024), (16, 1024), (16, 1024)), "threads", None, 135 * MIB)
    assert (tight.unit_shape, tight.memory.workers) == ((128, 1024), 4)


@pytest.mark.parametrize(
    ("limit", "unit", "reads", "count"),
    [
        # beside the 124 MiB of the interpreter a unit takes 29, 21 or 13 MiB; output counts four times the input
        (8 << 30, (1024, 4096), 1.0, 4),
        (245 * MIB, (1024, 4096), 1.0, 4),
        (235 * MIB, (512, 4096), 2.0, 4),
        (205 * MIB, (512, 4096), 2.0, 3),  # four that read everything twice as often would be no faster
        (149 * MIB, (512, 4096), 2.0, 1),
    ],
)
def test_units_grow_to_the_sources_grid_as_memory_allows(limit, unit, reads, count):
    given = work((32768, 4096), (1024, 1024), (256, 4096), encodes=False)
    found = workers.arrange(given, "threads", None, limit)
    assert (found.unit_shape, found.source_reads, found.memory.workers) == (unit, reads, count)
    assert found.memory.total <= limit


def test_a_whole_tensor_in_one_shard_is_still_shared_between_workers():
    found = workers.arrange(work((16384, 4096), (256, 4096), (512, 4096), shard=(16384, 4096)), "threads", 4, 8 << 30)
    assert (found.memory.workers, found.source_reads) == (4, 1.0)
    assert found.units >= 4


def test_more_of_a_shard_is_taken_where_fetching_counts():
    # a unit of 4 MiB is a quarter of a shard of 64 small chunks: of four fetches of 256 KiB beside 20 MiB two are worth
    # saving, the third is less than 2 %
    small = work((65536, 1024), (64, 1024), (64, 1024), shard=(4096, 1024))
    assert workers.arrange(small, "threads", None, 8 << 30).unit_shape == (2048, 1024)
    assert workers.arrange(small, "threads", None, 180 * MIB).unit_shape == (1024, 1024)
    large = work((65536, 4096), (4096, 4096), (4096, 4096), shard=(16384, 4096))
    assert workers.arrange(large, "threads", 1, 8 << 30).unit_shape == (4096, 4096)


def test_workers_that_were_asked_for_are_not_fewer():
    given = work((65536, 4096), (1024, 4096), (1024, 4096))
    free = workers.arrange(given, "threads", None, 200 * MIB)
    assert free.memory.workers == 1
    assert workers.arrange(given, "threads", 3, 1 << 30).memory.workers == 3
    assert workers.arrange(given, "sync", 3, 1 << 30).memory.workers == 1
    with pytest.raises(chunkq.SpecError, match="or fewer workers") as caught:
        workers.arrange(given, "threads", 3, 200 * MIB)
    assert caught.value.reason == "max_mem"


def test_fewer_processes_than_threads_are_not_worth_it():
    given = work((65536, 4096), (64, 4096), (64, 4096))
    found = workers.arrange(given, "auto", None, 460 * MIB)
    assert (found.kind, found.memory.workers) == ("threads", 4)
    assert workers.arrange(given, "auto", None, 1 << 30).kind == "processes"
    assert workers.arrange(given, "processes", None, 460 * MIB).memory.workers == 3
    # one thread is as good as one process, and one interpreter less
    large = work((65536, 4096), (4096, 4096), (4096, 4096))
    found = workers.arrange(large, "auto", None, 440 * MIB)
    assert (found.kind, found.memory.workers) == ("threads", 1)
    assert workers.arrange(large, "processes", None, 440 * MIB).memory.workers == 1


def test_the_least_that_would_do_does():
    given = work((65536, 1024), (64, 1024), (16, 1024))
    with pytest.raises(chunkq.SpecError, match=r"this run needs at least [0-9.]+ MiB") as caught:
        workers.arrange(given, "threads", None, MIB)
    least = float(str(caught.value).split("at least ")[1].split(" ")[0])
    assert workers.arrange(given, "threads", None, int((least + 0.5) * MIB)).memory.total <= (least + 0.5) * MIB
    with pytest.raises(chunkq.SpecError, match="at least"):
        workers.arrange(given, "threads", None, int((least - 1.5) * MIB))


@pytest.mark.parametrize("scheduler", workers.SCHEDULERS)
def test_empty_and_scalar_tensors(scheduler):
    assert workers.arrange(work((0, 4), (5, 4), (5, 4)), scheduler, None, 1 << 30).units == 0
    assert workers.arrange(work((), (), ()), scheduler, None, 1 << 30).units == 1


def test_what_freed_buffers_keep_is_counted_where_nobody_prevents_it(monkeypatch):
    given = work((65536, 4096), (1024, 4096), (1024, 4096))
    flat = {kind: workers.arrange(given, kind, 2, 8 << 30).memory for kind in ("threads", "processes")}
    monkeypatch.setattr(workers, "creep", lambda: 4 / 3)
    found = {kind: workers.arrange(given, kind, 2, 8 << 30).memory for kind in ("threads", "processes")}
    assert found["threads"].task == flat["threads"].task * 4 // 3
    assert found["processes"] == flat["processes"]  # our own worker processes give memory back at once


@pytest.mark.parametrize("scheduler", ["threads", "auto"])
def test_ten_million_objects_are_planned_in_milliseconds(scheduler, monkeypatch):
    monkeypatch.setattr(workers, "available_cpus", lambda: 256)
    given = work((10**7, 64, 64), (3, 64, 64), (1, 64, 64))
    began = time.perf_counter()
    found = workers.arrange(given, scheduler, None, 8 << 30)
    assert time.perf_counter() - began < 0.1
    assert found.source_reads == 1.0
    assert prod(found.unit_shape) * 4 <= workers.UNIT_BYTES


def test_a_cluster_keeps_each_worker_within_its_own_limit():
    distributed = pytest.importorskip("distributed")
    given = work((32768, 4096), (1024, 1024), (256, 4096))
    how = {"processes": False, "n_workers": 2, "threads_per_worker": 2, "dashboard_address": None}
    with distributed.LocalCluster(memory_limit=500 * MIB, **how) as cluster, distributed.Client(cluster) as client:
        found = workers.arrange_on_cluster(given, client, None)
        assert (found.kind, found.limit, found.memory.workers) == ("cluster", 500 * MIB, 2)
        assert found.memory.total <= 500 * MIB
        assert (found.unit_shape, found.source_reads) == ((1024, 4096), 1.0)
        found = workers.arrange_on_cluster(given, client, 210 * MIB)
        assert (found.unit_shape, found.source_reads) == ((512, 4096), 2.0)
        with pytest.raises(chunkq.SpecError, match="a worker is too little: 2 threads need") as caught:
            workers.arrange_on_cluster(given, client, 100 * MIB)
    assert caught.value.reason == "max_mem"


def test_the_journal_of_many_units_takes_what_the_model_says():
    target = zarr.create_array({}, shape=(1000, 1000), chunks=(1, 1), dtype="float32")
    tracemalloc.start()
    try:
        progressed = Progressed(target, (1, 1))
        todo = progressed.todo()
        progressed.begun()
        assert progressed.elements(todo) == 10**6
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= workers.bookkeeping_bytes(10**6, 2 * 10**6)
