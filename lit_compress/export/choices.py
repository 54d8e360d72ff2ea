"""Choices for an export, besides the model: programs, widths, vocabulary, embeddings, number formats."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from lit_compress.export.integers import INTEGERS, Integers
from lit_compress.export.runtimes import Dtype, Format
from lit_compress.export.vocabulary import check_table
from lit_compress.models.sites import Model
from lit_compress.utils.errors import UserError

Vocabulary = Literal["all", "data"]
NEEDS: dict[Format, tuple[str, ...]] = {
    "hf": (), "onnx": ("onnx", "onnxscript", "onnxruntime", "nncf"),
    "openvino": ("openvino", "transformers.exporters", "nncf"),
}  # fmt: skip


@dataclass(frozen=True)
class Choices:
    """How a model is exported; the options of ``export``.

    Args:
        format: ``onnx`` and ``openvino`` also write the model as one program (program.py).
        embeddings: ``int8``: the table of token embeddings as integers with a scale per row; None or
            ``none`` leaves it.
        dtype: of the weights in the file; ``auto``, the commands' default: as in the model's files, or float32 with a
            program or a budget of speed-up; ``int8``: of the weights and activations of the program, and of its
            weights alone if the model writes text; ``int4``: of the weights of a model that writes text.
        max_drop: points of the first dev metric that the export may lose, hundredths, or 1 of a perplexity; None for
            any number.
        vocabulary: ``data`` keeps the pieces that the training data and unknown words need (vocabulary.py).
    """

    format: Format = "hf"
    vocabulary: Vocabulary = "all"
    embeddings: str | None = None
    dtype: Dtype = "float32"
    max_drop: float | None = None

    def __post_init__(self) -> None:
        if self.embeddings == "none":
            object.__setattr__(self, "embeddings", None)

    @property
    def half(self) -> bool:
        """Whether the weights are stored in 16 bits."""
        return self.dtype in ("bfloat16", "float16")

    @property
    def integers(self) -> Integers | None:
        """The integers of the program; None if it has none."""
        return self.dtype if self.dtype == "int8" or self.dtype == "int4" else None

    def check(self, net: Model | None = None) -> None:
        """Refuse values that are not valid, choices that exclude each other, and those that ``net`` cannot have.

        Raises:
            UserError: one of them, or a package is missing.
        """
        if missing := ", ".join(name for name in NEEDS.get(self.format, ()) if find_spec(name) is None):
            raise UserError(
                f"export: --format {self.format} needs {missing}; in the clone: pip install '.[{self.format}]'"
            )
        if self.max_drop is not None and not self.max_drop >= 0:
            raise UserError(f"export: --max_drop {self.max_drop:g} is not a number of points; the smallest is 0")
        if self.embeddings not in (None, "int8"):
            raise UserError(
                f"export: --embeddings '{self.embeddings}' is not valid; int8 or none (version 0.3 removed rank=)"
            )
        if self.integers and self.format not in (formats := INTEGERS[self.integers]):
            raise UserError(
                f"export: --format {self.format} has no --dtype {self.dtype}; give --format {' or '.join(formats)}"
            )
        if self.half and self.format != "hf":
            raise UserError(
                f"export: --format {self.format} writes a program of float32, --dtype {self.dtype} is for the folder; "
                "leave one out, or give --format onnx --dtype int8"
            )
        if net is not None and self.embeddings:
            check_table(net)
        if net is None or not self.integers:
            return
        if net.config.is_encoder_decoder and net.can_generate():
            raise UserError(
                f"export: --dtype {self.dtype} cannot measure a model that writes summaries; nearest: bfloat16"
            )
        if self.dtype == "int4" and not net.can_generate():
            raise UserError("export: --dtype int4 is for models that write text, one token at a time; nearest: int8")

    def check_drop(self, report: dict[str, Any]) -> None:
        """Raise a UserError if the export of a report loses more of the metric than ``max_drop``."""
        if self.max_drop is None:
            return
        before, metric = report["dense"]["metric"], report["metric"]
        after = (report.get("program") or {}).get("metric", report["compressed"]["metric"])  # of one of integers
        lost = 100 * (before - after) if metric["mode"] == "max" else after - before
        if metric["name"] == "perplexity" and (changed := (report.get("vocabulary") or {}).get("dev_changed")):
            raise UserError(
                f"export: --max_drop compares perplexities of the same pieces, and {changed} dev inputs have others "
                "with --vocabulary data; leave one of them out; nothing was exported"
            )
        if not lost <= self.max_drop:
            raise UserError(
                f"export: dev {metric['name']} goes from {before:.4f} to {after:.4f}, {lost:.2f} points, more than "
                f"--max_drop {self.max_drop:g}; nothing was exported"
            )


AS_IS = Choices()
