"""One of the task's labels for every row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.errors import UserError, nearest
from lit_compress.kinds.base import TaskKind

if TYPE_CHECKING:
    import pyarrow as pa

    from lit_compress.tasks import Task

UNLABELLED = -1  # how the hub marks the rows of a test split whose labels are secret


def is_secret(label: Any) -> bool:
    """Say whether a label is the hub's mark for a secret one, as a number or as text."""
    return label in (UNLABELLED, str(UNLABELLED), str(float(UNLABELLED)))


def class_number(task: Task, where: str, label: Any, what: str = "label") -> int:
    """Return the class of a label: its name, or its number as an integer or as digits, unless numbers are names.

    Raises:
        UserError: it is no class of ``task``; ``where`` begins the message.
    """
    name = label_name(where, label, what)
    if name in task.labels:
        return task.labels.index(name)
    numbers = not any(known.removeprefix("-").isdigit() for known in task.labels)
    if numbers and name.isascii() and name.isdigit() and len(name) < 9 and int(name) < len(task.labels):
        return int(name)
    raise UserError(
        f"{where}: {what} {label!r:.60} is none of task '{task.name}'; {nearest(label, task.labels)}"
        + (f", or 0..{len(task.labels) - 1}" if numbers else "")
    )


def label_name(where: str, label: Any, what: str = "label") -> str:
    """Return how a label is written: text as it is, a number (also a whole one stored as float), True or False.

    Raises:
        UserError: it is null, empty or nothing of these; ``where`` begins the message.
    """
    if label is None or label != label or label == "":
        raise UserError(f"{where}: the {what} is null; fill it in or leave the row out")
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    if isinstance(label, str | int):
        return str(label)
    raise UserError(f"{where}: {what} {label!r:.60} is neither text nor a whole number")


class Classification(TaskKind):
    """Logits [b, classes], labels [b]."""

    name = "classification"
    auto_class = "AutoModelForSequenceClassification"
    suffix = "ForSequenceClassification"
    pipeline = "text-classification"
    texts = (1, 2)
    classes = True

    def label_type(self) -> pa.DataType:
        """Return the type of class numbers."""
        import pyarrow as pa

        return pa.int64()

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> int:
        """Return the class number."""
        return class_number(task, where, row[task.label])

    def is_unlabelled(self, label: Any) -> bool:
        """Say whether the label is -1."""
        return is_secret(label)

    def metrics(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return accuracy, and F1 averaged over the classes."""
        return "accuracy", "macro_f1"

    def constants(self, task: Task) -> list[Tensor]:
        """Return logits of every class."""
        return list(torch.eye(task.num_labels).split(1))

    def answer(self, task: Task, row: dict[str, Any], pieces: list[Tensor]) -> dict[str, Any]:
        """Return ``label`` and its ``probability``."""
        probability, label = pieces[0].softmax(-1).max(-1)
        return {"label": task.labels[int(label)], "probability": float(probability)}
