"""A text for every text (XSum, CNN/DailyMail): a sequence-to-sequence net writes it, ``generate`` with beams.

How it writes stands in the net's ``generation_config``, which goes with it into runs and exports: what the backbone's
has (BART: no repeated trigrams, the first token), beams, length penalty and longest text as the task says.

A batch has the texts' token ids, ``labels`` [b, target tokens] (-100 where there is none), which the net reads one step
later, and ``reference`` [b, bytes], the true texts themselves: ROUGE is not taken on what is left of them as tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.errors import UserError
from lit_compress.kinds.base import IGNORED, Columns, TaskKind, inputs_of

if TYPE_CHECKING:
    import pyarrow as pa
    from torchmetrics import MetricCollection
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lit_compress.tasks import Task


def as_bytes(texts: list[str]) -> list[list[int]]:
    """Return the texts as UTF-8, without zeros, which fill up."""
    return [list(text.replace("\0", " ").encode(errors="replace")) for text in texts]


def as_texts(rows: Tensor) -> list[str]:
    """Return the texts of :func:`as_bytes`, as a tensor [b, bytes] filled up with zeros."""
    return [bytes(row[row != 0].tolist()).decode(errors="replace") for row in rows.cpu()]


class Summarization(TaskKind):
    """Logits [b, target tokens, vocabulary], labels [b, target tokens]."""

    name = "summarization"
    auto_class = "AutoModelForSeq2SeqLM"
    suffix = "ForConditionalGeneration"
    pipeline = "summarization"
    columns = ("document",)
    label = "summary"
    length = max_length = 256

    def label_type(self) -> pa.DataType:
        """Return the type of texts."""
        import pyarrow as pa

        return pa.string()

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> str:
        """Return the true text."""
        text = row[task.label]
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{where}: '{task.label}' is {text!r:.60}; give text")
        return text

    def metrics(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return ROUGE."""
        return ("rougeL",)

    def encode(
        self, batch: Columns, rows: list[int], tokenizer: PreTrainedTokenizerBase, task: Task, max_length: int
    ) -> Columns:
        """Tokenise texts and true texts."""
        columns = super().encode({task.text[0]: batch[task.text[0]]}, rows, tokenizer, task, max_length)
        if task.label in batch:
            texts = batch[task.label]
            found = tokenizer(text_target=texts, truncation=True, max_length=task.writing.target_length)
            columns["labels"], columns["reference"] = found["input_ids"], as_bytes(texts)
        return columns

    def head(self, task: Task) -> dict[str, Any]:
        """Return nothing: the net's head is the backbone's own."""
        return {}

    def configure(self, net: PreTrainedModel, task: Task) -> None:
        """Say in the net's generation settings how it writes.

        Raises:
            UserError: the longest text is longer than the net's positions.
        """
        assert net.generation_config is not None
        writing, positions = task.writing, getattr(net.config, "max_position_embeddings", None)
        if positions is not None and writing.target_length >= positions:
            raise UserError(
                f"data.target_length: {writing.target_length} is more than '{net.name_or_path}' writes; "
                f"the largest is {positions - 1}"
            )
        net.generation_config.update(
            num_beams=writing.num_beams, length_penalty=writing.length_penalty, max_new_tokens=writing.target_length,
            max_length=None, min_length=0, min_new_tokens=None,
        )  # fmt: skip

    def inputs(self, net: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add what the decoder reads: the labels, one step later."""
        config = net.config
        before = torch.full_like(batch["labels"][:, :1], config.decoder_start_token_id)
        ids = torch.cat([before, batch["labels"][:, :-1]], dim=1)
        return {**inputs_of(batch), "decoder_input_ids": ids.masked_fill(ids == IGNORED, config.pad_token_id)}

    def masks(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return where tokens are in the texts, and in the true ones."""
        return batch["attention_mask"], self.counted(batch)

    def counted(self, batch: dict[str, Tensor]) -> Tensor:
        """Return where the true texts' tokens are."""
        return batch["labels"] != IGNORED

    def outputs(self, net: PreTrainedModel, batch: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Return the texts that the net writes, as bytes [b, n]."""
        ids = net.generate(**inputs_of(batch))  # type: ignore[operator]
        texts = as_bytes([text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)])
        longest = max(map(len, texts), default=0)
        return torch.tensor([row + [0] * (longest - len(row)) for row in texts], device=ids.device).view(len(texts), -1)

    def observe(self, metrics: MetricCollection, outputs: Tensor, batch: dict[str, Tensor]) -> None:
        """Show texts and true texts."""
        metrics.update(as_texts(outputs), as_texts(batch["reference"]))

    def answer(self, task: Task, row: dict[str, Any], pieces: list[Tensor]) -> dict[str, Any]:
        """Return the written text under the name of the true one."""
        return {task.label: as_texts(pieces[0][None])[0]}

    def example(self, task: Task) -> str:
        """Return a text."""
        return f'"a {task.text[0]}"'

    def meaning(self, task: Task) -> str:
        """Say how the text is had."""
        return (
            "Logits of the next token. `tokenizer.decode(net.generate(**inputs)[0], skip_special_tokens=True)` writes "
            f"the {task.label}, with the beams and length penalty of `generation_config.json`."
        )
