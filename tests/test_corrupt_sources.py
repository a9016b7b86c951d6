"""Sources with damaged, missing and rewritten objects: R4, R5 and R9. No fill value ever takes the place of data."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import zarr
from processes import PATIENCE, contents, finished, holds_lock, run, start
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec

import chunkq
from chunkq import workers
from chunkq.store import object_shape

SHAPE, CHUNKS = (32, 48), (8, 16)
X = np.random.default_rng(3).integers(1, 100, SHAPE, np.int8)
SCALE = np.linspace(0.5, 2, 32, dtype=np.float32)
Y = X.astype(np.float32) * SCALE[:, None]
OP = chunkq.DequantizeLinear(SCALE, axis=0)

#: How a source is stored, and whether that can show any damage.
CODECS = {
    "none": ({"compressors": None}, False),
    "zstd": ({"compressors": [ZstdCodec()]}, False),
    "zstd with checksum": ({"compressors": [ZstdCodec(checksum=True)]}, True),
    "blosc": ({"compressors": [BloscCodec()]}, False),
    "gzip": ({"compressors": [GzipCodec()]}, True),
    "crc32c": ({"compressors": [Crc32cCodec()]}, True),
    "sharded": ({"compressors": [ZstdCodec(), Crc32cCodec()], "shards": (16, 48)}, True),
}


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


DAMAGES = {
    "bit flip": flipped,
    "truncation": lambda data: data[: len(data) * 2 // 3],
    "zero bytes": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "trailing junk": lambda data: data + b"\x5a" * 37,
}


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """One stored object a unit, however small."""
    monkeypatch.setattr(workers, "UNIT_BYTES", 1)


def write(path, x=X, chunks=CHUNKS, fill_value=0, **how):
    array = zarr.create_array(str(path), shape=x.shape, dtype=x.dtype, chunks=chunks, fill_value=fill_value, **how)
    array[...] = x
    return path


def first_line(error):
    return str(error.value).splitlines()[0]


def planned(source, target, **how):
    return chunkq.plan(OP, source, target, **({"scheduler": "sync", "target_shards": None} | how))


def undisturbed(folder, source):
    planned(source, folder / "expected.zarr").run()
    return contents(folder / "expected.zarr")


def region_of(array, key):
    """The region of an array that one of its objects holds."""
    places = [int(i) for i in key.removeprefix("c/").split("/")]
    return tuple(slice(i * k, (i + 1) * k) for i, k in zip(places, object_shape(array), strict=True))


# ---- R4: damaged objects


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_reported_or_cannot_be_seen(tmp_path, codec, damage):
    how, shows = CODECS[codec]
    source, target = write(tmp_path / "x.zarr", **how), tmp_path / "y.zarr"
    key = "c/1/0" if codec == "sharded" else "c/2/1"
    good = (source / key).read_bytes()
    (source / key).write_bytes(DAMAGES[damage](good))
    message = failure_of(planned(source, target).run)
    if message:
        assert key in message
        assert "\n" not in message
        assert not (target / key).exists()
        if target.exists():
            y = zarr.open_array(target, mode="r")
            assert y.attrs["chunkq.complete"] is False
            # all that could be read is there, and nothing but NaN where it could not
            rest = Y.copy()
            rest[region_of(y, key)] = np.nan
            np.testing.assert_array_equal(y[:], rest)
        # the same again, once the object is as it was: the rest is not done again
        (source / key).write_bytes(good)
        planned(source, target).run()
        assert contents(target) == undisturbed(tmp_path, source)
    else:
        assert not shows
        assert damage != "zero bytes"
        y = zarr.open_array(target, mode="r")
        rest = Y.copy()
        rest[region_of(y, key)] = y[region_of(y, key)]
        np.testing.assert_array_equal(y[:], rest)


def failure_of(call):
    """What a failed run says; empty where it does not fail."""
    try:
        call()
    except chunkq.RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("codec", ["zstd with checksum", "gzip", "crc32c", "sharded"])
def test_every_flipped_bit_is_seen_where_there_is_a_checksum(tmp_path, codec):
    """Every byte of the stored object in turn, but for gzip's header, of which its checksum says nothing."""
    how, _ = CODECS[codec]
    source = write(tmp_path / "x.zarr", **how)
    object_ = source / ("c/1/0" if codec == "sharded" else "c/2/1")
    good = object_.read_bytes()
    for place in range(0, len(good), max(1, len(good) // 60)):
        object_.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        message = failure_of(lambda: list(chunkq.stream(OP, source)))
        if message:
            assert str(object_.relative_to(source)) in message
        else:  # what is not seen must not matter
            np.testing.assert_array_equal(zarr.open_array(source, mode="r")[:], X)


@pytest.mark.parametrize("scheduler", ["threads", "processes"])
def test_every_bad_object_is_listed_and_the_rest_is_done(tmp_path, scheduler):
    source, target = write(tmp_path / "x.zarr", compressors=[Crc32cCodec()]), tmp_path / "y.zarr"
    bad = ["c/0/2", "c/1/1", "c/3/0"]
    good = {key: (source / key).read_bytes() for key in bad}
    for key in bad:
        (source / key).write_bytes(flipped(good[key]))
    with pytest.raises(chunkq.RunError) as caught:
        planned(source, target, scheduler=scheduler, workers=2).run()
    assert first_line(caught).startswith("3 of 12 units failed")
    assert all(key in str(caught.value) for key in bad)
    objects = {str(path.relative_to(target)) for path in target.rglob("c/*/*")}
    assert len(objects) == 9
    assert not objects & set(bad)
    # mended one by one: each run does what can be done, and names what is still bad
    for n, key in enumerate(bad[:-1]):
        (source / key).write_bytes(good[key])
        with pytest.raises(chunkq.RunError) as caught:
            planned(source, target).run()
        assert first_line(caught).startswith(f"{2 - n} of 12 units failed")
        assert [k for k in bad if k in str(caught.value)] == bad[n + 1 :]
    (source / bad[-1]).write_bytes(good[bad[-1]])
    planned(source, target).run()
    assert contents(target) == undisturbed(tmp_path, source)


def test_while_an_object_is_bad_no_other_may_be_rewritten(tmp_path):
    source, target = write(tmp_path / "x.zarr", compressors=[Crc32cCodec()]), tmp_path / "y.zarr"
    good = (source / "c/1/1").read_bytes()
    (source / "c/1/1").write_bytes(flipped(good))
    with pytest.raises(chunkq.RunError, match="c/1/1"):
        planned(source, target).run()
    (source / "c/1/1").write_bytes(good)
    (source / "c/0/0").write_bytes((source / "c/0/1").read_bytes())
    before = contents(target)
    with pytest.raises(chunkq.SpecError, match=r"source \(its stored objects were rewritten") as caught:
        planned(source, target).run()
    assert caught.value.reason == "target_exists"
    assert contents(target) == before


def test_bad_objects_may_be_mended_after_any_end_of_a_later_run(tmp_path):
    """A killed run, or one that stops at the first, says nothing new of the objects that it did not come to."""
    source, target = write(tmp_path / "x.zarr", compressors=[Crc32cCodec()]), tmp_path / "y.zarr"
    bad = ["c/0/2", "c/1/1", "c/3/0"]
    good = {key: (source / key).read_bytes() for key in bad}
    for key in bad:
        (source / key).write_bytes(flipped(good[key]))
    assert "3 of 12" in failure_of(planned(source, target).run)

    def stop(done, units):
        if (source / bad[0]).read_bytes() != good[bad[0]] or (target / bad[0]).exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planned(source, target).run(progress=stop)
    assert "1 of 12" in failure_of(planned(source, target, fail_fast=True).run)
    (source / bad[0]).write_bytes(good[bad[0]])
    with pytest.raises(KeyboardInterrupt):
        planned(source, target).run(progress=stop)
    assert (target / bad[0]).exists()
    # what was read before a run was killed is not known: it is read again, whatever it is by now
    (source / bad[0]).write_bytes((source / "c/0/1").read_bytes())
    for key in bad[1:]:
        (source / key).write_bytes(good[key])
    planned(source, target).run()
    assert contents(target) == undisturbed(tmp_path, source)


def test_the_command_line_lists_bad_objects_and_continues(tmp_path):
    source, target = write(tmp_path / "x.zarr", compressors=[Crc32cCodec()]), tmp_path / "y.zarr"
    command = ("dequantize", source, target, "--scale", "0.5", "--scheduler", "threads")
    bad = ("c/0/2", "c/3/0")
    good = {key: (source / key).read_bytes() for key in bad}
    for key in bad:
        (source / key).write_bytes(flipped(good[key]))
    for more, named in (((), all), (("--fail-fast",), any)):
        code, out, err = run(*command, *more, "--json")
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert named(key in err for key in bad)
        assert "Traceback" not in err
    for key in bad:
        (source / key).write_bytes(good[key])
    finished(*command)
    finished("dequantize", source, tmp_path / "expected.zarr", *command[3:])
    assert contents(target) == contents(tmp_path / "expected.zarr")


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_fail_fast_stops_at_the_first(tmp_path, scheduler):
    x = np.ones((400, 4), np.int8)
    source = write(tmp_path / "x.zarr", x, (1, 4), compressors=[Crc32cCodec()])
    good = (source / "c/0/0").read_bytes()
    for row in range(400):
        (source / f"c/{row}/0").write_bytes(flipped(good))
    op, done = chunkq.DequantizeLinear(0.5), []
    plan = chunkq.plan(op, source, tmp_path / "y.zarr", scheduler=scheduler, workers=2, fail_fast=True)
    with pytest.raises(chunkq.RunError, match="1 of 400 units failed"):
        plan.run(progress=lambda n, _: done.append(n))
    assert len(done) < 4
    slow = chunkq.plan(op, source, tmp_path / "z.zarr", scheduler=scheduler, workers=2)
    with pytest.raises(chunkq.RunError, match=r"400 of 400 units failed.* and 380 more"):
        slow.run()


def test_a_damaged_parameter_is_named(tmp_path):
    source = write(tmp_path / "x.zarr")
    scale = write(tmp_path / "scale.zarr", SCALE, (8,), fill_value=np.nan, compressors=[Crc32cCodec()])
    (scale / "c/2").write_bytes(flipped((scale / "c/2").read_bytes()))
    op = chunkq.DequantizeLinear(zarr.open_array(scale, mode="r"), axis=0)
    with pytest.raises(chunkq.RunError, match=r"parameters.*(checksum|CRC)"):
        chunkq.plan(op, source, tmp_path / "y.zarr", scheduler="sync").run()


# ---- R5: missing objects


def without_inner_chunk(shard, entries, place):
    """A shard written again without one of its inner chunks, its index at the end with a checksum."""
    import google_crc32c

    data = shard.read_bytes()
    size = 16 * int(np.prod(entries)) + 4
    index = np.frombuffer(data[-size:-4], "<u8").reshape(*entries, 2).copy()
    index[place] = 2**64 - 1
    content = index.tobytes()
    shard.write_bytes(data[:-size] + content + google_crc32c.value(content).to_bytes(4, "little"))


def without_chunk(folder):
    source = write(folder / "x.zarr", fill_value=7)
    os.unlink(source / "c/2/1")
    return source, "c/2/1", (slice(16, 24), slice(16, 32))


def without_shard(folder):
    source = write(folder / "x.zarr", fill_value=7, shards=(16, 48))
    os.unlink(source / "c/1/0")
    return source, "c/1/0", (slice(16, 32), slice(None))


def without_inner(folder):
    codec = ShardingCodec(chunk_shape=CHUNKS, codecs=[BytesCodec(), Crc32cCodec()])
    assert codec.to_dict()["configuration"]["index_location"] == "end"
    source = write(folder / "x.zarr", fill_value=7, shards=(16, 48), compressors=[Crc32cCodec()])
    without_inner_chunk(source / "c/1/0", (2, 3), (1, 2))
    return source, "c/1/0 (inner chunk 1.2)", (slice(24, 32), slice(32, 48))


LACKING = {"a chunk": without_chunk, "a shard": without_shard, "an inner chunk": without_inner}


@pytest.mark.parametrize("what", LACKING)
def test_what_is_missing_is_named_before_anything_is_written_or_filled_when_asked(tmp_path, what):
    source, name, region = LACKING[what](tmp_path)
    target = tmp_path / "y.zarr"
    code, out, err = run("dequantize", source, target, "--scale", "0.5", "--json")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert name in err
    assert "--missing fill" in err
    assert not target.exists()
    with pytest.raises(chunkq.RunError, match="missing='fill'"):
        next(chunkq.stream(OP, source))

    report = json.loads(finished("dequantize", source, target, "--scale", "0.5", "--json", "--missing", "fill"))[
        "report"
    ]
    assert report["missing_objects"] == 1
    expected = X.astype(np.float32) * np.float32(0.5)
    expected[region] = 3.5
    np.testing.assert_array_equal(zarr.open_array(target, mode="r")[:], expected)
    assert chunkq.verify(source, target).ok


def test_an_object_that_vanishes_during_the_run_is_no_fill_value(tmp_path):
    source, target = write(tmp_path / "x.zarr"), tmp_path / "y.zarr"

    def vanish(done, units):
        (source / "c/3/2").unlink(missing_ok=True)

    with pytest.raises(chunkq.RunError, match=r"rewritten during the run|c/3/2"):
        planned(source, target).run(progress=vanish)
    assert zarr.open_array(target, mode="r").attrs["chunkq.complete"] is False


# ---- R9: rewritten sources


def interrupted(source, target, op=OP):
    """A run that stopped after some units."""

    def stop(done, units):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chunkq.plan(op, source, target, scheduler="sync").run(progress=stop)
    assert len(list(target.rglob("c/*/*"))) == 4


def test_a_source_rewritten_between_run_and_resume_is_refused(tmp_path):
    source, target = write(tmp_path / "x.zarr"), tmp_path / "y.zarr"
    interrupted(source, target)
    before = contents(target)
    kept = tmp_path / "kept"
    shutil.copytree(source, kept)
    write_again = zarr.open_array(source, mode="r+")
    write_again[0, 0] += 1
    np.save(tmp_path / "scale.npy", SCALE)
    code, out, err = run("dequantize", source, target, "--scale", tmp_path / "scale.npy", "--axis", "0", "--json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "source (its stored objects were rewritten" in err
    assert "--overwrite" in err
    assert contents(target) == before
    planned(source, target, overwrite=True).run()
    assert zarr.open_array(target, mode="r")[0, 0] == np.float32(X[0, 0] + 1) * SCALE[0]


def test_other_metadata_of_the_source_are_refused(tmp_path):
    source, target = write(tmp_path / "x.zarr", fill_value=0), tmp_path / "y.zarr"
    interrupted(source, target)
    document = json.loads((source / "zarr.json").read_text())
    (source / "zarr.json").write_text(json.dumps(document | {"fill_value": 9}))
    with pytest.raises(chunkq.SpecError, match=r"source \(another array, or its metadata were changed\)"):
        planned(source, target)


def test_a_parameter_rewritten_between_run_and_resume_is_refused(tmp_path):
    source, target = write(tmp_path / "x.zarr"), tmp_path / "y.zarr"
    scale = write(tmp_path / "scale.zarr", SCALE, (8,), fill_value=np.nan)
    interrupted(source, target, chunkq.DequantizeLinear(zarr.open_array(scale, mode="r"), axis=0))
    zarr.open_array(scale, mode="r+")[3] = 9
    again = chunkq.DequantizeLinear(zarr.open_array(scale, mode="r"), axis=0)
    with pytest.raises(chunkq.SpecError, match=r"scale \(its stored objects were rewritten"):
        chunkq.plan(again, source, target, scheduler="sync").run()


def test_reading_and_touching_access_times_changes_nothing(tmp_path):
    source, target = write(tmp_path / "x.zarr"), tmp_path / "y.zarr"
    expected = undisturbed(tmp_path, source)
    interrupted(source, target)
    for path in source.rglob("*"):
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns + 10**12, status.st_mtime_ns))
    planned(source, target).run()
    assert contents(target) == expected


@pytest.mark.parametrize("which", ["source", "scale"])
def test_an_input_rewritten_during_the_run_leaves_an_unfinished_target(tmp_path, which):
    """The run is stopped in the middle, as a debugger would, while an object is rewritten with the same content."""
    source, target = tmp_path / "x.zarr", tmp_path / "y.zarr"
    x = np.random.default_rng(0).integers(1, 100, (16 * 512, 2048), np.int8)
    write(source, x, (512, 2048), compressors=None)
    scale = write(tmp_path / "scale.zarr", np.full(16 * 512, 0.5, np.float32), (512,), fill_value=np.nan)
    command = ("dequantize", source, target, "--scale", scale, "--axis", "0", "--scheduler", "threads", "--json")
    process = start(*command)
    try:
        assert holds_lock(process, target)
        process.send_signal(signal.SIGSTOP)
        rewritten = {"source": source / "c/15/0", "scale": scale / "c/15"}[which]
        data = rewritten.read_bytes()
        rewritten.unlink()
        rewritten.write_bytes(data)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode, out, err.count("\n")) == (1, "", 1)
    assert f"the stored objects of {which} were rewritten during the run" in err
    assert "--overwrite" in err
    assert zarr.open_array(target, mode="r").attrs["chunkq.complete"] is False
    # it stays refused, and nothing makes a mixture look whole
    code, _, err = run(*command)
    assert code == 2
    assert f"{which} (its stored objects were rewritten" in err
    finished(*command, "--overwrite")
    assert chunkq.verify(source, target, sample=0.2).ok
