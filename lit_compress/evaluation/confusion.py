"""Scores that depend only on how often each class was taken for which: tables [..., true class, predicted class]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def accuracy(tables: Tensor) -> Tensor:
    """Return the fraction of rows whose class is right, [...]."""
    return _ratio(tables.diagonal(dim1=-2, dim2=-1).sum(-1), tables.sum((-2, -1)))


def _f1(tables: Tensor) -> Tensor:
    """Return F1 of every class, [..., classes]; NaN for classes that are neither true nor predicted anywhere."""
    right = tables.diagonal(dim1=-2, dim2=-1)
    seen = tables.sum(-1) + tables.sum(-2)
    return torch.where(seen > 0, 2 * right / seen, torch.nan)


def f1(tables: Tensor) -> Tensor:
    """Return F1 of class 1 of two, [...]."""
    return torch.nan_to_num(_f1(tables)[..., 1])


def macro_f1(tables: Tensor) -> Tensor:
    """Return the mean F1 of the classes that are seen, [...]."""
    return torch.nan_to_num(_f1(tables).nanmean(-1))


def matthews(tables: Tensor) -> Tensor:
    """Return Matthews correlation as scikit-learn defines it, [...]; 0 if truth or predictions are constant."""
    right, rows = tables.diagonal(dim1=-2, dim2=-1).sum(-1), tables.sum((-2, -1))
    true, predicted = tables.sum(-1), tables.sum(-2)
    product = right * rows - (true * predicted).sum(-1)
    spread = (rows**2 - (true**2).sum(-1)) * (rows**2 - (predicted**2).sum(-1))
    return _ratio(product, spread.sqrt())


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole, 0.0)


CONFUSION_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "accuracy": accuracy, "f1": f1, "macro_f1": macro_f1, "matthews": matthews,
}  # fmt: skip
