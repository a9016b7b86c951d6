"""The target's layout: literal answers, and what no size may break."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkq.errors import SpecError
from chunkq.layout import chunks_within, parse_shape, target_layout

KIB = 1024


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("7", (7,)),
        ("4,1024", (4, 1024)),
        ("-1,2", (-1, 2)),  # refused where the rank is known
        ("64MiB", "64MiB"),
        (" 1.5 GB ", "1.5 GB"),
        ("100B", "100B"),
    ],
)
def test_shapes_from_the_command_line(text, expected):
    assert parse_shape("--chunks", text) == expected


@pytest.mark.parametrize("text", ["", "x", "4,", "64XiB", "4x4", "1.5", "64MiB,2", "0KiB"])
def test_texts_that_are_no_shape(text):
    with pytest.raises(SpecError, match=r"--chunks .*64MiB") as caught:
        parse_shape("--chunks", text)
    assert caught.value.reason == "chunks"


@pytest.mark.parametrize(
    ("source", "asked", "expected"),
    [
        (((64, 512), None), (None, None), ((64, 512), None)),
        (((64, 512), (128, 1024)), (None, None), ((64, 512), (128, 1024))),
        (((64, 512), (128, 1024)), ((32, 32), None), ((32, 32), None)),
        (((64, 512), (128, 1024)), (None, [128, 512]), ((64, 512), (128, 512))),
        (((64, 512), None), ("32,32", "64,64"), ((32, 32), (64, 64))),
        # sizes: 4 bytes an element, the tensor is 1000 x 4096
        (((64, 512), None), ("128KiB", None), ((64, 512), None)),
        (((64, 512), None), ("512KiB", None), ((64, 2048), None)),
        (((64, 512), None), ("2MiB", None), ((128, 4096), None)),
        (((64, 512), None), ("100GiB", None), ((1000, 4096), None)),  # never past the tensor
        (((64, 512), None), ("100KiB", None), ((32, 512), None)),  # a divisor, not 50 rows
        (((64, 512), None), ("1KiB", None), ((1, 256), None)),
        (((61, 512), None), ("100KiB", None), ((50, 512), None)),  # 61 has no divisor near
        (((10, 512), (60, 2048)), ("100KiB", None), ((10, 2048), None)),  # 4 chunks of a shard
        (((64, 512), (128, 1024)), (None, "1MiB"), ((64, 512), (64, 4096))),
        (((64, 512), None), ("64KiB", "64KiB"), ((32, 512), (32, 512))),
        (((64, 512), None), (None, "5GB"), ((64, 512), (1024, 4096))),  # whole chunks, past the edge
    ],
)
def test_target_layout(source, asked, expected):
    assert target_layout((1000, 4096), 4, *source, *asked) == expected


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (((3,), None), r"target_chunks=\(3,\): expected 2 positive integers, one for each axis"),
        ((7, None), "target_chunks=7: expected 2 positive integers"),
        (((0, 4), None), "expected 2 positive integers"),
        (((2.0, 4), None), "expected 2 positive integers"),
        (((True, 4), None), "expected 2 positive integers"),
        (("1B", None), "an element takes 4 bytes"),
        (("64XB", None), "target_chunks '64XB': expected a size"),
        (((4, 4), (8, 6)), r"target_shards=\(8, 6\): expected multiples of the chunks \(4, 4\)"),
        ((None, "1KiB"), "one chunk .* takes 128 KiB"),
    ],
)
def test_layouts_that_are_refused(asked, words):
    with pytest.raises(SpecError, match=words) as caught:
        target_layout((1000, 4096), 4, (64, 512), None, *asked)
    assert caught.value.reason == "chunks"


def test_too_many_objects_are_refused_unless_shards_hold_them():
    shape = (10**8 + 1,)
    with pytest.raises(SpecError, match=r"100000001 stored objects.*larger target chunks"):
        target_layout(shape, 4, (1,), None)
    assert target_layout((10**8,), 4, (1,), None) == ((1,), None)
    assert target_layout(shape, 4, (1,), None, None, "8B") == ((1,), (2,))


def test_an_integer_alone_is_the_length_of_a_one_dimensional_chunk():
    assert target_layout((100,), 4, (10,), None, 64) == ((64,), None)
    assert target_layout((100,), 4, (10,), None, "64") == ((64,), None)


def test_tensors_of_no_axes_and_no_elements():
    assert target_layout((), 4, (), None, "1KiB", "1KiB") == ((), ())
    assert target_layout((0, 4), 4, (5, 4), None, "1KiB") == ((1, 4), None)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 12), st.integers(1, 4)), max_size=3),
    st.integers(1, 5000),
    st.booleans(),
)
def test_a_chunk_of_a_size_fits_the_size_the_tensor_and_the_grid(axes, elements, sharded):
    shape, chunks, factors = zip(*axes, strict=True) if axes else ((),) * 3
    shards = tuple(c * f for c, f in zip(chunks, factors, strict=True)) if sharded else None
    found = chunks_within(elements, shape, chunks, shards)
    assert prod(found) <= elements
    whole = tuple(map(min, chunks, shape))
    for n, c, k, f in zip(shape, chunks, found, factors, strict=True):
        assert 1 <= k <= n
        # once a source chunk fits, its boundaries are kept
        assert prod(whole) > elements or k % c == 0 or k in (n, f * c)
    if prod(whole) > elements:
        assert all(k <= c for k, c in zip(found, chunks, strict=True))


def test_lengths_do_not_matter():
    assert prod(chunks_within(2**20, (2**60,), (2**60,), None)) == 2**20
    assert prod(chunks_within(2**20, (2**60, 2**60), (1, 2**61 - 1), (2**40, 2**61 - 1))) <= 2**20
