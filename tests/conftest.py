"""Fixtures that several test files share."""

import os

import pytest

from chunkq import kernels, ops, run
from chunkq.kernels._cpu import supported

# Subprocesses must import the installed package, not a source folder that happens to be the current one.
os.environ["PYTHONSAFEPATH"] = "1"

USABLE = [isa for isa in kernels.built() if isa in supported()]


@pytest.fixture(params=USABLE)
def isa(request, monkeypatch):
    """Every instruction set that was built and that this CPU has, one after the other."""
    module = kernels.load(request.param)
    monkeypatch.setattr(run, "kernels", module)
    ops._kept.cache_clear()  # operators that hold calls of another instruction set
    return request.param


@pytest.fixture(scope="session")
def run_region():
    """Call with operator, x, region: the region alone, its parameters cut as the Dask and zarr tasks cut them."""

    def run_one(op, x, region, n_threads=1):
        spec, params = op.bind(x.shape, x.dtype.name)
        cut = tuple(value[param.own_region(region)] for param, value in zip(spec.params, params, strict=True))
        start = tuple(part.start for part in region)
        return run.run_chunk(spec, x[region], cut, start=start, n_threads=n_threads)

    return run_one
