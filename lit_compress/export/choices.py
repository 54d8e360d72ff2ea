"""What users choose for an export, beside the net: programs, widths, vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_compress.export.program import Format, check_format

Vocabulary = Literal["all", "data"]


@dataclass(frozen=True)
class Choices:
    """How a net is exported; the options of ``export``.

    Attributes:
        form: ``onnx`` and ``torch`` also write the net as one program (program.py).
        round_to: widths of hidden states and feed-forward networks are padded with zeros to multiples of this number
            (SP3); None for no padding.
        vocabulary: ``data`` keeps the pieces that the training data and unknown words need (vocabulary.py).
    """

    form: Format = "hf"
    round_to: int | None = None
    vocabulary: Vocabulary = "all"

    def check(self) -> None:
        """Refuse, before the work, what cannot be done.

        Raises:
            UserError: packages are missing.
        """
        check_format(self.form)


AS_IS = Choices()
