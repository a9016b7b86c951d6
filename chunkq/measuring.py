"""The commands that look at tensors and write none: calibrate, compare; and what a calibration is to quantize.

Imports arguments, options and console; calibrating, comparing, kept and page when they are used.
"""

from __future__ import annotations

import os
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from chunkq.arguments import LINEAR_NAMES, open_at
from chunkq.calibration import METHODS, Calibration
from chunkq.console import with_progress
from chunkq.dtypes import ELEMENT_TYPES
from chunkq.errors import SpecError
from chunkq.memory import format_size
from chunkq.options import WORK_OPTIONS, options_of

_MISSING = click.option(
    "--missing",
    type=click.Choice(["error", "fill"]),
    default="error",
    show_default=True,
    help="What absent objects mean.",
)

_METHOD_OPTIONS = (
    click.option("--percentile", type=float, help="With percentile: how many of the values are inside [99.99]."),
    click.option("--bins", type=int, help="With percentile and mse: of the histograms [2048]."),
)

#: How quantize takes its parameters from a calibration.
CALIBRATED_OPTIONS = (
    click.option("--params", metavar="PLACE", help="Take scale and zero point from what `chunkq calibrate` kept."),
    click.option("--calibrate", type=click.Choice(METHODS), help="Calibrate SRC first, by this method."),
    click.option(
        "--symmetric/--asymmetric",
        default=None,
        help="With these: a zero point in the middle, or not [symmetric].",
    ),
    click.option("--narrow-range", is_flag=True, default=None, help="With these: leave the lowest code out."),
    *_METHOD_OPTIONS,
)


def _integers(name: str, text: str | None) -> Any:
    """What --axis or --block-size says: nothing, an integer, or several."""
    if text is None:
        return None
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SpecError(name, f"--{name.replace('_', '-')} {text!r}: expected integers such as 0 or 0,2") from error
    return found if len(found) > 1 else found[0]


def _work(options: dict[str, Any]) -> dict[str, Any]:
    """The options of work, as the functions call them."""
    names = ("max_mem", "workers", "scheduler", "retries", "storage_options", "missing")
    return {name: options[name] for name in names if name in options}


# ---- calibrate


@click.command()
@click.argument("src")
@click.option(
    "--axis", metavar="N[,N,...]", help="A group for each index of the axis (of each pair, ...) [one in all]."
)
@click.option("--block-size", metavar="N[,N,...]", help="Blocks along the axis, or a size for each axis.")
@click.option("--method", type=click.Choice(METHODS), default="minmax", show_default=True, help="What the range is.")
@options_of(_METHOD_OPTIONS)
@click.option(
    "-o", "--output", metavar="PLACE", help="Keep what was found there, in zarr, for `chunkq quantize --params`."
)
@click.option("--overwrite", is_flag=True, help="Replace another calibration there.")
@_MISSING
@options_of(WORK_OPTIONS)
def calibrate(src: str, **options: Any) -> None:
    """Find the range of SRC, in all or of each channel or block, to quantize it with.

    minmax: from the lowest to the highest value. absmax: plus and minus the largest magnitude. percentile: what all but
    100 - PERCENTILE percent lie in. mse: the range with the least squared error.
    """
    from chunkq.kept import check_kept

    output, storage_options = options["output"], options["storage_options"]
    if output is not None:
        check_kept(output, options["overwrite"], storage_options)
    source = open_at(src, storage_options)
    found = _calibrated(source, options, _integers("axis", options["axis"]), _block(options))
    if output is not None:
        found.to_zarr(output, overwrite=options["overwrite"], storage_options=storage_options)
    click.echo(found.to_json() if options["json"] else _told(found, output))


def _block(options: dict[str, Any]) -> Any:
    return _integers("block_size", options["block_size"]) or 0


