"""The metrics of tasks, by name, as torchmetrics: correct over any number of batches and ranks.

A metric that is not defined (no data, constant predictions or labels) is 0.0, never NaN, with which comparisons of
epochs would be accidental.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassMatthewsCorrCoef,
)
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
from torchmetrics.utilities import dim_zero_cat

from lit_compress.evaluation.confusion import macro_f1
from lit_compress.evaluation.kept_rows import KeptRows
from lit_compress.evaluation.label_metrics import LabelScores
from lit_compress.evaluation.ranking_metrics import Ranking, Retrieval
from lit_compress.evaluation.text_metrics import Perplexity, Rouge
from lit_compress.evaluation.vector_metrics import TeacherCosine
from lit_compress.tasks.records import Task
from lit_compress.tasks.span_qa import Piece, as_pieces, merge, n_best
from lit_compress.tasks.spans import best_threshold, exact_match, normalize, token_f1
from lit_compress.tasks.tagging import entity_tags
from lit_compress.utils.errors import UserError, nearest


class F1(BinaryF1Score):
    """F1 of class 1 of two classes; takes logits [batch, 2] and labels [batch]."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch."""
        super().update(preds.argmax(dim=-1), target)


class Matthews(MulticlassMatthewsCorrCoef):
    """Matthews correlation as scikit-learn defines it; takes logits [batch, classes] and labels [batch].

    torchmetrics returns +-1 if predictions and labels are constant; that case is undefined and 0.0 here.
    """

    def compute(self) -> Tensor:
        """Return the score of all batches of all ranks."""
        constant = ((self.confmat > 0).any(dim=0).sum() < 2) | ((self.confmat > 0).any(dim=1).sum() < 2)
        return torch.zeros((), device=self.confmat.device) if constant else super().compute()


class MacroF1(MulticlassConfusionMatrix):
    """F1, the mean over the classes that are seen; takes logits [batch, classes] and labels [batch]."""

    higher_is_better = True

    def compute(self) -> Tensor:
        """Return the score of all batches of all ranks."""
        return macro_f1(self.confmat.float())


