"""The metrics of tasks, by name, as torchmetrics: correct over any number of batches and ranks.

A metric that is not defined (no data, constant predictions or labels) is 0.0, never NaN, with which comparisons of
epochs would be accidental.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.text import squad

from lit_compress.evaluation.intervals import KeptRows, RowScores
from lit_compress.evaluation.ranking_metrics import Ranking, Retrieval, TeacherCosine
from lit_compress.tasks.records import Task
from lit_compress.tasks.span_qa import Piece, SpanQA, as_pieces, n_best
from lit_compress.tasks.tagging import entity_tags
from lit_compress.utils.errors import UserError, nearest

CONFUSION_SCORES = ("accuracy", "f1", "macro_f1", "matthews")


class Confusion(RowScores):
    """Scores that depend only on how often each class was taken for which: ``names`` of :data:`CONFUSION_SCORES`.

    As scikit-learn defines them: the fraction of rows whose class is right, F1 of class 1, the mean F1 of the classes
    that are seen, and Matthews correlation, 0 if truth or predictions are constant. Takes logits [batch, classes] and
    labels [batch].
    """

    predicted: list[Tensor]
    labels: list[Tensor]

    def __init__(self, classes: int, names: Collection[str]) -> None:
        super().__init__()
        self.classes, self.names = classes, [name for name in CONFUSION_SCORES if name in names]

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch."""
        self.keep(preds.argmax(-1), target)

    def scores(self, *values: Tensor) -> dict[str, Tensor]:
        """Return the scores of some rows by name."""
        predicted, labels = values
        cells = (labels * self.classes + predicted).bincount(minlength=self.classes**2)
        table = cells.double().view(self.classes, -1)  # [true class, predicted class]
        right, true, predicted, rows = table.diagonal(), table.sum(1), table.sum(0), table.sum()
        f1 = torch.where(true + predicted > 0, 2 * right / (true + predicted), torch.nan)
        product = right.sum() * rows - (true * predicted).sum()
        spread = ((rows**2 - (true**2).sum()) * (rows**2 - (predicted**2).sum())).sqrt()
        found = right.sum() / rows, f1[1], f1.nanmean(), torch.where(spread > 0, product / spread, 0.0)
        by_name = dict(zip(CONFUSION_SCORES, found, strict=True))
        return {name: by_name[name].nan_to_num() for name in self.names}


CORRELATIONS = ("pearson", "spearman", "pearson_spearman")


class Correlation(RowScores):
    """Correlation coefficients, and their mean: ``names`` of :data:`CORRELATIONS`; 0 if one side is constant.

    Takes predictions [batch] or [batch, 1] and labels [batch]. All values are kept, as Spearman's ranks cannot be
    computed from running sums.
    """

    predictions: list[Tensor]
    labels: list[Tensor]

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = sorted(names)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch."""
        self.keep(preds.detach().reshape(-1).float(), target.reshape(-1).float())

    def scores(self, *values: Tensor) -> dict[str, Tensor]:
        """Return the coefficients of some rows, from float64: predictions may differ in the last digits only."""
        both = [some.double() for some in values]
        if any(some.min() == some.max() for some in both):
            return dict.fromkeys(self.names, torch.zeros((), dtype=torch.float64))
        pearson, spearman = pearson_corrcoef(*both), spearman_corrcoef(*both)
        found = {"pearson": pearson, "spearman": spearman, "pearson_spearman": torch.stack([pearson, spearman]).mean()}
        return {name: found[name].nan_to_num() for name in self.names}


class LabelScores(RowScores):
    """F1 over all decisions, mean F1 of the labels that are seen, and the share of rows whose labels are all right.

    A label is seen if some row has it, or is given it. Takes decisions and labels, int [batch, labels] of 0 and 1.
    """

    names = ("micro_f1", "macro_f1", "subset_accuracy")
    predicted: list[Tensor]
    true: list[Tensor]

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch."""
        self.keep(preds.to(torch.uint8), target.to(torch.uint8))

    def scores(self, *values: Tensor) -> dict[str, Tensor]:
        """Return micro_f1, macro_f1 and subset_accuracy of some rows; undefined scores are 0."""
        predicted, true = (some.bool() for some in values)
        right = (predicted & true).sum(0).double()
        seen = predicted.sum(0) + true.sum(0)
        f1 = torch.where(seen > 0, 2 * right / seen, torch.nan)
        found = 2 * right.sum() / seen.sum(), f1.nanmean(), (predicted == true).all(1).double().mean()
        return {name: torch.nan_to_num(value, nan=0.0) for name, value in zip(self.names, found, strict=True)}


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
        rows = sorted(row for words in self.kept() for row in words.tolist())  # by row, then by word
        found: dict[str, tuple[float, int]] = {}
        if self.tags is not None:
            tags = [self.tags.get(name) for name in self.names]
            predicted, true = (set(entities([(row[0], tags[row[i]]) for row in rows])) for i in (2, 3))
            right = len(predicted & true)
            found["entity_f1"] = 2 * right, len(predicted) + len(true)
            found |= {"entity_precision": (right, len(predicted)), "entity_recall": (right, len(true))}
        found["word_accuracy"] = sum(row[2] == row[3] for row in rows), len(rows)
        return _ratios(found, self.device)


