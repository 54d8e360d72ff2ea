"""Writing a model as one program that runs without transformers: ``model.onnx``, ``openvino_model.xml``.

Its inputs are the tokenizer's tensors, of any batch size and length; its outputs are logits, of a sentence model the
states of the tokens and the finished vectors. A model that generates text returns the logits of every next token. The
file is read back and compared with the model on batches of other shapes, one of a single text.

OpenVINO's file is made by ``transformers.exporters``, whose repairs of the graph its converter needs. For ONNX they
call the same functions of PyTorch as this file, and write the same model. But the axes of their files have no names,
the files hold paths of the machine, and weights are in a second file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_compress.export.runtimes import FILES, RUNTIMES, ProgramFormat, Runner, Setting, placed
from lit_compress.models.accounting import random_inputs
from lit_compress.models.padding import usable_positions
from lit_compress.models.sites import Model
from lit_compress.tasks import TaskType, task_type_of_net
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import write_failure
from lit_compress.utils.types import Config, Tokenizer

TOLERANCE = {"hf": 1e-4, "onnx": 1e-4, "openvino": 1e-3}
OPSET = 18
PROBES = ((1, 11), (3, 37))  # batch and length at which results are compared, of other shapes than the traced one

ANY = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim.DYNAMIC}  # batch size and length

Inputs = dict[str, Tensor]


def write_program(
    net: Model,
    tokenizer: Tokenizer,
    folder: Path,
    form: ProgramFormat,
    kind: TaskType | None = None,
) -> dict[str, Any]:
    """Write ``net`` as a program into ``folder``; return its file, format, inputs, outputs, bytes and difference.

    ``net`` is in evaluation mode afterwards, and requires no gradients. The tokenizer says whether texts have token
    types. ``kind`` is the type of the task, which sets the outputs; None: the usual one of the model's class.

    Raises:
        UserError: PyTorch or the runtime cannot follow this model; the program's logits differ from the model's by more
            than ``TOLERANCE`` (relative above 1).
    """
    path = folder / FILES[form]
    module = _Logits(net.eval().requires_grad_(False), kind or task_type_of_net(net.config))
    inputs = example_inputs(net, tokenizer, 4, 16)
    with torch.no_grad():
        module.results = tuple(module(**inputs))
    try:
        (_write_onnx if form == "onnx" else _write_openvino)(module, inputs, path)
        run, probes = read_program(path, module.results), [example_inputs(net, tokenizer, *shape) for shape in PROBES]
        with torch.inference_mode():
            off, allowed = farthest(module.kind, run, probes, [module(**probe) for probe in probes]), TOLERANCE[form]
    except Exception as error:  # exporters and runtimes raise anything
        if write_failure(error):
            raise
        reason = re.sub(r"\x1b\[\d*m", "", str(error)).strip().split("\n")[0][:160]
        raise UserError(
            f"export: --format {form} cannot write {type(net).__name__} ({net.config.model_type}), --format hf can; "
            f"{reason or type(error).__name__}"
        ) from error
    if not off <= allowed:
        raise UserError(
            f"export: the logits of {path.name} differ by {off:.2e}, more than {allowed:.0e}; nothing was exported"
        )
    return {
        "file": path.name, "format": form, "inputs": list(inputs),
        "outputs": list(module.results), "bytes": program_bytes(path), "difference": off,
    }  # fmt: skip


class _Logits(nn.Module):
    """A model that returns a dict of tensors instead of an output class of transformers."""

    def __init__(self, net: Model, kind: TaskType) -> None:
        super().__init__()
        self.net, self.kind, self.results = net, kind, kind.results

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
    ) -> Inputs:
        """Return the model's results by name."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        for name, value in (("token_type_ids", token_type_ids), ("decoder_input_ids", decoder_input_ids)):
            inputs |= {} if value is None else {name: value}
        return self.kind.gives(self.net(**inputs), inputs)


def example_inputs(net: Model, tokenizer: Tokenizer, batch: int, length: int, padded: bool = True) -> Inputs:
    """Return random inputs [batch, length]; ``padded``: the second half of the second text is padding."""
    inputs = random_inputs(net, batch, min(length, usable_positions(net.config) or length), length, padded)
    if "token_type_ids" in tokenizer("a") and "token_type_ids" in inspect.signature(net.forward).parameters:
        types = getattr(net.config, "type_vocab_size", 0)
        inputs["token_type_ids"] = (inputs["input_ids"] % max(types, 1)).sort(dim=1).values
    return inputs