class Correlation(KeptRows):
    """The mean of correlation coefficients; takes predictions [batch] or [batch, 1] and labels [batch].

    All values are kept, as Spearman's ranks cannot be computed from running sums.
    """

    predictions: list[Tensor]
    labels: list[Tensor]

    def __init__(self, *coefficients: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.coefficients = coefficients

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch."""
        self.keep(preds.detach().reshape(-1).float(), target.reshape(-1).float())

    def compute(self) -> Tensor:
        """Return the score of all batches of all ranks."""
        if not len(self.predictions):
            return torch.zeros((), device=self.device)
        predictions, labels = dim_zero_cat(self.predictions), dim_zero_cat(self.labels)
        # float64 on the CPU (not every accelerator has it): predictions may differ in the last digits only
        return self.score(predictions.cpu().double(), labels.cpu().double()).float().to(labels.device)

    def score(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of the coefficients of some values [rows]; 0 if one side is constant."""
        if not len(labels) or predictions.min() == predictions.max() or labels.min() == labels.max():
            return torch.zeros((), dtype=predictions.dtype)
        values = [coefficient(predictions, labels) for coefficient in self.coefficients]
        return torch.nan_to_num(torch.stack(values).mean(), nan=0.0)


class Entities(KeptRows):
    """Precision, recall and F1 of the entities in tagged words, as ``seqeval`` counts them, and the words' accuracy.

    Labels that are no tags of entities, see :func:`entity_tags`, have the accuracy alone. An entity is correct if its
    type, its first and its last word are. Takes per word the predicted class, the true class, the number of its row and
    its own number in the row (int [words] each); the words of a row may come in several batches.
    """

    words: list[Tensor]

    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__()
        self.names, self.tags = tuple(labels), entity_tags(labels)

    def update(self, preds: Tensor, target: Tensor, example: Tensor, word: Tensor) -> None:
        """Add one batch."""
        self.keep(torch.stack([example, word, preds, target], dim=1))

    def compute(self) -> dict[str, Tensor]:
        """Return word_accuracy and, of tags of entities, entity_f1, entity_precision, entity_recall of all ranks."""
        words = dim_zero_cat(self.words) if len(self.words) else torch.zeros(0, 4, dtype=torch.long)
        rows = sorted(words.tolist())  # by row, then by word
        values = {}
        if self.tags is not None:
            tags = [self.tags.get(name) for name in self.names]
            predicted, true = (set(entities([(row[0], tags[row[i]]) for row in rows])) for i in (2, 3))
            right = len(predicted & true)
            values = {
                "entity_f1": _ratio(2 * right, len(predicted) + len(true)),
                "entity_precision": _ratio(right, len(predicted)),
                "entity_recall": _ratio(right, len(true)),
            }
        values["word_accuracy"] = _ratio(sum(row[2] == row[3] for row in rows), len(rows))
        return {name: torch.tensor(value, device=self.device) for name, value in values.items()}


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def entities(words: Sequence[tuple[int, tuple[str, str] | None]]) -> list[tuple[str, int, int]]:
    """Return (type, first word, last word) of the entities in ``words``, which are (row, tag), ordered by row.

    A tag is None or a letter and a type: B begins an entity, I continues one of the same type or else begins one (IOB1,
    IOB2), E ends one, S is an entity of one word.
    """
    spans: list[tuple[str, int, int]] = []
    last: tuple[int, str, bool] | None = None  # entity of the word before: its row, its type, whether it may go on
    for place, (row, tag) in enumerate(words):
        if tag is None:
            last = None
            continue
        prefix, kind = tag
        if prefix in "IE" and last == (row, kind, True):
            spans[-1] = (kind, spans[-1][1], place)
        else:
            spans.append((kind, place, place))
        last = (row, kind, prefix in "BI")
    return spans


class Answers(KeptRows):
    """Exact match and F1 of answer spans as in SQuAD's evaluation, in [0, 1]; takes logits and windows of contexts.

    If questions may have no answer, there are also both metrics for questions with and without an answer, and the best
    values over all thresholds of "no answer" (``best_...``, with that threshold).

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
        if len(self.examples):
            pieces = as_pieces(dim_zero_cat(self.places), dim_zero_cat(self.scores))
            for example, piece in zip(dim_zero_cat(self.examples).tolist(), pieces, strict=True):
                windows.setdefault(example, []).append(piece)
        values = answer_scores(self.task, self.rows, windows)
        return {name: torch.tensor(value, device=self.device) for name, value in values.items()}


def answer_scores(task: Task, rows: Any, windows: dict[int, list[Piece]]) -> dict[str, float]:
    """Return the metrics of :class:`Answers`; ``windows`` has the answers in every window, by number of the row."""
    threshold = task.spans.null_threshold
    # per question: has it an answer; null score - span score; (exact match, F1) as answered, of the best span, of none
    questions = []
    for number, pieces in windows.items():
        row = rows[number]
        null, spans = merge(pieces, 1)
        truths = [text for text in row[task.label]["text"] if threshold is None or normalize(text)]
        text = row[task.text[1]][spans[0][1] : spans[0][2]] if spans else ""
        margin = null - spans[0][0] if spans else math.inf
        given = "" if threshold is not None and margin > threshold else text
        of_given, of_text, of_none = (
            (exact_match(answer, truths), token_f1(answer, truths)) for answer in (given, text, "")
        )
        questions.append((bool(truths), margin, of_given, of_text, of_none))
    values = {}
    for i, name in enumerate(("exact_match", "answer_f1")):
        values[name] = _mean([given[i] for _, _, given, *_ in questions])
        if threshold is None:
            continue
        for group, wanted in (("answerable", True), ("unanswerable", False)):
            values[f"{name}_{group}"] = _mean([given[i] for has, _, given, *_ in questions if has is wanted])
        margins = [(margin, best[i], none[i]) for _, margin, _, best, none in questions]
        values[f"best_{name}"], values[f"best_{name}_threshold"] = best_threshold(margins)
    return values


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def bind(metrics: MetricCollection, rows: Any) -> None:
    """Give the rows of a split to the metrics that need them."""
    for metric in metrics.values():
        if isinstance(metric, Answers):
            metric.rows = rows


def _ranking(task: Task) -> Metric:
    return Ranking() if task.kind == "reranking" else Retrieval()


METRICS: dict[str, Callable[[Task], Metric]] = {
    "accuracy": lambda task: MulticlassAccuracy(task.num_labels, average="micro"),
    "f1": lambda task: F1(),
    "matthews": lambda task: Matthews(task.num_labels),
    "pearson": lambda task: Correlation(pearson_corrcoef),
    "spearman": lambda task: Correlation(spearman_corrcoef),
    "pearson_spearman": lambda task: Correlation(pearson_corrcoef, spearman_corrcoef),
    "macro_f1": lambda task: MacroF1(task.num_labels),
    "micro_f1": lambda task: LabelScores(),
    "entity_f1": lambda task: Entities(task.labels),
    "rougeL": lambda task: Rouge(),
    "rougeLsum": lambda task: Rouge(),
    "perplexity": lambda task: Perplexity(),
    "teacher_cosine": lambda task: TeacherCosine(),
    "ndcg_at_10": _ranking,
    "recall_at_10": _ranking,
    "mrr_at_10": _ranking,
    "word_accuracy": lambda task: Entities(task.labels),
    "answer_f1": Answers,
    "exact_match": Answers,
}


def higher_is_better(task: Task) -> bool:
    """Return whether larger values of the first metric of ``task`` are better."""
    return bool(METRICS[task.metrics[0]](task).higher_is_better)


def build_metrics(task: Task, prefix: str = "") -> MetricCollection:
    """Return the metrics of ``task``; keys are ``prefix`` + the names of the metrics and of other values they compute.

    The type of the task calls the collection in ``observe``, with logits [batch, num_labels] (or predictions [batch]
    for regression) and labels [batch] where a row has one label.

    Raises:
        UserError: the task's record names a metric that does not exist.
    """
    for name in task.metrics:
        if name not in METRICS:
            raise UserError(f"task '{task.name}': unknown metric '{name}'; {nearest(name, METRICS)}")
    # One metric may compute several of the names. No compute groups: torchmetrics forms them by comparing states,
    # which may be equal by accident.
    kinds = {METRICS[name]: name for name in reversed(task.metrics)}
    return MetricCollection({name: kind(task) for kind, name in kinds.items()}, prefix=prefix, compute_groups=False)