def _ratios(found: Mapping[str, tuple[float, int]], device: torch.device) -> dict[str, Tensor]:
    """Return part / whole by name; 0 of nothing."""
    return {name: torch.tensor(part / whole if whole else 0.0, device=device) for name, (part, whole) in found.items()}


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


ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class Words:
    """The tokenizer of ROUGE: that of ``rouge_score`` with stemming, which keeps a-z and 0-9 alone.

    A text with more letters of other scripts has the words that blanks and punctuation separate; characters count in
    scripts without blanks (Chinese, Japanese, Thai, Lao, Khmer, Burmese).
    """

    characters = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"

    def __init__(self) -> None:
        from rouge_score.tokenizers import DefaultTokenizer

        self.latin = DefaultTokenizer(use_stemmer=True)

    def tokenize(self, text: str) -> list[str]:
        """Return the words."""
        text = text.lower()
        letters = [letter.isascii() for letter in text if letter.isalpha()]
        if 2 * sum(letters) >= len(letters):
            return list(self.latin.tokenize(text))
        plain = "".join(c if unicodedata.category(c)[0] in "LMN" else " " for c in text)
        return re.findall(rf"[{self.characters}]|[^\s{self.characters}]+", plain)


class Rouge(RowScores):
    """ROUGE-1, 2, L and Lsum of ``rouge_score`` on :class:`Words`: F, mean over the texts, 0 to 1.

    Lsum compares sentences, which are separated by line ends in predictions and references, as in CNN/DailyMail. No
    other sentence splitter is used, so that nothing is downloaded. On one line Lsum equals L.
    """

    names = ROUGE
    texts: list[Tensor]

    def update(self, preds: Sequence[str], target: Sequence[str]) -> None:
        """Add one batch."""
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(list(ROUGE), tokenizer=Words())
        by_text = [scorer.score(true, text) for text, true in zip(preds, target, strict=True)]
        rows = [[scores[name].fmeasure for name in ROUGE] for scores in by_text]
        self.keep(torch.tensor(rows, device=self.device).view(-1, len(ROUGE)))


class Perplexity(KeptRows):
    """Exponential of the mean negative log-likelihood of all tokens of all batches and ranks; infinite without any."""

    higher_is_better = False
    sums: list[Tensor]

    def update(self, losses: Tensor, counted: Tensor) -> None:
        """Add one batch: losses [b, tokens] in nats, and bool [b, tokens], which of them count."""
        self.keep(torch.stack([torch.where(counted, losses.float(), 0.0).sum(1), counted.sum(1)], dim=1))

    def compute(self) -> Tensor:
        """Return the perplexity of all batches of all ranks."""
        loss, count = self.kept()[0].double().sum(0) if len(self.sums) else torch.zeros(2)
        return (loss / count).exp().float().to(self.device) if count else torch.tensor(torch.inf, device=self.device)


