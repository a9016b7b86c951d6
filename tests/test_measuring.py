"""calibrate, quantize with what was found, and compare from the command line; a calibration kept in zarr."""

import json

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from test_calibrate import KINDS, SHAPE, same, values

import chunkq
from chunkq.cli import main
from chunkq.store import CALIBRATION, COMPLETE


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = values(SHAPE, odd=False)
    zarr.create_array("x.zarr", data=x, chunks=(2, 5, 8))
    return tmp_path


def run(*arguments, code=0):
    """What a command prints on stdout; on an error, its one line on stderr."""
    result = CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.stderr
    return result.stdout if code == 0 else result.stderr


# ---- kept


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("method", ["minmax", "percentile"])
def test_what_is_kept_comes_back(kind, method):
    found = chunkq.calibrate(values(SHAPE), method=method, percentile=99.5, bins=16, **kind)
    found.to_zarr("kept.zarr")
    back = chunkq.open_calibration("kept.zarr")
    same(found, back)
    assert (back.percentile, back.x_dtype) == (99.5, "float32")
    with pytest.raises(chunkq.SpecError) as caught:
        found.to_zarr("kept.zarr")
    assert caught.value.reason == "target_exists"
    other = chunkq.calibrate(values((3,)), axis=0)
    other.to_zarr("kept.zarr", overwrite=True)
    same(chunkq.open_calibration("kept.zarr"), other)


def test_only_calibrations_are_replaced(folder):
    found = chunkq.calibrate(values(SHAPE))
    before = sorted(str(p) for p in folder.rglob("*"))
    for place in ("x.zarr", "x.zarr/inner", "."):
        with pytest.raises(chunkq.SpecError):
            found.to_zarr(place, overwrite=True)
    assert sorted(str(p) for p in folder.rglob("*")) == before
    found.to_zarr("kept.zarr")
    (folder / "kept.zarr" / "notes.txt").write_text("mine")
    with pytest.raises(chunkq.SpecError, match=r"notes\.txt"):
        found.to_zarr("kept.zarr", overwrite=True)
    assert (folder / "kept.zarr" / "notes.txt").exists()


DAMAGE = [
    ({"shape": [6, 5]}, "metadata"),
    ({"steps": [2, 0, 0]}, "metadata"),
    ({"steps": [-1, 0, 0]}, "metadata"),
    ({"method": "other"}, "metadata"),
    ({"shape": "x"}, "metadata"),
    ({"peak_memory": None}, "metadata"),
]


@pytest.mark.parametrize(("changes", "reason"), DAMAGE, ids=str)
def test_damaged_calibrations(changes, reason):
    chunkq.calibrate(values(SHAPE), axis=0).to_zarr("kept.zarr")
    group = zarr.open_group("kept.zarr")
    group.attrs[CALIBRATION] = group.attrs[CALIBRATION] | changes
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.open_calibration("kept.zarr")
    assert caught.value.reason == reason


def test_what_is_no_calibration(folder):
    for place in ("x.zarr", "none.zarr"):
        with pytest.raises(chunkq.SpecError) as caught:
            chunkq.open_calibration(place)
        assert caught.value.reason == "source"
    chunkq.calibrate(values(SHAPE), axis=0, method="mse").to_zarr("kept.zarr")
    group = zarr.open_group("kept.zarr")
    group.attrs[COMPLETE] = False
    with pytest.raises(chunkq.SpecError, match="unfinished"):
        chunkq.open_calibration("kept.zarr")
    group.attrs[COMPLETE] = True
    chunkq.open_calibration("kept.zarr")
    for name in ("minimum", "count", "histogram"):  # a fill value is no answer
        (lost,) = (path for path in (folder / "kept.zarr" / name / "c").rglob("*") if path.is_file())
        content = lost.read_bytes()
        lost.unlink()
        with pytest.raises(chunkq.SpecError, match=f"damaged: {name} .* lacks 1 stored"):
            chunkq.open_calibration("kept.zarr")
        lost.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(chunkq.SpecError, match="damaged"):
            chunkq.open_calibration("kept.zarr")
        lost.write_bytes(content)


