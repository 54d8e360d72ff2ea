"""Multi-label classification: for every row any number of the task's labels, each decided on its own.

The model gives one logit z per label, whose probability is sigmoid(z). A sigmoid is a softmax over the two logits 0 and
z, so each label is handled as a classification of two classes, off and on: losses, distillation, drawn labels and
divergences are as for classification over [b, labels, 2]. The cross-entropy is the mean of binary cross-entropies that
transformers uses for ``problem_type: multi_label_classification``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_compress.tasks.base import Batch, Columns, Metrics, Tokenizer
from lit_compress.tasks.classification import Classification, class_number, whole_number
from lit_compress.tasks.records import Task
from lit_compress.tasks.text_lists import list_in
from lit_compress.utils.errors import UserError, nearest


class MultiLabel(Classification):
    """Multi-label classification: logits [b, labels, 2], labels [b, labels], 1 for the labels that a row has."""

    name = "multi_label"
    problem = "multi_label_classification"
    stored: Any = ["int64"]
    scores = ("micro_f1",)
    one_label = secret = False
    own_columns = True
    label = "labels"
    means = "One logit per label; its probability is sigmoid(logit):\n\n{classes}"

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> Any:
        """Return the class numbers of a row, in order."""
        if isinstance(row[task.label], dict):
            return [number for number, name in enumerate(task.labels) if _is_on(where, name, row[task.label])]
        labels = _listed(where, row[task.label], known=task.labels)
        if (flags := _flags(where, labels, len(task.labels))) is not None:
            return [number for number, on in enumerate(flags) if on]
        return sorted({class_number(task, where, label) for label in labels})

    def classes_in(self, where: str, label: Any) -> list[Any]:
        """Return the labels of a row, whose names become classes; 0 and 1 for every label have no names."""
        if isinstance(label, dict):
            return list(label)
        labels = _listed(where, label)
        if len(labels) > 1 and _are_flags(labels):
            raise UserError(f"{where} is {labels!r:.60}, 0 or 1 for every label; name the labels by data.custom.labels")
        return labels

    def head(self, task: Task) -> dict[str, Any]:
        """Return the settings of the configuration: labels, and that each has a sigmoid of its own."""
        return super().head(task) | {"problem_type": self.problem}

    def encode(self, batch: Columns, rows: list[int], tokenizer: Tokenizer, task: Task, max_length: int) -> Columns:
        """Tokenise texts; class numbers become a 0 or 1 for every label."""
        columns = super().encode(batch, rows, tokenizer, task, max_length)
        if "labels" in columns:
            columns["labels"] = [[int(i in on) for i in range(len(task.labels))] for on in columns["labels"]]
        return columns

    def logits(self, output: Any, batch: Batch) -> Tensor:
        """Return the logits [b, labels, 2] of off, which are 0, and on."""
        on = output.logits
        return torch.stack([torch.zeros_like(on), on], -1)

    def constants(self, task: Task) -> list[Tensor]:
        """Return logits that give every row all labels, or a single one of them."""
        on = torch.cat([torch.ones(1, task.num_labels), 2 * torch.eye(task.num_labels) - 1])
        return list(torch.stack([torch.zeros_like(on), on], -1).split(1))

    def observe(self, metrics: Metrics, outputs: Tensor, batch: Batch) -> None:
        """Update the metrics with the decisions [b, labels] and the labels."""
        metrics.update(outputs.argmax(-1), batch["labels"])

    def answer(self, task: Task, row: dict[str, Any], pieces: list[Tensor]) -> dict[str, Any]:
        """Return ``labels``, those with a probability above 0.5, and the ``probabilities`` of all by name."""
        chances = pieces[0].softmax(-1)[:, 1].tolist()
        decided = pieces[0].argmax(-1).tolist()
        return {
            "labels": [name for name, on in zip(task.labels, decided, strict=True) if on],
            "probabilities": dict(zip(task.labels, chances, strict=True)),
        }


def _is_on(where: str, name: str, flags: dict[str, Any]) -> bool:
    """Return whether a row has the label ``name``, if it has a 0 or 1 for each, also as 1.0, "1", True or "true"."""
    if name not in flags:
        raise UserError(f"{where} has no '{name}'; {nearest(name, flags)}")
    value = flags[name]
    text = whole_number(str(value).strip().lower())
    if text not in ("0", "1", "false", "true"):
        shown = "null" if value is None or value != value else f"{value!r:.60}"
        raise UserError(f"{where}: '{name}' is {shown}; give 0 or 1")
    return text in ("1", "true")


def _listed(where: str, label: Any, known: Sequence[str] = ()) -> list[Any]:
    """Return the labels of a list, or of a text written like one.

    Texts of 0 and 1 are numbers if they cannot be names: one is there twice, or is not ``known``.
    """
    if label is None or label != label:  # the NaN that pandas makes of an empty cell
        raise UserError(f"{where}: the label is null; write [] if the row has no label")
    labels = list_in(where, label, bare=True) if isinstance(label, str) else label
    if not isinstance(labels, list | tuple):
        raise UserError(
            f"{where}: {label!r:.60} is no list; write ['toxic', 'insult'], [] for none, or give a column of 0 and 1 "
            "for each label"
        )
    whole = [whole_number(name.strip()) for name in labels if isinstance(name, str)]
    can_be_names = len({*whole}) == len(whole) and (not known or {*whole} <= {*known})
    is_other = len(whole) < max(2, len(labels)) or not {*whole} <= {"0", "1"}
    return list(labels) if can_be_names or is_other else [int(name) for name in whole]


def _are_flags(labels: list[Any]) -> bool:
    return all(isinstance(value, bool | int | float) and value in (0, 1) for value in labels)


def _flags(where: str, labels: list[Any], count: int) -> list[bool] | None:
    """Return whether a row has each of ``count`` labels, if it is written so: [1, 0, 1]; None if labels are listed."""
    if not labels or not _are_flags(labels):
        return None
    certain = any(isinstance(value, bool | float) for value in labels) or len(set(labels)) < len(labels)
    if not certain and len(labels) < count:
        return None  # class numbers, each once
    if len(labels) != count:
        raise UserError(f"{where}: {len(labels)} values of 0 and 1 for {count} labels; give one per label")
    if not certain:
        raise UserError(
            f"{where}: {labels!r} are two class numbers, or 0 and 1 for two labels; write names, or 0.0 and 1.0"
        )
    return [bool(value) for value in labels]
