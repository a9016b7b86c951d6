"""What quantization did to a tensor, as figures: drawn by matplotlib, given as SVG for a page or as PNG files.

Every figure keeps to a few hundred points: with more channels than a page has columns, neighbours share one.
Imports errors; matplotlib late, since few need it.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chunkq.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Document = dict[str, Any]
Colours = dict[str, str]
Floats = NDArray[np.float64]

#: What has a colour, and the colour on paper.
PAPER = {"ink": "#1b1f24", "faint": "#d5d9de", "data": "#2f6fb2", "mark": "#c2570c"}
#: Colours that stand for CSS variables until the SVG is written, so that a page's theme decides.
STAND_INS = {role: f"#01020{digit}" for digit, role in enumerate(PAPER)}

COLUMNS = 600  # that many a page shows apart
FEW = 32  # channels that have room for a dot and a number each
LINES = 48  # levels that may cross the whole histogram
TICKS = 256  # levels that are drawn one by one


@dataclass(frozen=True)
class Picture:
    """A figure, and in words what it shows: for captions and for those who do not see it."""

    name: str
    title: str
    text: str
    figure: Figure


def svgs(document: Document) -> list[tuple[Picture, str]]:
    """Draw the figures that the document has the data for, each as an <svg> to put into a page.

    Raises
    ------
    SpecError
        Reason ``argument``: matplotlib is not installed.
    """
    with _plain_settings(STAND_INS):
        return [(picture, _svg(picture)) for picture in _draw(document, STAND_INS)]


def save_figures(document: Document, folder: str | os.PathLike[str]) -> list[str]:
    """Write the same figures as PNG files into a folder, which is made where it is missing, and return their paths.

    Raises
    ------
    SpecError
        Reason ``argument``: matplotlib is not installed.
    """
    paths = []
    with _plain_settings(PAPER):
        os.makedirs(folder, exist_ok=True)
        for picture in _draw(document, PAPER):
            paths.append(os.path.join(folder, f"{picture.name}.png"))
            picture.figure.savefig(paths[-1], dpi=150, facecolor="white")
    return paths


def _draw(document: Document, colours: Colours) -> Iterator[Picture]:
    for make in (_histogram, _ranges, _scales, _errors, _sqnr):
        if (picture := make(document, colours)) is not None:
            yield picture


def _svg(picture: Picture) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    picture.figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    _, head, rest = re.split(r"(<svg[^>]*>)", buffer.getvalue(), maxsplit=1)
    box = re.search(r'viewBox="[^"]*"', head)
    label = f'role="img" aria-labelledby="{picture.name}-title" aria-describedby="{picture.name}-text"'
    # its <style> would hold for the whole page, and ids are the page's as well
    rest = re.sub(r"<style.*?</style>", "", rest, flags=re.DOTALL)
    rest = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{picture.name}-", rest)
    rest = re.sub(r'\bd="[^"]*"', _rounded, rest)
    for role, colour in STAND_INS.items():
        rest = rest.replace(colour, f"var(--{role})")
    return f"<svg {box[0] if box else ''} {label}>{rest}"


def _rounded(path: re.Match[str]) -> str:
    """A path to a hundredth of a point, which nobody sees, in half the text."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path[0])


def require_matplotlib() -> Any:
    """The library.

    Raises
    ------
    SpecError
        Reason ``argument``: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SpecError("argument", "figures need matplotlib: pip install 'chunkq[report]'") from None
    return matplotlib


@contextmanager
def _plain_settings(colours: Colours) -> Iterator[None]:
    """Hold matplotlib to its defaults and these colours, whatever the user's own settings are."""
    matplotlib = require_matplotlib()
    ink = colours["ink"]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("text", color=ink)
        matplotlib.rc("xtick", color=ink)
        matplotlib.rc("ytick", color=ink)
        matplotlib.rc("axes", edgecolor=ink, labelcolor=ink, axisbelow=True)
        matplotlib.rc("axes.spines", top=False, right=False)
        matplotlib.rc("grid", color=colours["faint"], linewidth=0.6)
        matplotlib.rc("legend", frameon=False)
        # text stays text, in the page's font; the salt keeps the bytes the same from run to run
        matplotlib.rc("svg", fonttype="none", hashsalt="chunkq")
        yield


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(9, height), layout="constrained")


def _axes(height: float = 2.8) -> tuple[Figure, Axes]:
    figure = _figure(height)
    axes = figure.add_subplot()
    axes.grid(axis="y")
    axes.use_sticky_edges = False
    return figure, axes


def _values(document: Document, key: str) -> Floats:
    """One number for each channel; NaN where there is none, or none that can be drawn."""
    found = document["channels"].get(key) or []
    values = np.array([np.nan if value is None else float(value) for value in found], dtype=np.float64)
    # matplotlib computes with differences of what it draws
    return np.where(np.abs(values) < 1e300, values, np.nan)


