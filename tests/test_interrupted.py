"""Runs that are killed, interrupted, run out of disk or meet another: R1, R3, R6 and R15. All of them real processes."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zarr
from processes import PATIENCE, all_ended, contents, descendants, finished, holds_lock, run, start, versions

import chunkq
from chunkq.store import open_quantized_group, open_source

SCHEDULERS = ("threads", "processes")
WORKERS = 2
#: Kills of each kind of run; five kinds make the twenty of R1.
KILLS = 4
SHAPE, CHUNKS = (16 * 512, 2048), (512, 2048)


def make(path, shape, chunks, dtype="int8", seed=0, **how):
    """An array of values none of which is the fill value."""
    x = np.random.default_rng(seed).integers(1, 100, shape, np.int8).astype(dtype)
    zarr.create_array(str(path), data=x, chunks=chunks, compressors=None, **how)
    return path


@dataclass(frozen=True)
class Kind:
    """One kind of run: what it reads, what lies at its target before, and its command line."""

    source: Callable[[Path], Path]
    arguments: tuple[str, ...]
    before: Callable[[Path], object] = lambda target: None

    def command(self, source, target, scheduler):
        how = ("--scheduler", scheduler, "--workers", str(WORKERS), "--json")
        return (self.arguments[0], source, target, *self.arguments[1:], *how)


def integers(path):
    return make(path, SHAPE, CHUNKS)


def floats(path):
    return make(path, (16 * 512, 2048), CHUNKS, "float32")


def another_jobs(target):
    """A finished target of another job, of the same shape."""
    source = target.parent / "other-x.zarr"
    if not source.exists():
        make(source, (8 * 512, 2048), CHUNKS, seed=1)
    chunkq.plan(chunkq.DequantizeLinear(np.float32(3)), source, target, compressors="none").run()


def old_array(target):
    make(target, (8 * 512, 2048), CHUNKS, zarr_format=2)


DEQUANTIZE = ("dequantize", "--scale", "0.5")
KINDS = {
    "plain": Kind(integers, DEQUANTIZE),
    "shards": Kind(integers, (*DEQUANTIZE, "--chunks", "256,512", "--shards", "512,2048")),
    "group": Kind(floats, ("quantize", "--scale", "0.5", "--dtype", "int8")),
    "over another job": Kind(integers, (*DEQUANTIZE, "--overwrite"), another_jobs),
    "over zarr v2": Kind(integers, (*DEQUANTIZE, "--overwrite"), old_array),
}


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody interrupted: source, what its target holds in the end, what the plan said."""

    source: Path
    contents: dict
    plan: dict
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Undisturbed runs by kind, each made once."""
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            source = KINDS[name].source(folder / "x.zarr")
            # into an empty place also where the interrupted ones replace something: the bytes must not tell
            out = json.loads(finished(*KINDS[name].command(source, folder / "y.zarr", "threads")))
            made[name] = Undisturbed(source, contents(folder / "y.zarr"), out["plan"], out["report"]["seconds"])
            shutil.rmtree(folder / "y.zarr")
        return made[name]

    return of


# ---- R1: SIGKILL


def looks_finished(target):
    """Whether any reader may take a target for a finished one."""
    try:
        if open_quantized_group(target) is None:
            open_source(target)
    except chunkq.SpecError:
        return False
    return True


def refuse_as_source(target):
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.plan(chunkq.DequantizeLinear(np.float32(1)), target, f"{target}-next")
    assert caught.value.reason == "source"


def units_touched(plan, keys):
    """How many units the objects belong to; each object is one chunk or shard."""
    size = plan["shards"] or plan["chunks"]
    places = [[int(i) for i in key.rpartition("c/")[2].split("/")] for key in keys]
    return len({tuple(i * k // u for i, k, u in zip(p, size, plan["unit_shape"], strict=True)) for p in places})


def wait_for_moment(process, target, moments, seconds):
    """Until a random moment: one in four of the whole life of the process, else of the time in which it writes."""
    if moments.random() < 0.75:
        holds_lock(process, target)
    soon(process, moments.uniform(0, seconds))


def kill(process):
    """SIGKILL the process alone; its workers must follow by themselves."""
    workers = descendants(process.pid)
    process.kill()
    process.wait()
    assert all_ended(workers), "a worker outlives its parent"
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_killed_at_random_moments(tmp_path, undisturbed, scheduler, name):
    kind, whole = KINDS[name], undisturbed(name)
    target = tmp_path / "y.zarr"
    kind.before(target)
    before = contents(target)
    command = kind.command(whole.source, target, scheduler)
    moments = random.Random(f"{scheduler} {name}")
    seconds = whole.seconds + (1.5 if scheduler == "processes" else 0)
    written, again, kills = {}, 0, 0
    for _ in range(KILLS):
        process = start(*command)
        wait_for_moment(process, target, moments, seconds)
        kill(process)
        now = contents(target)
        if now == whole.contents:  # it was faster; once more from the beginning
            shutil.rmtree(target)
            kind.before(target)
            written = {}
            continue
        # a lock beside what was there before changes nothing of it, nor does a document that is not yet in its place
        if {key: digest for key, digest in now.items() if not key.endswith((".lock", ".partial"))} != before:
            assert not looks_finished(target)
            refuse_as_source(target)
            kills += 1
            present = versions(target)
            again += units_touched(whole.plan, rewritten(whole, written, present))
            written = {} if b"chunkq.replacing" in (target / "zarr.json").read_bytes() else present
    if target.exists():  # what a kill in the middle of a write leaves; not every moment hits one
        (target / f"zarr.json.{'0' * 32}.partial").write_bytes(b"{")
    out = json.loads(finished(*command))
    present = versions(target)
    again += units_touched(whole.plan, rewritten(whole, written, present))
    assert contents(target) == whole.contents  # so no .partial and no lock either
    # what was computed twice is what was in flight: nothing where one object is one unit, as its write is atomic
    assert again <= (WORKERS * kills if name == "group" else 0)
    new = units_touched(whole.plan, of_the_data(whole, present) - of_the_data(whole, written))
    assert new <= out["report"]["units_done"] <= new + WORKERS * kills
    if name != "group":
        assert out["report"]["units_done"] == new


def of_the_data(whole, names):
    """Those of the objects that are the tensor's, not a parameter's."""
    prefix = "data/c/" if "data/zarr.json" in whole.contents else "c/"
    return {name for name in names if name.startswith(prefix)}


def rewritten(whole, earlier, later):
    """Objects of the data that were there already and are not the same write any more."""
    return [key for key in of_the_data(whole, earlier.keys() & later.keys()) if earlier[key] != later[key]]


# ---- R6: two processes, one target


def test_the_second_of_two_is_refused_and_a_killed_ones_lock_taken_over(tmp_path, undisturbed):
    whole, target = undisturbed("plain"), tmp_path / "y.zarr"
    command = KINDS["plain"].command(whole.source, target, "threads")
    first = start(*command)
    try:
        assert holds_lock(first, target)
        first.send_signal(signal.SIGSTOP)
        for more in ((), ("--overwrite",)):
            code, _, err = run(*command, *more)
            assert (code, err.count("\n")) == (1, 1)
            assert f"is being written by process {first.pid}" in err
        first.send_signal(signal.SIGCONT)
        assert first.wait(PATIENCE) == 0
    finally:
        first.kill()
        first.communicate()
    assert contents(target) == whole.contents

    shutil.rmtree(target)
    killed = start(*command)
    assert holds_lock(killed, target)
    killed.kill()
    killed.communicate()
    assert (target / "chunkq.lock").exists()
    finished(*command)
    assert contents(target) == whole.contents


# ---- R3: a full disk

PLAIN = ("--compressor", "none")  # 32 MiB


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 48 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "shards"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_full_disk_is_named_and_the_rerun_is_exact(small_disk, tmp_path, scheduler, name):
    source = make(tmp_path / "x.zarr", (8 * 512, 2048), CHUNKS)
    expected, target, ballast = tmp_path / "expected.zarr", small_disk / "y.zarr", small_disk / "ballast"
    finished(*KINDS[name].command(source, expected, "threads"), *PLAIN)
    ballast.write_bytes(bytes(30 << 20))
    command = (*KINDS[name].command(source, target, scheduler), *PLAIN)
    for taken in (30 << 20, 22 << 20):  # full twice, the second time after some more is done
        os.truncate(ballast, taken)
        code, out, err = run(*command)
        assert (code, out) == (1, "")
        assert str(target) in err
        assert "No space left" in err
        assert_one_line(err)
        assert not looks_finished(target)
    ballast.unlink()
    finished(*command)
    assert contents(target) == contents(expected)


def test_a_disk_that_is_full_from_the_start(small_disk, tmp_path):
    source = make(tmp_path / "x.zarr", (512, 2048), CHUNKS)
    target = small_disk / "y.zarr"
    with open(small_disk / "ballast", "wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, shutil.disk_usage(small_disk).free)
    code, _, err = run(*KINDS["plain"].command(source, target, "threads"))
    assert code in (1, 2)
    assert str(target) in err
    assert_one_line(err)
    (small_disk / "ballast").unlink()
    finished(*KINDS["plain"].command(source, target, "threads"))


def assert_one_line(err):
    """No traceback, none of asyncio's noise."""
    assert err.startswith("chunkq: ")
    assert err.count("\n") == 1, err


