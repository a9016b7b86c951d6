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
from chunkq.arguments import agreeing, linear_arguments, numbers, read_parameter
from chunkq.errors import ChunkqError, RunError, SpecError
from chunkq.linear import DequantizeLinear, QuantizeLinear
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
        target_chunks=numbers("--chunks", options["chunks"]),
        target_shards=numbers("--shards", options["shards"]),
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
    click.option("--overwrite", is_flag=True, help="Replace DST if it is a zarr array, or a group of chunkq's."),
    click.option("--json", is_flag=True, help="One JSON document on stdout."),
    click.option("--no-progress", is_flag=True, help="No progress bar."),
)


_LINEAR_OPTIONS = (
    click.option("--scale", metavar="PARAM", help="One for the tensor, one for each index of an axis or each block."),
    click.option("--zero-point", metavar="PARAM", help="Same shape as the scale [0]."),
    click.option("--axis", type=int, help="Axis of a 1-D scale or of the blocks [the only one that fits]."),
    click.option("--block-size", metavar="N[,N,...]", help="Blocks along the axis, or a size for each axis."),
    click.option("--x-dtype", metavar="DTYPE", help="What SRC holds, if it is stored as integers: float8_e4m3fn, ..."),
    click.option("--scale-dtype", metavar="DTYPE", help="The same for the scale: float8_e8m0fnu, ..."),
)


def _linear_options(command: Command) -> Command:
    for option in reversed(_LINEAR_OPTIONS):
        command = option(command)
    return command


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
    @_linear_options
    @click.option("--output-dtype", metavar="DTYPE", help="float32, float16 or bfloat16 [that of scale].")
    @dry
    @_run_options
    def dequantize(src: str, dst: str, output_dtype: str | None, **options: Any) -> None:
        """Write (SRC - zero point) * scale to DST (ONNX DequantizeLinear).

        SRC is a zarr array, or a group that `chunkq quantize` wrote, which brings its own parameters.
        """
        from chunkq.metadata import open_quantized

        opened = open_quantized(src, output_dtype)
        if opened is not None:
            source, op = opened
            agreeing(source, op, options)
        else:
            source, arguments = linear_arguments(src, options)
            op = DequantizeLinear(**arguments, output_dtype=output_dtype)
        _go(op, source, dst, {"dry_run": planning} | options)

    @group.command()
    @click.argument("src")
    @click.argument("dst")
    @_linear_options
    @click.option(
        "--dtype", metavar="DTYPE", help="Of the result: int8, float8_e4m3fn, ... [that of a zero point array]."
    )
    @click.option("--saturate/--no-saturate", default=True, show_default=True, help="What is too large for a float8.")
    @click.option("--precision", metavar="DTYPE", help="What is divided in [the type of scale].")
    @dry
    @_run_options
    def quantize(src: str, dst: str, dtype: str | None, saturate: bool, precision: str | None, **options: Any) -> None:
        """Write round(SRC / scale) + zero point, saturated, to the group DST (ONNX QuantizeLinear).

        DST gets the arrays data, scale and zero_point (if any) and the operator: `chunkq dequantize DST OUT` needs no more.
        """
        source, arguments = linear_arguments(src, options)
        if dtype is None and not hasattr(arguments["zero_point"], "dtype"):
            raise SpecError("argument", "--dtype is missing, and there is no zero point array to take it from")
        op = QuantizeLinear(**arguments, output_dtype=dtype, saturate=saturate, precision=precision)
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
            read_parameter("--input-low", input_low),
            read_parameter("--input-high", input_high),
            read_parameter("--output-low", output_low),
            read_parameter("--output-high", output_high),
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
