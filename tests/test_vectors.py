"""Runs the vectors, and makes sure they are all there."""

import json
from pathlib import Path

import numpy as np
import pytest
import reference

import chunkq

FOLDER = Path(__file__).parent / "vectors"
CASES = [case for name in ("reported", "fake_quantize") for case in json.loads((FOLDER / f"{name}.json").read_text())]


IDS = """
dq-block-axis1-sequential dq-block-1d nvfp4-scale-row-mismatch dq-u8-subtraction-must-widen dq-scale-shape-1-default-axis
fq-degenerate-range-is-a-threshold fq-ties-half-even fq-1d-range-broadcasts-on-last-axis dask-square-array-axis0
scalar_4levels_f32 scalar_5levels_clip_f32 per_channel_numpy_f32 per_channel_pdpd_axis1_f32
per_channel_pdpd_axis_m1_f32 mixed_range_shapes_16levels_f32
"""


def array(entry):
    return np.array(entry["values"], entry["dtype"]).reshape(entry["shape"])


def arguments(case):
    inputs = {name: array(entry) for name, entry in case["inputs"].items()}
    attributes = {k: v for k, v in case["attributes"].items() if k != "chunks"}
    return inputs, attributes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_vector(case, isa):
    inputs, attributes = arguments(case)
    operator = chunkq.dequantize_linear if case["operator"] == "DequantizeLinear" else chunkq.fake_quantize
    if case["reason"]:
        with pytest.raises(chunkq.SpecError) as caught:
            operator(**inputs, **attributes)
        assert caught.value.reason == case["reason"]
        return
    found = operator(**inputs, **attributes)
    expected = array(case["expected"])
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, **case["tolerance"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_reference_agrees(case):
    inputs, attributes = arguments(case)
    if case["operator"] == "FakeQuantize":
        mode = attributes.pop("auto_broadcast", "numpy"), attributes.pop("broadcast_axis", -1)
        found = reference.fake_quantize(*inputs.values(), attributes["levels"], *mode)
        np.testing.assert_allclose(found, array(case["expected"]), **case["tolerance"])
    elif not case["reason"]:
        found = reference.dequantize_linear(**inputs, **attributes)
        np.testing.assert_allclose(found, array(case["expected"]), **case["tolerance"])


def test_the_corpus_is_complete():
    assert [case["id"] for case in CASES] == IDS.split()
    assert sum(case["operator"] == "FakeQuantize" for case in CASES) == 9
    assert all(case["source"] and case["why"] for case in CASES)
    assert all("Apache-2.0" in case["source"] for case in CASES[-6:])
