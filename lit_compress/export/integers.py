"""Programs of integers: how they are made for which model, chosen and measured.

Models that write text get integers for the weights alone, from NNCF's ``compress_weights``: of 8 bits with a scale for
every row, or of 4 bits with one for every :data:`GROUP` weights of a row, and 8 bits for the tables and the most
sensitive tenth of the matrices, which adds 5 % to SmolLM2-135M and leaves two thirds of its loss. A few of their
activations are far larger than the others: fixed ranges cost SmolLM2-135M 11 % of perplexity (benchmarks/decoder).

All other models get integers of 8 bits for weights and activations. NNCF reads the range of every activation once,
from texts. So a text has the same answers alone, in a batch and padded at its end.
Weights take 7 of 8 bits: a processor without VNNI adds two products in 16 bits, which two of 8 bits overflow.
"""

from __future__ import annotations

import ast
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from math import inf, isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import evaluate, interval_of
from lit_compress.export.program import Program, program_bytes, read_program
from lit_compress.export.runtimes import RUNTIMES, Setting, openvino_core
from lit_compress.layers import Int8Embedding
from lit_compress.models.sites import Model
from lit_compress.stages.rounded import GROUP, is_rounded
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import write_failure

EXAMPLES = 128  # training texts, from which the ranges of activations are read
READ = 32  # training texts, from which weights of 4 bits are found
SMOOTH = (0.7, 0.5)  # shares of the activations' ranges that SmoothQuant (arXiv 2211.10438) moves into the weights
SHARE = 0.9  # of the matrices, whose weights have 4 bits, :data:`GROUP` with a scale; the others have 8 bits
WAY: dict[str, Any] = {"awq": True, "scale_estimation": True, "gptq": True}  # for weights of 4 bits, by NNCF

Feed = dict[str, np.ndarray]  # arrays [texts, tokens] by the names of a program's inputs
Integers = Literal["int8", "int4"]
INTEGERS: dict[str, tuple[str, ...]] = {"int8": ("onnx", "openvino"), "int4": ("openvino",)}  # dtype -> formats


def training_feeds(data: DataModule, option: str, examples: int = EXAMPLES) -> list[Feed]:
    """Return batches of some training rows, or of all if there are fewer; ``data`` are as the program reads them.

    A row of several texts gives each to the program, e.g. query and document.

    Raises:
        UserError: there are none, and ``option`` needs them.
    """
    data.reads_labels = False
    try:
        batches = data.calibration_dataloader(min(examples, data.train_size()))
    except UserError as error:
        raise UserError(f"{option} reads training texts: {error}") from error
    parts = (part for batch in batches for part in task_type(data.record).forwards(batch))
    return [{name: value.numpy() for name, value in part.items() if hasattr(value, "numpy")} for part in parts]


