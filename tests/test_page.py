"""The report as a page and as figures: its structure, what it escapes, and what it does in a real browser."""

import base64
import hashlib
import json
import math
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import browser as chromium
import matplotlib
import numpy as np
import pytest

from chunkq.errors import SpecError
from chunkq.figures import save_figures
from chunkq.page import page

HOSTILE = '</script><b>{{data}}</b><img src=x onerror="alert(1)">&amp;\udc80$x_1$'
PAGE_ROWS = 100


def document(channels=8, **changes):
    """A comparison of made-up numbers, every tenth channel a bad one."""
    rng = np.random.default_rng(channels)
    error = np.abs(rng.standard_normal(channels)) * np.where(np.arange(channels) % 10 == 3, 0.1, 0.001)
    spread = np.exp(rng.standard_normal(channels))
    counts, edges = np.histogram(rng.standard_normal(10_000), 2048)
    return {
        "a": {"name": "weight", "dtype": "float32", "shape": [channels, 64]},
        "b": {"name": "weight_int8", "dtype": "float32", "shape": [channels, 64]},
        "axis": 0,
        "overall": {
            "elements": channels * 64, "compared": channels * 64, "nonfinite": 0, "mismatched": 0,
            "max_abs_error": float(error.max(initial=0)), "mean_abs_error": 0.0004, "mse": 1e-7, "sqnr_db": 41.5,
            "cosine": 0.99998, "saturated": 0.0125,
        },
        "channels": {
            "minimum": (-spread).tolist(), "maximum": spread.tolist(), "max_abs_error": error.tolist(),
            "mean_abs_error": (error / 3).tolist(), "mse": (error**2).tolist(),
            "sqnr_db": (-20 * np.log10(error)).tolist(), "cosine": (1 - error).tolist(),
            "saturated": [0.0] * channels, "scale": (spread / 127).tolist(), "zero_point": [0] * channels,
            "worst_index": [[channel, 5] for channel in range(channels)],
        },
        "worst": [{"index": [3, 5], "a": 0.25, "b": 0.125, "error": -0.125, "channel": 3}],
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        "grid": [level / 32 for level in range(-128, 128)],
        **changes,
    }  # fmt: skip


def with_channels(found, **changes):
    found["channels"].update(changes)
    return found


