"""The benchmarks run, and their frame times nothing that is wrong."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import chunkq
from chunkq import workers

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def frame(monkeypatch):
    # last, so that an installed chunkq still comes before a source tree without compiled kernels
    monkeypatch.syspath_prepend(ROOT)
    sys.path.append(sys.path.pop(0))
    return importlib.import_module("benchmarks.frame")


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    # -m finds the benchmarks in the current folder, which the safe path of the other tests leaves out
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)


@pytest.mark.parametrize("suite", ["kernels", "statistics", "pipeline"])
def test_a_tiny_run(suite, tmp_path):
    done = run(suite, "--quick", "--elements", 4096, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["suite"] == suite
    assert result["elements"] == 4096
    cases = {row["case"] for row in result["rows"]}
    assert cases == set(run(suite, "--list").stdout.splitlines())
    timed = {row["case"]: row for row in result["rows"] if row["contender"] == "chunkq"}
    assert set(timed) == cases
    for row in timed.values():
        assert (row["status"], row["ratio"], len(row["times"])) == ("timed", 1.0, 3)
        assert 0 < row["min"] <= row["median"] <= row["max"]
        assert row["cores"] >= 0
    assert all(row["status"] in ("timed", "absent") for row in result["rows"])
    assert all(case in done.stdout for case in cases)
    assert str(ROOT) not in done.stdout + json.dumps(result)


def test_a_tiny_run_of_codecs(tmp_path):
    done = run("codecs", "--quick", "--elements", 4096, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["suite"], result["elements"]) == ("codecs", 4096)
    rows = {(row["case"], row["contender"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 2 * 2 * 9
    assert all((row["status"], len(row["times"])) == ("timed", 3) for row in rows.values())
    for data in "dequantized", "fake-quantized":
        ratios = {c: row["compression_ratio"] for (case, c), row in rows.items() if case == f"{data}, encode"}
        assert ratios["none"] == 1 < ratios["zstd, level 0"]
        assert ratios == {c: row["compression_ratio"] for (case, c), row in rows.items() if case == f"{data}, decode"}
        assert len([line for line in done.stdout.splitlines() if line.startswith(f"| {data} ")]) == 9
    assert str(ROOT) not in done.stdout + json.dumps(result)


def test_a_codec_that_changes_a_bit_is_never_timed(frame):
    codecs = importlib.import_module("benchmarks.codecs")

    class Wrong:
        def encode(self, data):
            return bytes(data)

        def decode(self, data):
            return bytes([data[0] ^ 1]) + data[1:]

    chunk = np.arange(6, dtype=np.float32).reshape(2, 3)
    right, wrong = codecs.Trial((), [chunk]), codecs.Trial((Wrong(),), [chunk])
    both = {name: frame.Contender(t.encode, t.check, facts=t.facts) for name, t in (("right", right), ("wrong", wrong))}
    rows = frame.measure(frame.Case("data, encode", 6, both, moved=24), rounds=3)
    assert [row.status for row in rows] == ["timed", "wrong"]
    assert "chunk 0 does not come back" in codecs.markdown(rows, frame.environment() | {"elements": 6, "rounds": 3}, "")


def test_a_statistic_that_is_off_is_refused(frame):
    statistics = importlib.import_module("benchmarks.statistics")
    case = statistics.sums_case("sums")
    found = chunkq.compare(*statistics.pair((1 << 16,)))
    check = case.contenders["chunkq"].check
    assert check(found) == ""
    found.overall.sums["ab"] = np.nextafter(found.overall.sums["ab"], np.inf)
    with pytest.raises(frame.WrongAnswer, match="differs in 1 of 1"):
        check(found)
    with pytest.raises(frame.WrongAnswer, match="mse is"):
        statistics.close("mse", np.float64([1, 2]))(np.float64([1, 2.000001]))
    expected = np.int64([[5000, 5000, 5000]])
    assert statistics.near(expected)(expected) == ""
    assert "2 of 15,000 values" in statistics.near(expected)(np.int64([[4998, 5002, 5000]]))
    for wrong in ([[5000, 5000, 5001]], [[4980, 5000, 5020]]):
        with pytest.raises(frame.WrongAnswer, match="beyond another edge"):
            statistics.near(expected)(np.int64(wrong))


def test_parameters_beside_onnxruntimes(frame):
    pytest.importorskip("onnxruntime.quantization")
    statistics = importlib.import_module("benchmarks.statistics")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in statistics.differences().splitlines()[7:]]
    assert len(rows) == 2 * 2 * 2
    for codes, method, mine, its, scales, zeros, why in rows:
        assert (int(scales) == int(zeros) == statistics.CHANNELS) == (why == "")
        assert "another reason" not in why
        if method == "minmax":
            assert int(scales) == statistics.CHANNELS
        if method == "minmax" and "symmetric" in codes:
            assert (mine, why) == (its, "")


def test_a_target_with_one_wrong_bit_or_other_codecs_is_refused(frame):
    pipeline = importlib.import_module("benchmarks.pipeline")
    work = pipeline.Work(64, "zstd")
    outcome = pipeline.run_numpy(work)
    assert work.check(outcome) == ""
    target = pipeline.zarr.open_array(work.target)
    target[3, 5] = np.nextafter(target[3, 5], np.float32(np.inf))
    with pytest.raises(frame.WrongAnswer, match="differs in region"):
        work.check(outcome)
    work.clear()
    work.codec = "none"
    work.create_target()
    work.codec = "zstd"
    with pytest.raises(frame.WrongAnswer, match="not the same work"):
        work.check(outcome)


def test_a_pipeline_peer_that_is_missing_is_absent(frame):
    pipeline = importlib.import_module("benchmarks.pipeline")
    there = frame.Contender(lambda: 0)
    assert pipeline.optional("no_such_package_anywhere", there).run is None
    assert pipeline.optional("numpy", there).remark == f"numpy {np.__version__}"


def test_a_tiny_run_of_scale(tmp_path):
    done = run("scale", "--quick", "--elements", 400, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    rows = {row["case"]: row for row in result["rows"]}
    assert [rows[f"planning {n:,} objects"]["items"] for n in (10**3, 10**7)] == [10**3, 10**7]
    assert rows["planning 10,000,000 objects"]["peak_memory"] < 200e6
    for kind in ("sync", "threads", "processes", "cluster"):
        assert rows[f"no-op units, {kind}"]["items"] == 400
        assert rows[f"no-op units, {kind}"]["each"] > 0
    assert rows["no-op units, cluster, one unit a task"]["items"] == 40
    assert rows["listing"]["items"] == 400
    check_paper(rows)
    assert all(case in done.stdout for case in rows)
    assert str(ROOT) not in done.stdout + json.dumps(result)


def check_paper(rows):
    """Real plans up to the first that is refused, and what is computed for them from the other rows."""
    source, target = rows["listing"]["each"], rows["listing, of a target"]["each"]
    planned = rows["1 PB in 64 MiB"]
    assert planned["items"] == planned["units"] == 14_907_321
    assert planned["listing"] == pytest.approx(planned["items"] * (2 * source + target))
    assert planned["bookkeeping"] == workers.bookkeeping_bytes(planned["units"], 2 * planned["items"])
    long = rows["no-op units, threads, one unit a task"]["steady"]
    assert planned["threads"]["on_top"] > planned["listing"] + planned["units"] * long * 0.99
    assert planned["threads"]["work"] == 10**15 / 10**9 / 2
    for case in ("10 PB in 64 MiB", "1 PB in 4 MiB"):
        assert "expected at most 100000000" in rows[case]["refused"]
        assert rows[case]["items"] > 10**8
    assert 0 < rows["naps for 4 MiB, 64 on cluster"]["asleep"] < rows["naps for 4 MiB, 64 on cluster"]["median"]


def test_a_case_that_is_not_there():
    done = run("kernels", "--rows", "nonsense")
    assert done.returncode == 2
    assert "there are: DequantizeLinear" in done.stderr


def contenders(frame, wrong):
    """A right one, and one that is wrong and counts its runs."""
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    runs = []

    def run_wrong():
        runs.append(1)
        return wrong(expected)

    check = frame.exact(expected)
    both = {"chunkq": frame.Contender(expected.copy, check), "peer": frame.Contender(run_wrong, check)}
    return frame.Case("case", 6, both), runs


@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: np.nextafter(y, np.float32(9)),
        lambda y: np.negative(y) * np.float32(-1) * np.where(y == 0, np.float32(-1), np.float32(1)),
        lambda y: y.astype(np.float64),
        lambda y: y[:1],
        lambda y: np.full_like(y, np.nan),
    ],
    ids=["last bit", "sign of zero", "dtype", "shape", "nothing written"],
)
def test_a_wrong_contender_is_never_timed(frame, wrong):
    case, runs = contenders(frame, wrong)
    right, refused = frame.measure(case, rounds=3)
    assert (right.status, len(right.times), right.ratio) == ("timed", 3, 1.0)
    assert (refused.status, refused.times, refused.ratio) == ("wrong", (), None)
    assert refused.remark.startswith("WRONG ANSWER, not timed: ")
    assert len(runs) == 1  # the check's own


def test_a_wrong_chunkq_leaves_no_ratios(frame):
    case, _ = contenders(frame, lambda y: y)
    swapped = dict(zip(("peer", "chunkq"), case.contenders.values(), strict=True))
    swapped["chunkq"] = frame.Contender(lambda: np.zeros(6, np.float32), swapped["peer"].check)
    rows = frame.measure(frame.Case("case", 6, swapped), rounds=3)
    assert [(row.status, row.ratio) for row in rows] == [("timed", None), ("wrong", None)]


def test_an_absent_peer_says_how_to_get_it(frame):
    absent = frame.absent("onnxruntime", ModuleNotFoundError("No module", name="onnxruntime"))
    case = frame.Case("case", 6, {"chunkq": frame.Contender(lambda: 0), "onnxruntime": absent})
    row = frame.measure(case, rounds=3)[1]
    assert row.status == "absent"
    about = {"cpu": "", "cores": 1, "isa": "", "commit": "", "python": "", "versions": {}, "elements": 6, "rounds": 3}
    assert "pip install 'chunkq[bench]'" in frame.markdown([row], about, "")


def test_the_tolerance_is_one_level(frame):
    expected = np.zeros(4, np.float32)
    check = frame.within_one_level(expected, np.float32(0.5))
    assert check(expected) == ""
    assert check(np.array([0, 0, 0, 0.5], np.float32)) == "not exact: 25% of elements differ, by at most one level"
    for wrong in (0.6, np.nan):
        with pytest.raises(frame.WrongAnswer):
            check(np.array([0, 0, 0, wrong], np.float32))


def test_a_slow_peer_bounds_the_rounds_of_its_case_only(frame):
    both = {"chunkq": frame.Contender(lambda: 0), "slow": frame.Contender(lambda: 0)}
    rows = frame.measure(frame.Case("bounded", 6, both, most_rounds=2), rounds=5)
    rows += frame.measure(frame.Case("free", 6, both), rounds=5)
    assert [len(row.times) for row in rows] == [2, 2, 5, 5]
    about = {"cpu": "", "cores": 1, "isa": "", "commit": "", "python": "", "versions": {}, "elements": 6, "rounds": 5}
    assert frame.markdown(rows, about, "").count("2 rounds") == 1  # said once, in the row of chunkq


def test_bytes_moved_are_the_contender_s_own_or_the_case_s(frame):
    both = {"chunkq": frame.Contender(lambda: 0), "half": frame.Contender(lambda: 0, moved=24)}
    rows = frame.measure(frame.Case("case", 6, both, moved=48), rounds=3)
    assert [row.moved for row in rows] == [48, 24]
    row = frame.Row("case", "chunkq", 6, "timed", "", (6e-9,), 1.0, moved=48)
    assert row.rate == "1.000 ns/element, 8.00 GB/s"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc/stat")
def test_what_others_keep_busy_is_told(frame):
    load = frame.OtherLoad()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.5)
        found = load.cpus()
    finally:
        other.kill()
        other.wait()
    assert found > 0.3  # nearly 1, less on a machine that is full already
    row = frame.Row("case", "chunkq", 6, "timed", "", (1.0,), 1.0, None, 1.0, facts={"other_cpus": found})
    about = {"cpu": "", "cores": 1, "isa": "", "commit": "", "python": "", "versions": {}, "elements": 6, "rounds": 3}
    assert "other processes kept" in frame.markdown([row], about, "")


def test_a_table_and_a_summary_of_some_contenders(tmp_path, frame, monkeypatch):
    files = ["--json", tmp_path / "out.json", "--markdown", tmp_path / "out.md"]
    done = run("kernels", "--quick", "--rows", "per axis", "--only", "numpy", *files)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["chunkq", "NumPy"]
    assert "per axis, small call" in (tmp_path / "out.md").read_text()
    done = run("kernels", "--quick", "--rows", "small", "--only", "nonsense")
    assert done.returncode == 2
    assert "--only nonsense" in done.stderr

    summary = importlib.import_module("benchmarks.summary")
    monkeypatch.setattr(summary, "RESULTS", tmp_path / "RESULTS.md")
    summary.RESULTS.write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
    done = run("kernels", "--quick", "--rows", "small", "--json", tmp_path / "out.json")
    assert summary.main([str(tmp_path / "out.json")]) == 0
    text = summary.RESULTS.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| DequantizeLinear uint8, small call | NumPy |" in text


def test_what_is_aimed_at_is_judged(frame):
    aims = {"peer": frame.Contender(None, target=2.0), "copy": frame.Contender(None, moved=80, share=0.5)}
    assert frame._aim(aims["peer"], 2.5, 40) == ">= 2 x: met"
    assert frame._aim(aims["peer"], 1.5, 40) == ">= 2 x: MISSED"
    assert frame._aim(aims["copy"], 1.0, 40) == "50% of its bytes/s, >= 50%: met"
    assert frame._aim(aims["copy"], 0.9, 40) == "45% of its bytes/s, >= 50%: MISSED"
    with pytest.raises(KeyError, match="no such contenders: other"):
        frame.aiming(aims, other=1.0)
