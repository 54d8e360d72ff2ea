"""Classification: one of the task's labels for every row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_compress.tasks.base import TaskType
from lit_compress.tasks.records import Task
from lit_compress.tasks.text_lists import list_in
from lit_compress.utils.errors import UserError, nearest


def class_number(task: Task, where: str, label: Any) -> int:
    """Return the class number of a label, which is a name or, where the task has ``numbered``, a number.

    Raises:
        UserError: the label is no class of ``task``; the message begins with ``where``.
    """
    name = label_name(where, label)
    whole = whole_number(name)
    for known in (name, whole):
        if known in task.labels:
            return task.labels.index(known)
    have_numbers = any(known.removeprefix("-").isdigit() for known in task.labels)
    if len(same := [i for i, known in enumerate(task.labels) if known.casefold() == name.casefold()]) == 1:
        return same[0]
    numbers, is_number = task.numbered and not have_numbers, whole.isascii() and whole.isdigit()
    if numbers and is_number and len(name) < 9 and int(whole) < len(task.labels):
        return int(whole)
    hint = f", or 0..{len(task.labels) - 1}" if numbers else ""
    if is_number and not (numbers or have_numbers):
        hint = "; that numbers are classes in this order is said by --data.custom.numbered true"
    raise UserError(f"{where}: label {label!r:.60} is none of task '{task.name}'; {nearest(label, task.labels)}{hint}")


def label_name(where: str, label: Any) -> str:
    """Return a label as text: a text without blanks around it, a whole number (also as float), True or False.

    Raises:
        UserError: the label is null, empty or of another type; the message begins with ``where``.
    """
    if label is None or label != label or (isinstance(label, str) and not label.strip()):
        raise UserError(f"{where}: the label is null; fill it in or leave the row out")
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    if isinstance(label, str | int):
        return str(label).strip()
    if isinstance(label, float):
        raise UserError(fraction_line(where, label))
    raise UserError(f"{where}: label {label!r:.60} is neither text nor a whole number")


def fraction_line(where: str, label: object) -> str:
    """Return the message on a number with a fraction in a column of classes."""
    return (
        f"{where}: label {label!r:.60} is a number with a fraction, neither text nor a whole number; kind regression "
        "predicts numbers, data.custom.labels gives numbers that are names of classes"
    )


def whole_number(name: str) -> str:
    """Return ``3`` for ``3.0``, as pandas writes whole numbers if a row has none; any other name as it is."""
    number, point, zeros = name.partition(".")
    is_whole = bool(point) and number.removeprefix("-").isdecimal() and not zeros.strip("0")
    return number if is_whole else name


class Classification(TaskType):
    """Classification: logits [b, classes], labels [b]."""

    name = "classification"
    auto_class = "AutoModelForSequenceClassification"
    suffix = "ForSequenceClassification"
    pipeline = "text-classification"
    scores: tuple[str, ...] = ("accuracy", "macro_f1")
    problem: str | None = "single_label_classification"
    texts = (1, 2)
    classes = one_label = secret = True

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> int:
        """Return the class number."""
        return class_number(task, where, row[task.label])

    def classes_in(self, where: str, label: Any) -> list[Any]:
        """Return the label; the text of a list is none, as ``['joy']``."""
        if isinstance(label, str) and list_in(where, label) is not None:
            raise UserError(f"{where} is {label!r:.60}, a list; kind multi_label reads lists")
        return [label]

    def constants(self, task: Task) -> list[Tensor]:
        """Return, for every class, logits that choose it."""
        return list(torch.eye(task.num_labels).split(1))

    def answer(self, task: Task, row: dict[str, Any], pieces: list[Tensor]) -> dict[str, Any]:
        """Return ``label`` and its ``probability``."""
        probability, label = pieces[0].softmax(-1).max(-1)
        return {"label": task.labels[int(label)], "probability": float(probability)}
