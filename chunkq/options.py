"""The options of the command line, several commands' together. Imports arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from chunkq.arguments import PARAMETER_NAMES, option

Command = Callable[..., None]


class StorageOptions(click.ParamType):  # type: ignore[type-arg]
    """JSON text, or the path of a file that holds it (credentials are no business of a process list)."""

    name = "JSON|FILE"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            options = json.loads(value if value.lstrip()[:1] in ("{", "[", '"') else Path(value).read_text())
        except (OSError, ValueError) as error:  # its text may hold what was meant to be secret
            self.fail(f"expected a JSON object, or a file that holds one ({type(error).__name__})", param, ctx)
        if not isinstance(options, dict):
            self.fail("expected a JSON object", param, ctx)
        return options


# what every command that reads tensors has
WORK_OPTIONS = (
    click.option(
        "--max-mem",
        metavar="SIZE",
        help="Resident memory of the whole run, e.g. 2GiB [half of what is free]; on a cluster, of each worker.",
    ),
    click.option("--workers", type=click.IntRange(min=1), help="Units in progress at once [CPUs, as memory allows]."),
    click.option(
        "--scheduler",
        default="auto",
        show_default=True,
        metavar="auto|threads|processes|sync|tcp://...",
        help="How tasks run, or the address of a Dask scheduler.",
    ),
    click.option(
        "--retries",
        type=click.IntRange(0, 100),
        default=3,
        show_default=True,
        help="How often a request to a store is repeated that failed for a reason that may pass.",
    ),
    click.option("--storage-options", type=StorageOptions(), help="What fsspec needs for URLs such as s3://..."),
    click.option("--json", is_flag=True, help="One JSON document on stdout."),
    click.option("--no-progress", is_flag=True, help="No progress bar."),
)

RUN_OPTIONS = (
    click.option(
        "--compressor",
        type=click.Choice(["auto", "none", "zstd", "blosc", "gzip"]),
        default="auto",
        show_default=True,
        help="Codec of DST; a crc32c checksum follows it.",
    ),
    click.option("--chunks", metavar="N,N,...|SIZE", help="Chunk shape of DST, or 4MiB, uncompressed [that of SRC]."),
    click.option("--shards", metavar="N,N,...|SIZE", help="Shard shape of DST, or 64MiB [that of SRC]."),
    click.option(
        "--missing",
        type=click.Choice(["error", "fill"]),
        default="error",
        show_default=True,
        help="What objects absent from SRC mean.",
    ),
    click.option("--fail-fast", is_flag=True, help="Stop at the first object that cannot be read, not after the rest."),
    click.option(
        "--overwrite",
        is_flag=True,
        help="Replace DST of another job (or of this one, finished): a zarr array, or a group of chunkq's.",
    ),
    click.option("--consolidate", is_flag=True, help="Write consolidated metadata of a quantized DST."),
    *WORK_OPTIONS,
)


PARAMETER_OPTIONS = tuple(
    click.option(option(name), metavar="PARAM", help="As it was given, if DST cannot tell.") for name in PARAMETER_NAMES
)

LINEAR_OPTIONS = (
    click.option("--scale", metavar="PARAM", help="One for the tensor, one for each index of an axis or each block."),
    click.option("--zero-point", metavar="PARAM", help="Same shape as the scale [0]."),
    click.option("--axis", type=int, help="Axis of a 1-D scale or of the blocks [the only one that fits]."),
    click.option("--block-size", metavar="N[,N,...]", help="Blocks along the axis, or a size for each axis."),
    click.option("--x-dtype", metavar="DTYPE", help="What SRC holds, if it is stored as integers: float8_e4m3fn, ..."),
    click.option("--scale-dtype", metavar="DTYPE", help="The same for the scale: float8_e8m0fnu, ..."),
)


def options_of(options: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    """One decorator of several options, in the order that --help shows."""

    def decorated(command: Command) -> Command:
        for decorate in reversed(options):
            command = decorate(command)
        return command

    return decorated
