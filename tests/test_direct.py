"""Whole objects by the short way: the same bytes that zarr writes, the same values that it reads, and else its own way."""

import subprocess
import sys

import google_crc32c
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

from chunkq import buffers, direct, kernels
from chunkq.kernels import load
from chunkq.kernels._cpu import supported

SHAPE, CHUNKS = (5, 12), (2, 6)
VALUES = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)

CODECS = {
    "none": {"compressors": ()},
    "checksum": {"compressors": (Crc32cCodec(),)},
    "zstd": {"compressors": (ZstdCodec(), Crc32cCodec())},
    "zstd of checksummed": {"compressors": (Crc32cCodec(), ZstdCodec())},
    "gzip": {"compressors": (GzipCodec(),)},
    "blosc": {"compressors": (BloscCodec(cname="lz4", shuffle="bitshuffle"),)},
    "transposed": {"compressors": (Crc32cCodec(),), "filters": (TransposeCodec(order=(1, 0)),)},
    "big-endian": {"compressors": (Crc32cCodec(),), "serializer": BytesCodec(endian="big")},
}

REGIONS = {
    "one object": np.s_[2:4, 6:12],
    "a row of objects": np.s_[0:2, 0:12],
    "a block of objects": np.s_[0:4, 0:12],
}


def create(store, **options):
    options = {"chunks": CHUNKS, "dtype": "float32", "fill_value": 0} | options
    return zarr.create_array(store, shape=SHAPE, config={"write_empty_chunks": True}, **options)


def stored(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "zarr.json"}


def without_time(data):
    """A stored object; of gzip without the second at which it was made."""
    return data[:4] + data[8:] if data.startswith(b"\x1f\x8b") else data


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
@pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)
def test_bytes_written_and_values_read_are_zarrs(tmp_path, codecs, region):
    ours, theirs = create(tmp_path / "ours", **codecs), create(tmp_path / "theirs", **codecs)
    assert direct.write(ours, region, VALUES[region])
    theirs[region] = VALUES[region]
    both = [{key: without_time(data) for key, data in stored(tmp_path / name).items()} for name in ("ours", "theirs")]
    assert both[0] == both[1] != {}
    assert np.array_equal(direct.read(theirs, region), VALUES[region])
    assert np.array_equal(ours[region], VALUES[region])


@pytest.mark.parametrize("codecs", CODECS.values(), ids=CODECS)
def test_objects_at_the_edge_are_read_as_far_as_they_are_the_tensors(codecs):
    array = create({}, **codecs)
    array[:] = VALUES
    for region in (np.s_[4:5, 0:6], np.s_[0:5, 0:12], np.s_[2:5, 6:12]):
        assert np.array_equal(direct.read(array, region), VALUES[region])


def test_what_is_not_whole_or_not_there_is_left_to_zarr(tmp_path):
    array = create(tmp_path / "x", compressors=())
    for region in (np.s_[0:1, 0:6], np.s_[1:3, 0:6], np.s_[0:2, 0:5], np.s_[0:2, 3:9]):
        assert direct.read(array, region) is None
        assert not direct.write(array, region, VALUES[region])
    assert not direct.write(array, np.s_[4:5, 0:6], VALUES[4:5, 0:6])  # its object is larger
    assert direct.read(array, np.s_[0:2, 0:6]) is None
    assert not direct.write(array, np.s_[0:2, 0:6], VALUES[0:2, 0:6].astype(np.float64))
    assert not direct.write(array, np.s_[0:2, 0:6], VALUES[0:2, 0:6].astype(">f4"))
    assert stored(tmp_path / "x") == {}


def test_shards_v2_and_scalars_are_left_to_zarr():
    sharded, old = create({}, chunks=(1, 3), shards=(2, 6)), create({}, zarr_format=2)
    for array in (sharded, old):
        array[:] = VALUES
        assert direct.read(array, np.s_[0:2, 0:6]) is None
        assert not direct.write(array, np.s_[0:2, 0:6], VALUES[0:2, 0:6])
    scalar = zarr.create_array({}, shape=(), dtype="float32")
    assert direct.read(scalar, ()) is None
    assert not direct.write(scalar, (), np.float32(1)[...])


DAMAGES = (lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: bytes([b[0] ^ 1]) + b[1:], lambda b: b[:2])


@pytest.mark.parametrize("damage", DAMAGES, ids=["checksum", "content", "cut"])
def test_a_wrong_checksum_fails_as_with_zarr(tmp_path, damage):
    array = create(tmp_path / "x", compressors=(Crc32cCodec(),))
    array[:] = VALUES
    path = tmp_path / "x/c/0/1"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="checksum") as theirs:
        array[0:2, 6:12]
    with pytest.raises(ValueError, match="checksum") as ours:
        direct.read(array, np.s_[0:2, 6:12])
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("isa", [isa for isa in kernels.built() if isa in supported() and load(isa).CRC32C])
def test_the_checksum_is_crc32c(isa):
    crc32c = load(isa).crc32c
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283  # the check value of CRC-32C
    data = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    for n in (0, 1, 7, 8, 9, 4095, 4096, 12287, 12288, 12289, 24581, 99_991):
        for start in (0, 1):
            part = data[start : start + n]
            assert crc32c(part) == google_crc32c.value(part.tobytes())


def test_memory_for_results_is_the_same_until_more_is_asked_for():
    assert buffers.result_memory((4,), np.dtype(np.float32)) is None
    with buffers.keeping_results():
        first = buffers.result_memory((4, 8), np.dtype(np.float32))
        first[...] = 1
        second = buffers.result_memory((16,), np.dtype(np.float16))
        assert np.shares_memory(first, second)
        assert (second.shape, second.dtype) == ((16,), np.float16)
        # room behind the whole of the last result only: behind a part there are other values
        whole = second.view(np.uint8)
        assert buffers.with_room(whole, 4).size == 36
        assert buffers.with_room(whole[:16], 4) is None
        assert buffers.with_room(whole.copy(), 4) is None
        assert buffers.with_room(whole, 4096) is None
        larger = buffers.result_memory((1000,), np.dtype(np.float64))
        assert not np.shares_memory(first, larger)
    assert buffers.result_memory((4,), np.dtype(np.float32)) is None


def test_a_run_leaves_zarrs_threads_to_the_caller(tmp_path):
    """A pool of one thread, once made, would encode for all workers and for whatever else the process does."""
    code = """
import sys, numpy, zarr, chunkq
from zarr.core import sync
zarr.create_array(sys.argv[1] + "/x", data=numpy.ones((8, 8), "u1"), chunks=(2, 8))
chunkq.plan(chunkq.DequantizeLinear(0.5), sys.argv[1] + "/x", sys.argv[1] + "/y", workers=2).run()
print(sync._get_executor()._max_workers)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1


def test_regions_as_zarr_takes_them():
    array = create({}, chunks=SHAPE, compressors=())
    array[:] = VALUES
    for region in ((slice(None), slice(None)), (slice(-5, None), slice(0, 100))):
        assert np.array_equal(direct.read(array, region), VALUES[region])
    assert direct.read(array, np.s_[::2, :]) is None
