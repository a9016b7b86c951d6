"""The compiled modules: their numbers, their own checks, their instructions, threads and fork."""

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest

import chunkq
from chunkq import kernels, run
from chunkq.dtypes import ELEMENT_TYPES
from chunkq.kernels import _cpu
from chunkq.threads import available_cpus, thread_count

X = np.random.default_rng(0).integers(0, 255, (64, 20_000), np.uint8)
SCALE = np.linspace(-1, 1, 64, dtype=np.float32)
Y = X.astype(np.float32) * SCALE[:, None]


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_element_codes_are_those_of_the_table():
    table = {row.code for row in ELEMENT_TYPES.values() if row.code}
    for isa in kernels.built():
        if isa in _cpu.supported():
            codes = kernels.load(isa).ELEMENT_CODES
            assert table == set(codes)
            assert len(set(codes.values())) == len(codes)


def settings(op=0, x_code=0, q_code=0, y_code=6, division=6, low=0, high=255, over=0, mini=(8, 3, 7, 126, -1, 127)):
    return np.array([op, x_code, q_code, y_code, division, low, high, over, *mini, 1], np.intp)


def launch(isa_module, table, params=(3, 3), x=24, y=24):
    values = [np.zeros(n, np.float32) for n in params]
    run_call(
        isa_module,
        settings(),
        np.array(table, np.intp).T.copy(),
        np.zeros(x, np.uint8),
        np.zeros(4 * y, np.uint8),
        values,
    )


def run_call(isa_module, numbers, table, x, y, params, shape=(24,)):
    call = isa_module.Call(numbers, 2, table, shape, np.dtype(np.float32), False, *params)
    call.run(x, y, 1)


# one list for each axis: size, then step, phase, stride of scale and zero point
GOOD = [[8, 0, 0, 0, 0, 0, 0], [3, 1, 0, 1, 1, 0, 1]]
BAD = {
    "longer than x": [[9, 0, 0, 0, 0, 0, 0], GOOD[1]],
    "shorter than x": [[7, 0, 0, 0, 0, 0, 0], GOOD[1]],
    "past the scale": [[8, 1, 0, 1, 0, 0, 0], GOOD[1]],
    "past the zero point": [[8, 0, 0, 0, 1, 0, 3], GOOD[1]],
    "phase past the scale": [GOOD[0], [3, 2, 5, 1, 1, 0, 1]],
    "negative step": [GOOD[0], [3, -1, 0, 1, 1, 0, 1]],
    "negative stride": [[8, 1, 0, -1, 0, 0, 0], GOOD[1]],
    "row not dense": [GOOD[0], [3, 1, 0, 2, 1, 0, 1]],
    "phase in a step of one": [[8, 0, 0, 0, 0, 0, 0], [2, 1, 1, 1, 1, 0, 1]],
    "empty row": [[8, 0, 0, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1]],
    "no zero point": [row[:4] for row in GOOD],
    "phase so large that the reach wraps": [[8, 1, 2**63 - 1, 1, 0, 0, 0], GOOD[1]],
    "negative sizes": [[-1, 0, 0, 0, 0, 0, 0], [-8, 1, 0, 1, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0]],
}


def test_a_good_geometry_is_taken(isa):
    launch(run.kernels, GOOD)


@pytest.mark.parametrize("table", BAD.values(), ids=BAD)
def test_a_geometry_that_reaches_outside_a_buffer_is_refused(isa, table):
    with pytest.raises(ValueError, match=r"geometry|parameter"):
        launch(run.kernels, table)


def test_buffers_of_unequal_size_are_refused(isa):
    with pytest.raises(ValueError, match="size"):
        launch(run.kernels, GOOD, y=23)


@pytest.mark.parametrize(
    ("real", "op", "x_code", "y_code"),
    [
        ("float32", 0, 12, 6),
        ("float32", 0, -1, 6),
        ("float32", 0, 6, 6),
        ("float32", 0, 0, 7),
        ("float32", 0, 0, 4),
        ("float32", 0, 9, 6),  # narrow, and not the quantized type
        ("float32", 1, 0, 0),
        ("float32", 1, 6, 6),
        ("float32", 1, 6, 4),
        ("float32", 2, 6, 0),
        ("float32", 3, 0, 6),
        ("float32", 4, 0, 6),
        ("float64", 0, 0, 6),
        ("float64", 0, 0, 5),
        ("float64", 3, 5, 7),  # the float64 kernels do not load float16
    ],
)
def test_unknown_codes_are_refused(real, op, x_code, y_code, isa):
    """Buffers of the sizes that the codes stand for, so that nothing but the codes is wrong."""
    sizes = {0: 1, 4: 4, 5: 2, 6: 4, 7: 8, 9: 1, 12: 8, -1: 8}
    x, y = np.zeros(3 * sizes[x_code], np.uint8), np.zeros(3 * sizes[y_code], np.uint8)
    table = np.array([[3] + [0] * (6 if op < 3 else 12)], np.intp).T.copy()
    params = [np.ones(1, real)] * (2 if op < 3 else 4)
    with pytest.raises(ValueError, match=r"code|op|narrow"):
        run_call(run.kernels, settings(op, x_code, 0, y_code), table, x, y, params, (3,))