def _ranges(document: Document, colours: Colours) -> Picture | None:
    low, high = _values(document, "minimum"), _values(document, "maximum")
    if len(low) < 2 or np.isnan(low).all():
        return None
    figure, axes = _axes()
    if len(low) <= FEW:
        axes.bar(np.arange(len(low)), high - low, 0.6, low, color=colours["data"], edgecolor=colours["data"])
    else:
        _band(axes, low, high, colours["data"])
    axes.axhline(0, color=colours["ink"], linewidth=0.8)
    _number_channels(axes, len(low))
    axes.set_ylabel("minimum to maximum")
    text = (
        f"From the smallest to the largest original value of each of {len(low):,} channels. The smallest of all is "
        f"{np.nanmin(low):.4g}, the largest {np.nanmax(high):.4g}.{_shared(len(low))}"
    )
    return Picture("ranges", "Range of each channel", text, figure)


def _scales(document: Document, colours: Colours) -> Picture | None:
    scale = _values(document, "scale")
    if len(scale) < 2 or np.isnan(scale).all():
        return None
    figure, axes = _axes(2.2)
    _points(axes, scale, colours["mark"])
    _log_if_wide(axes, scale)
    _number_channels(axes, len(scale))
    axes.set_ylabel("scale")
    text = (
        f"The scale of each of {len(scale):,} channels, from {np.nanmin(scale):.4g} to {np.nanmax(scale):.4g}."
        f"{_shared(len(scale))}"
    )
    return Picture("scales", "Scale of each channel", text, figure)


def _errors(document: Document, colours: Colours) -> Picture | None:
    largest, mean = _values(document, "max_abs_error"), _values(document, "mean_abs_error")
    order = _worst_first(-largest)
    if len(largest) < 2 or not len(order):
        return None
    figure, axes = _axes()
    _points(axes, largest[order], colours["mark"], "largest")
    _points(axes, mean[order], colours["data"], "mean")
    _log_if_wide(axes, np.concatenate((largest, mean)))
    axes.legend(loc="upper right", ncols=2, bbox_to_anchor=(1, 1.14))
    _rank_channels(axes, order)
    axes.set_ylabel("absolute error")
    text = (
        f"The largest and the mean absolute error of {len(order):,} channels, the channel with the largest error first. "
        f"Channel {order[0]} has {largest[order[0]]:.4g}, the best one {largest[order[-1]]:.4g}.{_shared(len(order))}"
    )
    return Picture("errors", "Error of each channel, worst first", text, figure)


def _sqnr(document: Document, colours: Colours) -> Picture | None:
    sqnr = _values(document, "sqnr_db")
    order = _worst_first(sqnr)
    if len(sqnr) < 2 or not len(order):
        return None
    figure, axes = _axes()
    _points(axes, sqnr[order], colours["data"])
    _rank_channels(axes, order)
    axes.set_ylabel("SQNR, dB")
    text = (
        f"The ratio of signal to quantization noise of {len(order):,} channels, the worst first: {sqnr[order[0]]:.4g} dB "
        f"in channel {order[0]}, {sqnr[order[-1]]:.4g} dB in the best.{_shared(len(order))}"
    )
    if left := len(sqnr) - len(order):
        text += f" Left out: {left:,} without such a number, for want of any error or of any signal."
    return Picture("sqnr", "SQNR of each channel, worst first", text, figure)


def _histogram(document: Document, colours: Colours) -> Picture | None:
    if not (document["histogram"] and document["histogram"]["counts"]):
        return None
    edges, counts = _merged(document["histogram"])
    levels = np.array(document["grid"] or [], dtype=np.float64)
    levels = levels[np.abs(levels) < 1e300]
    figure = _figure(3.4)
    bars, rug = figure.subplots(2, 1, sharex=True, height_ratios=(12, 1))
    bars.stairs(counts, edges, fill=True, color=colours["data"])
    bars.set_ylabel("elements")
    bars.tick_params(bottom=False)
    bars.set_xlim(*_view(edges, levels))
    _log_if_wide(bars, counts)
    bars.set_ylim(bottom=0.5 if bars.get_yscale() == "log" else 0, top=max(counts.max() * 1.1, 1))
    _draw_levels(bars, rug, levels, colours)
    rug.set_yticks([])
    rug.spines.left.set_visible(False)
    rug.set_xlabel("original value")
    text = _histogram_text(edges, levels, document["histogram"].get("channel"))
    return Picture("histogram", "Original values and the quantization grid", text, figure)


def _histogram_text(edges: Floats, levels: Floats, channel: int | None) -> str:
    where = "" if channel is None else f" of channel {channel}, which has the lowest SQNR,"
    text = f"How many elements{where} have which original value, from {edges[0]:.4g} to {edges[-1]:.4g}."
    if len(levels):
        text += (
            f" The strip below marks the {len(levels):,} values that the quantized tensor can take, "
            f"from {levels[0]:.4g} to {levels[-1]:.4g}"
        )
        text += "." if len(levels) <= TICKS else "; it is filled where they lie closer than lines can be drawn."
    return text


