"""Number formats of an export: the dtype of its file, and programs of 8-bit integers.

Integers are for ONNX Runtime only. torchao 0.18 was tried on exports: it quantizes ``nn.Linear``, which two of the 26
layers of a factorized BERT are; what it saves loads only where torchao is installed; and a dense BERT with weights and
activations of 8 bits took 20 times as long as in float32 in PyTorch on a CPU, as nothing is fused without a compiler.
"""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.evaluation.evaluate import evaluate, interval_of
from lit_compress.evaluation.order import same_order
from lit_compress.export.choices import Dtype
from lit_compress.export.program import FILES
from lit_compress.models.sites import find_sites
from lit_compress.numerics.decompose import all_finite
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from lit_compress.data.datamodule import DataModule

_SCOPES = "pkg.torch.onnx.name_scopes"  # of a node: the modules from the outermost to its own
EXAMPLES = 128  # of the training data, from which the ranges of activations are read


def cast(net: PreTrainedModel, dtype: Dtype) -> None:
    """Cast the floating-point weights of ``net``, in place, and name the dtype in its configuration.

    Raises:
        UserError: a weight is too large.
    """
    kind = getattr(torch, dtype)
    net.config.dtype = kind
    net.to(kind)
    for name, value in net.named_parameters():
        if value.is_floating_point() and not all_finite(value):
            raise UserError(f"export: --dtype {dtype} cannot hold the values of '{name}'; nearest: bfloat16")


def quantize_program(folder: Path, net: PreTrainedModel, data: DataModule) -> dict[str, Any]:
    """Quantize the ONNX program in ``folder`` in place, weights and activations, and measure its dev metric.

    Matrices get one scale per column and 7 bits, so that sums do not overflow on processors without instructions for
    8 bits; activations 8 bits, in the range that they have on training examples. The last matrix of a feed-forward
    network, which reads a few very large values, products of two activations, norms, embeddings and the Dense modules
    of a sentence model stay as they are.

    Returns:
        Its ``dtype`` and ``bytes``; its ``metric`` and the ``interval`` of that, or None; the number of ``examples``;
        ``order``, Spearman's correlation of its numbers with those of ``net``, or None for tasks without one number.

    Raises:
        UserError: ONNX Runtime cannot quantize it.
    """
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    path = folder / FILES["onnx"]
    small, large = path.with_suffix(".int8.onnx"), {site.name for site in find_sites(net) if site.role == "down"}
    examples = min(EXAMPLES, data.train_size())
    try:
        with _silent():
            quantize_static(
                path, small, _Ranges(path, data, examples), quant_format=QuantFormat.QDQ, per_channel=True,
                reduce_range=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
                op_types_to_quantize=["MatMul", "Gemm"], calibrate_method=CalibrationMethod.MinMax,
                extra_options={"CalibMovingAverage": True}, nodes_to_exclude=_kept(path, large),
            )  # fmt: skip
    except Exception as error:  # the library raises anything
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(f"export: --dtype int8 cannot quantize {path.name}: {reason}") from error
    os.replace(small, path)
    key = f"val/{data.record.metrics[0]}"
    program = OnnxProgram(path, net.config)
    scores = evaluate(program, data, sure=True)  # type: ignore[arg-type]
    return {
        "dtype": "int8", "bytes": path.stat().st_size, "metric": scores[key], "interval": interval_of(scores, key),
        "examples": examples, "order": same_order(net, program, data),
    }  # fmt: skip


def _kept(path: Path, modules: set[str]) -> list[str]:
    """Return the names of the nodes that stay in float.

    These are the nodes that ``modules`` of the net have become, all nodes after the net, and products of two
    activations: in this format ONNX Runtime ignores its option ``MatMulConstBOnly``.
    """
    import onnx

    graph, wanted, found = onnx.load(path).graph, {f"net.{name}" for name in modules}, []
    constants = {item.name for item in graph.initializer}
    for node in graph.node:
        scopes = [item.value for item in node.metadata_props if item.key == _SCOPES]
        names = {name for value in scopes for name in ast.literal_eval(value)}
        if wanted & names or "net" not in names or not constants & set(node.input):
            found.append(node.name)
    return found


class OnnxProgram(nn.Module):
    """An ONNX program that is called like the net it was made from, and computes the same fields.

    Args:
        path: of the file.
        config: of that net, which names its padding; None: batches are padded as it reads them.
    """

    def __init__(self, path: Path, config: PreTrainedConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.session = _session(path)
        self.takes, self.gives = ([item.name for item in items] for items in _ends(self.session))

    def get_output_embeddings(self) -> None:
        """Return None: the program has its output layer inside."""

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        """Return the results by name, on the device of the inputs."""
        device = inputs["input_ids"].device
        given = {name: inputs[name].cpu().numpy() for name in self.takes}
        arrays = zip(self.gives, self.session.run(self.gives, given), strict=True)
        return SimpleNamespace(**{name: torch.from_numpy(value).to(device) for name, value in arrays})


class _Ranges:
    """The batches of training examples, as ONNX Runtime's calibration asks for them, one by one."""

    def __init__(self, path: Path, data: DataModule, examples: int) -> None:
        names = [item.name for item in _ends(_session(path))[0]]
        batches = data.calibration_dataloader(examples)
        self._feeds = iter([{name: batch[name].numpy() for name in names} for batch in batches])

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch; None after the last."""
        return next(self._feeds, None)


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _ends(session: Any) -> tuple[list[Any], list[Any]]:
    return session.get_inputs(), session.get_outputs()


@contextmanager
def _silent() -> Iterator[None]:
    """Hide the advice that the library logs at every call."""
    known = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(known)