@pytest.mark.parametrize(("name", "value"), [("minimum", 99), ("maximum", np.nan), ("count", -1), ("histogram", 5)])
def test_numbers_that_no_calibration_finds(name, value):
    chunkq.calibrate(values(SHAPE), axis=0, method="mse").to_zarr("kept.zarr")
    array = zarr.open_array(f"kept.zarr/{name}")
    array[...] = np.full(array.shape, value, array.dtype)
    with pytest.raises(chunkq.SpecError, match="damaged"):
        chunkq.open_calibration("kept.zarr")


def test_a_shape_that_is_only_declared_takes_no_memory(folder):
    chunkq.calibrate(values(SHAPE), axis=0).to_zarr("kept.zarr")
    group = zarr.open_group("kept.zarr")
    group.attrs[CALIBRATION] = group.attrs[CALIBRATION] | {"shape": [10**15, 5, 8]}
    for document in (folder / "kept.zarr").glob("*/zarr.json"):
        found = json.loads(document.read_text())
        found["shape"][0] = 10**15
        document.write_text(json.dumps(found))
    with pytest.raises(chunkq.SpecError, match="lacks"):
        chunkq.open_calibration("kept.zarr")


def test_an_unfinished_one_is_made_again():
    found = chunkq.calibrate(values(SHAPE))
    found.to_zarr("kept.zarr")
    zarr.open_group("kept.zarr").attrs[COMPLETE] = False
    found.to_zarr("kept.zarr")
    same(chunkq.open_calibration("kept.zarr"), found)


def test_files_of_others_are_not_removed(folder):
    mine = folder / "photos" / f"cat.{'0' * 32}.partial"
    mine.parent.mkdir()
    mine.write_text("a cat")
    chunkq.calibrate(values(SHAPE)).to_zarr("photos")
    assert mine.read_text() == "a cat"


