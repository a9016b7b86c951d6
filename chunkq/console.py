"""A run as a terminal shows it: the progress bar, signals, errors in one line and exit codes.

Imports errors.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import click

from chunkq.errors import ChunkqError, SpecError

INTERRUPTED, TERMINATED = 130, 143

#: What becomes of a command that only reads.
NOTHING_KEPT = "nothing was kept, and the same command begins again"

#: Loggers that distributed gives a level of their own.
DISTRIBUTED_LOGGERS = ("distributed", "distributed.client")

Result = TypeVar("Result")


class Terminated(KeyboardInterrupt):
    """SIGTERM: as Ctrl-C, but for the exit code."""


class Commands(click.Group):
    """A group that ends every error of chunkq in one line and the right exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecError as error:
            _fail(str(error), 2)
        except (ChunkqError, OSError) as error:
            _fail(str(error), 1)
        except KeyboardInterrupt as interrupt:
            code = TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED
            keeps = ctx.invoked_subcommand not in ("calibrate", "compare")
            _fail(
                f"interrupted; {'what is done stays done, and the same command continues' if keeps else NOTHING_KEPT}",
                code,
            )


def _fail(message: str, code: int) -> None:
    click.echo(f"chunkq: {message}", err=True)
    # reads that zarr had not begun when another failed are dropped at exit, each with a traceback nobody asked for
    sys.unraisablehook = lambda _: None
    raise click.exceptions.Exit(code)


def prepare_console() -> None:
    """Let SIGTERM end a run as Ctrl-C does, and keep other libraries' tracebacks away."""

    def terminate(*_: Any) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    # zarr reports the first failed read of several; asyncio would print the others as tracebacks at exit
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    # a client that loses its scheduler logs tracebacks; distributed sets levels when it is imported, from here
    os.environ.setdefault("DASK_LOGGING", repr(dict.fromkeys(DISTRIBUTED_LOGGERS, "critical")))


def _bar(wanted: bool) -> AbstractContextManager[Any]:
    """A bar on stderr with rate and time left, where a person is looking."""
    if not wanted or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("units  {task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def with_progress(bytes_per_unit: float, wanted: bool, run: Callable[[Any], Result]) -> Result:
    """Call `run` with a function that takes the number of units done and of all, and show them."""
    with _bar(wanted) as bar:
        if bar is None:
            return run(None)
        bar.add_task("units", total=None, rate="")
        task = bar.tasks[0]
        first: list[int] = []

        def advance(done: int, units: int) -> None:
            if not first:
                first.append(done - 1)  # what earlier runs did is no part of the rate
            speed = (done - first[0]) / task.elapsed if task.elapsed else 0.0
            rate = f"{speed * bytes_per_unit / 1e9:.2f} GB/s" if bytes_per_unit else f"{speed:.1f} units/s"
            bar.update(task.id, completed=done, total=units, rate=rate)

        return run(advance)
