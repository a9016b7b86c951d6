"""R11 beyond one object a unit: units of several objects, shards, groups, verify and stream take the same at any length.

`test_job.py` has the plain shapes. Every measurement is of a fresh interpreter.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import zarr

from chunkq import grid
from chunkq.memory import MIB

pytestmark = pytest.mark.slow

COLUMNS = 1024
#: Units of 4 MiB of float32.
ROWS = 1024
LIMIT = 300 * MIB
#: What the allocator and the interpreter differ by from run to run.
NOISE = 24 * MIB

LAYOUTS = {
    "several objects a unit": {"chunks": (64, COLUMNS)},
    "shards": {"chunks": (128, COLUMNS), "shards": (ROWS, COLUMNS)},
}


def source(folder, units, dtype="uint8", **layout):
    """A source of that many units, of few values: what is measured is memory, not the codec."""
    shape = (ROWS * units, COLUMNS)
    path = folder / f"x{units}.zarr"
    array = zarr.create_array(str(path), shape=shape, dtype=dtype, fill_value=0, **layout)
    block = np.random.default_rng(1).integers(1, 4, (ROWS, COLUMNS)).astype(dtype)
    for region in grid.regions(shape, (ROWS, COLUMNS)):
        array[region] = block
    return path


# not the ru_maxrss of a child, in which its parent's memory counts until it becomes a program of its own
TELLING = """
import atexit, re, runpy, sys
def tell():
    sys.stderr.write("VmHWM " + re.search(r"VmHWM:\\s+([0-9]+)", open("/proc/self/status").read())[1])
atexit.register(tell)
how, what, *sys.argv[1:] = sys.argv[1:]
if how == "-m":
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    exec(what)
"""


def measured(*command):
    """What a command printed, and the peak of its resident memory."""
    line = [sys.executable, "-c", TELLING, *map(str, command)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, int(done.stderr.rpartition("VmHWM ")[2]) * 1024


STREAM = """
import sys, numpy, chunkq
from chunkq.memory import keep_memory_flat
keep_memory_flat()  # as the command line does
op = chunkq.DequantizeLinear(numpy.float32(0.5))
print(sum(1 for _ in chunkq.stream(op, sys.argv[1], max_mem=int(sys.argv[2]), workers=2)))
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_its_verification_and_a_stream_are_flat(tmp_path, layout):
    peaks = {"run": [], "verify": [], "stream": []}
    for units in (10, 200):
        x, y = source(tmp_path, units, **LAYOUTS[layout]), tmp_path / f"y{units}.zarr"
        common = ("--workers", "2", "--scheduler", "threads", "--max-mem", str(LIMIT), "--json")
        out, peak = measured("-m", "chunkq.cli", "dequantize", x, y, "--scale", "0.5", *common)
        report = json.loads(out)["report"]
        assert report["units"] == units
        assert peak <= report["projected_memory"] <= LIMIT
        peaks["run"].append(peak)

        out, peak = measured("-m", "chunkq.cli", "verify", x, y, *common)
        assert json.loads(out)["checked"] >= units // 2
        assert peak <= LIMIT
        peaks["verify"].append(peak)

        out, peak = measured("-c", STREAM, x, LIMIT)
        assert int(out) >= units // 2
        assert peak <= LIMIT
        peaks["stream"].append(peak)
    for what, (few, many) in peaks.items():
        assert many - few < NOISE, (what, few, many)


def test_a_group_is_flat(tmp_path):
    peaks = []
    for units in (10, 40):
        x = source(tmp_path, 4 * units, "float32", chunks=(256, COLUMNS))
        command = ("quantize", x, tmp_path / f"q{units}.zarr", "--scale", "0.5", "--dtype", "int8", "--workers", "2")
        out, peak = measured("-m", "chunkq.cli", *command, "--max-mem", str(LIMIT), "--json", "--scheduler", "threads")
        report = json.loads(out)["report"]
        assert report["units"] >= units
        assert peak <= report["projected_memory"] <= LIMIT
        peaks.append(peak)
    assert peaks[1] - peaks[0] < NOISE


CALIBRATE = """
import sys, chunkq
from chunkq.memory import keep_memory_flat
keep_memory_flat()
x, limit, method, y = sys.argv[1:]
how = {"max_mem": int(limit), "workers": 2, "scheduler": "threads"}
if y == "-":
    found = chunkq.calibrate(x, axis=1, method=method, bins=256, **how)
else:
    found = chunkq.compare(x, y, axis=1, **how)
print(found.peak_memory, found.projected_memory)
"""


@pytest.mark.parametrize("what", ["minmax", "percentile", "compare"])
def test_statistics_are_flat(tmp_path, what):
    """Per channel along the last axis: each unit touches all channels, and is moved together."""
    peaks = []
    for units in (10, 100):
        x = source(tmp_path, units, "float32", chunks=(ROWS, COLUMNS))
        other = x if what == "compare" else "-"
        method = "minmax" if what == "compare" else what
        out, peak = measured("-c", CALIBRATE, x, LIMIT, method, other)
        told, projected = map(int, out.split())
        assert told <= projected <= LIMIT
        assert peak <= projected + MIB
        peaks.append(peak)
    assert abs(peaks[1] - peaks[0]) < NOISE, peaks
