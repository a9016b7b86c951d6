"""Runs the vectors, and makes sure they are all there."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import reference

import chunkq

FOLDER = Path(__file__).parent / "vectors"
FILES = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in ("reported", "onnx_gaps", "fake_quantize")}
CASES = [case for cases in FILES.values() for case in cases]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])

IDS = """
dq-block-axis1-sequential dq-block-1d nvfp4-scale-row-mismatch dq-u8-subtraction-must-widen dq-scale-shape-1-default-axis
fq-degenerate-range-is-a-threshold fq-ties-half-even fq-1d-range-broadcasts-on-last-axis dask-square-array-axis0
fp8-block2d-ragged-rows mxfp4-gpt-oss-block32 dq-u16-to-f16-no-f16-intermediate q-round-before-zero-point
q-inf-and-overflowing-quotient q-nan-policy
dq-negative-axis q-negative-axis dq-int32-per-axis q-int32 q-int32-beyond-2-24 dq-bfloat16-per-axis q-bfloat16
dq-ragged-blocks q-ragged-blocks dq-blocks-on-axis-0 dq-blocks-on-the-last-of-three q-blocks-on-axis-0
q-blocks-on-the-last-of-three dq-scales-not-finite dq-float8-nan-inf-zero dq-float8-e4m3fnuz-nan
q-infinities-to-uint8 q-scale-of-zero-or-infinity q-nan-to-float8 dq-output-float16 dq-output-float16-denormal
dq-output-bfloat16 dq-output-float32-of-float16-scale q-output-int16 q-output-int4 q-output-float8-e5m2
q-output-float4 q-precision-float16 q-precision-bfloat16 q-precision-float32-of-float16
q-saturate-0-float8_e4m3fn q-saturate-1-float8_e4m3fn q-saturate-0-float8_e4m3fnuz q-saturate-1-float8_e4m3fnuz
q-saturate-0-float8_e5m2 q-saturate-1-float8_e5m2 q-saturate-0-float8_e5m2fnuz q-saturate-1-float8_e5m2fnuz
dq-float16-per-axis q-float16-per-axis
scalar_4levels_f32 scalar_5levels_clip_f32 per_channel_numpy_f32 per_channel_pdpd_axis1_f32
per_channel_pdpd_axis_m1_f32 mixed_range_shapes_16levels_f32
"""


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def array(entry):
    dtype, shape = dtype_of(entry["dtype"]), tuple(entry["shape"])
    if "packed" in entry:
        return chunkq.unpack(np.array(entry["packed"], np.uint8), entry["dtype"], shape)
    if "codes" in entry:
        return np.array(entry["codes"], f"u{dtype.itemsize}").view(dtype).reshape(shape)
    return (
        np.array(entry["values"], np.int64 if reference.is_integer(dtype) else np.float64).astype(dtype).reshape(shape)
    )


def written_out(entry):
    """An input as `from_json` has it: codes and packed bytes as values."""
    if "values" in entry:
        return entry
    values = array(entry)
    numbers = values.astype(np.int64 if reference.is_integer(values.dtype) else np.float64)
    words = [v if np.isfinite(v) else str(v) for v in numbers.reshape(-1).tolist()]
    return {"dtype": entry["dtype"], "shape": entry["shape"], "values": words}


def attributes_of(case):
    return {name: value for name, value in case["attributes"].items() if name != "chunks"}


def operator_of(case):
    inputs = {name: written_out(entry) for name, entry in case["inputs"].items() if name != "x"}
    return chunkq.from_json(
        json.dumps({"operator": case["operator"], "attributes": attributes_of(case), "inputs": inputs})
    )


def agrees(found, case):
    expected = array(case["expected"])
    assert found.dtype == expected.dtype
    if case["tolerance"] == {"rtol": 0, "atol": 0}:
        assert reference.same_bits(found, expected), (found, expected)
    else:
        np.testing.assert_allclose(found, expected, **case["tolerance"])


@every_case
def test_vector(case, isa):
    x = array(case["inputs"]["x"])
    if case["reason"]:
        with pytest.raises(chunkq.SpecError) as caught:
            operator_of(case)(x)
        assert caught.value.reason == case["reason"]
        return
    agrees(operator_of(case)(x), case)


@every_case
def test_the_vector_through_a_function(case):
    """The same with the arrays themselves, and made again of its own JSON."""
    x, *parameters = (array(case["inputs"][name]) for name in case["inputs"])
    attributes = attributes_of(case)
    op = getattr(chunkq, case["operator"])(*parameters, **attributes)
    for one in (op, chunkq.from_json(op.to_json())):
        if case["reason"] is None:
            agrees(one(x), case)


@every_case
def test_the_reference_agrees(case):
    inputs = {name: array(entry) for name, entry in case["inputs"].items()}
    attributes = attributes_of(case)
    if case["operator"] == "FakeQuantize":
        mode = attributes.pop("auto_broadcast", "numpy"), attributes.pop("broadcast_axis", -1)
        agrees(reference.fake_quantize(*inputs.values(), attributes["levels"], *mode), case)
    elif not case["reason"]:
        formula = reference.dequantize_linear if case["operator"] == "DequantizeLinear" else reference.quantize_linear
        for name in {"output_dtype", "precision"} & set(attributes):
            attributes[name] = dtype_of(attributes[name])
        if isinstance(attributes.get("block_size"), list):
            attributes["block_size"] = tuple(attributes["block_size"])
        agrees(formula(**inputs, **attributes), case)


def test_the_corpus_is_complete():
    assert [case["id"] for case in CASES] == IDS.split()
    assert len({case["id"] for case in CASES}) == len(CASES)
    assert sum(case["operator"] == "FakeQuantize" for case in CASES) == 9
    assert all(case["source"] and case["why"] for case in CASES)
    assert all("Apache-2.0" in case["source"] for case in FILES["fake_quantize"])
    named = ("ReferenceEvaluator, opset", "onnxruntime 1.", "by hand from the text of ONNX")
    assert all(case["source"].startswith(("onnx 1.", *named)) for case in FILES["onnx_gaps"])
    assert all("chunkq" not in case["source"] for case in CASES)


GAPS = {
    "negative axis": lambda case: case["attributes"].get("axis", 0) < 0,
    "int32": lambda case: case["inputs"]["x"]["dtype"] == "int32",
    "bfloat16": lambda case: case["inputs"]["scale"]["dtype"] == "bfloat16",
    "ragged blocks": lambda case: (
        (b := case["attributes"].get("block_size")) and case["inputs"]["x"]["shape"][case["attributes"]["axis"]] % b
    ),
    "blocks off axis 1": lambda case: case["attributes"].get("block_size") and case["attributes"]["axis"] != 1,
    "NaN": lambda case: any(reference.is_nan(array(entry)).any() for entry in case["inputs"].values()),
    "infinity": lambda case: any("inf" in str(entry.get("values")) for entry in case["inputs"].values()),
    "output_dtype": lambda case: "output_dtype" in case["attributes"],
    "float16 per axis": lambda case: case["inputs"]["scale"]["dtype"] == "float16" and case["inputs"]["scale"]["shape"],
    "precision": lambda case: "precision" in case["attributes"],
    "saturate=0": lambda case: case["attributes"].get("saturate") == 0,
}
ONE_OPERATOR = {"precision": ["QuantizeLinear"], "saturate=0": ["QuantizeLinear"]}


@pytest.mark.parametrize("gap", GAPS)
def test_every_gap_has_a_vector(gap):
    for operator in ONE_OPERATOR.get(gap, ["DequantizeLinear", "QuantizeLinear"]):
        assert any(GAPS[gap](case) for case in FILES["onnx_gaps"] if case["operator"] == operator), operator
