"""The certificate of an export: how far every file of it is from the model before export, on real texts.

The model before export is the one that training ended with. Nothing was merged, padded or cut in it, and its numbers
are float32. It and every form of the export, the folder and the programs, read the same texts of the data: one alone,
and three of different lengths, with padding. These are other shapes than the one that programs are traced with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from lit_compress.export.program import Inputs
from lit_compress.export.program import difference as difference_of
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule

TOLERANCE = {"hf": 1e-4, "onnx": 1e-4, "openvino": 1e-3}
TOKENS = 128  # of a block of a text without end: enough to compare, and logits of all tokens take memory
ELEMENTS = 1 << 24  # most logits of a text; Gemma's vocabulary leaves 64 tokens
SAME, CHANGED = "same", "changed as asked"

Entry = dict[str, Any]


class Certificate:
    """A model's answers before its export, to compare with the export's answers.

    Args:
        net: the model before export; it is in evaluation mode afterwards.
        data: of its task.
        split: whose texts are read.

    Attributes:
        entries: a record of every form that was compared, for the report.
    """

    def __init__(self, net: PreTrainedModel, data: DataModule, split: Literal["train", "validation"]) -> None:
        self.entries: list[Entry] = []
        self._tokens = max(1, min(TOKENS, ELEMENTS // net.config.vocab_size))
        self._split, self._data, self._kind = split, data, task_type(data.record)
        self._rows = _some_rows(_batches(data, split).encoded["length"])
        self._expected = [self.answers(net.eval(), inputs) for inputs in self.inputs(net, data)]

    def compare(
        self, form: Entry, net: PreTrainedModel, data: DataModule, run: Callable[[Inputs], Inputs], same: bool = True
    ) -> Entry:
        """Compare one form of the export with the model before it; return the record, which is also in ``entries``.

        Args:
            form: its ``file`` and ``format``.
            net: the exported model.
            data: as the export's tokenizer reads it.
            run: from inputs to results of this form.
            same: whether the results must be the same; else the choices change them, and the difference is only
                measured.

        Returns:
            ``file``; ``format``; ``shapes`` [texts, tokens] of the batches; ``difference`` of the results, the largest,
            relative above 1; the ``allowed`` one, None for any; the ``verdict``.

        Raises:
            UserError: the results differ by more than ``TOLERANCE``.
        """
        batches, differences = self.inputs(net, data), []
        for inputs, expected in zip(batches, self._expected, strict=True):
            given = run(inputs)
            for name, theirs in expected.items():
                ours = given[name].float()
                if ours.shape[-1] != theirs.shape[-1]:  # a token has another number in the vocabulary of the export
                    theirs = theirs[..., self._numbers(data, ours.shape[-1])]
                if ours.shape == theirs.shape:  # not where a text has other pieces now
                    differences.append(difference_of(self._kind, name, ours, theirs, inputs))
        difference = float(torch.stack(differences).max()) if differences else None
        allowed = TOLERANCE[form["format"]] if same else None
        if allowed is not None and (difference is None or not difference <= allowed):
            raise UserError(
                f"export: on texts of the data, the logits of {form['file']} differ from the model's before export "
                f"by {float('nan') if difference is None else difference:.2e}, more than {allowed:.0e}; "
                "nothing was exported"
            )
        self.entries.append({
            **form, "shapes": [list(inputs["input_ids"].shape) for inputs in batches], "difference": difference,
            "allowed": allowed, "verdict": SAME if same else CHANGED,
        })  # fmt: skip
        return self.entries[-1]

    def inputs(self, net: PreTrainedModel, data: DataModule) -> list[Inputs]:
        """Return the inputs of ``net`` from the rows."""
        takes, source, batches = inspect.signature(net.forward).parameters, _batches(data, self._split), []
        for rows in self._rows:
            inputs = self._kind.inputs(net, source[rows])
            if self._kind.one_text:
                inputs = {name: value[:, : self._tokens] for name, value in inputs.items()}
            batches.append({name: value for name, value in inputs.items() if name in takes})
        return batches

    def answers(self, net: PreTrainedModel, inputs: Inputs) -> Inputs:
        """Return the outputs of a program of ``net`` by name."""
        with torch.inference_mode():
            return {name: value.float() for name, value in self._kind.gives(net(**inputs), inputs).items()}

    def _numbers(self, data: DataModule, size: int) -> Any:
        """Return which token of the model before export each of the export's ``size`` tokens is, as a list."""
        return self._data.tokenizer.convert_tokens_to_ids(data.tokenizer.convert_ids_to_tokens(list(range(size))))


def _batches(data: DataModule, split: str) -> Any:
    """Return the rows of a split, to be asked for as batches."""
    return (data.val_dataloader()[0] if split == "validation" else data.train_dataloader()).dataset


def _some_rows(lengths: list[int]) -> list[list[int]]:
    """Return one row of middle length, and the shortest, another and the longest together.

    >>> _some_rows([5, 9, 3, 7, 8])
    [[3], [2, 0, 1]]
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    return [[order[len(order) // 2]], [order[0], order[len(order) // 3], order[-1]]]
