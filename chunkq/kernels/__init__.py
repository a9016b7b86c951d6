"""Picks one build of the kernels, once per process.

A build is chosen by what _cpu reports, never by importing to find out: an instruction the CPU lacks kills the process.
``CHUNKQ_ISA`` forces one; forcing what is not there is an error, never a fallback.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

from chunkq.errors import SpecError
from chunkq.kernels._cpu import supported

_MODULES = {"baseline": "_kernels", "avx2": "_kernels_avx2"}


def built() -> tuple[str, ...]:
    """Name the instruction sets this installation was built for, best last."""
    return tuple(isa for isa, name in _MODULES.items() if importlib.util.find_spec(f"{__name__}.{name}"))


def _choose() -> str:
    usable = [isa for isa in built() if isa in supported()]
    forced = os.environ.get("CHUNKQ_ISA")
    if not forced:
        return usable[-1]
    if forced not in usable:
        raise SpecError(
            "isa",
            f"CHUNKQ_ISA={forced!r}: this build has {', '.join(built())} and this CPU runs "
            f"{', '.join(supported())}; unset it or choose one of {', '.join(usable)}",
        )
    return forced


def load(isa: str) -> ModuleType:
    """Import the build for one instruction set; the caller vouches that the CPU has it."""
    return importlib.import_module(f"{__name__}.{_MODULES[isa]}")


#: The instruction set in use, and the module that has it.
ISA = _choose()
kernels = load(ISA)