def farthest(
    kind: TaskType, run: Callable[[Inputs], Inputs], probes: Sequence[Inputs], expected: Sequence[Inputs]
) -> float:
    """Return by how much the results of ``run`` differ from the ``expected`` ones at most, relative above 1.

    It is nan if a result is. Results at tokens are compared without padding.
    """
    off = []
    for inputs, wanted in zip(probes, expected, strict=True):
        answered = run(inputs)
        for name, values in wanted.items():
            pairs = []
            for i, pair in enumerate(zip(answered[name], values, strict=True)):  # logits of all texts can be large
                text = {key: value[i : i + 1] for key, value in inputs.items()}
                one, other = (kind.at_tokens(v[None, None], text) if name in kind.results else v for v in pair)
                pairs.append(torch.stack([(one - other).abs().max(), other.abs().max()]))
            largest, size = torch.stack(pairs).amax(0)
            off.append(largest / size.clamp_min(1))
    return float(torch.stack(off).max())  # max() of Python would lose nan


def program_bytes(path: Path) -> int:
    """Return the bytes of a program, including OpenVINO's separate file of weights."""
    return sum(file.stat().st_size for file in (path, path.with_suffix(".bin")) if file.is_file())


def _write_onnx(module: _Logits, inputs: Inputs, path: Path) -> None:
    axes = {name: None for name in inputs} | {"input_ids": {0: "batch", 1: "length"}}  # the others' follow
    if "decoder_input_ids" in inputs:
        axes["decoder_input_ids"] = {1: "target"}
    traced = torch.export.export(module, (), inputs, dynamic_shapes=dict.fromkeys(inputs, ANY))
    for node in traced.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    program: Any = torch.onnx.export(
        traced, (), kwargs=inputs, dynamo=True, opset_version=OPSET, verbose=False,
        input_names=list(inputs), output_names=list(module.results), dynamic_shapes=axes,
    )  # fmt: skip
    program.save(path)


def _write_openvino(module: _Logits, inputs: Inputs, path: Path) -> None:
    """Write OpenVINO's graph, and its weights into a file next to it."""
    from transformers.exporters.exporter_openvino import OpenVINOConfig, OpenVINOExporter

    exporter: Any = OpenVINOExporter()  # takes any module
    options = OpenVINOConfig(dynamic=True, dynamic_shapes=dict.fromkeys(inputs, ANY))
    program, _ = exporter.export_program(module, inputs, options)
    exporter.save_program(program, path)


def read_program(path: Path, results: tuple[str, ...]) -> Callable[[Inputs], Inputs]:
    """Return a function that runs a program file, without inputs that the program was not made with."""
    runtime = RUNTIMES["onnx" if path.suffix == ".onnx" else "openvino"]
    return by_name(runtime.load(path, Setting(results, torch.get_num_threads())), results)


def by_name(run: Runner, results: tuple[str, ...]) -> Callable[[Inputs], Inputs]:
    """Return a function that returns the results of a runtime by name, on the CPU in float32."""

    def call(given: Inputs) -> Inputs:
        values = run(placed(given, "cpu"))
        copies = (torch.tensor(v) if isinstance(v, np.ndarray) else v for v in values)  # OpenVINO writes there again
        return {name: value.float().cpu() for name, value in zip(results, copies, strict=True)}

    return call


class Program(nn.Module):
    """A program that is called like the model it was made from: ``run`` returns results by name from inputs on the CPU.

    The model's ``config`` names its padding; None: batches are padded as it reads them.
    """

    def __init__(self, run: Callable[[Inputs], Inputs], config: Config | None = None) -> None:
        super().__init__()
        self.config, self.run = config, run

    def get_output_embeddings(self) -> None:
        """Return None: the program has its output layer inside."""

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        """Return the results by name, on the device of the inputs."""
        device = inputs["input_ids"].device
        answers = self.run({name: value.cpu() for name, value in inputs.items()})
        return SimpleNamespace(**{name: value.to(device) for name, value in answers.items()})
