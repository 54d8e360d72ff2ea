"""The tasks: what is read, what is predicted, how it is scored. Adding a task is one record.

Data and methods never import each other; a :class:`Task` is what they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_compress.errors import UserError, nearest


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: the name in configs, e.g. ``sst2``.
        kind: what the head predicts; one class of ``labels``, or one real number.
        text: the one or two text columns.
        labels: class names in label-id order; empty for regression.
        metrics: names of :func:`lit_compress.metrics.build_metrics`; the first decides which epoch is best.
        hub: (repository, configuration) on the Hugging Face hub; None if the package makes the data itself.
        validation: hub split names used for validation; the first decides.
        length: median number of tokens of a validation example, the length at which FLOPs are reported.
        max_length: longest input in tokens; longer ones are truncated.
    """

    name: str
    kind: Literal["classification", "regression"]
    text: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    hub: tuple[str, str] | None
    validation: tuple[str, ...] = ("validation",)
    length: int = 32
    max_length: int = 128

    @property
    def num_labels(self) -> int:
        """Size of the output layer: the number of classes, or 1 for regression."""
        return len(self.labels) if self.kind == "classification" else 1


def _glue(
    name: str,
    text: tuple[str, ...],
    labels: tuple[str, ...],
    metrics: tuple[str, ...],
    length: int,
    validation: tuple[str, ...] = ("validation",),
) -> Task:
    kind: Literal["classification", "regression"] = "classification" if labels else "regression"
    return Task(name, kind, text, labels, metrics, ("nyu-mll/glue", name), validation, length)


_ENTAILMENT = ("entailment", "not_entailment")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _glue("cola", ("sentence",), ("unacceptable", "acceptable"), ("matthews",), 10),
        _glue("sst2", ("sentence",), ("negative", "positive"), ("accuracy",), 25),
        _glue("mrpc", ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("accuracy", "f1"), 53),
        _glue("stsb", ("sentence1", "sentence2"), (), ("pearson_spearman", "pearson", "spearman"), 28),
        _glue("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1"), 27),
        _glue(
            "mnli",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            ("accuracy",),
            36,
            ("validation_matched", "validation_mismatched"),
        ),
        _glue("qnli", ("question", "sentence"), _ENTAILMENT, ("accuracy",), 48),
        _glue("rte", ("sentence1", "sentence2"), _ENTAILMENT, ("accuracy",), 53),
        # needs no download: which area of the standard library a docstring comes from (embedded.py)
        Task(
            "docstrings",
            "classification",
            ("text",),
            ("concurrency", "files", "gui", "language", "network", "numbers", "testing", "text"),
            ("accuracy",),
            None,
            length=30,
            max_length=64,
        ),
    )
}


def get_task(name: str) -> Task:
    """Return the task called ``name``.

    Raises:
        UserError: there is no such task; names the nearest one.
    """
    if name not in TASKS:
        raise UserError(f"data.task: unknown task '{name}'; {nearest(name, TASKS)}")
    return TASKS[name]
