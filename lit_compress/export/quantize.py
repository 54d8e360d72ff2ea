"""Programs of 8-bit weights and activations: one way for ONNX Runtime, and one for OpenVINO.

ONNX Runtime's static quantization and NNCF read the range of every activation once, from texts. So a text has the same
answers alone, in a batch and with padding. Ranges that are read again in every batch would change them. Weights take
7 of 8 bits: a processor without VNNI adds two products in 16 bits, which two of 8 bits overflow.

Integers of PyTorch are left out. torchao 0.18 was tried on exports: it quantizes ``nn.Linear``, only two of the 26
layers of a factorized BERT; its files load only where torchao is installed; a dense BERT with weights and activations
of 8 bits took 20 times as long as in float32 in PyTorch on a CPU, as nothing is fused without a compiler.
"""

from __future__ import annotations

import ast
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_compress.layers import Int8Embedding

_SCOPES = "pkg.torch.onnx.name_scopes"  # of a node: the modules from the outermost to its own
Feed = dict[str, np.ndarray]  # arrays [texts, tokens] by the names of a program's inputs


# ------------------------------------------------------------------------------------------------- ONNX Runtime


def quantize_onnx(path: Path, out: Path, feeds: Sequence[Feed]) -> None:
    """Quantize matrices and their inputs by ONNX Runtime, and tables of embeddings by :func:`integer_tables`.

    The output of a matrix stays in float. With ranges for it MiniLM-L6 was off by twice as much, as the last
    matrix of a feed-forward network returns a few very large values, and it took longer.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    model, matrices = onnx.load(path), ["MatMul", "Gemm"]
    turned = fold(model)
    names = [item.name for item in model.graph.input]
    with silent():
        quantize_static(
            model, out, _Ranges([{name: feed[name] for name in names} for feed in feeds]),
            quant_format=QuantFormat.QDQ, per_channel=True, reduce_range=True, activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8, op_types_to_quantize=matrices, calibrate_method=CalibrationMethod.MinMax,
            extra_options={"CalibMovingAverage": True, "OpTypesToExcludeOutputQuantization": matrices},
            nodes_to_exclude=_kept(model.graph),
        )  # fmt: skip
    model = onnx.load(out)
    save_onnx(model, turned, out)


def save_onnx(model: Any, turned: Mapping[str, str], out: Path) -> None:
    """Write an ONNX model of integer matrices, with :func:`integer_tables`; ``turned`` as :func:`fold` returns it."""
    import onnx

    integer_tables(model, turned)
    model.graph.ClearField("value_info")
    for node in model.graph.node:
        node.ClearField("metadata_props")  # where it was in the model: half a megabyte
    onnx.save(model, out)


def fold(model: Any) -> dict[str, str]:
    """Replace ``Transpose`` and ``Pad`` of constants in an ONNX model by their results, in place.

    ONNX Runtime quantizes a matrix that the product itself reads. A right factor that several layers share, one with
    full rows, and a table that is the output layer come through such a node, and would stay in float.

    Returns:
        Name of a transposed constant -> name of the result.
    """
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    graph, nodes, made, turned = model.graph, list[Any](), dict[bytes, str](), dict[str, str]()
    constants = {item.name: item for item in graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in graph.node
                  if node.op_type == "Constant" and node.attribute[0].HasField("t")}  # fmt: skip
    renamed: dict[str, str] = {}
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        given: list[str] = [name for name in node.input if name]
        if node.op_type not in ("Transpose", "Pad") or not all(name in constants for name in given):
            nodes.append(node)
            continue
        key = b"".join(
            [node.op_type.encode(), *map(str.encode, given), *(a.SerializeToString() for a in node.attribute)]
        )
        if key in made:  # the same for several products
            renamed[node.output[0]] = made[key]
            continue
        made[key] = result = node.output[0]
        evaluated: Any = ReferenceEvaluator(node)
        values = {name: numpy_helper.to_array(constants[name]) for name in given}
        constants[result] = numpy_helper.from_array(evaluated.run(None, values)[0], result)
        graph.initializer.append(constants[result])
        if node.op_type == "Transpose":
            turned[given[0]] = result
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in graph.node for name in node.input} | {item.name for item in graph.output}
    kept = [item for item in graph.initializer if item.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return turned


class _Ranges:
    """The batches, as ONNX Runtime's calibration asks for them, one by one."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Feed | None:
        """Return the next batch; None after the last."""
        return next(self._feeds, None)


def _kept(graph: Any) -> list[str]:
    """Return the names of the nodes that stay in float: those after the model, and products of two activations.

    In this format ONNX Runtime ignores its option ``MatMulConstBOnly``.
    """
    constants, names = {item.name for item in graph.initializer}, []
    for node in graph.node:
        scopes = [item.value for item in node.metadata_props if item.key == _SCOPES]
        modules = {name for value in scopes for name in ast.literal_eval(value)}
        if "net" not in modules or not constants & set(node.input):
            names.append(node.name)
    return names