def test_a_report_that_cannot_be_written_leaves_the_old_one(folder, monkeypatch):
    pytest.importorskip("matplotlib")
    run("compare", "x.zarr", "x.zarr", "--html", "r.html")
    before = (folder / "r.html").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    result = CliRunner().invoke(main, ["compare", "x.zarr", "x.zarr", "--html", "r.html", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["overall"]["mse"] == 0
    assert (folder / "r.html").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["r.html", "x.zarr"]


# ---- the loop


def test_calibrate_quantize_dequantize_compare():
    x = zarr.open_array("x.zarr")[:]
    told = run("calibrate", "x.zarr", "--axis", "1", "--method", "percentile", "--percentile", "99", "-o", "p.zarr")
    assert "5 channels along axis 1 of float32 (6, 5, 8)" in told
    assert "240 finite" in told
    expected = chunkq.calibrate(x, axis=1, method="percentile", percentile=99)
    same(chunkq.open_calibration("p.zarr"), expected)
    run("quantize", "x.zarr", "q.zarr", "--params", "p.zarr", "--dtype", "int8")
    op = chunkq.QuantizeLinear(**expected.arguments("int8"))
    np.testing.assert_array_equal(zarr.open_array("q.zarr/data")[:], op(x))
    run("dequantize", "q.zarr", "y.zarr")
    found = json.loads(run("compare", "x.zarr", "q.zarr", "--json"))
    again = json.loads(run("compare", "x.zarr", "y.zarr", "--axis", "1", "--json"))
    assert found["axis"] == 1
    for name in ("compared", "max_abs_error", "mse", "sqnr_db", "cosine"):
        assert found["overall"][name] == again["overall"][name]
        assert found["channels"][name] == again["channels"][name]
    mine = chunkq.compare(x, zarr.open_array("y.zarr")[:], axis=1)
    assert found["channels"]["mse"] == mine.channels.mse.tolist()
    assert found["peak_memory"] <= found["projected_memory"]
    assert "SQNR" in run("compare", "x.zarr", "q.zarr")


@pytest.mark.parametrize("how", [("--symmetric",), ("--asymmetric",), ("--asymmetric", "--narrow-range")], ids=str)
@pytest.mark.parametrize("where", ["", "--axis 2", "--axis 1 --block-size 2", "--block-size 2,5,3"])
def test_quantize_that_calibrates_first(how, where):
    where = where.split()
    x = zarr.open_array("x.zarr")[:]
    run("quantize", "x.zarr", "q.zarr", "--calibrate", "minmax", "--dtype", "int4", *how, *where)
    kind = {}
    if "--axis" in where:
        kind["axis"] = int(where[1])
    if "--block-size" in where:
        sizes = tuple(map(int, where[-1].split(",")))
        kind["block_size"] = sizes if len(sizes) > 1 else sizes[0]
    symmetric = {"symmetric": how[0] == "--symmetric", "narrow_range": "--narrow-range" in how}
    op = chunkq.QuantizeLinear(**chunkq.calibrate(x, **kind).arguments("int4", **symmetric))
    np.testing.assert_array_equal(zarr.open_array("q.zarr/data")[:], op(x).astype(np.int8))


def test_a_report(folder):
    pytest.importorskip("matplotlib")
    run("quantize", "x.zarr", "q.zarr", "--calibrate", "minmax", "--axis", "0", "--dtype", "int8")
    run("compare", "x.zarr", "q.zarr", "--html", "r.html", "--png", "figures")
    text = (folder / "r.html").read_text()
    assert "of channel " in text
    assert "the 256 values that the quantized tensor can take" in text
    assert (folder / "figures" / "histogram.png").read_bytes().startswith(b"\x89PNG")
    # without an operator there is no grid, and one channel without an axis
    run("compare", "x.zarr", "x.zarr", "--html", "same.html")
    assert "No element differs" in (folder / "same.html").read_text()


WRONG = [
    (("calibrate", "none.zarr"), "none.zarr"),
    (("calibrate", "x.zarr", "--axis", "a"), "--axis 'a'"),
    (("calibrate", "x.zarr", "--axis", "3"), "axis=3"),
    (("calibrate", "x.zarr", "--percentile", "3", "--method", "percentile"), "percentile=3"),
    (("calibrate", "x.zarr", "--percentile", "99", "--method", "mse"), "--percentile goes with"),
    (("calibrate", "x.zarr", "--bins", "64"), "--bins goes with"),
    (("calibrate", "x.zarr", "--scheduler", "bogus"), "scheduler='bogus'"),
    (("calibrate", "x.zarr", "-o", "p.zarr/minimum", "--overwrite"), "p.zarr/minimum"),
    (("calibrate", "x.zarr", "-o", "p.zarr/more"), "which chunkq wrote"),
    (
        ("quantize", "x.zarr", "p.zarr/minimum", "--params", "p.zarr", "--dtype", "int8", "--overwrite"),
        "which chunkq wrote",
    ),
    (("quantize", "x.zarr", "q.zarr", "--scale", "1", "--dtype", "int8", "--narrow-range"), "--narrow-range goes with"),
    (
        ("quantize", "x.zarr", "q.zarr", "--scale", "1", "--dtype", "int8", "--asymmetric"),
        "--symmetric/--asymmetric goes",
    ),
    (
        ("quantize", "x.zarr", "q.zarr", "--params", "p.zarr", "--dtype", "int8", "--bins", "4"),
        "--bins is for calibrating",
    ),
    (("compare", "x.zarr", "x.zarr", "--html", "x.zarr/zarr.json"), "ends in .html"),
    (("compare", "x.zarr", "x.zarr", "--html", "x.zarr/r.html"), "lies inside"),
    (("compare", "x.zarr", "x.zarr", "--png", "x.zarr"), "lies inside"),
    (("compare", "x.zarr", "x.zarr", "--png", "/dev/null/none"), "not a writable folder"),
    (("calibrate", "x.zarr", "-o", "x.zarr"), "no calibration"),
    (("calibrate", "x.zarr", "--max-mem", "1MiB"), "max_mem"),
    (("quantize", "x.zarr", "q.zarr", "--params", "none.zarr", "--dtype", "int8"), "none.zarr"),
    (("quantize", "x.zarr", "q.zarr", "--params", "p.zarr"), "--dtype is missing"),
    (("quantize", "x.zarr", "q.zarr", "--params", "p.zarr", "--dtype", "int8", "--scale", "1"), "--scale and --params"),
    (("quantize", "x.zarr", "q.zarr", "--params", "p.zarr", "--dtype", "int8", "--axis", "1"), "--axis and --params"),
    (
        ("quantize", "x.zarr", "q.zarr", "--params", "p.zarr", "--dtype", "int8", "--calibrate", "mse"),
        "--params and --cal",
    ),
    (("quantize", "x.zarr", "q.zarr", "--params", "other.zarr", "--dtype", "int8"), "shape (4, 6)"),
    (
        ("quantize", "x.zarr", "q.zarr", "--calibrate", "minmax", "--dtype", "int8", "--zero-point", "1"),
        "--zero-point and",
    ),
    (("compare", "x.zarr", "none.zarr"), "none.zarr"),
    (("compare", "x.zarr", "small.zarr"), "shape"),
    (("compare", "x.zarr", "x.zarr", "--html", "no/such/r.html"), "no/such"),
    (("compare", "x.zarr", "codes.zarr"), "int8"),
]


@pytest.mark.parametrize(
    ("arguments", "part"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_bad_requests_give_one_clear_line_and_leave_nothing(folder, arguments, part):
    chunkq.calibrate(values(SHAPE)).to_zarr("p.zarr")
    chunkq.calibrate(values((4, 6))).to_zarr("other.zarr")
    zarr.create_array("small.zarr", data=values((4, 6)))
    zarr.create_array("codes.zarr", data=np.ones(SHAPE, np.int8))
    before = sorted(str(p) for p in folder.rglob("*"))
    said = run(*arguments, code=2)
    assert said.startswith("chunkq: ")
    assert said.count("\n") == 1
    assert part in said
    assert sorted(str(p) for p in folder.rglob("*")) == before


def test_an_interrupted_calibration_keeps_nothing(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("chunkq.calibrating.calibrate", interrupted)
    assert "nothing was kept" in run("calibrate", "x.zarr", "-o", "kept.zarr", code=130)


def test_workers_of_a_cluster_without_the_memory_are_not_asked():
    from distributed import Client, LocalCluster

    zarr.create_array("wide.zarr", data=values((4096, 8), odd=False), chunks=(64, 8))
    how = {"n_workers": 1, "threads_per_worker": 1, "memory_limit": "400MiB", "host": "127.0.0.1"}
    with LocalCluster(**how, dashboard_address="127.0.0.1:0") as cluster, Client(cluster) as client:
        with pytest.raises(chunkq.SpecError, match="worker of the cluster may use 400 MiB"):
            chunkq.calibrate("wide.zarr", axis=0, method="mse", bins=8192, scheduler=client)
        chunkq.calibrate("wide.zarr", axis=0, method="mse", bins=64, scheduler=client)


def test_states_count_without_a_limit_too(monkeypatch):
    monkeypatch.setattr("chunkq.survey.available", lambda: 1 << 30)
    with pytest.raises(chunkq.SpecError, match="max_mem=512 MiB is too little: what is kept of the groups takes"):
        chunkq.calibrate("x.zarr", axis=(0, 1, 2), method="mse", bins=1 << 20)
