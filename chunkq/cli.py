"""The command line: parse, call, print. stdout carries results, stderr everything else.

Exit code 0: done. 1: the run failed. 2: the request was wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click

import chunkq
from chunkq.arguments import PARAMETER_NAMES, agreeing, linear_arguments, open_at, option, read_parameter
from chunkq.console import Commands, prepare_console, with_progress
from chunkq.errors import RunError, SpecError
from chunkq.layout import parse_shape
from chunkq.linear import DequantizeLinear, QuantizeLinear
from chunkq.measuring import CALIBRATED_OPTIONS, calibrate, calibrated_arguments, compare
from chunkq.memory import keep_memory_flat
from chunkq.ops import FakeQuantize, Operator
from chunkq.options import LINEAR_OPTIONS, PARAMETER_OPTIONS, RUN_OPTIONS, WORK_OPTIONS, options_of

Command = Callable[..., None]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(chunkq.__version__, prog_name="chunkq")
def main() -> None:
    """Exact linear quantization of tensors that do not fit in memory.

    A parameter (scale, zero point, range) is a number, a comma-separated list, a .npy file, or a zarr array
    (store.zarr/scale).
    """
    keep_memory_flat()
    prepare_console()


# ---- running


def run_plan(plan: Any, show_progress: bool) -> Any:
    """Run a plan under a progress bar and return its report."""
    per_unit = (plan.bytes_read + plan.bytes_written) / max(plan.units, 1)
    return with_progress(per_unit, show_progress, lambda progress: plan.run(progress=progress))


def _go(op: Operator, source: Any, destination: str, options: dict[str, Any]) -> None:
    plan = chunkq.plan(
        op,
        source,
        destination,
        max_mem=options["max_mem"],
        target_chunks=parse_shape("--chunks", options["chunks"]),
        target_shards=parse_shape("--shards", options["shards"]),
        compressors=options["compressor"],
        overwrite=options["overwrite"],
        missing=options["missing"],
        scheduler=options["scheduler"],
        workers=options["workers"],
        retries=options["retries"],
        fail_fast=options["fail_fast"],
        consolidate=options["consolidate"],
        storage_options=options["storage_options"],
    )
    if options["dry_run"]:
        click.echo(plan.to_json() if options["json"] else str(plan))
        return
    if not options["json"]:
        click.echo(str(plan), err=True)
    report = run_plan(plan, not options["no_progress"])
    if options["json"]:
        click.echo(json.dumps({"plan": json.loads(plan.to_json()), "report": json.loads(report.to_json())}))
    else:
        click.echo(str(report))


# ---- commands


def _add_operators(group: click.Group, *, planning: bool) -> None:
    """The operator commands; in the group `plan` they only print what they would do."""
    dry = options_of(
        () if planning else (click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),)
    )

    @group.command()
    @click.argument("src")
    @click.argument("dst")
    @options_of(LINEAR_OPTIONS)
    @click.option("--output-dtype", metavar="DTYPE", help="float32, float16 or bfloat16 [that of scale].")
    @dry
    @options_of(RUN_OPTIONS)
    def dequantize(src: str, dst: str, output_dtype: str | None, **options: Any) -> None:
        """Write (SRC - zero point) * scale to DST (ONNX DequantizeLinear).

        SRC is a zarr array, or a group that `chunkq quantize` wrote, which brings its own parameters.
        """
        from chunkq.metadata import open_quantized

        opened = open_quantized(src, output_dtype, storage_options=options["storage_options"])
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
    @options_of(LINEAR_OPTIONS)
    @options_of(CALIBRATED_OPTIONS)
    @click.option(
        "--dtype", metavar="DTYPE", help="Of the result: int8, float8_e4m3fn, ... [that of a zero point array]."
    )
    @click.option("--saturate/--no-saturate", default=True, show_default=True, help="What is too large for a float8.")
    @click.option("--precision", metavar="DTYPE", help="What is divided in [the type of scale].")
    @dry
    @options_of(RUN_OPTIONS)
    def quantize(src: str, dst: str, dtype: str | None, saturate: bool, precision: str | None, **options: Any) -> None:
        """Write round(SRC / scale) + zero point, saturated, to the group DST (ONNX QuantizeLinear).

        DST gets the arrays data, scale and zero_point (if any) and the operator: `chunkq dequantize DST OUT` needs no more.
        """
        found = calibrated_arguments(src, dtype, options)
        source, arguments = found or linear_arguments(src, options)
        if dtype is None and not hasattr(arguments["zero_point"], "dtype"):
            raise SpecError("argument", "--dtype is missing, and there is no zero point array to take it from")
        arguments.pop("output_dtype", None)
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
    @options_of(RUN_OPTIONS)
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
        read = partial(read_parameter, storage_options=options["storage_options"])
        op = FakeQuantize(
            read("--input-low", input_low),
            read("--input-high", input_high),
            read("--output-low", output_low),
            read("--output-high", output_high),
            levels,
            auto_broadcast=auto_broadcast,
            broadcast_axis=broadcast_axis,
        )
        _go(op, open_at(src, options["storage_options"]), dst, {"dry_run": planning} | options)


_add_operators(main, planning=False)


@main.group()
def plan() -> None:
    """Print what a command would do; write nothing."""


_add_operators(plan, planning=True)

main.add_command(calibrate)
main.add_command(compare)


@main.command()
@click.argument("src")
@click.argument("dst")
@click.option("--sample", type=float, metavar="SHARE", help="Compute this share of the units, e.g. 0.01 [all].")
@click.option("--seed", type=int, default=0, show_default=True, help="Which units a sample takes.")
@options_of(PARAMETER_OPTIONS)
@options_of(WORK_OPTIONS)
def verify(src: str, dst: str, **options: Any) -> None:
    """Compute again what DST should hold of SRC, and compare every bit.

    The operator is the one that DST records; parameters are read from where it was given them, or from the options.
    """
    from chunkq.checking import verify as check

    as_json, show = options.pop("json"), not options.pop("no_progress")
    texts = {name: options.pop(name) for name in PARAMETER_NAMES}
    params = {n: read_parameter(option(n), text, options["storage_options"]) for n, text in texts.items() if text}
    check_with = partial(check, src, dst, params=params, **options)
    found = with_progress(0.0, show, lambda progress: check_with(progress=progress))
    click.echo(found.to_json() if as_json else str(found))
    if not found.ok:
        raise click.exceptions.Exit(1)


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
            documents = {"plan": json.loads(plan.to_json()), "report": json.loads(report.to_json())}
            click.echo(json.dumps(documents | {"wrong": wrong}))
        else:
            click.echo(f"{report}\n{wrong} elements differ from NumPy")
            if keep:
                click.echo(f"kept in {os.path.abspath(keep)}")
    if wrong:
        raise RunError(f"{wrong} elements differ from NumPy")


if __name__ == "__main__":
    main()