# ---- R15: SIGINT, SIGTERM

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(scope="module")
def many_objects(tmp_path_factory):
    """A source whose listing takes a while: 20,000 objects of one byte in 20 shards' worth of target."""
    source = tmp_path_factory.mktemp("many") / "x.zarr"
    zarr.create_array(str(source), shape=(20, 1000), chunks=(1, 1), dtype="int8", compressors=None)
    for row in range(20):
        folder = source / "c" / str(row)
        folder.mkdir(parents=True)
        for column in range(1000):
            (folder / str(column)).write_bytes(b"\5")
    return source


def interrupt(command, number, moment):
    """Send a signal to the whole process group, as a terminal does; exit code, stderr, and whether all have ended."""
    process = start(*command)
    moment(process)
    workers = descendants(process.pid)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    code = process.returncode
    if code == -signal.SIGINT and err.endswith("the same command continues\n"):
        # where it arrived inside exec (a dataclass being made) CPython ends with the signal, which a shell shows as 130
        code = 128 + signal.SIGINT
    return code, out, err, all_ended(workers)


def without_json(command):
    return tuple(part for part in command if part != "--json")


def after_the_plan(process):
    """The plan is printed before the inputs are listed."""
    assert process.stderr.readline().startswith("operator")


def soon(process, seconds):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_interrupted_at_random_moments(tmp_path, undisturbed, scheduler, number):
    whole, target = undisturbed("plain"), tmp_path / "y.zarr"
    command = without_json(KINDS["plain"].command(whole.source, target, scheduler))
    moments = random.Random(f"{scheduler} {number.name}")
    # the first while the target begins and workers start, the others while they write
    for most in (0.05, 0.3, 0.8):
        delay = moments.uniform(0, most)

        def moment(process, delay=delay):
            holds_lock(process, target)
            soon(process, delay)

        code, out, err, ended = interrupt(command, number, moment)
        if code == 0:
            break
        assert (code, out) == (CODES[number], ""), err
        last = err.splitlines()[-1]
        assert last == "chunkq: interrupted; what is done stays done, and the same command continues"
        assert "Traceback" not in err
        assert "Error" not in err
        assert ended, "a worker outlives the run"
        assert not (target / "chunkq.lock").exists()
        assert not target.exists() or not looks_finished(target)
    finished(*command)
    assert contents(target) == whole.contents


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_interrupted_while_listing(tmp_path, many_objects, number):
    target = tmp_path / "y.zarr"
    command = ("dequantize", many_objects, target, "--scale", "0.5", "--chunks", "20,1000", "--scheduler", "threads")
    moments = random.Random(number.name)
    for _ in range(3):

        def moment(process):
            after_the_plan(process)
            soon(process, moments.uniform(0, 0.1))

        code, out, err, _ = interrupt(command, number, moment)
        assert (code, out) == (CODES[number], "")
        assert err.endswith("chunkq: interrupted; what is done stays done, and the same command continues\n")
        assert "Traceback" not in err
        assert not (target / "chunkq.lock").exists()


