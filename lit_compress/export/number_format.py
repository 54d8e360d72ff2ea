"""Number formats of an export: the dtype of its file, and the metric of a program of small integers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.evaluation.evaluate import evaluate, interval_of
from lit_compress.evaluation.order import same_order
from lit_compress.export.choices import Dtype
from lit_compress.export.program import Inputs, program_bytes, read_program
from lit_compress.export.quantize import EXAMPLES, Integers, quantize, training_feeds
from lit_compress.numerics.decompose import all_finite
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note
from lit_compress.utils.timing import integers_note

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from lit_compress.data.datamodule import DataModule


def cast(net: PreTrainedModel, dtype: Dtype) -> None:
    """Cast the floating-point weights of ``net``, and name the dtype in its configuration.

    Its parameters are replaced by others: another model may share them.

    Raises:
        UserError: a weight is too large.
    """
    kind = getattr(torch, dtype)
    net.config.dtype = kind
    new = {}
    for name, value in net.named_parameters():
        new[value] = nn.Parameter(value.detach().to(kind)) if value.is_floating_point() else value
        if value.is_floating_point() and not all_finite(new[value]):
            raise UserError(f"export: --dtype {dtype} cannot hold the values of '{name}'; nearest: bfloat16")
    for module in net.modules():  # some tensors have several owners
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, new[value])
    net.to(kind)  # buffers


def quantize_program(
    folder: Path, made: dict[str, Any], net: PreTrainedModel, data: DataModule, dtype: Integers
) -> dict[str, Any]:
    """Quantize the program in ``folder``, in place, and measure its dev metric.

    Args:
        folder: of the export.
        made: the result of :func:`~lit_compress.export.program.write_program`.
        net: which the program was made from.
        data: of its task.
        dtype: of the integers.

    Returns:
        Its ``dtype`` and ``bytes``; its ``metric`` with ``interval``, or None; the number of ``examples``; ``order``,
        Spearman's correlation of its numbers with the numbers of ``net``, or None for tasks without one number.

    Raises:
        UserError: there are no training texts; the library cannot quantize it.
    """
    path = folder / made["file"]
    if said := integers_note():
        note(said)
    quantize(path, path, training_feeds(data, f"export: --dtype {dtype}"), dtype)
    program = Program(read_program(path, tuple(made["outputs"])), net.config)
    key = f"val/{data.record.metrics[0]}"
    scores = evaluate(program, data, sure=True)  # type: ignore[arg-type]
    return {
        "dtype": dtype, "bytes": program_bytes(path), "metric": scores[key], "interval": interval_of(scores, key),
        "examples": min(EXAMPLES, data.train_size()), "order": same_order(net, program, data),
    }  # fmt: skip


class Program(nn.Module):
    """A program that is called like the model it was made from, and computes the same fields.

    Args:
        run: function of its inputs, on the CPU, that returns its results by name.
        config: of that model, which names its padding; None: batches are padded as it reads them.
    """

    def __init__(self, run: Callable[[Inputs], Inputs], config: PreTrainedConfig | None = None) -> None:
        super().__init__()
        self.config, self.run = config, run

    def get_output_embeddings(self) -> None:
        """Return None: the program has its output layer inside."""

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        """Return the results by name, on the device of the inputs."""
        device = inputs["input_ids"].device
        answers = self.run({name: value.cpu() for name, value in inputs.items()})
        return SimpleNamespace(**{name: value.to(device) for name, value in answers.items()})