class Answers(KeptRows):
    """Exact match and F1 of answer spans as in SQuAD's evaluation, in [0, 1]; takes logits and windows of contexts.

    Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250 (v1.1), Rajpurkar et al. 2018,
    https://arxiv.org/abs/1806.03822 (v2.0: some questions have no answer).

    If questions may have no answer, there are also both metrics for questions with and without an answer.

    Attributes:
        rows: the rows of the split, with texts and true answers; to be set before :meth:`compute`.
    """

    examples: list[Tensor]
    places: list[Tensor]
    scores: list[Tensor]

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.rows: Any = None

    def update(self, preds: Tensor, target: Tensor, example: Tensor, begin: Tensor, end: Tensor) -> None:
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
        groups = ("", "_answerable", "_unanswerable") if may_be_none else ("",)
        scored: dict[str, list[float]] = {
            f"{name}{some}": [] for name in ("exact_match", "answer_f1") for some in groups
        }
        for number, pieces in windows.items():
            row = self.rows[number]
            # in SQuAD 2 an answer without words, e.g. an article alone, is none
            truths = [text for text in row[self.task.label]["text"] if not (may_be_none and answer_scores(text, [])[0])]
            exact, f1 = answer_scores(SpanQA().answer(self.task, row, pieces)["answer"], truths)
            for some in ("", "_answerable" if truths else "_unanswerable")[: len(groups)]:
                scored[f"exact_match{some}"].append(exact)
                scored[f"answer_f1{some}"].append(f1)
        return _ratios({name: (sum(values), len(values)) for name, values in scored.items()}, self.device)


def answer_scores(answer: str, truths: Sequence[str]) -> tuple[float, float]:
    """Return exact match and F1 of an answer, in [0, 1], the best over ``truths``; without any no answer is right."""
    found = squad([{"prediction_text": answer, "id": ""}], [{"answers": {"text": list(truths) or [""]}, "id": ""}])
    return float(found["exact_match"]) / 100, float(found["f1"]) / 100


def bind(metrics: MetricCollection, rows: Any) -> None:
    """Give the rows of a split to the metrics that need them."""
    for metric in metrics.values():
        if isinstance(metric, Answers):
            metric.rows = rows


METRICS: dict[str, Callable[[Task], KeptRows]] = {
    **dict.fromkeys(CONFUSION_SCORES, lambda task: Confusion(task.num_labels, task.metrics)),
    **dict.fromkeys(CORRELATIONS, lambda task: Correlation({*CORRELATIONS} & {*task.metrics})),
    **dict.fromkeys(("entity_f1", "word_accuracy"), lambda task: Entities(task.labels)),
    **dict.fromkeys(
        ("ndcg_at_10", "recall_at_10", "mrr_at_10"),
        lambda task: Ranking() if "mrr_at_10" in task.metrics else Retrieval(),
    ),
    **dict.fromkeys(("exact_match", "answer_f1"), Answers),
    "micro_f1": lambda task: LabelScores(),
    **dict.fromkeys(("rougeL", "rougeLsum"), lambda task: Rouge()),
    "perplexity": lambda task: Perplexity(),
    "teacher_cosine": lambda task: TeacherCosine(),
}


def higher_is_better(task: Task) -> bool:
    """Return whether larger values of the first metric of ``task`` are better."""
    return bool(METRICS[task.metrics[0]](task).higher_is_better)


def build_metrics(task: Task, alone: bool = False) -> MetricCollection:
    """Return the metrics of ``task``, which its type updates in ``observe``; keys are the names of their values.

    If it is ``alone``, this process sees all rows, whatever others do.

    Raises:
        UserError: the task's record names a metric that does not exist.
    """
    for name in task.metrics:
        if name not in METRICS:
            raise UserError(f"task '{task.name}': unknown metric '{name}'; {nearest(name, METRICS)}")
    # One metric may compute several of the names. No compute groups: torchmetrics forms them by comparing states,
    # which may be equal by accident.
    kinds = {METRICS[name]: name for name in reversed(task.metrics)}
    metrics = {name: kind(task) for kind, name in kinds.items()}
    for metric in metrics.values() if alone else ():
        metric.distributed_available_fn = lambda: False
    return MetricCollection(dict(metrics), compute_groups=False)
