"""Scores of answers that are spans of a text, as in SQuAD's evaluation.

Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250 (v1.1), Rajpurkar et al. 2018, https://arxiv.org/abs/1806.03822
(v2.0: some questions have no answer).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_compress.evaluation.kept_rows import KeptRows
from lit_compress.tasks.records import Task
from lit_compress.tasks.span_qa import Piece, SpanQA, as_pieces, n_best

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Answers(KeptRows):
    """Exact match and F1 of answer spans as in SQuAD's evaluation, in [0, 1]; takes logits and windows of contexts.

    If questions may have no answer, there are also both metrics for questions with and without an answer.

    Attributes:
        rows: the rows of the split, with texts and true answers; to be set before :meth:`compute`.
    """

    examples: list[Tensor]
    places: list[Tensor]
    scores: list[Tensor]

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.rows = task, None

    def update(self, preds: Tensor, example: Tensor, begin: Tensor, end: Tensor) -> None:
        """Add the n-best answers of a batch."""
        self.keep(example, *n_best(preds, begin, end, self.task.spans.n_best, self.task.spans.max_answer))

    def compute(self) -> dict[str, Tensor]:
        """Return the scores of all questions of all ranks."""
        windows: dict[int, list[Piece]] = {}
        if states := self.kept():
            examples, places, scores = states
            for example, piece in zip(examples.tolist(), as_pieces(places, scores), strict=True):
                windows.setdefault(example, []).append(piece)
        may_be_none = self.task.spans.null_threshold is not None
        found: dict[str, list[float]] = {}
        for number, pieces in windows.items():
            row = self.rows[number]
            truths = [text for text in row[self.task.label]["text"] if not may_be_none or normalize(text)]
            text = SpanQA().answer(self.task, row, pieces)["answer"]
            for name, score in (("exact_match", exact_match(text, truths)), ("answer_f1", token_f1(text, truths))):
                found.setdefault(name, []).append(score)
                found.setdefault(f"{name}_{'answerable' if truths else 'unanswerable'}", []).append(score)
        groups = ("", "_answerable", "_unanswerable") if may_be_none else ("",)
        names = [f"{name}{group}" for name in ("exact_match", "answer_f1") for group in groups]
        return {name: torch.tensor(_mean(found.get(name, [])), device=self.device) for name in names}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def normalize(answer: str) -> str:
    """Return an answer in lower case without punctuation, articles and repeated spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truths: Sequence[str]) -> float:
    """Return 1.0 if the normalized answer is one of the normalized ``truths`` (empty if there are none), else 0.0."""
    given = normalize(answer)
    return float(any(given == normalize(truth) for truth in truths or ("",)))


def token_f1(answer: str, truths: Sequence[str]) -> float:
    """Return the largest F1 of the answer's normalized words, over ``truths``; 1.0 if neither has any words."""
    given = normalize(answer).split()
    return max(_word_f1(given, normalize(truth).split()) for truth in truths or ("",))


def _word_f1(given: list[str], true: list[str]) -> float:
    if not given or not true:
        return float(given == true)
    same = sum((Counter(given) & Counter(true)).values())
    return 2 * same / (len(given) + len(true))
