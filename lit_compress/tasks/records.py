"""The records of the tasks: columns, labels, metrics, lengths. A new task is one record.

Data and methods never import each other; both use a :class:`Task`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lit_compress.tasks.sentences import Pooling
from lit_compress.utils.errors import UserError, nearest

KindName = Literal[
    "classification", "regression", "tagging", "span_qa", "summarization", "language_modelling", "embedding",
    "reranking", "multi_label",
]  # fmt: skip


@dataclass(frozen=True)
class Spans:
    """How answer spans are found in contexts."""

    stride: int = 128  # tokens that neighbouring windows of a context share
    n_best: int = 20  # best spans that are kept, per window and per question
    max_answer: int = 30  # tokens of the longest answer
    # how far the score of "no answer" must exceed the best span's to be given; None: every question has an answer
    null_threshold: float | None = None


@dataclass(frozen=True)
class Writing:
    """How texts are generated if the model's ``generation_config`` says nothing else."""

    target_length: int = 128  # tokens of the longest text; longer reference texts are truncated in training
    num_beams: int = 8  # of beam search
    length_penalty: float = 1.0  # a text's log-likelihood is divided by its length to this power
    asked: tuple[str, ...] = field(default=(), repr=False)  # names of those above that replace the model's own


@dataclass(frozen=True)
class Custom:
    """The user's own task, ``custom``.

    Args:
        kind: type of the task: classification, multi_label (any number of labels per row), regression, tagging (a
            label per word), span_qa (an answer that is a part of a context), summarization (a text for a text),
            language_modelling (plain text), embedding (a vector for a text) or reranking (how relevant a document is
            to a query).
        text: name of the text column, or names of several in brackets; without it, by kind, text, or tokens,
            question and context, document, query and document.
        label: name of the label column; without it, by kind, label, or labels, tags, answers, summary, or none for
            embedding. For multi_label also names of several in brackets: one 0 or 1 for each label, named like it.
        labels: names of the classes in order of their numbers; without it the training rows' labels.
        numbered: whether 0, 1, ... in a file are the classes in that order, if these have other names; without it,
            where labels without digits or a table of the library datasets gives the order.
        configuration: which part of a data set of the hub is read, if its card names several, e.g. sst2 of
            nyu-mll/glue.
        split_words: true: the tokenizer reads words as a list, with is_split_into_words, as run_ner.py of transformers
            trains; false: joined by spaces. Both are the same for most tokenizers (tagging).
    """

    kind: KindName = "classification"
    text: list[str] | str | None = None
    label: list[str] | str | None = None
    labels: list[str] | None = None
    numbered: bool | None = None
    configuration: str | None = None
    split_words: bool = False


@dataclass(frozen=True)
class Task:
    """One task. Fingerprints of data in checkpoints are made from its ``repr``."""

    name: str  # in configs, e.g. ``sst2``
    kind: KindName  # type of the task, a key of :data:`lit_compress.tasks.KINDS`
    text: tuple[str, ...]  # names of the text columns: one or two; one of lists of words; or question and context
    labels: tuple[str, ...]  # names of the classes in order of their numbers; () without classes
    metrics: tuple[str, ...]  # names for ``build_metrics``; the first decides which epoch is best
    # (repository, configuration) on the hub, the configuration None if there is only one; None: the data is the user's
    hub: tuple[str, str | None] | None
    validation: tuple[str, ...] = ("validation",)  # dev splits on the hub; the first decides which epoch is best
    length: int = 32  # median tokens of a validation example, at which FLOPs and latency are measured
    max_length: int = 128  # tokens of the longest input; longer ones are truncated
    label: str = "label"  # name of the column of the labels, or of the reference texts
    spans: Spans = Spans()  # span_qa
    writing: Writing = Writing()  # summarization
    pooling: Pooling = field(default=Pooling(), repr=False)  # embedding
    numbered: bool = field(default=True, repr=False)  # labels in files may be numbers of classes
    configuration: str | None = field(default=None, repr=False)  # of the user's data set on the hub
    # columns that have a 0 or 1 for one label each, in place of ``label`` (multi_label)
    label_columns: tuple[str, ...] = field(default=(), repr=False)
    split_words: bool = field(default=False, repr=False)  # words are a list for the tokenizer, else joined (tagging)

    @property
    def num_labels(self) -> int:
        """Size of the output layer: the number of classes, or 1 where there are none."""
        return len(self.labels) or 1

    @property
    def wants_vectors(self) -> bool:
        """Whether the labels are the vectors that a teacher gives single texts."""
        return self.kind == "embedding" and len(self.text) == 1


