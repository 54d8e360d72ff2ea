"""Reranking: how well a document answers a query, from a model that reads both at once (a cross-encoder).

A row is a query, a document and how relevant the document is, from 0 to 1. The model gives one number, the logit of the
relevance, by which the documents of a query are put in order. Labels are learned by their cross-entropy; everything
that compares two models compares logits, as only their order counts: a probability near 0 or 1 hardly tells documents
apart (numerics/losses.py, kind ``relevance``).

The dev metric judges the order of every query's documents. Rows with the same query, word by word, belong together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_compress.numerics.losses import LossKind
from lit_compress.tasks.base import Columns, Config, Tokenizer
from lit_compress.tasks.embedding import number_of
from lit_compress.tasks.records import Task
from lit_compress.tasks.regression import Regression
from lit_compress.tasks.sentences import SETTINGS, read_modules, read_object
from lit_compress.utils.errors import UserError


class Reranking(Regression):
    """Reranking: logits [b, 1], labels [b] from 0 to 1; a further column ``query`` [b], the same for equal queries."""

    name = "reranking"
    pipeline = "text-ranking"
    scores = ("ndcg_at_10", "mrr_at_10")
    library = "sentence-transformers"
    loss: LossKind = "relevance"
    columns = ("query", "document")
    texts = (2, 2)
    lists = True
    means = (
        "One real number: the larger, the better the {text[1]} answers the {text[0]}. In\nsentence-transformers, "
        "`CrossEncoder(folder, trust_remote_code=True).rank({query}, documents)` puts\ndocuments in order."
    )

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> float:
        """Return the relevance; true is 1, false is 0."""
        label = row[task.label]
        number = float(label) if isinstance(label, bool) else super().label_of(task, where, row)
        if not 0 <= number <= 1:
            raise UserError(f"{where}: label {number:g} is no relevance; give one from 0 (none) to 1")
        return number

    def encode(self, batch: Columns, rows: list[int], tokenizer: Tokenizer, task: Task, max_length: int) -> Columns:
        """Tokenise query and document as one sequence, and number the queries."""
        columns = super().encode(batch, rows, tokenizer, task, max_length)
        return columns | {"query": list(map(number_of, batch[task.text[0]]))}

    def adopt(self, config: Config, folder: Path, option: str) -> None:
        """Write the activation of a cross-encoder into ``config``, where all versions of sentence-transformers read it.

        Raises:
            UserError: the cross-encoder does more than a model with a head.
        """
        what = f"{option}: '{folder}'"
        modules = [name for name, _ in read_modules(folder, option) or ()]
        if modules not in ([], ["Transformer"]):
            raise UserError(f"{what} scores by {', '.join(modules)} (modules.json); only the model itself can be kept")
        settings = read_object(folder / SETTINGS, what, {})
        if settings.get("default_prompt_name") is not None:
            raise UserError(f"{what} has a default prompt, which is not kept; write it into the texts")
        if settings.get("activation_fn") is not None:
            config.sentence_transformers = {"activation_fn": settings["activation_fn"]}
