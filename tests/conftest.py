"""Fixtures that several test files share."""

import pytest

from chunkq import kernels, run
from chunkq.kernels._cpu import supported

USABLE = [isa for isa in kernels.built() if isa in supported()]


@pytest.fixture(params=USABLE)
def isa(request, monkeypatch):
    """Every instruction set that was built and that this CPU has, one after the other."""
    module = kernels.load(request.param)
    monkeypatch.setattr(run, "kernels", module)
    monkeypatch.setattr(run, "_RUNNERS", {"float32": module.run_float32, "float64": module.run_float64})
    return request.param
