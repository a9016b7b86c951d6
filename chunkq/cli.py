"""The command line: parse, call, print. stdout carries results, stderr everything else.

Exit code 0: done. 1: the run failed. 2: the request was wrong.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import click

import chunkq
from chunkq.errors import ChunkqError, RunError, SpecError
from chunkq.linear import DequantizeLinear
from chunkq.memory import format_size, keep_memory_flat
from chunkq.ops import FakeQuantize, Operator

INTERRUPTED = 130

Command = Callable[..., None]


class Commands(click.Group):
    """A group that ends every error of chunkq in one line and the right exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecError as error:
            _fail(str(error), 2)
        except (ChunkqError, OSError) as error:
            _fail(str(error), 1)
        except KeyboardInterrupt:
            _fail("interrupted; the target is unfinished (its attribute chunkq.complete is false)", INTERRUPTED)


def _fail(message: str, code: int) -> None:
    click.echo(f"chunkq: {message}", err=True)
    # reads that zarr had not begun when another failed are dropped at exit, each with a traceback nobody asked for
    sys.unraisablehook = lambda _: None
    raise click.exceptions.Exit(code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(chunkq.__version__, prog_name="chunkq")
def main() -> None:
    """Exact linear quantization of tensors that do not fit in memory.

    A parameter (scale, zero point, range) is a number, a comma-separated list, a .npy file, or a zarr array
    (store.zarr/scale).
    """
    keep_memory_flat()
    # zarr reports the first failed read of several; asyncio would print the others as tracebacks at exit
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


# ---- parameters


def _parameter(option: str, text: str | None) -> Any:
    """A parameter from the command line: number, list, .npy file or zarr array."""
    if text is None:
        return None
    try:
        values = [_number(part) for part in text.split(",")]
    except ValueError:
        return _stored_parameter(option, text)
    return values if "," in text else values[0]


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _stored_parameter(option: str, text: str) -> Any:
    if not text.endswith(".npy"):
        from chunkq.store import open_source

        return open_source(text, option)
    import numpy as np

    try:
        return np.array(np.load(text, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise SpecError("argument", f"{option}: {text!r} is not a readable .npy file: {error}") from error


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SpecError("chunks", f"{option} {text!r}: expected integers such as 4,1024,1024") from error


def _lying_on_one_axis(source: Any, scale: Any, zero_point: Any) -> tuple[int | None, Any, Any]:
    """A scale kept at x's rank, (N, 1) for x of (N, K), says itself which axis it lies on; ONNX wants it 1-D."""
    shape = getattr(scale, "shape", ())
    long = [a for a, n in enumerate(shape) if n != 1]
    if not hasattr(scale, "reshape") or len(shape) != len(source.shape) or len(shape) < 2 or len(long) != 1:
        return None, scale, zero_point
    click.echo(f"axis {long[0]}: scale has the shape {shape}", err=True)
    same = hasattr(zero_point, "reshape") and zero_point.shape == shape
    return long[0], scale.reshape(-1), zero_point.reshape(-1) if same else zero_point


def _axis_for(source: Any, scale: Any, axis: int | None) -> int:
    """The axis of a 1-D scale: as given, or the only one it can be. Never a guess."""
    if axis is not None:
        return axis
    length = len(scale) if isinstance(scale, list) else (scale.shape[0] if getattr(scale, "ndim", 0) == 1 else 1)
    if length == 1:
        return 1  # per-tensor: ONNX ignores it
    shape = tuple(source.shape)
    fits = [a for a, n in enumerate(shape) if n == length]
    if len(fits) != 1:
        which = f"axes {' and '.join(map(str, fits))} have that length" if fits else "no axis has that length"
        raise SpecError("axis", f"scale has {length} elements and x the shape {shape}: {which}; pass --axis")
    click.echo(f"axis {fits[0]}: the only one with as many elements as scale ({length})", err=True)
    return fits[0]


# ---- running


def _progress(total: int, wanted: bool) -> AbstractContextManager[Any]:
    """A bar on stderr with rate and time left, where a person is looking."""
    if not wanted or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("units  {task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task("units", total=total, rate="")
    return bar


def run_plan(plan: Any, show_progress: bool) -> Any:
    """Run a plan under a progress bar and return its report."""
    per_unit = (plan.bytes_read + plan.bytes_written) / max(plan.units, 1)
    with _progress(plan.units, show_progress) as bar:
        if bar is None:
            return plan.run()
        task = bar.tasks[0]

        def advance(done: int) -> None:
            elapsed = task.elapsed or 0.0
            rate = f"{done * per_unit / elapsed / 1e9:.2f} GB/s" if elapsed else ""
            bar.update(task.id, completed=done, rate=rate)

        return plan.run(progress=advance)


def report_lines(report: Any) -> str:
    """A report for people."""
    return (
        f"{report.units} units, {format_size(report.bytes_read)} read, {format_size(report.bytes_written)} written "
        f"in {report.seconds:.1f} s ({report.gb_per_second:.2f} GB/s)\n"
        f"peak memory {format_size(report.peak_memory)} measured, {format_size(report.projected_memory)} projected, "
        f"{format_size(report.max_mem)} allowed"
    )


def report_json(report: Any) -> dict[str, Any]:
    """A report for programs."""
    return asdict(report) | {"gb_per_second": report.gb_per_second}


def _go(op: Operator, source: Any, destination: str, options: dict[str, Any]) -> None:
    plan = chunkq.plan(
        op,
        source,
        destination,
        max_mem=options["max_mem"],
        target_chunks=_numbers("--chunks", options["chunks"]),
        target_shards=_numbers("--shards", options["shards"]),
        compressors=options["compressor"],
        overwrite=options["overwrite"],
        missing=options["missing"],
        scheduler=options["scheduler"],
        workers=options["workers"],
    )
    if options["dry_run"]:
        click.echo(plan.to_json() if options["json"] else str(plan))
        return
    if not options["json"]:
        click.echo(str(plan), err=True)
    report = run_plan(plan, not options["no_progress"])
    if options["json"]:
        click.echo(json.dumps({"plan": json.loads(plan.to_json()), "report": report_json(report)}))
    else:
        click.echo(report_lines(report))


# ---- commands

_RUN_OPTIONS = (
    click.option(
        "--max-mem",
        metavar="SIZE",
        help="Resident memory of the whole run, e.g. 2GiB [half of what is free].",
    ),
    click.option(
        "--compressor",
        type=click.Choice(["auto", "none", "zstd", "blosc", "gzip"]),
        default="auto",
        show_default=True,
        help="Codec of DST; a crc32c checksum follows it.",
    ),
    click.option("--chunks", metavar="N,N,...", help="Chunk shape of DST [that of SRC]."),
    click.option("--shards", metavar="N,N,...", help="Shard shape of DST [that of SRC]."),
    click.option("--workers", type=click.IntRange(min=1), help="Units in progress at once [CPUs, as memory allows]."),
    click.option(
        "--scheduler",
        default="auto",
        show_default=True,
        metavar="auto|threads|processes|sync|tcp://...",
        help="How tasks run, or the address of a Dask scheduler.",
    ),
    click.option(
        "--missing",
        type=click.Choice(["error", "fill"]),
        default="error",
        show_default=True,
        help="What objects absent from SRC mean.",
    ),
    click.option("--overwrite", is_flag=True, help="Replace DST if it is a zarr array."),
    click.option("--json", is_flag=True, help="One JSON document on stdout."),
    click.option("--no-progress", is_flag=True, help="No progress bar."),
)


def _unchanged(command: Command) -> Command:
    return command


def _run_options(command: Command) -> Command:
    for option in reversed(_RUN_OPTIONS):
        command = option(command)
    return command


def _add_operators(group: click.Group, *, planning: bool) -> None:
    """The operator commands; in the group `plan` they only print what they would do."""
    dry: Callable[[Command], Command] = _unchanged
    if not planning:
        dry = click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")

    @group.command()
    @click.argument("src")
    @click.argument("dst")
    @click.option("--scale", required=True, metavar="PARAM", help="One for the tensor, one for each index of an axis.")
    @click.option("--zero-point", metavar="PARAM", help="Same shape as the scale [0].")
    @click.option("--axis", type=int, help="Axis of a 1-D scale [the only one of that length].")
    @dry
    @_run_options
    def dequantize(src: str, dst: str, scale: str, zero_point: str | None, axis: int | None, **options: Any) -> None:
        """Write (SRC - zero point) * scale to DST as float32 (ONNX DequantizeLinear)."""
        from chunkq.store import open_source

        source = open_source(src)
        scales = _parameter("--scale", scale)
        zeros = _parameter("--zero-point", zero_point)
        if axis is None:
            axis, scales, zeros = _lying_on_one_axis(source, scales, zeros)
        op = DequantizeLinear(scales, zeros, axis=_axis_for(source, scales, axis))
        _go(op, source, dst, {"dry_run": planning} | options)

    @group.command(name="fake-quantize")
    @click.argument("src")
    @click.argument("dst")
    @click.option("--input-low", required=True, metavar="PARAM")
    @click.option("--input-high", required=True, metavar="PARAM")
    @click.option("--output-low", required=True, metavar="PARAM")
    @click.option("--output-high", required=True, metavar="PARAM")
    @click.option("--levels", required=True, type=int)
    @click.option("--auto-broadcast", type=click.Choice(["numpy", "none", "pdpd"]), default="numpy", show_default=True)
    @click.option("--broadcast-axis", type=int, default=-1, show_default=True, help="For pdpd: the first axis.")
    @dry
    @_run_options
    def fake_quantize(
        src: str,
        dst: str,
        input_low: str,
        input_high: str,
        output_low: str,
        output_high: str,
        levels: int,
        auto_broadcast: str,
        broadcast_axis: int,
        **options: Any,
    ) -> None:
        """Write SRC rounded to LEVELS steps of its range to DST (OpenVINO FakeQuantize-1)."""
        from chunkq.store import open_source

        op = FakeQuantize(
            _parameter("--input-low", input_low),
            _parameter("--input-high", input_high),
            _parameter("--output-low", output_low),
            _parameter("--output-high", output_high),
            levels,
            auto_broadcast=auto_broadcast,
            broadcast_axis=broadcast_axis,
        )
        _go(op, open_source(src), dst, {"dry_run": planning} | options)


_add_operators(main, planning=False)


@main.group()
def plan() -> None:
    """Print what a command would do; write nothing."""


_add_operators(plan, planning=True)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def info(as_json: bool) -> None:
    """Print versions, built and active instruction sets, OpenMP, threads."""
    from importlib.metadata import PackageNotFoundError, version

    from chunkq.kernels import ISA, built, kernels
    from chunkq.kernels._cpu import supported
    from chunkq.threads import DEFAULT_THREADS, available_cpus

    facts: dict[str, Any] = {"chunkq": chunkq.__version__, "python": sys.version.split()[0]}
    for package in ("numpy", "zarr", "dask", "distributed"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    facts |= {
        "instruction_sets_built": list(built()),
        "instruction_sets_of_cpu": list(supported()),
        "instruction_set": ISA,
        "openmp": kernels.OPENMP or None,
        "cpus": available_cpus(),
        "default_threads": DEFAULT_THREADS,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = ", ".join(value) if isinstance(value, list) else ("no" if value is None else value)
        click.echo(f"{name.replace('_', ' '):<24} {shown}")


@main.command()
@click.option(
    "--size",
    default="256MiB",
    show_default=True,
    help="Bytes of the int8 tensor; the result has four times as many.",
)
@click.option("--max-mem", default="512MiB", show_default=True, help="Resident memory of the run.")
@click.option("--keep", type=click.Path(file_okay=False), help="Keep the data in this folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--no-progress", is_flag=True, help="No progress bar.")
def demo(size: str, max_mem: str, keep: str | None, as_json: bool, no_progress: bool) -> None:
    """Dequantize a made-up per-axis int8 tensor under a memory limit and check it against NumPy."""
    from chunkq.demo import Demo

    with Demo(size, max_mem, keep) as run:
        click.echo(f"writing {run.description} to {run.source}", err=True)
        run.write_source()
        plan = run.plan()
        click.echo(str(plan), err=True)
        report = run_plan(plan, not no_progress)
        click.echo("checking every element against NumPy", err=True)
        wrong = run.count_differences()
        if as_json:
            click.echo(json.dumps({"plan": json.loads(plan.to_json()), "report": report_json(report), "wrong": wrong}))
        else:
            click.echo(f"{report_lines(report)}\n{wrong} elements differ from NumPy")
            if keep:
                click.echo(f"kept in {os.path.abspath(keep)}")
    if wrong:
        raise RunError(f"{wrong} elements differ from NumPy")


if __name__ == "__main__":
    main()
