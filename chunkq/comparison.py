"""What a comparison found, channel by channel and in all; made by `compare`. Imports exact and statistics."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

from chunkq.exact import carry, rounded
from chunkq.groups import Groups
from chunkq.run import Array
from chunkq.statistics import COUNTS, SUMS, State

#: How many of the worst places are named.
NAMED = 10

#: Products from here on are rounded like all others.
PRODUCTS_FROM = 1e-290


@dataclass(frozen=True, eq=False)
class Measures:
    """What was lost, of each group: NumPy arrays of one shape, () where they are of the whole tensor.

    Attributes
    ----------
    compared, nonfinite, mismatched : numpy.ndarray of int64
        Elements finite on both sides, which everything else is about; the others; of these the ones that are not the same
        (NaN counts as the same as NaN).
    sums : dict of str to numpy.ndarray
        Over a, b and d = a - b in float64, the terms rounded once: ``d``, ``abs_d``, ``dd``, ``aa``, ``bb``, ``ab``. Each
        is what `math.fsum` gives.
    max_abs_error, mean_abs_error, mean_error, mse : numpy.ndarray
        Of d; NaN where nothing was compared.
    sqnr_db : numpy.ndarray
        10 log10(aa / dd): infinite where there is no error at all, NaN where errors are too small for their squares.
    cosine : numpy.ndarray
        ab / sqrt(aa bb); NaN where one side is 0 throughout.
    saturated : numpy.ndarray or None
        Share of the codes that are the lowest or highest of their type, where b is given as codes.
    """

    compared: Array
    nonfinite: Array
    mismatched: Array
    sums: dict[str, Array]
    max_abs_error: Array
    mean_abs_error: Array
    mean_error: Array
    mse: Array
    sqnr_db: Array
    cosine: Array
    saturated: Array | None

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists."""
        fields = {name: value for name, value in vars(self).items() if name != "sums"}
        return {name: None if value is None else value.tolist() for name, value in fields.items()}


@dataclass(frozen=True)
class Worst:
    """One of the places with the largest errors: the largest of its group, the first of several."""

    index: tuple[int, ...]
    a: float
    b: float
    error: float
    channel: int | None