# ---- where a signal arrives


def in_a_fresh_python(code):
    """What a script prints that sends itself signals."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


SIGNALLED = """
import signal
from chunkq.interrupts import check_interrupts, held_interrupts

class Deaf:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def tell(number, frame):
    print(signal.Signals(number).name)
    raise KeyboardInterrupt

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, tell)
"""


def test_a_signal_where_errors_are_ignored_is_not_lost():
    code = """
with held_interrupts():
    Deaf()
    print("on")
    try:
        check_interrupts()
    except KeyboardInterrupt:
        print("stopped")
    check_interrupts()
    print("once")
print(signal.getsignal(signal.SIGINT) is tell)
"""
    assert in_a_fresh_python(SIGNALLED + code) == ["on", "SIGINT", "stopped", "once", "True"]


def test_a_second_signal_does_not_wait():
    code = """
try:
    with held_interrupts():
        signal.raise_signal(signal.SIGTERM)
        print("on")
        signal.raise_signal(signal.SIGINT)
        print("never")
except KeyboardInterrupt:
    print("stopped")
"""
    assert in_a_fresh_python(SIGNALLED + code) == ["on", "SIGINT", "SIGTERM", "stopped"]


def test_a_signal_that_nothing_asked_for_comes_at_the_end():
    code = """
try:
    with held_interrupts(), held_interrupts():
        signal.raise_signal(signal.SIGTERM)
        print("on")
    print("never")
except KeyboardInterrupt:
    print("stopped")
"""
    assert in_a_fresh_python(SIGNALLED + code) == ["on", "SIGTERM", "stopped"]


def test_nothing_is_written_after_an_interrupted_run_has_given_its_lock_back(tmp_path, monkeypatch):
    """Another run may begin from then on."""
    from chunkq import units, workers

    monkeypatch.setattr(workers, "UNIT_BYTES", 1)
    source = make(tmp_path / "x.zarr", (12, 8), (1, 8))
    late, began, first = [], threading.Event(), threading.Lock()
    write = units._write

    def slow(job, region, y):
        if region[0].start and first.acquire(blocking=False):
            began.set()
            threading.Event().wait(0.5)  # in flight when the run is interrupted
            late.append(Path(tmp_path / "y.zarr" / "chunkq.lock").exists())
        write(job, region, y)

    def interrupted(done, _):
        began.wait(5)
        raise KeyboardInterrupt

    monkeypatch.setattr(units, "_write", slow)
    plan = chunkq.plan(chunkq.DequantizeLinear(0.5), source, tmp_path / "y.zarr", scheduler="threads", workers=WORKERS)
    with pytest.raises(KeyboardInterrupt):
        plan.run(progress=interrupted)
    assert not (tmp_path / "y.zarr" / "chunkq.lock").exists()
    assert late == [True]
