"""What quantization did to a tensor, as one HTML file that needs nothing else: no network, no other file.

`page.html` is its frame; `page.css` and `page.js` are put into it. Imports figures.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from importlib.resources import files
from typing import Any

from chunkq.figures import Document, Picture, svgs

#: The table's columns: key in the document, head, word for the search.
COLUMNS = (
    ("minimum", "minimum", "min"),
    ("maximum", "maximum", "max"),
    ("scale", "scale", "scale"),
    ("zero_point", "zero point", "zero"),
    ("max_abs_error", "largest error", "error"),
    ("mean_abs_error", "mean error", "mean"),
    ("mse", "MSE", "mse"),
    ("sqnr_db", "SQNR, dB", "sqnr"),
    ("cosine", "cosine similarity", "cosine"),
    ("saturated", "share saturated", "saturated"),
)

OVERALL = (
    ("elements", "elements"),
    ("compared", "compared"),
    ("max_abs_error", "largest absolute error"),
    ("mean_abs_error", "mean absolute error"),
    ("mse", "mean squared error"),
    ("sqnr_db", "SQNR, dB"),
    ("cosine", "cosine similarity"),
    ("saturated", "saturated"),
    ("nonfinite", "not finite"),
    ("mismatched", "mismatched"),
)

NONE = "&ndash;"


def page(document: Document) -> str:
    """Give the report on a comparison as the text of an HTML file.

    Raises
    ------
    SpecError
        Reason ``argument``: matplotlib is not installed.
    """
    script = _resource("page.js")
    parts = {
        "title": f"chunkq: {_words(document['a']['name'])}",
        "name": _words(document["a"]["name"]),
        "tensors": _tensors(document),
        "overall": _overall(document["overall"]),
        "figures": "\n".join(_figure(*drawn) for drawn in svgs(document)),
        "worst": _worst(document["worst"]),
        "words": ", ".join(f"<code>{column['words'][0]}</code>" for column in _columns(document) if column["sortable"]),
        "data": _data(document),
        "style": _resource("page.css"),
        "script": script,
        # no script but this one runs, whatever else gets into the page
        "script_hash": "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    # in one pass: what is put in is not looked at again
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _resource("page.html"))


def _resource(name: str) -> str:
    return files("chunkq").joinpath(name).read_text("utf-8")


def _words(value: object) -> str:
    """Text of the document for HTML; file names may hold what UTF-8 cannot."""
    return escape(str(value).encode("utf-8", "replace").decode())


def _number(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _place(index: list[int]) -> str:
    return f"({', '.join(map(str, index))})"


def _tensors(document: Document) -> str:
    lines = []
    for key, role in (("a", "original"), ("b", "came out")):
        tensor = document[key]
        shape = " &times; ".join(f"{size:,}" for size in tensor["shape"]) or "scalar"
        lines.append(
            f'<tr><th scope="row">{role}</th><td class="long">{_words(tensor["name"])}</td>'
            f"<td>{_words(tensor['dtype'])}</td><td>{shape}</td></tr>"
        )
    return "\n".join(lines)


def _overall(overall: dict[str, Any]) -> str:
    shown = {key: _number(overall[key]) for key, _ in OVERALL}
    if overall["saturated"] is not None:
        shown["saturated"] = f"{overall['saturated']:.4%}"
    return "\n".join(f"<div><dt>{head}</dt><dd>{shown[key]}</dd></div>" for key, head in OVERALL)


def _figure(picture: Picture, svg: str) -> str:
    name = picture.name
    return (
        f'<section aria-labelledby="{name}-title">\n<h2 id="{name}-title">{_words(picture.title)}</h2>\n<figure>\n'
        f'<div class="wide" tabindex="0" role="group" aria-labelledby="{name}-title">{svg}</div>\n'
        f'<figcaption id="{name}-text">{_words(picture.text)}</figcaption>\n</figure>\n</section>'
    )


def _worst(places: list[dict[str, Any]]) -> str:
    if not places:
        return "<p>No element differs.</p>"
    heads = ("place", "channel", "original", "came out", "error")
    lines = [
        (_place(place["index"]), *(_number(place[key]) for key in ("channel", "a", "b", "error"))) for place in places
    ]
    head = "".join(f'<th scope="col" class="number">{text}</th>' for text in heads)
    body = "\n".join(
        f'<tr><th scope="row" class="number">{first}</th>'
        + "".join(f'<td class="number">{text}</td>' for text in others)
        + "</tr>"
        for first, *others in lines
    )
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'<div class="wide" tabindex="0" role="group" aria-labelledby="worst">\n{table}\n</div>'


def _columns(document: Document) -> list[dict[str, Any]]:
    """The columns of the table that the document has, as the page's script wants them."""
    channels = document["channels"]
    rows = len(channels["minimum"])
    columns = [{"title": "channel", "words": ["channel"], "sortable": True, "values": list(range(rows))}]
    columns += [
        {"title": head, "words": [word, key], "sortable": True, "values": [_plain(value) for value in channels[key]]}
        for key, head, word in COLUMNS
        if channels[key] is not None
    ]
    places = [None if index is None else _place(index) for index in channels["worst_index"]]
    return [*columns, {"title": "worst place", "words": ["place"], "sortable": False, "values": places}]


def _plain(value: Any) -> float | int | str | None:
    """A number for JSON, which has neither inf nor nan; nine digits are all that a float32 has."""
    if value is None or isinstance(value, int):
        return value
    text = f"{value:.9g}"
    return text if text in ("inf", "-inf", "nan") else float(text)


def _data(document: Document) -> str:
    columns = _columns(document)
    text = json.dumps({"rows": len(columns[0]["values"]), "columns": columns}, allow_nan=False, separators=(",", ":"))
    # nothing that looks like a tag may stand inside <script>
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