@dataclass(frozen=True, eq=False)
class Comparison:
    """What two tensors differ by.

    Attributes
    ----------
    a, b : dict
        ``name``, ``dtype`` and ``shape`` of the original and of what it was compared with.
    axis : int or None
        The channels lie along it.
    overall, channels : Measures
        In all, and for each channel; without an axis there is one.
    minimum, maximum : numpy.ndarray
        Of a's finite values in each channel; 0 where there is none.
    worst_index : numpy.ndarray of int64
        Of each channel, the place of its largest error: a row of indexes, -1 where nothing was compared.
    worst : tuple of Worst
        The `NAMED` channels with the largest errors, the largest first.
    scale, zero_point : numpy.ndarray or None
        Of b's operator, for each channel.
    peak_memory, projected_memory : int
        Measured, and foretold, in bytes; 0 for arrays in memory.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    axis: int | None
    overall: Measures
    channels: Measures
    minimum: Array
    maximum: Array
    worst_index: Array
    worst: tuple[Worst, ...]
    scale: Array | None = None
    zero_point: Array | None = None
    peak_memory: int = 0
    projected_memory: int = 0

    def __str__(self) -> str:
        whole = self.overall
        compared = int(whole.compared)
        lines = [
            f"original     {_named(self.a)}",
            f"compared to  {_named(self.b)}",
            f"elements     {compared} compared, {int(whole.nonfinite)} not finite ({int(whole.mismatched)} of them differ)",
            f"errors       at most {float(whole.max_abs_error):.6g}, {float(whole.mean_abs_error):.6g} on average; "
            f"MSE {float(whole.mse):.6g}",
            f"SQNR         {float(whole.sqnr_db):.2f} dB; cosine similarity {float(whole.cosine):.9g}",
        ]
        if whole.saturated is not None:
            lines.append(f"saturated    {float(whole.saturated):.4%} of the codes")
        for place in self.worst[:3]:
            channel = "" if place.channel is None else f"channel {place.channel}, "
            lines.append(f"worst        {channel}{list(place.index)}: {place.a:.6g} became {place.b:.6g}")
        return "\n".join(lines)

    def _worst_indexes(self) -> list[list[int]]:
        rank = len(self.a["shape"])
        rows: list[list[int]] = self.worst_index.reshape((int(np.prod(self.worst_index.shape[:-1])), rank)).tolist()
        return rows

    def to_json(self) -> str:
        """All that was found, as one JSON document; null for NaN, text for infinities."""
        return json.dumps(_for_json(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """All that was found, in numbers and lists."""
        more = {
            name: None if value is None else value.tolist()
            for name, value in vars(self).items()
            if name in ("minimum", "maximum", "scale", "zero_point")
        }
        channels = {name: _listed(value) for name, value in (self.channels.to_dict() | more).items()}
        return {
            "a": self.a,
            "b": self.b,
            "axis": self.axis,
            "overall": self.overall.to_dict() | {"elements": int(np.prod(self.a["shape"], dtype=np.int64))},
            "channels": channels | {"worst_index": self._worst_indexes()},
            "worst": [asdict(place) for place in self.worst],
            "peak_memory": self.peak_memory,
            "projected_memory": self.projected_memory,
        }


def _named(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']}: {tensor['dtype']} {tuple(tensor['shape'])}"


def _for_json(value: Any) -> Any:
    """The same without NaN and infinities, which JSON does not have: None, and text."""
    if isinstance(value, dict):
        return {name: _for_json(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(inner) for inner in value]
    if not isinstance(value, float) or np.isfinite(value):
        return value
    return None if np.isnan(value) else str(value)


def _listed(value: Any) -> Any:
    return value if value is None or isinstance(value, list) else [value]


# ---- from the state of `statistics.Errors` and `statistics.Saturated`


def in_all(state: State) -> State:
    """The state of all groups together, of the grid ()."""
    limbs = state["limbs"].reshape(-1, *state["limbs"].shape[-2:])
    counts = state["counts"].reshape(-1, len(COUNTS))
    total = counts.sum(axis=0)
    total[3] = np.bitwise_or.reduce(counts[:, 3]) if len(counts) else 0
    carried = limbs.sum(axis=0)
    carry(carried)
    whole = {"limbs": carried, "counts": total, "worst": state["worst"].max(initial=-1.0, keepdims=False)}
    if "saturated" in state:
        whole["saturated"] = state["saturated"].sum()
    return {name: np.asarray(value) for name, value in whole.items()}


def measures(state: State, elements: Any) -> Measures:
    """What the sums come to; `elements` of each group."""
    sums = _sums(state)
    compared, nonfinite, mismatched = (state["counts"][..., i] for i in range(3))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        mean, mean_abs, mse = (sums[name] / compared for name in ("d", "abs_d", "dd"))
        # squares of errors may be too small for float64: then nothing is known of the ratio
        unknown = (sums["dd"] == 0) & (state["worst"] > 0)
        ratio = 10 * (np.log10(sums["aa"]) - np.log10(sums["dd"]))
        sqnr = np.where(unknown, np.nan, np.where(sums["dd"] == 0, np.inf, ratio))
        product = sums["aa"] * sums["bb"]
        norm = np.where(
            np.isfinite(product) & (product > PRODUCTS_FROM),
            np.sqrt(product),
            np.sqrt(sums["aa"]) * np.sqrt(sums["bb"]),
        )
        cosine = np.clip(sums["ab"] / norm, -1, 1)
        share = state["saturated"] / elements if "saturated" in state else None
    none = compared == 0
    return Measures(
        compared=compared,
        nonfinite=nonfinite,
        mismatched=mismatched,
        sums=sums,
        max_abs_error=np.where(none, np.nan, state["worst"]),
        mean_abs_error=mean_abs,
        mean_error=mean,
        mse=mse,
        sqnr_db=np.where(none, np.nan, sqnr),
        cosine=cosine,
        saturated=None if share is None else np.asarray(share),
    )


def _sums(state: State) -> dict[str, Array]:
    found = rounded(state["limbs"])
    overflows = state["counts"][..., 3]
    sums = {}
    for i, name in enumerate(SUMS):
        # of what sign the terms were that are too large for float64, nobody noted
        beyond = np.nan if name in ("d", "ab") else np.inf
        sums[name] = np.where(overflows >> i & 1, beyond, found[..., i])
    return sums


def worst_places(groups: Groups, where: Array) -> Array:
    """Rows of indexes for flat ones; -1 where there is none."""
    flat = where.reshape(-1)
    if not groups.shape:
        return np.empty((flat.size, 0), np.int64)
    if not prod(groups.shape):
        return np.full((flat.size, len(groups.shape)), -1)
    rows = np.stack(np.unravel_index(np.maximum(flat, 0), groups.shape), axis=-1)
    return np.where(flat[:, np.newaxis] < 0, -1, rows)