class Tags(HTMLParser):
    """Every tag with its attributes, and the text inside scripts, heads and others by tag."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self, tag):
        return "".join(data for name, data in self.texts if name == tag)

    def values(self, attribute):
        return [attributes[attribute] for _, attributes in self.tags if attribute in attributes]


def data_of(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)], parse_constant=refuse)


def test_structure():
    found = Tags(page(document()))
    ids = found.values("id")
    assert len(ids) == len(set(ids))
    for attribute in ("aria-labelledby", "aria-describedby", "for"):
        named = found.values(attribute)
        assert named
        assert set(named) <= set(ids)
    pictures = [attributes for tag, attributes in found.tags if tag == "svg"]
    assert len(pictures) == 5
    assert all(attributes["role"] == "img" for attributes in pictures)
    assert all("scope" in attributes for tag, attributes in found.tags if tag == "th")
    assert [tag for tag, _ in found.tags].count("h1") == 1
    assert "aria-label" in dict(found.tags[[tag for tag, _ in found.tags].index("nav")][1])


def test_it_asks_for_nothing_and_holds_no_handlers():
    text = page(document())
    for _, attributes in Tags(text).tags:
        assert not [name for name in attributes if name.startswith("on")]
        links = [attributes[name] for name in ("src", "href", "xlink:href", "action") if name in attributes]
        assert all(link.startswith("#") for link in links)
    assert "://" not in text
    assert "@import" not in text


def test_only_its_own_script_may_run():
    found = Tags(page(document()))
    scripts = [data for tag, data in found.texts if tag == "script" and "use strict" in data]
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(content for content in found.values("content") if content.startswith("default-src"))
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_what_the_document_says_is_escaped():
    tensor = {"name": HOSTILE, "dtype": HOSTILE, "shape": []}
    places = [{"index": [], "a": math.nan, "b": math.inf, "error": -math.inf, "channel": None}]
    # the index is no number only in a document that somebody made by hand
    hostile = with_channels(document(1, a=tensor, b=tensor, worst=places), worst_index=[[HOSTILE]])
    text = page(hostile)
    found = Tags(text)
    tags = [tag for tag, _ in found.tags]
    assert tags.count("script") == 2
    assert not {"b", "img"} & set(tags)
    assert HOSTILE.replace("\udc80", "?") in found.text("span")
    text.encode("utf-8")
    assert [data for tag, data in found.texts if tag == "td"][-3:] == ["nan", "inf", "-inf"]


def test_numbers_that_json_does_not_have():
    special = with_channels(
        document(4),
        sqnr_db=[math.inf, -math.inf, math.nan, None],
        worst_index=[None, [1, 2], [3], []],
        zero_point=[None, 2**62, -1, 0],
    )
    columns = {column["words"][0]: column["values"] for column in data_of(page(special))["columns"]}
    assert columns["sqnr"] == ["inf", "-inf", "nan", None]
    assert columns["place"] == [None, "(1, 2)", "(3)", "()"]
    assert columns["zero"] == [None, 2**62, -1, 0]
    assert columns["scale"] == pytest.approx(special["channels"]["scale"], rel=1e-8)


def test_what_there_is_not_is_left_out():
    less = with_channels(document(histogram=None, grid=None, worst=[]), scale=None, zero_point=None, saturated=None)
    less["overall"].update(sqnr_db=None, cosine=None, saturated=None)
    text = page(less)
    assert not {"scale", "zero", "saturated"} & {column["words"][0] for column in data_of(text)["columns"]}
    assert text.count("<svg") == 3
    assert text.count("<dd>&ndash;</dd>") == 3
    assert "No element differs." in text


NOTHING = [None] * 4


@pytest.mark.parametrize(
    "odd",
    [
        document(0),
        document(1, axis=None),
        document(33),
        with_channels(document(4), **dict.fromkeys(("minimum", "maximum", "max_abs_error", "mean_abs_error"), NOTHING)),
        with_channels(document(4), **dict.fromkeys(("scale", "sqnr_db", "cosine", "mse"), NOTHING)),
        with_channels(document(2), minimum=[-1.7e308, -math.inf], maximum=[1.7e308, math.inf], scale=[0.0, 0.0]),
        with_channels(document(2), max_abs_error=[0.0, 0.0], mean_abs_error=[0.0, 0.0], sqnr_db=[math.inf] * 2),
        document(grid=[0.0]),
        document(grid=[]),
        document(grid=[-math.inf, -1e308, 0.0, 1e308, math.inf]),
        document(histogram={"edges": [5.0, 5.0], "counts": [12]}),
        document(histogram={"edges": [0.0, 0.0], "counts": [0]}, grid=[0.0, 1.0]),
        document(histogram={"edges": [-1.7e308, 0.0, 1.7e308], "counts": [1, 0]}),
        document(histogram={"edges": [0.0], "counts": []}),
    ],
)
def test_odd_tensors_have_a_page_too(odd, tmp_path):
    assert data_of(page(odd))["rows"] == len(odd["channels"]["minimum"])
    save_figures(odd, tmp_path)


def test_many_channels_and_levels_stay_small():
    many = document(8000, grid=[level / 8192 for level in range(-32768, 32768)])
    text = page(many)
    assert sum(len(part.split("</svg>")[0]) for part in text.split("<svg")[1:]) < 400_000
    assert len(text) < 2_000_000


def levels_drawn(count):
    """How many upright lines, and how many filled pieces of the strip, stand for a grid."""
    text = page(document(grid=[level / count for level in range(count)]))
    picture = text[text.index("<svg") : text.index("</svg>")]
    paths = [part.split('"')[1] for part in picture.split("<path d=")[1:]]
    return max(path.count("M") for path in paths), picture.count("PolyCollection") + picture.count("FillBetween")


def test_levels_are_lines_until_they_are_too_many():
    assert levels_drawn(16) == (16, 0)
    assert levels_drawn(256) == (256, 0)
    lines, filled = levels_drawn(5000)
    assert lines < 16
    assert filled


def test_the_same_bytes_whatever_matplotlib_is_set_to():
    plain = page(document())
    own = {"text.color": "red", "font.size": 30.0, "axes.facecolor": "yellow", "svg.fonttype": "path"}
    with matplotlib.rc_context(own):
        assert page(document()) == plain
        assert {key: matplotlib.rcParams[key] for key in own} == own


def test_png_files(tmp_path):
    folder = tmp_path / "made" / "here"
    paths = save_figures(document(), folder)
    assert [Path(path).stem for path in paths] == ["histogram", "ranges", "scales", "errors", "sqnr"]
    assert all(path.endswith(".png") for path in paths)
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in paths)
    assert sorted(folder.iterdir()) == sorted(map(Path, paths))
    assert [Path(path).name for path in save_figures(document(1, axis=None), tmp_path)] == ["histogram.png"]


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (lambda: page(document()), lambda: save_figures(document(), tmp_path / "none")):
        with pytest.raises(SpecError, match=r"pip install 'chunkq\[report\]'") as caught:
            call()
        assert caught.value.reason == "argument"
    assert not (tmp_path / "none").exists()


# In a browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    path = chromium.find()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(chromium.NAMES)} is on PATH")
    with chromium.Browser(path, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def show(tab, tmp_path):
    """Open a document's page; the browser."""

    def open_page(found, scheme="light", width=1200):
        file = tmp_path / "report.html"
        file.write_text(page(found), "utf-8")
        tab.scheme(scheme)
        tab.size(width, 900)
        tab.open(file.as_uri())
        return tab

    return open_page


