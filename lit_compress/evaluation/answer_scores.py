"""Scores of answers that are spans of a text, as in SQuAD's evaluation.

Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250 (v1.1), Rajpurkar et al. 2018, https://arxiv.org/abs/1806.03822
(v2.0: some questions have no answer).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_compress.evaluation.kept_rows import KeptRows
from lit_compress.tasks.records import Task
from lit_compress.tasks.span_qa import Piece, as_pieces, merge, n_best

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
        values = answer_scores(self.task, self.rows, windows)
        return {name: torch.tensor(value, device=self.device) for name, value in values.items()}


def answer_scores(task: Task, rows: Any, windows: dict[int, list[Piece]]) -> dict[str, float]:
    """Return the metrics of :class:`Answers`; ``windows`` has the answers in every window, by number of the row."""
    threshold = task.spans.null_threshold
    questions: list[tuple[bool, dict[str, float]]] = []  # has it an answer; its scores
    for number, pieces in windows.items():
        row = rows[number]
        null, spans = merge(pieces, 1)
        truths = [text for text in row[task.label]["text"] if threshold is None or normalize(text)]
        text = row[task.text[1]][spans[0][1] : spans[0][2]] if spans else ""
        if threshold is not None and spans and null - spans[0][0] > threshold:
            text = ""
        questions.append(
            (bool(truths), {"exact_match": exact_match(text, truths), "answer_f1": token_f1(text, truths)})
        )
    values = {}
    for name in ("exact_match", "answer_f1"):
        values[name] = _mean([scores[name] for _, scores in questions])
        for group, wanted in (("answerable", True), ("unanswerable", False)) if threshold is not None else ():
            values[f"{name}_{group}"] = _mean([scores[name] for has, scores in questions if has is wanted])
    return values


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