@pytest.mark.parametrize(
    "bad",
    [
        {"division": 0},
        {"x_code": 11, "q_code": 11, "mini": (9, 3, 7, 126, -1, 127)},
        {"x_code": 11, "q_code": 11, "mini": (8, 7, 7, 126, -1, 127)},
        {"x_code": 11, "q_code": 11, "mini": (8, 3, 127, 126, -1, 127)},
        {"x_code": 11, "q_code": 11, "mini": (8, 3, 7, 2**40, -1, 127)},
        {"x_code": 10, "q_code": 10, "mini": (0, 0, 0, 0, 0, 0)},
        {"x_code": 10, "q_code": 10, "mini": (8, 0, 0, 0, 0, 0)},
        {"mini": ()},
    ],
)
def test_settings_that_no_loop_is_written_for_are_refused(bad, isa):
    table = np.array([[3] + [0] * 6], np.intp).T.copy()
    params = [np.ones(1, np.float32)] * 2
    x, y = np.zeros(3, np.uint8), np.zeros(12, np.uint8)
    run_call(run.kernels, settings(), table, x, y, params, (3,))
    with pytest.raises(ValueError, match=r"settings|division"):
        run_call(run.kernels, settings(**bad), table, x, y, params, (3,))


def test_isa_can_be_forced_and_never_falls_back():
    code = "import chunkq.kernels as k; print(k.ISA)"
    assert python(code, CHUNKQ_ISA="baseline").stdout.strip() == "baseline"
    done = python(code, CHUNKQ_ISA="avx9")
    assert done.returncode != 0
    assert "CHUNKQ_ISA='avx9'" in done.stderr


def test_default_threads_from_the_environment():
    code = "import chunkq.threads as t; print(t.DEFAULT_THREADS)"
    assert python(code, CHUNKQ_NUM_THREADS="5").stdout.strip() == "5"
    assert "CHUNKQ_NUM_THREADS='none'" in python(code, CHUNKQ_NUM_THREADS="none").stderr


def disassembled(module):
    """The machine code of a build, which this CPU need not be able to run."""
    path = find_spec(f"chunkq.kernels.{module}").origin
    return subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True).stdout


needs_objdump = pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() != "x86_64" or os.environ.get("CHUNKQ_DEBUG") == "1",
    reason="looks at optimised x86-64 machine code",
)


@needs_objdump
@pytest.mark.skipif("avx2" not in kernels.built(), reason="this installation has no AVX2 build")
def test_avx2_divides_vectors():
    assert re.search(r"vdivps\s.*%ymm", disassembled("_kernels_avx2"))


@needs_objdump
@pytest.mark.parametrize("build", kernels.built())
def test_nothing_is_fused(build):
    assert not re.search(r"\bvfn?m(add|sub)", disassembled(kernels._MODULES[build]))


# ---- threads and fork (R13)

FORK = """
import os, sys, time
import numpy as np, chunkq
x = np.arange(1 << 22, dtype=np.uint8).reshape(64, -1)
scale = np.linspace(-1, 1, 64, dtype=np.float32)
expected = x.astype(np.float32) * scale[:, None]
def check():
    return np.array_equal(chunkq.dequantize_linear(x, scale, axis=0, n_threads=2), expected)
assert check()
child = os.fork()
if child == 0:
    os._exit(0 if check() and check() else 1)
deadline = time.monotonic() + 5
while time.monotonic() < deadline:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.01)
os.kill(child, 9)
sys.exit("the child hangs")
"""

POOL = """
import multiprocessing
import numpy as np, chunkq
x = np.arange(1 << 22, dtype=np.uint8).reshape(64, -1)
scale = np.linspace(-1, 1, 64, dtype=np.float32)
def work(i):
    y = chunkq.dequantize_linear(x, scale, axis=0, n_threads=2)
    return bool(np.array_equal(y, x.astype(np.float32) * scale[:, None]))
if __name__ == "__main__":
    assert work(0)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map_async(work, range(6)).get(timeout=20) == [True] * 6
    assert work(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork exists on POSIX only")
@pytest.mark.parametrize("code", [FORK, POOL], ids=["fork", "pool"])
def test_forked_children_run_threads_of_their_own(code):
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_eight_threads_on_the_same_arrays(isa):
    def work(i):
        return np.array_equal(chunkq.dequantize_linear(X, SCALE, axis=0, n_threads=i % 3 + 1), Y)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))


def test_beside_another_openmp_library():
    """onnxruntime and numpy bring thread pools of their own; both run between two of ours."""
    code = (
        "import numpy as np, onnxruntime, chunkq\n"
        "x = np.ones((512, 4096), np.uint8)\n"
        "for _ in range(3):\n"
        "    y = chunkq.dequantize_linear(x, 0.5, n_threads=2)\n"
        "    assert float((y[:512, :512] @ y[:512, :512])[0, 0]) == 128.0\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_threads_are_bounded():
    """OpenMP ends the process when the system refuses it one."""
    assert thread_count(10**6, 10**9) <= max(64, available_cpus())
