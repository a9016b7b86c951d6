"""The data of `chunkq demo`: a per-axis int8 tensor on disk, and the check of its result."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import numpy as np

from chunkq import grid
from chunkq.errors import SpecError
from chunkq.linear import DequantizeLinear
from chunkq.memory import format_size, parse_size
from chunkq.planning import plan
from chunkq.report import Plan
from chunkq.store import open_source
from chunkq.target import create_source

COLUMNS = 4096
CHUNK = (1024, 4096)  # 4 MiB of int8


class Demo:
    """Holds the folder; a context manager that removes it again.

    Parameters
    ----------
    size : int or str
        Bytes of the int8 tensor.
    max_mem : int or str
        Limit of the run.
    keep : str, optional
        Folder to use and keep; it must not hold the demo's arrays yet.
    """

    def __init__(self, size: int | str, max_mem: int | str, keep: str | None = None) -> None:
        self.max_mem = parse_size(max_mem)
        self.rows = max(1, parse_size(size, "size") // COLUMNS)
        self.keep = keep
        self.folder = ""
        # float32 weights of a layer spread differently from row to row; so do their scales
        rng = np.random.default_rng(0)
        self.scale = (np.abs(rng.standard_normal(self.rows)) * 0.01 + 1e-4).astype(np.float32)
        self.zero_point = rng.integers(-8, 8, self.rows, np.int8)

    def __enter__(self) -> Demo:
        needed = self.rows * COLUMNS * 5
        parent = self.keep or tempfile.gettempdir()
        if self.keep:
            os.makedirs(self.keep, exist_ok=True)
            taken = [name for name in ("weights_int8.zarr", "weights.zarr") if name in os.listdir(self.keep)]
            if taken:
                raise SpecError(
                    "target_exists", f"--keep {self.keep!r} holds {taken[0]} already; choose another folder"
                )
        if shutil.disk_usage(parent).free < needed:
            raise SpecError("target", f"{parent!r} has less than {format_size(needed)} free; pass a smaller --size")
        self.folder = self.keep or tempfile.mkdtemp(prefix="chunkq-demo-")
        return self

    def __exit__(self, *_: Any) -> None:
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def source(self) -> str:
        """Path of the int8 tensor."""
        return os.path.join(self.folder, "weights_int8.zarr")

    @property
    def target(self) -> str:
        """Path of the float32 result."""
        return os.path.join(self.folder, "weights.zarr")

    @property
    def description(self) -> str:
        """The tensor in words."""
        return f"int8 {(self.rows, COLUMNS)}, {format_size(self.rows * COLUMNS)}, one scale and zero point a row"

    def write_source(self) -> None:
        """Write the tensor, chunk by chunk: bell-shaped values, as weights are."""
        array = create_source(self.source, (self.rows, COLUMNS), CHUNK, "int8", ("row", "column"))
        rng = np.random.default_rng(1)
        for region in grid.regions((self.rows, COLUMNS), CHUNK):
            shape = tuple(part.stop - part.start for part in region)
            normal = rng.standard_normal(shape, np.float32) * 32.0
            array[region] = np.clip(np.rint(normal), -128, 127).astype(np.int8)

    def plan(self) -> Plan:
        """Plan the dequantization under the limit."""
        op = DequantizeLinear(self.scale, self.zero_point, axis=0)
        return plan(op, self.source, self.target, max_mem=self.max_mem, scheduler="auto")

    def count_differences(self) -> int:
        """Compare every element with the NumPy formula, chunk by chunk."""
        x, y = open_source(self.source), open_source(self.target, "target")
        wrong = 0
        for region in grid.regions(x.shape, CHUNK):
            rows = region[0]
            codes = np.asarray(x[region]).astype(np.int32) - self.zero_point[rows, None].astype(np.int32)
            expected = codes.astype(np.float32) * self.scale[rows, None]
            found = np.asarray(y[region])
            wrong += int(np.count_nonzero(found.view(np.uint32) != expected.view(np.uint32)))
        return wrong