def _calibrated(source: Any, options: dict[str, Any], axis: Any, block_size: Any) -> Calibration:
    from chunkq.calibrating import calibrate as find

    method = options["method"]
    for name, methods in (("percentile", ("percentile",)), ("bins", ("percentile", "mse"))):
        if options[name] is not None and method not in methods:
            raise SpecError("argument", f"--{name} goes with the method {' or '.join(methods)}, not with {method}")
    how = {"method": method} | {name: options[name] for name in ("percentile", "bins") if options[name] is not None}
    work = _work(options) | {"storage_options": None}  # the source is open
    run = partial(find, source, axis=axis, block_size=block_size, **how, **work)
    return with_progress(0.0, not options["no_progress"], lambda progress: run(progress=progress))


def _told(found: Calibration, output: str | None) -> str:
    where = "the whole tensor" if not any(found.steps) else f"{found.minimum.size} groups"
    if found.axis is not None:
        where = f"{found.minimum.size} channels along axis {found.axis}"
    odd = [f"{int(getattr(found, name).sum())} {name.replace('_', ' ')}" for name in _ODD if getattr(found, name).any()]
    lines = [
        f"method     {found.method}, {where} of {found.x_dtype} {found.shape}",
        f"values     {int(found.count.sum())} finite" + "".join(f", {text}" for text in odd),
        f"range      {found.minimum.min(initial=np.inf):.6g} to {found.maximum.max(initial=-np.inf):.6g}"
        if found.minimum.size
        else "range      none",
        f"memory     {format_size(found.peak_memory)} measured peak, {format_size(found.projected_memory)} projected",
    ]
    return "\n".join([*lines, *([f"kept in    {output}"] if output else [])])


_ODD = ("nan", "positive_infinite", "negative_infinite")


# ---- what quantize takes from it


