"""Results as a stream: order, bits, memory, and the end of the work, however it comes."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

import chunkq
from chunkq import workers
from chunkq.errors import RunError, SpecError

SHAPE = (30, 40)
SCALE = np.linspace(-2, 3, 30, dtype=np.float32)
X = np.random.default_rng(0).integers(-128, 128, SHAPE, dtype=np.int8)
Y = X.astype(np.float32) * SCALE[:, None]
OP = chunkq.DequantizeLinear(SCALE, axis=0)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """One stored object a unit, however small."""
    monkeypatch.setattr(workers, "UNIT_BYTES", 1)


def write(location, x=X, chunks=(10, 15), **how):
    array = zarr.create_array(location, shape=x.shape, chunks=chunks, dtype=x.dtype, **how)
    array[...] = x
    return location


@pytest.fixture
def source(tmp_path):
    return write(str(tmp_path / "x.zarr"))


def working():
    """Threads that a stream has started and not ended."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("chunkq-stream")]


def starts(results):
    return [tuple(part.start for part in region) for region, _ in results]


@pytest.mark.parametrize("how", [{}, {"shards": (20, 30)}, {"zarr_format": 2, "order": "F"}], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_regions_in_order_cover_the_tensor_once(tmp_path, how, count):
    source = write(str(tmp_path / "x.zarr"), **how)
    found, times = np.full(SHAPE, np.nan, np.float32), np.zeros(SHAPE, int)
    results = list(chunkq.stream(OP, source, workers=count))
    for region, y in results:
        assert y.shape == tuple(part.stop - part.start for part in region)
        found[region] = y
        times[region] += 1
    assert (times == 1).all()
    np.testing.assert_array_equal(found.view(np.uint32), Y.view(np.uint32))
    assert starts(results) == sorted(starts(results))
    assert len(results) > 1
    assert not working()


def test_every_operator_and_parameters_in_zarr(tmp_path, source):
    scale = zarr.open_array(write(str(tmp_path / "scale.zarr"), SCALE, (7,)))
    y = np.zeros(SHAPE, np.float32)
    for region, part in chunkq.stream(chunkq.DequantizeLinear(scale, axis=0), source):
        y[region] = part
    np.testing.assert_array_equal(y.view(np.uint32), Y.view(np.uint32))
    floats = write(str(tmp_path / "y.zarr"), Y)
    low = Y.min(axis=1, keepdims=True)
    for op in (
        chunkq.QuantizeLinear(0.5, output_dtype="int4"),
        chunkq.QuantizeDequantize(0.5, quantized_dtype="int8"),
        chunkq.FakeQuantize(low, -low, low, -low, 255),
    ):
        expected = np.asarray(op(Y))
        for region, part in chunkq.stream(op, floats):
            assert part.dtype == expected.dtype
            assert part.tobytes() == expected[region].tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_small_and_empty_tensors(tmp_path, shape):
    source = write(str(tmp_path / "x.zarr"), np.full(shape, 3, np.uint8), tuple(max(n, 1) for n in shape))
    results = list(chunkq.stream(chunkq.DequantizeLinear(0.5), source))
    assert [y.tolist() for _, y in results] == ([1.5] if shape == () else [])


def test_a_pipeline_of_generators(source):
    totals = (float(y.sum(dtype=np.float64)) for _, y in chunkq.stream(OP, source, workers=2))
    assert sum(totals) == pytest.approx(float(Y.sum(dtype=np.float64)))


class Counting(LocalStore):
    """Counts the chunks that are read."""

    reads = 0

    async def get(self, key, *arguments, **keywords):
        type(self).reads += key.startswith("c/")
        return await super().get(key, *arguments, **keywords)


@pytest.mark.parametrize("end", ["close", "forget", "error"])
def test_the_end_of_a_stream_is_the_end_of_its_work(tmp_path, monkeypatch, end):
    monkeypatch.setattr(Counting, "reads", 0)
    write(str(tmp_path / "x.zarr"), np.ones((400, 4), np.int8), (1, 4))
    results = chunkq.stream(chunkq.DequantizeLinear(1.0), Counting(tmp_path / "x.zarr", read_only=True), workers=2)
    next(results)
    assert working()
    if end == "close":
        results.close()
        with pytest.raises(StopIteration):
            next(results)
    elif end == "forget":
        del results
        gc.collect()
    else:
        with pytest.raises(ZeroDivisionError):
            results.throw(ZeroDivisionError)
    assert not working()
    assert 0 < Counting.reads <= 8


def test_an_error_in_the_consumer_ends_the_work(source):
    def consume():
        for _ in chunkq.stream(OP, source, workers=2):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    gc.collect()
    assert not working()


def test_reading_ahead_is_bounded(tmp_path, monkeypatch):
    """A consumer that takes its time finds no more than the results that the memory model counts."""
    monkeypatch.setattr(Counting, "reads", 0)
    write(str(tmp_path / "x.zarr"), np.ones((100, 4), np.int8), (1, 4))
    results = chunkq.stream(chunkq.DequantizeLinear(1.0), Counting(tmp_path / "x.zarr", read_only=True), workers=2)
    for taken, _ in enumerate(results, 1):
        assert Counting.reads <= taken + 3


def test_nothing_starts_before_the_first_result(source):
    unused = chunkq.stream(OP, source)
    assert not working()
    unused.close()
    with pytest.raises(StopIteration):
        next(unused)
    assert not working()


def test_what_is_missing_is_an_error_before_the_first_result(tmp_path, source):
    (tmp_path / "x.zarr" / "c" / "1" / "0").unlink()
    with pytest.raises(RunError, match=r"c/1/0.*missing='fill'"):
        chunkq.stream(OP, source)
    filled = dict(zip(range(100), chunkq.stream(OP, source, missing="fill"), strict=False))
    assert sum(float(np.abs(y).sum()) for _, y in filled.values()) > 0


def test_what_cannot_be_decoded_is_named_where_it_lies(tmp_path, source):
    bad = tmp_path / "x.zarr" / "c" / "1" / "1"
    bad.write_bytes(b"junk")
    before = []

    def consume():
        for region, y in chunkq.stream(OP, source, workers=2):
            before.append((region, y))

    with pytest.raises(RunError, match=r"\[10:20, 15:30\].*c/1/1"):
        consume()
    assert starts(before) == [(0, 0), (0, 15), (0, 30), (10, 0)]
    assert not working()


def test_wrong_requests(source):
    for keywords, reason in (
        ({"max_mem": "1MiB"}, "max_mem"),
        ({"missing": "x"}, "argument"),
        ({"workers": 0}, "n_threads"),
        ({"retries": -1}, "argument"),
    ):
        with pytest.raises(SpecError) as caught:
            chunkq.stream(OP, source, **keywords)
        assert caught.value.reason == reason
    with pytest.raises(SpecError):
        chunkq.stream(chunkq.DequantizeLinear(np.ones(7, np.float32), axis=0), source)


MEASURED = """
import sys, threading, zarr, chunkq
from chunkq.memory import MIB, keep_memory_flat
keep_memory_flat()  # as the command line and worker processes do; elsewhere glibc lets the peak creep up by a third
pause = threading.Event()
total = 0
for region, y in chunkq.stream(chunkq.DequantizeLinear(0.5), sys.argv[1], max_mem=sys.argv[2], workers=2):
    # a consumer that is slower than the stream, and lets it read as far ahead as it may at first
    pause.wait(float(sys.argv[3]) if total else 2)
    total += y.size
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(total, peak)
"""


@pytest.mark.slow
def test_memory_stays_within_the_limit_and_flat(tmp_path):
    """10 and 100 units of 16 MiB, by a consumer that takes its time."""
    limit, rows = 320 << 20, 1 << 20
    peaks = {}
    for units in (10, 100):
        path = str(tmp_path / f"{units}.zarr")
        array = zarr.create_array(path, shape=(units * rows, 4), chunks=(rows, 4), dtype="int8")
        for i in range(units):
            array[i * rows : (i + 1) * rows] = np.random.default_rng(i % 3).integers(0, 9, (rows, 4), np.int8)
        command = [sys.executable, "-c", MEASURED, path, str(limit), "0.02"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
        total, peaks[units] = map(int, done.stdout.split())
        assert total == units * rows * 4
    assert max(peaks.values()) <= limit
    assert peaks[100] <= peaks[10] * 1.15
