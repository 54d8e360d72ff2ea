"""Programs of 8-bit weights and activations: a scale per row, the same answers in any batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers import Tokenizer, net_of

import lit_compress
from lit_compress.export.fuse import compact, fuse
from lit_compress.export.integers import fold, integer_tables, quantize
from lit_compress.export.program import Program, program_bytes, read_program, write_program
from lit_compress.layers import LowRankLinear, LowRankSparseLinear
from lit_compress.models.accounting import dense_layers
from lit_compress.models.outline import estimated_bytes
from lit_compress.models.sites import find_sites, stacks
from lit_compress.models.surgery import factorize
from lit_compress.numerics.decompose import decompose
from lit_compress.run.solve import GRAPH

NAMES = ("input_ids", "attention_mask", "token_type_ids")


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
    quantize(tmp_path / "model.onnx", tmp_path / "small.onnx", "int8", [given])
    made = onnx.load(tmp_path / "small.onnx")
    kept = {item.name: item for item in made.graph.initializer if np.prod(item.dims) >= 300 * 16}
    assert len(kept) == 2 and {item.data_type for item in kept.values()} == {TensorProto.INT8}
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, given)
    assert np.abs(answer - exact).max() < 0.03 * np.abs(exact).max()


def stacked_and_rows(net):
    """Query, key and value on one right factor; factors and rows elsewhere."""
    shared = stacks(net)
    ranks = {site.name: 12 for site in find_sites(net)}
    first = {name: rank for name, rank in ranks.items() if name in shared}
    inside = {name for names in shared.values() for name in names}
    factorize(net, first, lambda _, weight, rank: decompose(weight, rank), stacks=shared)
    rest = {name: rank for name, rank in ranks.items() if name not in inside}
    factorize(net, rest, lambda _, weight, rank: decompose(weight, rank), LowRankSparseLinear)
    for name in rest:
        net.get_submodule(name).sparse.data[::2] = 0
    return fuse(compact(net))


def sizes_in_float(path):
    """Return the bytes of every constant in float."""
    if path.suffix == ".onnx":
        constants = pytest.importorskip("onnx").load(path).graph.initializer
        return [4 * int(np.prod(item.dims)) for item in constants if item.data_type == 1]
    nodes = pytest.importorskip("openvino").Core().read_model(path).get_ops()
    return [n.get_byte_size() for n in nodes if n.get_type_name() == "Constant" and n.get_element_type().is_real()]


def feeds(batches=4, vocabulary=100):
    generator = np.random.default_rng(1)
    ids = [generator.integers(5, vocabulary, (8, length)) for length in (9, 20, 31, 40)[:batches]]
    return [dict(zip(NAMES, (each, np.ones_like(each), each % 2), strict=True)) for each in ids]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "openvino"])
def test_a_text_has_the_same_answers_in_any_batch(form, tmp_path):
    """Alone, in a batch of 3, padded to 256; one of its tokens is unknown (1). No matrix stays in float."""
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "nncf"}[form])
    settings = {"max_position_embeddings": 256, "vocab_size": 3000, "hidden_size": 96, "task": "conll2003"}
    net = stacked_and_rows(net_of("bert", torch.float32, **settings)).eval()
    made = write_program(net, Tokenizer("token_type_ids"), tmp_path, form)
    path, before = tmp_path / made["file"], made["bytes"]
    assert before == sum(file.stat().st_size for file in tmp_path.iterdir())
    for place in (lit_compress, transformers):  # paths of where it was made
        assert place.__file__.rpartition("/")[0].encode() not in path.read_bytes()
    quantize(path, path, "int8", feeds(vocabulary=3000))
    assert all(size <= 256 * 4 or size == 3000 * 4 for size in sizes_in_float(path))  # biases, scales of a table
    assert program_bytes(path) < before / 2
    assert abs(program_bytes(path) - estimated_bytes(net, 8, GRAPH[form])) < 0.25 * program_bytes(path)
    program, text = Program(read_program(path, ("logits",)), net.config), [2, 1, 77, 2500, 9, 3]
    answers = []
    for rows, length in (([text], 6), ([text, [*range(30, 50)], [2, 5, 3]], 20), ([text], 256)):
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        given = {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": torch.zeros_like(ids)}
        both = (each(**given).logits[0, :6].detach().flatten() for each in (program, net))
        answers.append(tuple(both))
    for answer, exact in answers:
        assert torch.cosine_similarity(answer, answers[0][0], dim=0) > 0.99999
        assert 0.9 < torch.cosine_similarity(answer, exact, dim=0) < 1


# over 10 s: a program is quantized in each way
@pytest.mark.slow
def test_factors_whose_ranges_differ(tmp_path):
    """Between two factors ranges may differ by 50 times, as after training; of two ways to smooth them the better is
    taken, whichever is tried first."""
    pytest.importorskip("nncf")
    torch.manual_seed(0)
    net = net_of("bert", torch.float32, num_hidden_layers=1).eval()
    ranks = {name: min(layer.weight.shape) // 2 for name, layer in dense_layers(net).items()}
    net = factorize(net, ranks, lambda _, weight, rank: decompose(weight, rank)).eval()
    for layer in net.modules():
        if isinstance(layer, LowRankLinear):
            layer.right.data[::7] *= 50
            layer.left.data[:, ::7] /= 50
    made, given = write_program(net, Tokenizer("token_type_ids"), tmp_path, "openvino"), feeds(2)
    inputs = {name: torch.from_numpy(value) for name, value in given[1].items()}
    exact = net(**inputs).logits.detach()

    def error(*smooth):
        quantize(tmp_path / made["file"], tmp_path / "small.xml", "int8", given, smooth)
        assert b"> <" not in b" ".join((tmp_path / "small.xml").read_bytes().split())  # no indentation
        answer = Program(read_program(tmp_path / "small.xml", ("logits",)), net.config)(**inputs).logits
        return float((answer - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())

    alone = sorted(error(share) for share in (0.95, 0.5))
    assert error(0.95, 0.5) == alone[0] < alone[1] and alone[0] < 0.1, alone


# over 10 s: a process of its own for libraries that leave it broken
@pytest.mark.slow
def test_other_programs_of_integers():
    """integers_cases.py: with many other tests in one process NNCF's ways to 4 bits left an object of Python broken."""
    pytest.importorskip("nncf")
    file = Path(__file__).with_name("integers_cases.py")
    line = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(file)]
    said = subprocess.run(line, capture_output=True, text=True, cwd=file.parents[2])
    assert said.returncode == 0, said.stdout[-3000:]