def calibrated_arguments(src: str, dtype: str | None, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """The source, and QuantizeLinear's arguments where a calibration gives them; its options are taken out."""
    taken = {
        name: options.pop(name) for name in ("params", "calibrate", "symmetric", "narrow_range", "percentile", "bins")
    }
    if taken["params"] is None and taken["calibrate"] is None:
        _refuse_given(taken, "goes with --params or --calibrate")
        return None
    if taken["params"] is not None:
        _refuse_given(
            {name: taken[name] for name in ("percentile", "bins")}, "is for calibrating, which --params has done"
        )
    given = {name: options.pop(name) for name in LINEAR_NAMES}
    _refuse_both(taken, given)
    if dtype is None:
        raise SpecError("argument", "--dtype is missing: what to quantize to, e.g. int8")
    source = open_at(src, options["storage_options"])
    found = _kept(taken["params"], source, options) if taken["params"] else _made(source, taken, given, options)
    symmetric = taken["symmetric"] is not False
    return source, found.arguments(dtype, symmetric=symmetric, narrow_range=bool(taken["narrow_range"]))


def _refuse_given(options: dict[str, Any], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            shown = "symmetric/--asymmetric" if name == "symmetric" else name.replace("_", "-")
            raise SpecError("argument", f"--{shown} {why}")


def _refuse_both(taken: dict[str, Any], given: dict[str, Any]) -> None:
    own = () if taken["params"] else ("axis", "block_size")
    for name, value in given.items():
        if value is not None and name not in own:
            way = "--params" if taken["params"] else "--calibrate"
            raise SpecError("argument", f"--{name.replace('_', '-')} and {way} are given; pass one of them")
    if taken["params"] and taken["calibrate"]:
        raise SpecError("argument", "--params and --calibrate are given; pass one of them")


def _kept(place: str, source: Any, options: dict[str, Any]) -> Calibration:
    from chunkq.kept import open_calibration
    from chunkq.places import options_for

    found = open_calibration(place, storage_options=options_for(place, options["storage_options"]))
    if found.shape != tuple(source.shape):
        raise SpecError("shape", f"--params is of a tensor of shape {found.shape}, SRC has {tuple(source.shape)}")
    return found


def _made(source: Any, taken: dict[str, Any], given: dict[str, Any], options: dict[str, Any]) -> Calibration:
    how = options | {"method": taken["calibrate"], "percentile": taken["percentile"], "bins": taken["bins"]}
    return _calibrated(source, how, given["axis"], _integers("block_size", given["block_size"]) or 0)


# ---- compare


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--axis", type=int, help="Of the channels [that of B's scale, if any].")
@click.option("--html", metavar="FILE", type=click.Path(dir_okay=False), help="Write a report that a browser shows.")
@click.option("--png", metavar="FOLDER", type=click.Path(file_okay=False), help="Write the report's figures there.")
@_MISSING
@options_of(WORK_OPTIONS)
def compare(a: str, b: str, axis: int | None, html: str | None, png: str | None, **options: Any) -> None:
    """Say what was lost between A, the original, and B, in all and channel by channel.

    Both are zarr arrays of floats; B may also be the group that `chunkq quantize` wrote.
    """
    from chunkq.comparing import compare as find

    if html or png:
        _check_report(html, png, (a, b))
    run = partial(find, a, b, axis=axis, **_work(options))
    found = with_progress(0.0, not options["no_progress"], lambda progress: run(progress=progress))
    # first what took the work
    click.echo(found.to_json() if options["json"] else str(found))
    if html or png:
        _report(found, open_at(a, options["storage_options"], "a"), options, html, png)


def _check_report(html: str | None, png: str | None, tensors: tuple[str, ...]) -> None:
    """What would fail after the work is said before it; nothing of a tensor is written over."""
    from chunkq.figures import require_matplotlib

    require_matplotlib()
    if html and not html.lower().endswith((".html", ".htm")):
        raise SpecError("target", f"--html {html}: expected a name that ends in .html")
    for name, path in (("--html", html), ("--png", png)):
        if path is None:
            continue
        real = os.path.realpath(path)
        above = os.path.dirname(real)
        while name == "--png" and not os.path.exists(above):
            above = os.path.dirname(above)
        if not os.path.isdir(above) or not os.access(above, os.W_OK | os.X_OK):
            raise SpecError("target", f"{name} {path}: {above!r} is not a writable folder")
        for tensor in tensors:
            if f"{real}/".startswith(f"{os.path.realpath(tensor)}/"):
                raise SpecError("target", f"{name} {path} lies inside {tensor!r}; choose another place")


def _report(found: Any, original: Any, options: dict[str, Any], html: str | None, png: str | None) -> None:
    from chunkq.figures import save_figures
    from chunkq.page import page

    bins = 2048 if found.axis is None else 256
    how = options | {"method": "percentile", "percentile": 99.99, "bins": bins}
    document = report_document(found, _calibrated(original, how, found.axis, 0))
    if html:
        _write_whole(Path(html), page(document))
        click.echo(f"report in {html}", err=True)
    if png:
        os.makedirs(png, exist_ok=True)
        click.echo(f"figures: {', '.join(save_figures(document, png))}", err=True)


def _write_whole(path: Path, text: str) -> None:
    """A file that is there whole, or as it was before."""
    made = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        made.write_text(text, "utf-8")
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def report_document(found: Any, values: Calibration) -> dict[str, Any]:
    """What the report shows: the comparison, and of the channel with the lowest SQNR values and grid."""
    ratio = np.atleast_1d(found.channels.sqnr_db)
    channel = int(np.argmin(np.where(np.isnan(ratio), np.inf, ratio))) if ratio.size else 0
    edges, counts = (np.atleast_2d(array) for array in (values.edges(), values.counts()))
    shown = None
    if len(counts) and counts[channel].any():
        of = None if found.axis is None else channel
        shown = {"edges": edges[channel].tolist(), "counts": counts[channel].tolist(), "channel": of}
    document: dict[str, Any] = found.to_dict()
    return document | {"histogram": shown, "grid": _levels(found, channel)}


def _levels(found: Any, channel: int) -> list[float] | None:
    """The values that a channel of quantized integers can have."""
    row = ELEMENT_TYPES[found.b["dtype"]]
    if found.scale is None or row.limits is None or not found.scale.size:
        return None
    scale = float(np.atleast_1d(found.scale)[channel])
    zero = 0.0 if found.zero_point is None else float(np.atleast_1d(found.zero_point)[channel])
    low, high = row.limits
    return [(code - zero) * scale for code in range(low, high + 1)]
