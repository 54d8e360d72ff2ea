"""Regression: one real number for every row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lit_compress.numerics.losses import LossKind
from lit_compress.tasks.base import TaskType
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError


class Regression(TaskType):
    """Regression: logits [b, 1], labels [b]."""

    name = "regression"
    auto_class = "AutoModelForSequenceClassification"
    suffix = "ForSequenceClassification"
    pipeline = "text-classification"
    stored = "float32"
    scores: tuple[str, ...] = ("pearson_spearman", "pearson", "spearman")
    loss: LossKind = "regression"
    one_label = secret = True
    texts = (1, 2)
    means = "One real number, the predicted score."

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> float:
        """Return the number."""
        label = row[task.label]
        if label is None:
            raise UserError(f"{where}: the label is null; fill it in or leave the row out")
        try:
            number = math.nan if isinstance(label, bool) or "_" in str(label) else float(label)  # 2_3 is 23
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise UserError(f"{where}: label {label!r:.60} is not a finite number; task '{task.name}' is a regression")
        return number

    def constants(self, task: Task) -> list[Tensor]:
        """Return one number for all rows, whose correlation is 0; [] for lists, which it leaves in no order."""
        return [] if self.lists else [torch.ones(1, 1)]

    def answer(self, task: Task, row: dict[str, Any], pieces: list[Tensor]) -> dict[str, Any]:
        """Return ``score``."""
        return {"score": float(pieces[0])}