CHANNELS = "[...document.querySelectorAll('#table tbody th')].map(cell => Number(cell.textContent))"
FOUND = "document.getElementById('found').textContent"


def search(tab, words):
    tab.ask("document.getElementById('query').select()")
    tab.type(words)
    return tab.ask(CHANNELS)


def click_head(tab, title):
    tab.ask(f"[...document.querySelectorAll('#table thead button')].find(one => one.textContent === {title!r}).click()")
    return tab.ask(CHANNELS)


def contrast(tab, one, other):
    """Ratio of the luminances of two CSS variables (WCAG 2)."""

    def luminance(name):
        value = tab.ask(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')").strip()
        parts = [int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("channels", [8, 8000])
@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 29)")])
def test_it_opens_from_a_file(show, channels, scheme, ground, tmp_path):
    tab = show(document(channels, a={"name": HOSTILE, "dtype": "float32", "shape": [channels, 64]}), scheme)
    assert tab.problems() == ([], [(tmp_path / "report.html").as_uri()])
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == ground
    assert tab.ask(CHANNELS) == list(range(min(channels, PAGE_ROWS)))
    assert tab.ask("document.querySelector('h1 span').textContent") == HOSTILE.replace("\udc80", "?")
    # the figures follow the theme
    ink = tab.ask("getComputedStyle(document.body).color")
    fills = "[...new Set([...document.querySelectorAll('svg text')].map(one => getComputedStyle(one).fill))]"
    assert tab.ask(fills) == [ink]
    assert tab.ask("getComputedStyle(document.querySelector('svg')).backgroundColor") == "rgba(0, 0, 0, 0)"
    for role, least in (("ink", 7), ("soft", 4.5), ("mark", 4.5), ("data", 3)):
        assert contrast(tab, role, "ground") >= least, role
    assert contrast(tab, "soft", "raised") >= 4.5


@pytest.mark.parametrize("channels", [8, 8000])
def test_search(show, channels):
    found = document(channels)
    tab = show(found)
    sqnr, largest = (np.array(found["channels"][key]) for key in ("sqnr_db", "maximum"))
    for words, wanted in (
        ("3", [3]),
        ("sqnr<40", np.flatnonzero(sqnr < 40)),
        ("SQNR_dB >= 40", np.flatnonzero(sqnr >= 40)),
        ("max > 1.5 sqnr<40", np.flatnonzero((largest > 1.5) & (sqnr < 40))),
        ("channel>=5 channel<=6", [5, 6]),
        ("channel!=0", range(1, channels)),
        ("zero=0", range(channels)),
        ("(7,", [7]),
        ("", range(channels)),
    ):
        assert search(tab, words) == list(wanted)[:PAGE_ROWS], words
        assert tab.ask(FOUND).startswith(f"{len(wanted):,} of {channels:,} channels"), words
    for words, told in (("colour>1", "no column “colour”"), ("sqnr<", "needs a number"), ("mse<x", "needs a number")):
        assert search(tab, words) == []
        assert told in tab.ask(FOUND)
    assert tab.problems()[0] == []


def test_search_and_what_is_no_number(show):
    special = with_channels(document(4), sqnr_db=[math.inf, -math.inf, math.nan, None])
    tab = show(special)
    assert search(tab, "sqnr>20") == [0]
    assert search(tab, "sqnr<20") == [1]
    assert search(tab, "sqnr=inf") == [0]
    assert search(tab, "sqnr!=5") == [0, 1]
    assert search(tab, "nan") == [2]


@pytest.mark.parametrize("channels", [8, 8000])
def test_sort(show, channels):
    found = document(channels)
    found["channels"]["sqnr_db"][:3] = [math.inf, None, math.nan]
    numbers = [math.nan if value is None else value for value in found["channels"]["sqnr_db"]]
    ordered = sorted(set(range(channels)) - {1, 2}, key=lambda channel: numbers[channel])
    tab = show(found)
    states = "[...document.querySelectorAll('#table thead th')].map(cell => cell.ariaSort).filter(Boolean)"
    # what has no number is last, both ways
    assert click_head(tab, "SQNR, dB") == [*ordered, 1, 2][:PAGE_ROWS]
    assert tab.ask(states) == ["ascending"]
    assert click_head(tab, "SQNR, dB") == [*ordered[::-1], 1, 2][:PAGE_ROWS]
    assert tab.ask(states) == ["descending"]
    # a search keeps the order
    assert search(tab, "sqnr<40") == [channel for channel in ordered[::-1] if numbers[channel] < 40][:PAGE_ROWS]
    assert click_head(tab, "channel") == [channel for channel in range(channels) if numbers[channel] < 40][:PAGE_ROWS]


def test_pages_of_rows(show):
    tab = show(document(8000))
    for button, first in (("next", 100), ("next", 200), ("previous", 100), ("last", 7900), ("first", 0)):
        tab.ask(f"document.querySelector('[data-to={button}]').click()")
        assert tab.ask(CHANNELS) == list(range(first, first + PAGE_ROWS))
        assert tab.ask(FOUND) == f"8,000 of 8,000 channels, rows {first + 1:,} to {first + PAGE_ROWS:,}"
    disabled = "[...document.querySelectorAll('#pages :disabled')].map(one => one.dataset.to)"
    assert tab.ask(disabled) == ["first", "previous"]
    tab.ask("document.querySelector('[data-to=last]').click()")
    assert search(tab, "channel<150") == list(range(100))
    search(tab, "3")
    assert tab.ask("document.getElementById('pages').hidden") is True


def test_eight_thousand_channels_stay_quick(show):
    tab = show(document(8000))
    start = time.perf_counter()
    for words in ("sqnr<40", "0.12", "max>0.1 sqnr>1"):
        search(tab, words)
        click_head(tab, "largest error")
    # a hundredth of that on a free machine
    assert time.perf_counter() - start < 10
    assert tab.ask("document.querySelectorAll('#table tbody tr').length") <= PAGE_ROWS


def test_keyboard(show):
    tab = show(document(300))
    tab.ask("document.getElementById('query').focus()")
    tab.type("channel>250")
    assert tab.ask(CHANNELS) == list(range(251, 300))
    focused = "document.activeElement.textContent"
    for _ in range(3):
        tab.press("Tab", 9)
    assert tab.ask(focused) == "minimum"
    tab.ask("document.activeElement.blur()")
    tab.ask("document.querySelector('#table thead button').focus()")
    tab.press("Enter", 13, "\r")
    assert tab.ask(CHANNELS) == list(range(299, 250, -1))
    assert tab.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_no_other_script_runs(show):
    tab = show(document())
    tab.ask("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    tab.ask("document.body.append(Object.assign(document.createElement('img'), {src: 'x.png'}))")
    assert tab.ask("window.ran === undefined")
    assert len(tab.problems()[0]) == 2


@pytest.mark.parametrize("width", [380, 1200])
def test_the_page_is_as_wide_as_the_window(show, width):
    long = {"name": "s3://bucket/" + "very_long_name_" * 20, "dtype": "float32", "shape": [8000, 64]}
    tab = show(document(8000, a=long), width=width)
    assert tab.ask("document.documentElement.scrollWidth") <= width
    if width == 1200:
        around = "document.getElementById('table').parentNode"
        assert tab.ask(f"{around}.scrollWidth - {around}.clientWidth") == 0
