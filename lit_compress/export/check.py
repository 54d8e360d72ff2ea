"""Two checks of an export: in another process that cannot import this package, and by texts of the data.

The certificate says how far every form of the export, the folder and the programs, is from the model before export: the
one that training ended with, in float32, nothing merged or cut. All read the same texts: one alone, and three of
different lengths, with padding. These are other shapes than the one that programs are traced with.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lit_compress.export.program import TOLERANCE, Inputs
from lit_compress.export.program import difference as difference_of
from lit_compress.models.accounting import padded_inputs
from lit_compress.models.own_code import references
from lit_compress.models.padding import usable_positions
from lit_compress.tasks import task_type, task_type_of_net
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.tasks import TaskType

RELOADED = 1e-5  # largest difference of logits in the other process, relative above 1
TOKENS = 128  # of a block of a text without end: enough to compare, and logits of all tokens take memory
ELEMENTS = 1 << 24  # most logits of a batch; a vocabulary of 262,144 leaves 16 tokens of each of four texts
SAME, CHANGED = "same", "changed as asked"

Entry = dict[str, Any]

_LOADER = """
import sys
sys.modules["lit_compress"] = None  # an import of it fails from here on
import torch, transformers
from safetensors.torch import load_file, save_file
folder, trust, probe, result, auto_class, *names = sys.argv[1:]
auto_class = getattr(transformers, auto_class)
net = auto_class.from_pretrained(folder, trust_remote_code=trust == "True", dtype=torch.float32).eval()
with torch.inference_mode():
    output = net(**load_file(probe))
    save_file({name: output[name].clone() for name in names}, result)
"""


def check_export(net: PreTrainedModel, folder: Path) -> float:
    """Load ``folder`` in another process and return the largest difference of its logits from the logits of ``net``.

    Both get a random batch with padding. The code in the folder runs, which is the package's, or was trusted before.

    Raises:
        UserError: the folder does not load, or the logits differ by more than ``RELOADED``; or it
            names code that is not in it.
    """
    from safetensors.torch import load_file, save_file

    named = list(references(folder))
    if elsewhere := next((ref for ref in named if "--" in ref or "/" in ref), None):
        raise UserError(f"export: '{folder}' names code that is not in it: '{elsewhere}'; nothing was exported")
    kind = task_type_of_net(net.config)
    length = min(37, usable_positions(net.config) or 37)
    if kind.over_vocabulary:
        length = max(1, min(length, ELEMENTS // (4 * net.config.vocab_size)))
    probe = padded_inputs(net, 4, length, seed=1)
    with torch.inference_mode():
        expected = kind.at_tokens(_results(net.eval()(**probe), kind), probe)
    with tempfile.TemporaryDirectory() as work:
        save_file({name: value.contiguous() for name, value in probe.items()}, Path(work) / "probe.safetensors")
        environment = os.environ | {"HF_MODULES_CACHE": work, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "-I", "-c", _LOADER, str(folder.resolve()), str(bool(named)), "probe.safetensors",
             "result.safetensors", kind.auto_class, *kind.results],
            cwd=work, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"export: '{folder}' does not load by itself: {done.stderr.strip().splitlines()[-1]}")
        loaded = kind.at_tokens(_results(load_file(Path(work) / "result.safetensors"), kind), probe)
    difference = float((loaded - expected).abs().max())
    if not difference <= RELOADED * max(1.0, float(expected.abs().max())):
        raise UserError(
            f"export: the reloaded logits differ by {difference:.2e}, more than {RELOADED:.0e}; nothing was exported"
        )
    return difference


def _results(output: Any, kind: TaskType) -> Tensor:
    """Return the results of ``kind`` in ``output``, by name, as one tensor [n, b, ...]; a single one is not copied."""
    values = [output[name] for name in kind.results]
    return torch.stack(values) if values[1:] else values[0][None]


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
