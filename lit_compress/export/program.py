"""Writing a net as one program that runs without transformers: ``model.pt2`` or ``model.onnx``.

Its inputs are the tokenizer's tensors, of any batch size and length; its outputs are logits. A net that generates text
returns the logits of every next token: generation, with its cache and beams, needs the folder itself. The file is read
back and compared with the net on batches of other shapes, one of a single text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lit_compress.models.accounting import random_inputs
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Format = Literal["hf", "onnx", "torch"]
FILES = {"onnx": "model.onnx", "torch": "model.pt2"}
TOLERANCE = {"onnx": 1e-4, "torch": 1e-5}
OPSET = 18
_ONNX = ("onnx", "onnxscript", "onnxruntime")

Inputs = dict[str, Tensor]


def check_format(form: Format) -> None:
    """Raise a UserError if packages that ``form`` needs are not installed."""
    missing = [name for name in _ONNX if find_spec(name) is None] if form == "onnx" else []
    if missing:
        raise UserError(f"export: --format onnx needs {', '.join(missing)}; pip install 'lit_compress[onnx]'")


def write_program(
    net: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, form: Literal["onnx", "torch"]
) -> dict[str, Any]:
    """Write ``net`` as a program into ``folder``; return its file, format, inputs, outputs, bytes and difference.

    Afterwards ``net`` is in evaluation mode, and its parameters require no gradients.

    Raises:
        UserError: PyTorch or ONNX Runtime cannot follow this net; the program's logits differ from the net's by more
            than ``TOLERANCE`` (relative above 1).
    """
    path = folder / FILES[form]
    module = _Logits(net.eval().requires_grad_(False), task_type_of_net(net.config).results)
    try:
        run = (_write_onnx if form == "onnx" else _write_torch)(module, example_inputs(net, tokenizer, 4, 16), path)
        differences = [_difference(module, run, example_inputs(net, tokenizer, *shape)) for shape in ((1, 11), (3, 37))]
        difference, allowed = float(torch.stack(differences).max()), TOLERANCE[form]
    except Exception as error:  # exporters and runtimes raise anything
        reason = re.sub(r"\x1b\[\d*m", "", str(error)).strip().split("\n")[0][:160]
        raise UserError(
            f"export: --format {form} cannot write {type(net).__name__} ({net.config.model_type}), --format hf can; "
            f"{reason or type(error).__name__}"
        ) from error
    if not difference <= allowed:
        raise UserError(
            f"export: the logits of {path.name} differ by {difference:.2e}, more than {allowed:.0e}; "
            "nothing was exported"
        )
    return {
        "file": path.name, "format": form, "inputs": list(example_inputs(net, tokenizer, 1, 4)),
        "outputs": list(module.results), "bytes": path.stat().st_size, "difference": difference,
    }  # fmt: skip


class _Logits(nn.Module):
    """A net that returns a dict of tensors instead of an output class of transformers."""

    def __init__(self, net: PreTrainedModel, results: tuple[str, ...]) -> None:
        super().__init__()
        self.net, self.results = net, results

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
    ) -> Inputs:
        """Return the net's results by name."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        for name, value in (("token_type_ids", token_type_ids), ("decoder_input_ids", decoder_input_ids)):
            inputs |= {} if value is None else {name: value}
        output = self.net(**inputs)
        return {name: output[name] for name in self.results}


def example_inputs(net: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int, length: int) -> Inputs:
    """Return random inputs [batch, length] for the net, padding in the second text, with token types if it has them."""
    inputs = random_inputs(
        net, batch, min(length, getattr(net.config, "max_position_embeddings", length + 4) - 4), length
    )
    if batch > 1:
        inputs["attention_mask"][1, inputs["input_ids"].shape[1] // 2 :] = 0
    if "token_type_ids" in tokenizer("a") and "token_type_ids" in inspect.signature(net.forward).parameters:
        types = getattr(net.config, "type_vocab_size", 0)
        inputs["token_type_ids"] = (inputs["input_ids"] % max(types, 1)).sort(dim=1).values
    return inputs


def _difference(module: _Logits, run: Callable[[Inputs], Inputs], inputs: Inputs) -> Tensor:
    """Return the largest difference between the results of ``run`` and ``module``, relative above 1."""
    with torch.inference_mode():
        found, expected = (
            torch.stack([output[name] for name in module.results]) for output in (run(inputs), module(**inputs))
        )
    return (found - expected).abs().max() / expected.abs().max().clamp_min(1)


def _trace(module: _Logits, inputs: Inputs) -> torch.export.ExportedProgram:
    free = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(module, (), inputs, dynamic_shapes=dict.fromkeys(inputs, free))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _write_torch(module: _Logits, inputs: Inputs, path: Path) -> Callable[[Inputs], Inputs]:
    """Write a PyTorch archive and return a function that runs the file."""
    torch.export.save(_trace(module, inputs), path)
    read = torch.export.load(path).module()
    return lambda given: read(**given)


def _write_onnx(module: _Logits, inputs: Inputs, path: Path) -> Callable[[Inputs], Inputs]:
    """Write an ONNX graph and return a function that runs the file in ONNX Runtime."""
    import onnxruntime

    axes = {name: None for name in inputs} | {"input_ids": {0: "batch", 1: "length"}}  # the others' follow
    if "decoder_input_ids" in inputs:
        axes["decoder_input_ids"] = {1: "target"}
    torch.onnx.export(
        _trace(module, inputs), (), kwargs=inputs, dynamo=True, opset_version=OPSET, verbose=False,
        input_names=list(inputs), output_names=list(module.results), dynamic_shapes=axes,
    ).save(path)  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(given: Inputs) -> Inputs:
        found = session.run(list(module.results), {name: value.numpy() for name, value in given.items()})
        return {name: torch.from_numpy(value) for name, value in zip(module.results, found, strict=True)}

    return run
