"""The models that ``bench`` times: their folders, inputs and scores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lit_compress.evaluation.evaluate import evaluate
from lit_compress.export.modelling import MODULE, is_own_code
from lit_compress.export.program import Program, example_inputs, program_bytes, write_program
from lit_compress.export.quantize import Feed, quantize
from lit_compress.export.runtimes import (
    ONNX,
    ONNX_INT8,
    OPENVINO,
    OPENVINO_INT8,
    RUNTIMES,
    Inputs,
    Runner,
    Setting,
)
from lit_compress.models.checks import check_head
from lit_compress.models.own_code import check_code, trusts_code
from lit_compress.models.padding import usable_positions
from lit_compress.models.shards import tensor_files
from lit_compress.models.storage import load_net
from lit_compress.tasks import task_type_of_net
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule

BATCHES, LENGTHS = (1, 8, 32, 128), (32, 128, 384)
ROUNDS, SECONDS = 30, 60.0

Texts = Callable[[Path], list[Feed]]
_PLAIN = {ONNX_INT8: ONNX, OPENVINO_INT8: OPENVINO}  # which program in float32 becomes one of int8


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        batches, lengths: sizes of the batches and lengths in tokens, each with each.
        own: further lengths, by name, e.g. the median of the texts.
        runtimes: their names.
        threads: of every runtime.
        rounds: forwards of every model at every shape.
        seconds: no further round of a shape begins after these.
        device: ``cpu``, ``cuda``, or another type of PyTorch's.
        trust: run the code of a folder also if this version would not write it.
        dtype: of weights and products in PyTorch.
    """

    batches: tuple[int, ...] = BATCHES
    lengths: tuple[int, ...] = LENGTHS
    own: tuple[tuple[str, int], ...] = ()
    runtimes: tuple[str, ...] = tuple(RUNTIMES)
    threads: int = 1
    rounds: int = ROUNDS
    seconds: float = SECONDS
    device: str = "cpu"
    trust: bool = False
    dtype: str = "float32"

    def shapes(self, limit: int) -> list[tuple[int, int]]:
        """Return batch and length of all shapes that models read that have ``limit`` positions, the cheapest first."""
        lengths = {length for length in (*self.lengths, *(length for _, length in self.own)) if length <= limit}
        pairs = [(batch, length) for batch in set(self.batches) for length in lengths]
        return sorted(pairs, key=lambda shape: (shape[0] * shape[1], shape))


class BenchedNet:
    """A folder whose model is timed.

    Args:
        label: ``dense`` or ``compressed``.
        folder: an export, or what ``save_pretrained`` wrote.
        settings: how it is run.
        work: folder for programs that are not next to the model.
        texts: function of the folder that returns training texts, from which int8 reads ranges of activations.

    Raises:
        UserError: it cannot be loaded, or brings code that no export has.
    """

    def __init__(self, label: str, folder: Path, settings: Settings, work: Path, texts: Texts | None = None) -> None:
        self.label, self.folder, self.work, self.texts = label, folder, work / label, texts
        self.work.mkdir()
        self.net, self.tokenizer = self._load(), _tokenizer(folder)
        kind = task_type_of_net(self.net.config)
        if not (settings.trust or is_own_code(self.net, folder)):
            raise UserError(
                f"bench: '{folder}' brings code that this version of lit_compress does not write; --trust_remote_code "
                "runs it, or export the model again"
            )
        trust = trusts_code() or (folder / f"{MODULE}.py").is_file()
        self.setting = Setting(kind.auto_class, kind.results, settings.threads, settings.device, trust, settings.dtype)

    @property
    def longest(self) -> int:
        """How many tokens the model reads."""
        return usable_positions(self.net.config) or sys.maxsize

    @cached_property
    def quantized(self) -> dict[str, str]:
        """The program of integers in the folder, of ``export --dtype``: its file and its dtype; {} for none."""
        report = self.folder / "report.json"
        program = (read_json("bench", report, dict).get("program") if report.is_file() else None) or {}
        return {program.get("file", ONNX): program["dtype"]} if "dtype" in program else {}

    def _load(self) -> PreTrainedModel:
        import transformers

        if (self.folder / "structure.json").is_file():
            return load_net(self.folder)
        try:
            check_code(f"bench: '{self.folder}'", self.folder)
            trust = {"trust_remote_code": trusts_code()}
            config = transformers.AutoConfig.from_pretrained(self.folder, **trust)
            kind = getattr(transformers, task_type_of_net(config).auto_class)
            return kind.from_pretrained(self.folder, dtype=torch.float32, **trust).eval()
        except UserError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            raise UserError(f"bench: cannot load a model from '{self.folder}': {reason}") from error

    def inputs(self, batch: int, length: int, padded: bool = False) -> Inputs:
        """Return arrays of random tokens; ``padded``: half of the second text is padding."""
        tensors = example_inputs(self.net, self.tokenizer, batch, length, padded)
        return {name: value.numpy() for name, value in tensors.items()}

    def at_tokens(self, results: Sequence[Any], inputs: Inputs) -> np.ndarray:
        """Return the results as one array, without padding."""
        whole = torch.stack([torch.as_tensor(value).float().cpu() for value in results])
        mask = {"attention_mask": torch.from_numpy(inputs["attention_mask"])}
        return task_type_of_net(self.net.config).at_tokens(whole, mask).numpy()

    def file(self, name: str | None) -> Path:
        """Return the input of a runtime: the folder, or a program, which is written first if it is not there."""
        if name is None:
            return self.folder
        plain, made = _PLAIN.get(name, name), self.work / name
        if (self.folder / plain).is_file() and self.quantized.get(plain) == (None if name == plain else "int8"):
            return self.folder / plain
        if not made.is_file() and name == plain:
            write_program(self.net, self.tokenizer, self.work, "onnx" if name == ONNX else "openvino")
        elif not made.is_file():
            if self.texts is None:
                raise LookupError("needs training texts, from which it reads the ranges of activations")
            quantize(self.file(plain), made, self.texts(self.folder))
        return made

    def bytes(self, path: Path) -> int:
        """Return the size of a program, or of the tensors of a folder."""
        if path.is_file():
            return program_bytes(path)
        return sum(file.stat().st_size for file in tensor_files(path) if file.is_file())

    def scores(self, run: Runner, data: DataModule) -> dict[str, float]:
        """Return the dev scores of a runtime's answers.

        Raises:
            UserError: the model answers another task.
        """
        data.read_as(str(self.folder))
        check_head(f"bench: '{self.folder}'", self.net.config, data.record)

        def answers(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            results = run({name: value.numpy() for name, value in inputs.items()})
            values = [torch.as_tensor(value).float().cpu() for value in results]
            return dict(zip(self.setting.results, values, strict=True))

        return evaluate(Program(answers, self.net.config), data, sure=True)  # type: ignore[arg-type]


def _tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder; where it has none, what says that token types are not needed."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code())
    except Exception:  # any of many
        return lambda text: {}
