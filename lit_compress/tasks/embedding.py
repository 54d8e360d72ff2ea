"""Embedding: a vector for a text, from an encoder without a head, as sentence-transformers use it.

The states of a text's last layer become one vector as the model's own record says (sentences.py), and the vector is
divided by its length: only directions are trained and compared. A row is one text, two, or three:

    text                        is to get the vector that a teacher gives it, its label (data/encode.py)
    two texts and a score       their cosine is to have the order of the scores
    a query and its document    and maybe a document that is none of it: the query is to find its own among all

The texts of a row go through the model as rows of one batch: the first row's, then the second row's.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_compress.numerics.losses import LossKind
from lit_compress.numerics.vectors import pool
from lit_compress.tasks.base import Batch, Columns, Metrics, Model, TaskType, Tokenizer, token_columns
from lit_compress.tasks.records import Task
from lit_compress.tasks.regression import Regression
from lit_compress.tasks.sentences import STATES, VECTORS, Pooling
from lit_compress.utils.errors import UserError

_ENDS = ("", "_2", "_3")  # of the columns of a row's texts
_USUAL = Pooling()


class Embedding(TaskType):
    """Embedding: logits [b, texts, width] of length 1; labels as :func:`lit_compress.numerics.vectors.vectors_loss`.

    Further columns: ``input_ids_2``, ``attention_mask_2``, ... of further texts.

    Args:
        pooling: how vectors are made.
    """

    name = "embedding"
    auto_class = "AutoModel"
    suffix = "Model"
    pipeline = "sentence-similarity"
    library = "sentence-transformers"
    stored = "float32"
    loss: LossKind = "vectors"
    results = (STATES,)
    per_token = True
    label = ""  # scores of pairs, if they are named
    texts = (1, 3)
    pools = own_head = secret = one_stack = True
    unused = ("pooler.",)  # it serves heads
    sample = '"a text"'
    means = (
        "States of the last layer. In sentence-transformers,\n"
        "`SentenceTransformer(folder, trust_remote_code=True).encode(texts)` gives the vectors."
    )

    def __init__(self, pooling: Pooling = _USUAL) -> None:
        self.pooling = pooling

    def of(self, task: Task) -> Embedding:
        """Return the type with the task's way of making vectors."""
        return Embedding(task.pooling)

    def make(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors [rows, width] of the last layer's states [rows, tokens, hidden size], by the texts' mask.

        They have length 1 if the model normalizes them before it cuts them.
        """
        vectors = pool(states, mask, self.pooling.tokens)
        vectors = F.normalize(vectors, dim=-1) if self.pooling.normalize else vectors
        return vectors[..., : self.pooling.dim]

    def of_texts(self, task: Task) -> Task:
        """Return the task whose rows are one text that gets its teacher's vector."""
        return replace(task, text=task.text[:1], label="")

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> float:
        """Return the score of a pair."""
        return Regression().label_of(task, where, row)

    def metrics_of(self, task: Task) -> tuple[str, ...]:
        """Return how near texts are to the teacher's, the rank correlation of scored pairs, or how queries find.

        Raises:
            UserError: there is a column of scores, and not two texts.
        """
        if task.label and len(task.text) != 2:
            raise UserError(
                f"data.custom.label: '{task.label}' is a score of two texts, data.custom.text names {len(task.text)}"
            )
        if len(task.text) == 1:
            return ("teacher_cosine",)
        return ("spearman", "pearson") if task.label else ("ndcg_at_10", "recall_at_10")

    def encode(self, batch: Columns, rows: list[int], tokenizer: Tokenizer, task: Task, max_length: int) -> Columns:
        """Tokenise every text by itself."""
        columns: Columns = {}
        for name, end in zip(task.text, _ENDS, strict=False):
            texts = [task.pooling.prompt + text for text in batch[name]]
            tokens = token_columns(tokenizer(texts, truncation=True, max_length=max_length))
            columns[f"input_ids{end}"] = tokens["input_ids"]
            if end:
                columns[f"attention_mask{end}"] = [[1] * max(n, 1) for n in tokens["length"]]
                columns["truncated"] = [a or b for a, b in zip(columns["truncated"], tokens["truncated"], strict=True)]
            else:
                columns |= {key: tokens[key] for key in ("token_type_ids", "length", "truncated") if key in tokens}
        if task.label in batch:
            columns["labels"] = batch[task.label]
        elif len(task.text) > 1:
            columns["labels"] = [
                list(map(number_of, texts)) for texts in zip(*(batch[n] for n in task.text), strict=True)
            ]
        return columns

    def inputs(self, net: Model, batch: Batch) -> Batch:
        """Return the inputs of the texts of all rows, [b * texts, tokens]."""
        inputs = {"input_ids": _joined(batch, "input_ids"), "attention_mask": _joined(batch, "attention_mask")}
        if "token_type_ids" in batch:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        return inputs

    def masks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return where tokens are in :meth:`inputs`, twice."""
        mask = _joined(batch, "attention_mask")
        return mask, mask

    def logits(self, output: Any, batch: Batch) -> Tensor:
        """Return the vectors of the texts, of length 1."""
        return F.normalize(self._vectors(output, batch), dim=-1)

    def _vectors(self, output: Any, batch: Batch) -> Tensor:
        """Return the vectors [b, texts, width] as the model makes them; of several forwards in a row."""
        states, mask = output.last_hidden_state, _joined(batch, "attention_mask")
        return self.make(states, mask.repeat(len(states) // len(mask), 1)).unflatten(0, (-1, _texts(batch)))

    def gives(self, output: Any, inputs: Batch) -> Batch:
        """Return the states, and the texts' vectors [b, width] as the model makes them."""
        given = super().gives(output, inputs)
        return {**given, VECTORS: self.make(given[STATES], inputs["attention_mask"])}

    def forwards(self, batch: Batch) -> list[Batch]:
        """Return a batch for every text of a row: together, a query would have as many tokens as a document."""
        names = ("input_ids", "attention_mask")
        kinds = {name: batch[name] for name in ("token_type_ids",) if name in batch}
        return [kinds | {name: batch[f"{name}{end}"] for name in names} for end in _ENDS[: _texts(batch)]]

    def outputs(self, net: Model, batch: Batch, tokenizer: Tokenizer) -> Tensor:
        """Return the vectors as the model makes them, [b, texts, width]."""
        return torch.cat([self._vectors(self.run(net, one), one) for one in self.forwards(batch)], 1).float()

    def observe(self, metrics: Metrics, outputs: Tensor, batch: Batch) -> None:
        """Update the metrics with vectors, cosines of pairs, or queries and documents."""
        vectors, labels = F.normalize(outputs, dim=-1), batch["labels"]
        if labels.is_floating_point() and labels.ndim == 1:
            metrics.update((vectors[:, 0] * vectors[:, 1]).sum(-1), labels)
        else:
            super().observe(metrics, vectors, batch)

    def answer(self, task: Task, row: dict[str, Any], pieces: list[Tensor]) -> dict[str, Any]:
        """Return ``vector``; of several texts ``similarity``, the cosine of the first two, and ``vectors``."""
        vectors = pieces[0]
        if len(vectors) == 1:
            return {"vector": vectors[0].tolist()}
        return {"similarity": float(F.cosine_similarity(vectors[0], vectors[1], dim=0)), "vectors": vectors.tolist()}


def number_of(text: str) -> int:
    """Return a number of 63 bits, the same for equal texts."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _texts(batch: Batch) -> int:
    """Return how many texts a row has."""
    return sum(f"input_ids{end}" in batch for end in _ENDS)


def _joined(batch: Batch, name: str) -> Tensor:
    """Return a column of all texts [b * texts, tokens], padded with 0, the texts of a row one after the other."""
    columns = [batch[f"{name}{end}"] for end in _ENDS[: _texts(batch)]]
    longest = max(column.shape[1] for column in columns)
    return torch.stack([F.pad(column, (0, longest - column.shape[1])) for column in columns], 1).flatten(0, 1)