def _draw_levels(bars: Axes, rug: Axes, levels: Floats, colours: Colours) -> None:
    """Every level as a line below the histogram, and across it while there are few; beyond TICKS what they cover."""
    left, right = bars.get_xlim()
    seen = levels[(levels >= left) & (levels <= right)]
    if len(seen) <= LINES:
        low, high = bars.get_ylim()
        _lines(bars, seen, low, high, color=colours["mark"], linewidth=0.7, alpha=0.9)
    if len(seen) <= TICKS:
        _lines(rug, seen, 0, 1, color=colours["mark"], linewidth=0.8)
    else:
        # columns that hold a level, runs of them in one piece
        column = (right - left) / COLUMNS
        taken = np.unique(((seen - left) / column).astype(np.int64))
        first = taken[np.diff(taken, prepend=-2) > 1]
        last = taken[np.diff(taken, append=COLUMNS + 2) > 1]
        pieces = [(left + a * column, (b + 1 - a) * column) for a, b in zip(first, last, strict=True)]
        rug.broken_barh(pieces, (0, 1), color=colours["mark"], linewidth=0)
    rug.set_ylim(0, 1)


def _lines(axes: Axes, places: Floats, low: float, high: float, **how: Any) -> None:
    """Upright lines as one path: each of its own would be most of the page."""
    gaps = np.full_like(places, np.nan)
    across = np.stack((places, places, gaps), axis=1).ravel()
    axes.plot(across, np.tile((low, high, np.nan), len(places)), **how)


def _view(edges: Floats, levels: Floats) -> tuple[float, float]:
    """What part of the axis to show: all values, and of the grid beyond them at most half as much on either side."""
    low, high = float(edges[0]), float(edges[-1])
    room = (high - low) / 2 or max(abs(low), 1.0) / 2
    if len(levels):
        return max(min(low, levels[0]), low - room) - room / 25, min(max(high, levels[-1]), high + room) + room / 25
    return low - room / 25, high + room / 25


def _merged(histogram: dict[str, Any]) -> tuple[Floats, Floats]:
    """The histogram with neighbouring bins put together, until a page can show them apart."""
    edges, counts = np.array(histogram["edges"], dtype=np.float64), np.array(histogram["counts"], dtype=np.float64)
    edges = np.clip(edges, -1e300, 1e300)
    starts = np.arange(0, len(counts), -(-len(counts) // COLUMNS))
    return np.append(edges[starts], edges[-1]), np.add.reduceat(counts, starts)


def _points(axes: Axes, values: Floats, colour: str, label: str | None = None) -> None:
    """One value for each place: a dot each, or the outline of what shares a column."""
    if len(values) <= FEW:
        axes.plot(values, "o", color=colour, markersize=5, label=label)
    else:
        _band(axes, values, values, colour, label)


def _band(axes: Axes, low: Floats, high: Floats, colour: str, label: str | None = None) -> None:
    """Fill from the least to the greatest of the places that share a column."""
    channels = len(low)
    starts = np.arange(0, channels, _per_column(channels))
    low = np.fmin.reduceat(low, starts)
    high = np.fmax.reduceat(high, starts)
    # the last step needs an end; the edge shows what has no height
    ends = np.append(starts, channels)
    low, high = np.append(low, low[-1]), np.append(high, high[-1])
    axes.fill_between(ends - 0.5, low, high, step="post", color=colour, linewidth=0.9, label=label)


def _per_column(channels: int) -> int:
    return -(-channels // COLUMNS)


def _shared(channels: int) -> str:
    """A sentence for the caption where columns are shared."""
    each = _per_column(channels)
    if each == 1:
        return ""
    return f" Each column of the figure stands for {each} channels, from their least to their greatest."


def _worst_first(badness: Floats) -> NDArray[np.intp]:
    """Channels in ascending order of a number, those without one left out."""
    order = np.argsort(badness, kind="stable")
    return order[~np.isnan(badness[order])]


def _number_channels(axes: Axes, channels: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=min(FEW, 12), integer=True))
    axes.set_xlim(-0.7, channels - 0.3)
    axes.set_xlabel("channel")


def _rank_channels(axes: Axes, order: NDArray[np.intp]) -> None:
    """Name the channels where there is room; else tell how many are as bad."""
    if len(order) <= FEW:
        axes.set_xticks(np.arange(len(order)), [str(channel) for channel in order])
        axes.set_xlabel("channel, worst first")
    else:
        axes.set_xlabel("number of channels, worst first")
    axes.set_xlim(-0.7, len(order) - 0.3)


def _log_if_wide(axes: Axes, values: Floats) -> None:
    """A logarithmic axis for what spans more than two powers of ten; zeros then lie below it."""
    positive = values[values > 0]
    if len(positive) and positive.max() > 100 * positive.min() and not (values < 0).any():
        axes.set_yscale("log", nonpositive="clip")
        # 0.001 rather than powers: a page may set them in another font
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_minor_formatter(lambda *_: "")