def _glue(
    name: str, text: str, labels: str, metrics: str, length: int, validation: tuple[str, ...] = ("validation",)
) -> Task:
    kind: KindName = "classification" if labels else "regression"
    hub = ("nyu-mll/glue", name)
    return Task(name, kind, tuple(text.split()), tuple(labels.split()), tuple(metrics.split()), hub, validation, length)


_EMOTIONS = (
    "admiration amusement anger annoyance approval caring confusion curiosity desire disappointment disapproval "
    "disgust embarrassment excitement fear gratitude grief joy love nervousness optimism pride realization relief "
    "remorse sadness surprise neutral"
)
_ENTITIES = "O B-PER I-PER B-ORG I-ORG B-LOC I-LOC B-MISC I-MISC"

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _glue("cola", "sentence", "unacceptable acceptable", "matthews", 10),
        _glue("sst2", "sentence", "negative positive", "accuracy", 25),
        _glue("mrpc", "sentence1 sentence2", "not_equivalent equivalent", "accuracy f1", 53),
        _glue("stsb", "sentence1 sentence2", "", "pearson_spearman pearson spearman", 28),
        _glue("qqp", "question1 question2", "not_duplicate duplicate", "accuracy f1", 27),
        _glue("mnli", "premise hypothesis", "entailment neutral contradiction", "accuracy", 36,
              ("validation_matched", "validation_mismatched")),
        _glue("qnli", "question sentence", "entailment not_entailment", "accuracy", 48),
        _glue("rte", "sentence1 sentence2", "entailment not_entailment", "accuracy", 53),
        _glue("wnli", "sentence1 sentence2", "not_entailment entailment", "accuracy", 33),
        # as parquet; eriktks/conll2003 needs a script, which datasets 4 does not run
        Task("conll2003", "tagging", ("tokens",), tuple(_ENTITIES.split()), ("entity_f1",), ("lhoestq/conll2003", None),
             length=16, label="ner_tags"),
        # length, beams and 128 tokens are from LoSparse (section 4.3) and its program
        Task("xsum", "summarization", ("document",), (), ("rougeL",), ("EdinburghNLP/xsum", None), length=256,
             max_length=256, label="summary"),
        Task("cnn_dailymail", "summarization", ("article",), (), ("rougeLsum",), ("abisee/cnn_dailymail", "3.0.0"),
             length=256, max_length=256, label="highlights"),
        Task("wikitext2", "language_modelling", ("text",), (), ("perplexity",), ("Salesforce/wikitext",
             "wikitext-2-v1"), length=512, max_length=512, label="text"),
        # any plain text, --data.path to train.txt and validation.txt
        Task("plain_text", "language_modelling", ("text",), (), ("perplexity",), None, length=512, max_length=512,
             label="text"),
        # two texts whose vectors' cosine is to have the order of the scores; other columns through task custom
        Task("stsb_embedding", "embedding", ("sentence1", "sentence2"), (), ("spearman", "pearson"),
             ("nyu-mll/glue", "stsb"), length=14),
        # sentences of Wikipedia for a question, of which some answer it
        Task("wiki_qa", "reranking", ("question", "answer"), (), ("ndcg_at_10", "mrr_at_10"),
             ("microsoft/wiki_qa", None), length=40),
        # comments of Reddit, each with one or more of 28 emotions
        Task("go_emotions", "multi_label", ("text",), tuple(_EMOTIONS.split()), ("micro_f1",),
             ("google-research-datasets/go_emotions", "simplified"), length=18, label="labels"),
        Task("squad", "span_qa", ("question", "context"), (), ("answer_f1", "exact_match"), ("rajpurkar/squad", None),
             length=165, max_length=384, label="answers"),
        Task("squad_v2", "span_qa", ("question", "context"), (), ("answer_f1", "exact_match"),
             ("rajpurkar/squad_v2", None), length=165, max_length=384, label="answers",
             spans=Spans(null_threshold=0.0)),
    )
}  # fmt: skip


def get_task(task: str | Task) -> Task:
    """Return the task of a name; a task itself as it is.

    Raises:
        UserError: there is no such task; the message names the nearest one.
    """
    if isinstance(task, str) and task not in TASKS:
        raise UserError(f"data.task: unknown task '{task}'; {nearest(task, TASKS)}")
    return TASKS[task] if isinstance(task, str) else task
