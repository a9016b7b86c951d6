"""The DequantizeLinear and QuantizeLinear cases that the onnx wheel builds in memory: bits, not their tolerance."""

from collections import Counter

import numpy as np
import pytest
import reference
from onnx import TensorProto, helper, numpy_helper

# load_model_tests(kind="node") would run the other 1,850 cases too, which takes nine seconds
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.node import dequantizelinear, quantizelinear  # noqa: F401  (importing makes the cases)

import chunkq

CASES = [
    case
    for case in node_cases._NodeTestCases
    if [node.op_type for node in case.model.graph.node] in (["DequantizeLinear"], ["QuantizeLinear"])
]


def translated(case):
    """Operator, its attributes, inputs and the expected output in NumPy's and ml_dtypes' types."""
    (node,) = case.model.graph.node
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    for name in {"output_dtype", "precision"} & set(attributes):
        attributes[name] = helper.tensor_dtype_to_np_dtype(attributes[name])
    inputs, (expected,) = (
        [numpy_helper.to_array(v) if isinstance(v, TensorProto) else np.asarray(v) for v in values]
        for values in case.data_sets[0]
    )
    return node.op_type, attributes, inputs, expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_of_the_case(case, isa):
    op_type, attributes, (x, *parameters), expected = translated(case)
    found = getattr(chunkq, op_type)(*parameters, **attributes)(x)
    assert reference.same_bits(found, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_agrees(case):
    op_type, attributes, inputs, expected = translated(case)
    formula = reference.dequantize_linear if op_type == "DequantizeLinear" else reference.quantize_linear
    assert reference.same_bits(formula(*inputs, **attributes), expected)


def test_the_cases_are_all_there():
    counts = Counter(case.model.graph.node[0].op_type for case in CASES)
    assert counts["DequantizeLinear"] >= 14
    assert counts["QuantizeLinear"] >= 13