def integer_tables(model: Any, turned: Mapping[str, str] = {}) -> None:
    """Store the tables of an ONNX model that only ``Gather`` reads as :class:`Int8Embedding` does, in place.

    The rows that are read are multiplied with their scales after it. ONNX Runtime's own tools have one scale for the
    whole table. If the transposed table is also a matrix of integers, the output layer over the vocabulary, its
    integers are read.

    Args:
        model: of which the matrices are quantized.
        turned: as :func:`fold` returns it.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph, nodes = model.graph, []
    there = {item.name: item for item in graph.initializer}
    tables = {name: t for name, t in there.items() if t.data_type == TensorProto.FLOAT and len(t.dims) == 2}
    for node in graph.node:
        by_rows = node.op_type == "Gather" and not any(a.name == "axis" and a.i for a in node.attribute)
        for name in node.input[int(by_rows) :]:
            tables.pop(name, None)
    tables = {name: table for name, table in tables.items() if any(name in node.input for node in graph.node)}
    for name, table in tables.items():
        columns, scale = (f"{turned.get(name)}_{part}" for part in ("quantized", "scale"))
        if columns in there and list(there[scale].dims) == [table.dims[0]]:
            graph.initializer.append(numpy_helper.from_array(np.array([1]), f"{name}.axis"))
            nodes.append(helper.make_node("Transpose", [columns], [f"{name}.rows"], perm=[1, 0]))
            nodes.append(helper.make_node("Unsqueeze", [scale, f"{name}.axis"], [f"{name}.scales"]))
        else:
            small = Int8Embedding.from_table(torch.from_numpy(numpy_helper.to_array(table).copy()))
            for part, value in (("rows", small.weight), ("scales", small.scale[:, None])):
                graph.initializer.append(numpy_helper.from_array(value.numpy(), f"{name}.{part}"))
        graph.initializer.remove(table)
    for node in graph.node:
        if node.op_type != "Gather" or (name := node.input[0]) not in tables:
            nodes.append(node)
            continue
        (result,), ids = node.output, node.input[1]
        for part in ("rows", "scales"):
            nodes.append(helper.make_node("Gather", [f"{name}.{part}", ids], [f"{result}.{part}"]))
        nodes.append(helper.make_node("Cast", [f"{result}.rows"], [f"{result}.steps"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Mul", [f"{result}.steps", f"{result}.scales"], [result]))
    del graph.node[:]
    graph.node.extend(nodes)


@contextmanager
def silent() -> Iterator[None]:
    """Hide the advice that the libraries log and print at every call."""
    os.environ.setdefault("NNCF_CI", "1")  # else NNCF sends how it is used to its makers
    known = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(known)


# ------------------------------------------------------------------------------------------------- OpenVINO


def quantize_openvino(path: Path, out: Path, feeds: Sequence[Feed], smooth: Sequence[float]) -> None:
    """Quantize weights and activations by NNCF.

    Of the shares ``smooth`` the one is taken whose answers to ``feeds`` are nearest to those of ``path``. NNCF's 0.95
    is nearer for a dense MiniLM, and far off for components at 0.10: ranges between two factors differ by up to 52
    times there, and with 0.95 of them the columns of the second factor do.
    """
    with silent():
        import nncf
        import openvino

        read = openvino.Core().read_model
        model = read(path)
        given = [{item.any_name: feed[item.any_name] for item in model.inputs} for feed in feeds]
        made = [
            nncf.quantize(
                read(path), nncf.Dataset(given), subset_size=len(given), model_type=nncf.ModelType.TRANSFORMER,
                preset=nncf.QuantizationPreset.MIXED,
                advanced_parameters=nncf.AdvancedQuantizationParameters(
                    overflow_fix=nncf.OverflowFix.ENABLE,
                    smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=share),
                ),
            )
            for share in smooth
        ]  # fmt: skip
    save(min(made, key=_off(model, given)) if made[1:] else made[0], out)


def save(program: Any, out: Path) -> None:
    """Write OpenVINO's program without indentation, which is a sixth of its graph."""
    import openvino

    openvino.save_model(program, out, compress_to_fp16=False)
    out.write_text(re.sub(r">\s+<", "><", out.read_text(encoding="utf-8")), encoding="utf-8")


def _off(model: Any, feeds: Sequence[Feed]) -> Callable[[Any], float]:
    """Return a function of a program: the sum of squares by which its answers differ from ``model``'s.

    Padding counts in no answer that has one per token. One batch of answers is in memory.
    """
    import openvino

    exactly = {"INFERENCE_PRECISION_HINT": "f32"}
    run = openvino.compile_model(model, "CPU", exactly)

    def off(other: Any) -> float:
        also, total = openvino.compile_model(other, "CPU", exactly), 0.0
        for feed in feeds:
            mask = np.asarray(feed["attention_mask"], dtype=bool)
            for exact, answer in zip(run(feed).values(), also(feed).values(), strict=True):
                squares = np.square(exact.astype(np.float32) - answer)
                total += float((squares[mask] if squares.shape[:2] == mask.shape else squares).sum())
        return total

    return off
