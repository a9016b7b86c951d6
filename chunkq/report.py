"""A plan and a report: what a run would do and what it did, for people and programs. Making them is in job.py.

Imports spec, memory, layout and workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from chunkq.memory import format_size
from chunkq.spec import FORMULAS, QuantSpec, Shape
from chunkq.workers import Memory

#: Called with the number of units done so far, those of earlier runs included, and the number of all.
Progress = Callable[[int, int], None]

#: What a plan finds where the target is to be, and does about it.
STATES = {
    "new": "",
    "unfinished": "there, unfinished, of this job by its metadata: if the source's objects are the same, the rest is done",
    "finished": "there, finished, of this job by its metadata: if the source's objects are the same, nothing to do",
    "other": "there, of another job: will be replaced",
}


def counted(number: int, thing: str) -> str:
    """A number of things: 1 unit, 2 units."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


@dataclass(frozen=True)
class Report:
    """What a run did.

    Attributes
    ----------
    units, units_done : int
        Tasks in all, and those that this run did; the others had been done before.
    bytes_read, bytes_written : int
        By this run, uncompressed.
    seconds : float
        Wall time of the run, start-up of workers included.
    peak_memory, projected_memory, max_mem : int
        Measured peak resident bytes of the process tree (on a cluster: of the worker with the highest), what the plan
        foretold, and the limit.
    missing_objects : int
        Stored objects (and chunks inside shards) that the inputs lack and that were taken as their fill value.
    compared : tuple of str
        By what the inputs' stored objects were told from rewritten ones: "key", "size", "mtime", "etag".
    """

    units: int
    units_done: int
    bytes_read: int
    bytes_written: int
    seconds: float
    peak_memory: int
    projected_memory: int
    max_mem: int
    missing_objects: int
    compared: tuple[str, ...]

    @property
    def gb_per_second(self) -> float:
        """Rate of bytes read and written, in 10**9 bytes a second."""
        return (self.bytes_read + self.bytes_written) / max(self.seconds, 1e-9) / 1e9

    def __str__(self) -> str:
        size = format_size
        if not self.units_done:
            return f"nothing to do: {counted(self.units, 'unit')} there already"
        done = counted(self.units_done, "unit")
        if self.units_done < self.units:
            done += f" ({self.units - self.units_done} of {self.units} had been done before)"
        lines = [
            f"{done}, {size(self.bytes_read)} read, {size(self.bytes_written)} written "
            f"in {self.seconds:.1f} s ({self.gb_per_second:.2f} GB/s)",
            f"peak memory {size(self.peak_memory)} measured, {size(self.projected_memory)} projected, "
            f"{size(self.max_mem)} allowed",
        ]
        if self.missing_objects:
            lines.append(f"missing from the inputs and taken as fill value: {counted(self.missing_objects, 'object')}")
        if self.compared == ("key",):
            lines.append("the store tells neither sizes nor times: a source rewritten meanwhile would not be noticed")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Give the report as one JSON document; sizes are bytes."""
        return json.dumps(asdict(self) | {"gb_per_second": self.gb_per_second})


@dataclass(frozen=True)
class Plan:
    """A run that has not begun: what `print` shows is what `run` will do.

    Attributes
    ----------
    spec : QuantSpec
        The operation.
    source, target : str
        Where from and where to.
    source_chunks, source_shards, chunks, shards : tuple of int or None
        Layouts of source and target.
    codecs : str
        The target's.
    unit_shape : tuple of int
        Elements one task computes, at most.
    units : int
        How many tasks.
    bytes_read, bytes_written : int
        Uncompressed.
    source_reads : float
        How many times each chunk of the source is decoded, where the grids do not match.
    scheduler : str
        "threads", "processes", "sync" or "cluster".
    memory : Memory
        The projected peak and its terms.
    max_mem : int
        The limit, in bytes.
    state : str
        What is there already: a key of `STATES`.
    notes : tuple of str
        What the user should know before running.
    """

    spec: QuantSpec
    source: str
    target: str
    source_chunks: Shape
    source_shards: Shape | None
    chunks: Shape
    shards: Shape | None
    codecs: str
    unit_shape: Shape
    units: int
    bytes_read: int
    bytes_written: int
    source_reads: float
    scheduler: str
    memory: Memory
    max_mem: int
    state: str
    notes: tuple[str, ...]
    _run: Callable[[Plan, Progress | None, Any], Report]

    def __str__(self) -> str:
        spec, size = self.spec, format_size
        what = "each worker" if self.scheduler == "cluster" else "whole run"
        workers = f"{self.memory.workers} ({self.scheduler}), 1 thread each"
        if self.scheduler == "cluster":
            workers = f"those of the cluster, {counted(self.memory.workers, 'unit')} at a time each"
        levels = f"; levels = {spec.levels}" if spec.op == "FakeQuantize" else ""
        source = f"{spec.x_dtype} {spec.shape}, {_layout(self.source_chunks, self.source_shards)}"
        lines = [
            ("operator", spec.op),
            ("formula", FORMULAS[spec.op] + levels),
            ("granularity", spec.granularity),
            ("source", f"{self.source}: {source}"),
            ("target", f"{self.target}: {spec.y_dtype} {spec.shape}, {_layout(self.chunks, self.shards)}"),
            ("codecs", self.codecs),
            ("units", f"{self.units} of {self.unit_shape}"),
            ("bytes", f"{size(self.bytes_read)} read, {size(self.bytes_written)} written (uncompressed)"),
            ("workers", workers),
            ("memory", f"{size(self.memory.total)} projected peak, {size(self.max_mem)} allowed ({what})"),
        ]
        if self.source_reads > 1:
            lines.append(("re-reading", f"each source object is decoded {self.source_reads:.2f} times on average"))
        if STATES[self.state]:
            lines.append(("target is", STATES[self.state]))
        lines += [("note", note) for note in self.notes]
        return "\n".join(f"{name:<12} {text}" for name, text in lines)

    def to_json(self) -> str:
        """Give the plan as one JSON document; the sizes are bytes."""
        spec = self.spec
        fields = {
            "operator": spec.op,
            "formula": FORMULAS[spec.op],
            "axis": spec.axis,
            "granularity": spec.granularity,
            "levels": spec.levels if spec.op == "FakeQuantize" else None,
            "source": self.source,
            "target": self.target,
            "shape": spec.shape,
            "source_dtype": spec.x_dtype,
            "target_dtype": spec.y_dtype,
            "source_chunks": self.source_chunks,
            "source_shards": self.source_shards,
            "chunks": self.chunks,
            "shards": self.shards,
            "codecs": self.codecs,
            "unit_shape": self.unit_shape,
            "units": self.units,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "source_reads": self.source_reads,
            "scheduler": self.scheduler,
            "workers": self.memory.workers,
            "threads_per_worker": 1,
            "projected_memory": self.memory.total,
            "max_mem": self.max_mem,
            "state": self.state,
            "notes": self.notes,
        }
        return json.dumps(fields)

    def run(self, *, client: Any = None, progress: Progress | None = None) -> Report:
        """Carry the plan out, or carry on with it: units whose objects exist are not done again.

        Ctrl-C takes effect when the next unit is done; a second one at once.

        Parameters
        ----------
        client : distributed.Client, optional
            The cluster to run on, whatever the plan says of a scheduler; its workers must have the memory for the units.
        progress : callable, optional
            Called with the number of finished units, and of all, after each one; short units come several at a time.

        Raises
        ------
        RunError
            A unit failed, the inputs lack objects or were rewritten, or another run is at this target; the message says
            which. What is done stays done: run it again to continue.
        SpecError
            Reasons ``target_exists`` (the target is another job's), and with a client ``max_mem`` and ``scheduler``.
        """
        return self._run(self, progress, client)


def _layout(chunks: Shape, shards: Shape | None) -> str:
    return f"chunks {chunks}" + (f", shards {shards}" if shards else "")
