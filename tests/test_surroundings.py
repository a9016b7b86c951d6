"""What goes on around a run: other Dask work in the program, sources and targets that change, places that are the same."""

import os
import subprocess
import threading
import time

import dask
import numpy as np
import pytest
import zarr

import chunkq
from chunkq.operands import load_npy
from chunkq.places import options_beside, place_of, redacted
from chunkq.target import DOCUMENT

OP = chunkq.DequantizeLinear(0.5)


def write(path, x, **how):
    array = zarr.create_array(str(path), shape=x.shape, dtype=x.dtype, **{"chunks": (1, x.shape[1])} | how)
    array[...] = x
    return str(path)


def nap():
    time.sleep(0.002)
    return 1


def test_other_dask_work_in_the_program_takes_nothing_away(tmp_path):
    """Callbacks in force for all of Dask went to whichever computation began next: a wrong target then verified."""
    source = write(tmp_path / "x.zarr", np.ones((4, 1000), np.int8))
    target = str(tmp_path / "y.zarr")
    chunkq.plan(OP, source, target).run()
    zarr.open_array(target, mode="r+")[:] = 7.0
    stop, strange = threading.Event(), []

    def other():
        while not stop.is_set():
            results = dask.compute(*[dask.delayed(nap, pure=False)() for _ in range(5)], scheduler="threads")
            if results != (1,) * 5:
                strange.append(results)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        found = [len(chunkq.verify(source, target).differing) > 0 for _ in range(15)]
    finally:
        stop.set()
        thread.join()
    assert all(found)
    assert not strange


def test_a_run_inside_a_task_of_a_cluster_in_this_process(tmp_path):
    from distributed import Client, LocalCluster

    source = write(tmp_path / "x.zarr", np.ones((4, 100), np.int8))

    def job():
        return chunkq.plan(OP, source, tmp_path / "y.zarr").run().units_done

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        # the only thread of the only worker does not wait for itself
        assert client.submit(job, pure=False).result(timeout=60) > 0


# ---- what changes


def test_a_source_that_changed_since_the_plan_was_made(tmp_path):
    source = write(tmp_path / "x.zarr", np.int8([[1, 2, 3], [4, 5, 6]]))
    plan = chunkq.plan(OP, source, tmp_path / "y.zarr")
    zarr.create_array(source, data=np.uint8([[200, 201, 202]] * 2), chunks=(1, 3), overwrite=True)
    with pytest.raises(chunkq.SpecError, match=r"changed since the plan was made: source \(another array"):
        plan.run()
    assert not (tmp_path / "y.zarr").exists()


@pytest.mark.parametrize("document", [b"{}", b"x", None])
def test_a_targets_document_that_changed_during_the_run(tmp_path, document):
    source = write(tmp_path / "x.zarr", np.ones((6, 10), np.int8))
    place = tmp_path / "y.zarr" / DOCUMENT

    def spoil(done, units):
        if document is None:
            place.unlink(missing_ok=True)
        else:
            place.write_bytes(document)

    with pytest.raises(chunkq.RunError, match=r"metadata of target .* were changed or removed"):
        chunkq.plan(OP, source, tmp_path / "y.zarr").run(progress=spoil)
    assert (place.read_bytes() if place.exists() else None) == document


@pytest.mark.parametrize("lost", ["scale/c/0", "scale", "data/zarr.json", "data/c/1"])
def test_a_finished_group_gets_back_what_it_lost(tmp_path, lost):
    source = write(tmp_path / "x.zarr", np.float32([[1, 2], [3, 4], [5, 60]]))
    op = chunkq.QuantizeLinear(np.float32([1, 2, 3]), axis=0, output_dtype="int8")
    target = tmp_path / "q.zarr"
    chunkq.plan(op, source, target).run()
    whole = {p.relative_to(target): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    subprocess.run(["rm", "-r", str(target / lost)], check=True)
    chunkq.plan(op, source, target).run()
    assert {p.relative_to(target): p.read_bytes() for p in target.rglob("*") if p.is_file()} == whole
    assert chunkq.verify(source, target).ok


# ---- the same place by another name


def test_one_folder_at_two_places(tmp_path):
    source = write(tmp_path / "a" / "x.zarr", np.ones((2, 3), np.int8))
    (tmp_path / "b").mkdir()
    if subprocess.run(["mount", "--bind", tmp_path / "a", tmp_path / "b"], capture_output=True).returncode:
        pytest.skip("no permission to mount")
    try:
        for target in ("b/x.zarr", "b/x.zarr/inside"):
            with pytest.raises(chunkq.SpecError) as caught:
                chunkq.plan(OP, source, tmp_path / target, overwrite=True)
            assert caught.value.reason == "same_array"
    finally:
        subprocess.run(["umount", tmp_path / "b"], check=True)


def test_a_source_behind_a_cache_is_the_same_array(tmp_path):
    source = write(tmp_path / "x.zarr", np.ones((2, 3), np.int8))
    with pytest.raises(chunkq.SpecError) as caught:
        chunkq.plan(OP, f"simplecache::file://{source}", source, overwrite=True)
    assert caught.value.reason == "same_array"


@pytest.mark.parametrize("url", ["file:///d/run#1.zarr", "file:///d/q?1.zarr", "file://tmp/x.zarr"])
def test_file_urls_name_one_place(url):
    with pytest.raises(chunkq.SpecError, match="host, a query or a fragment"):
        place_of(url, writing=True)


# ---- what is nobody's business


def test_options_go_to_no_server_that_somebody_else_named():
    options = {"key": "secret"}
    known = ["s3://mine/x.zarr", "/local/y.zarr"]
    assert options_beside(known, options, "s3://mine/scale.zarr") == options
    assert options_beside(known, options, "s3://theirs/scale.zarr") is None
    assert options_beside(known, options, "http://mine/scale.zarr") is None
    assert options_beside(["/local"], options, "http://theirs/scale.zarr") is None
    assert options_beside(known, options, "/local/scale.zarr") is None


@pytest.mark.parametrize(
    "url", ["http://user:TOP/SECRET@host/x", "https://host/x.zarr#token=TOP", "s3://u:TOP@b/x?k=TOP"]
)
def test_urls_are_shown_without_secrets(url):
    assert "TOP" not in redacted(f"cannot open {url!r}")


def test_a_pipe_is_no_parameter(tmp_path):
    os.mkfifo(tmp_path / "s.npy")
    with pytest.raises(chunkq.SpecError, match="is not a file"):
        load_npy("scale", str(tmp_path / "s.npy"))