def quantize(
    path: Path, out: Path, dtype: Integers, feeds: Sequence[Feed] | None = None, smooth: Sequence[float] = SMOOTH,
    way: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write the program ``path`` with integers to ``out``, which may be the same file.

    Args:
        path: ``.onnx`` or ``.xml``, in float32.
        out: the file to write, and for ``.xml`` the weights next to it.
        dtype: ``int4`` is for the weights of OpenVINO's programs.
        feeds: batches of the program's inputs, from which the ranges of activations are read; None: only weights get
            integers. For a ``way`` every text alone, without padding.
        smooth: the shares that are tried; one is enough to time the program.
        way: further arguments of NNCF for weights of 4 bits, e.g. :data:`WAY`; None: they are rounded.

    Raises:
        UserError: the library cannot quantize it.
    """
    write = _write_onnx if path.suffix == ".onnx" else _write_openvino
    with TemporaryDirectory(dir=out.parent) as work:
        shares = smooth if dtype == "int8" and feeds else smooth[:1]
        made = {Path(work) / f"{number}{out.suffix}": share for number, share in enumerate(shares)}
        try:
            with silent():
                for file, share in made.items():
                    write(path, file, dtype, feeds, share, way or {})
                best = min(made, key=lambda file: _off(path, file, feeds or ())) if shares[1:] else next(iter(made))
        except Exception as error:  # the libraries raise anything
            if write_failure(error):
                raise
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise UserError(f"export: --dtype {dtype} cannot quantize {path.name}: {reason}") from error
        for suffix in {out.suffix, ".bin"} if out.suffix == ".xml" else {out.suffix}:  # OpenVINO's weights as well
            best.with_suffix(suffix).replace(out.with_suffix(suffix))


def quantize_program(
    folder: Path, made: dict[str, Any], net: Model, data: DataModule, dtype: Integers
) -> dict[str, Any]:
    """Quantize the program in ``folder``, in place, and measure its dev metric.

    ``made`` is the result of :func:`~lit_compress.export.program.write_program` for ``net``.

    Returns:
        Its ``dtype`` and ``bytes``; its ``metric`` and ``interval``; the number of ``examples`` that were read.

    Raises:
        UserError: there are no training texts; the library cannot quantize it.
    """
    path, results = folder / made["file"], tuple(made["outputs"])
    if dtype == "int4" and is_rounded(net):  # trained on the grid of 4 bits, so rounding does not change the weights
        feeds, read, way = None, 0, {"ratio": 1.0}
    elif dtype == "int4":
        feeds = single_texts(training_feeds(data, "export: --dtype int4", READ))
        read, way = len(feeds), WAY
    else:
        feeds = None if net.can_generate() else training_feeds(data, f"export: --dtype {dtype}")
        read, way = min(EXAMPLES, data.train_size()) if feeds else 0, {}
    quantize(path, path, dtype, feeds, way=way)
    program = Program(read_program(path, results), net.config)
    key = f"val/{data.record.metrics[0]}"
    scores = evaluate(program, data, sure=True)  # type: ignore[arg-type]
    return {
        "dtype": dtype, "bytes": program_bytes(path), "metric": scores[key], "interval": interval_of(scores, key),
        "examples": read,
    }  # fmt: skip


def single_texts(feeds: Sequence[Feed]) -> list[Feed]:
    """Return every text of some batches alone, without padding, which would count in statistics."""
    return [
        {name: value[i : i + 1, mask != 0] for name, value in feed.items() if value.shape == masks.shape}
        for feed in feeds
        for masks in [feed["attention_mask"]]
        for i, mask in enumerate(masks)
    ]


def _write_onnx(
    path: Path, out: Path, dtype: Integers, feeds: Sequence[Feed] | None, share: float, way: Mapping[str, Any]
) -> None:
    """Quantize matrices, and with ``feeds`` their inputs, and tables of embeddings by :func:`integer_tables`."""
    import nncf
    import onnx

    model, turned = fold(onnx.load(path))
    if feeds is None:
        tables = nncf.IgnoredScope(types=["Gather"], validate=False)
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=tables)
    else:
        constants, kept = {item.name for item in model.graph.initializer}, []
        for node in model.graph.node:  # those after the model, and products of two activations, stay in float
            scopes = (item.value for item in node.metadata_props if item.key == "pkg.torch.onnx.name_scopes")
            modules = {name for value in scopes for name in ast.literal_eval(value)}
            if node.op_type not in ("MatMul", "Gemm") or "net" not in modules or not constants & set(node.input):
                kept.append(node.name)
        model = _with_ranges(model, [item.name for item in model.graph.input], feeds, share, kept)
        _without_signs(model)
    integer_tables(model, turned)
    model.graph.ClearField("value_info")
    for node in model.graph.node:
        node.ClearField("metadata_props")  # where it was in the model: half a megabyte
    onnx.save(model, out)


def _with_ranges(model: Any, names: Sequence[str], feeds: Sequence[Feed], share: float, kept: Sequence[str]) -> Any:
    """Return a model of ONNX or OpenVINO whose weights and activations have 8 bits, but those of the nodes ``kept``.

    Of the ranges of activations ``share`` moves into the weights. With NNCF's 0.95 the vectors of a dense MPNet are off
    by ten times as much as with 0.7, and a MiniLM's by three times. Components at 0.10 want 0.5: ranges between two
    factors differ by up to 52 times there, and with 0.95 of them the columns of the second factor do.
    """
    import nncf

    given = [{name: feed[name] for name in names} for feed in feeds]
    return nncf.quantize(
        model, nncf.Dataset(given), subset_size=len(given), model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset.MIXED, ignored_scope=nncf.IgnoredScope(names=[*kept], validate=False),
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            overflow_fix=nncf.OverflowFix.ENABLE, disable_bias_correction=True,  # a dense MPNet is as near without
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=share),
        ),
    )  # fmt: skip


def _without_signs(model: Any) -> None:
    """Let the integers of activations begin at 0, in place: others are multiplied in float on a processor of x86."""
    from onnx import numpy_helper

    zeros = {node.input[2] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    for item in model.graph.initializer:
        if item.name in zeros and (zero := numpy_helper.to_array(item)).dtype == np.int8:
            item.CopyFrom(numpy_helper.from_array((zero.astype(np.int16) + 128).astype(np.uint8), item.name))


def fold(model: Any) -> tuple[Any, dict[str, str]]:
    """Replace ``Transpose`` and ``Pad`` of constants in an ONNX model by their results; return their names as well.

    ONNX Runtime quantizes only a matrix that the product itself reads. Shared right factors, those with full rows, and
    a table that is the output layer come through such a node.
    """
    from onnxscript import ir, optimizer

    graph, passes = ir.from_proto(model), ir.passes.common
    passes.CommonSubexpressionEliminationPass()(graph)  # one result for several products
    turned = {
        node.inputs[0].name: node.outputs[0].name
        for node in graph.graph if node.op_type == "Transpose" and node.inputs[0].const_value is not None
    }  # fmt: skip
    optimizer.fold_constants(graph, should_fold=lambda node: node.op_type in ("Transpose", "Pad"))
    passes.RemoveUnusedNodesPass()(graph)
    return ir.to_proto(graph), turned


def integer_tables(model: Any, turned: Mapping[str, str] = {}) -> None:
    """Store the tables of an ONNX model that only ``Gather`` reads as :class:`Int8Embedding` does, in place.

    Of a transposed table that is also the output layer, the integers of that matrix are read.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph, nodes = model.graph, []
    there = {item.name: item for item in graph.initializer}
    read, elsewhere = set(), set()
    for node in graph.node:
        by_rows = node.op_type == "Gather" and not any(a.name == "axis" and a.i for a in node.attribute)
        read |= {*node.input[: int(by_rows)]}
        elsewhere |= {*node.input[int(by_rows) :]}
    tables = {name: t for name, t in there.items() if t.data_type == TensorProto.FLOAT and len(t.dims) == 2}
    tables = {name: tables[name] for name in tables if name in read - elsewhere}
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


def _write_openvino(
    path: Path, out: Path, dtype: Integers, feeds: Sequence[Feed] | None, share: float, way: Mapping[str, Any]
) -> None:
    """Quantize weights by NNCF, and for ``int8`` with ``feeds`` activations."""
    import nncf
    import openvino

    model, mode = openvino_core().read_model(path), nncf.CompressWeightsMode
    names = [item.any_name for item in model.inputs]
    if dtype == "int4":
        settings: dict[str, Any] = {"mode": mode.INT4_SYM, "group_size": GROUP, "ratio": SHARE, "all_layers": False}
        settings |= way
        if given := [{name: feed[name] for name in names} for feed in feeds or ()]:
            settings |= {"dataset": nncf.Dataset(given), "subset_size": len(given)}
        adjusted = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
        program = nncf.compress_weights(model, advanced_parameters=adjusted, **settings)
    elif feeds is None:
        program = nncf.compress_weights(model, mode=mode.INT8_ASYM)
    else:
        program = _with_ranges(model, names, feeds, share, ())
    openvino.save_model(program, out, compress_to_fp16=False)
    out.write_text(re.sub(r">\s+<", "><", out.read_text(encoding="utf-8")), encoding="utf-8")  # a sixth is indentation


def _off(path: Path, other: Path, feeds: Sequence[Feed]) -> float:
    """Return the sum of squares by which the answers of two programs differ at tokens; inf if one is NaN."""
    runtime, total = RUNTIMES["onnx" if path.suffix == ".onnx" else "openvino"], 0.0
    exact, also = (runtime.load(one, Setting((), torch.get_num_threads())) for one in (path, other))
    for feed in feeds:
        mask = np.asarray(feed["attention_mask"], dtype=bool)
        for one, answer in zip(exact(feed), also(feed), strict=True):
            squares = np.square(one.astype(np.float32) - answer)
            total += float((squares[mask] if squares.shape[:2] == mask.shape else squares).sum())
    return inf if isnan(total) else total
