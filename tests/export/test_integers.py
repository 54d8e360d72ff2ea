"""Graphs of ONNX with integers: tables with a scale per row, folded products; other programs in integers_cases.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lit_compress.export.integers import fold, integer_tables, quantize


def table(rows=50000, width=3):
    values = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    values[7:8], values[8:9] = 0, 1e-30
    return values


def test_tables_of_a_graph():
    """Those that only ``Gather`` reads, in rows; one with another reader, and columns, stay as they are."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    values = {"alone": table(), "tied": table(9, 3), "columns": table(4, 9)}
    nodes = [
        helper.make_node("Gather", ["alone", "ids"], ["a"]), helper.make_node("Gather", ["tied", "ids"], ["b"]),
        helper.make_node("Gather", ["columns", "ids"], ["c"], axis=1), helper.make_node("Identity", ["tied"], ["d"]),
    ]  # fmt: skip
    shapes = {"a": [2, 2, 3], "b": [2, 2, 3], "c": [4, 2, 2], "d": [9, 3]}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [2, 2])
    tensors = [numpy_helper.from_array(value, name) for name, value in values.items()]
    model = helper.make_model(helper.make_graph(nodes, "tables", [ids], outputs, tensors))
    given = {"ids": np.array([[7, 1], [0, 8]])}
    expected = ReferenceEvaluator(model).run(None, given)
    integer_tables(model)
    onnx.checker.check_model(model)
    kept = {i.name: i.data_type for i in model.graph.initializer}
    assert kept["alone.rows"] == TensorProto.INT8 and "alone" not in kept and {"tied", "columns"} <= set(kept)
    first, *others = ReferenceEvaluator(model).run(None, given)
    assert np.abs(first - expected[0]).max() <= np.abs(values["alone"]).max() / 127 / 2
    assert all(np.array_equal(*pair) for pair in zip(others, expected[1:], strict=True))


def scoped(name, *args, **settings):
    """A node of the model itself."""
    from onnx import StringStringEntryProto, helper

    node = helper.make_node(name, *args, name=f"node {args[1][0]}", **settings)
    node.metadata_props.append(StringStringEntryProto(key="pkg.torch.onnx.name_scopes", value="['', 'net']"))
    return node


def graph_of(nodes, values, given, outputs, rank=2):
    from onnx import TensorProto, helper, numpy_helper

    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in given.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (None,) * rank) for name in outputs]
    tensors = [numpy_helper.from_array(value, name) for name, value in values.items()]
    opset = [helper.make_opsetid("", 18)]
    return helper.make_model(
        helper.make_graph(nodes, "made", inputs, results, tensors), opset_imports=opset, ir_version=9
    )


def test_constants_that_come_to_a_product_through_a_node_are_folded():
    """A right factor that two products share, as a transpose each, and one that is padded with rows of zeros."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto
    from onnx.reference import ReferenceEvaluator

    draw = np.random.default_rng(0).normal
    values = {"shared": draw(size=(3, 8)).astype(np.float32), "rows": draw(size=(5, 8)).astype(np.float32),
              "pads": np.array([0, 0, 3, 0])}  # fmt: skip
    nodes = [
        scoped("Transpose", ["shared"], ["first"], perm=[1, 0]), scoped("MatMul", ["x", "first"], ["a"]),
        scoped("Transpose", ["shared"], ["second"], perm=[1, 0]), scoped("MatMul", ["x", "second"], ["b"]),
        scoped("Pad", ["rows", "pads"], ["padded"]), scoped("Gemm", ["x", "padded"], ["c"], transB=1),
        scoped("Transpose", ["x"], ["d"], perm=[1, 0]),
    ]  # fmt: skip
    model = graph_of(nodes, values, {"x": (TensorProto.FLOAT, [2, 8])}, "abcd")
    given = {"x": draw(size=(2, 8)).astype(np.float32)}
    expected = ReferenceEvaluator(model).run(None, given)
    model, turned = fold(model)
    onnx.checker.check_model(model)
    assert turned == {"shared": "first"} and "Pad" not in {node.op_type for node in model.graph.node}
    assert {item.name: list(item.dims) for item in model.graph.initializer} == {"first": [8, 3], "padded": [8, 8]}
    for one, other in zip(ReferenceEvaluator(model).run(None, given), expected, strict=True):
        assert np.array_equal(one, other)


def test_a_table_that_is_also_the_output_layer_is_stored_once(tmp_path):
    """And one that two stacks read: as integers, too."""
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    from onnx import TensorProto
    from onnx.reference import ReferenceEvaluator

    draw = np.random.default_rng(0).normal
    values = {name: draw(size=(300, 16)).astype(np.float32) for name in ("tied", "twice")}
    nodes = [
        scoped("Gather", ["tied", "ids"], ["x"]), scoped("Gather", ["twice", "ids"], ["y"]),
        scoped("Gather", ["twice", "ids"], ["z"]), scoped("Transpose", ["tied"], ["columns"], perm=[1, 0]),
        scoped("Add", ["x", "y"], ["s"]), scoped("Add", ["s", "z"], ["t"]), scoped("MatMul", ["t", "columns"], ["out"]),
    ]  # fmt: skip
    onnx.save(graph_of(nodes, values, {"ids": (TensorProto.INT64, [2, 7])}, ["out"], 3), tmp_path / "model.onnx")
    given = {"ids": np.random.default_rng(1).integers(0, 300, (2, 7))}
    (exact,) = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(None, given)
    quantize(tmp_path / "model.onnx", tmp_path / "small.onnx", "int8")
    made = onnx.load(tmp_path / "small.onnx")
    kept = {item.name: item for item in made.graph.initializer if np.prod(item.dims) >= 300 * 16}
    assert len(kept) == 2 and {item.data_type for item in kept.values()} == {TensorProto.INT8}
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, given)
    assert np.abs(answer - exact).max() < 0.03 * np.abs(exact).max()


# over 10 s: a process of its own for libraries that leave it broken
@pytest.mark.slow
def test_other_programs_of_integers():
    """integers_cases.py: after many other tests in one process NNCF leaves an object of Python broken."""
    pytest.importorskip("nncf")
    file = Path(__file__).with_name("integers_cases.py")
    line = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(file)]
    said = subprocess.run(line, capture_output=True, text=True, cwd=file.parents[2])
    assert said.returncode == 0, said.stdout[-3000:]
