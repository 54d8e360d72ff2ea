"""Which columns of a data set hold texts and labels, the names of its classes, and its type of task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lit_compress.tasks import KINDS, is_list, likely_kind
from lit_compress.utils.errors import UserError, nearest

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

# how columns of texts are usually called, pairs first
TEXTS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"), ("text1", "text2"),
    ("question", "sentence"), ("text",), ("sentence",), ("review",), ("content",), ("document",),
)  # fmt: skip
LABELS = ("label", "labels", "target", "class")


@dataclass(frozen=True)
class Columns:
    """The known options of the task and its columns; None for unknown ones.

    Attributes:
        task: a task of the package, which has its own columns.
        kind: type of the task.
        text: name of the column of the texts, or names of several.
        label: name of the column of the labels, or names of columns of 0 and 1, one for each label.
        labels: names of the classes, in order of their numbers.
    """

    task: str | None = None
    kind: str | None = None
    text: str | Sequence[str] | None = None
    label: str | Sequence[str] | None = None
    labels: Sequence[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("kind", "text", "label", "labels") if getattr(self, name) is not None]
        if self.task not in (None, "custom") and given:
            raise UserError(f"{given[0]}: task '{self.task}' has its own columns and labels; leave one out")
        if self.kind is not None and self.kind not in KINDS:
            raise UserError(f"kind: unknown '{self.kind}'; {nearest(self.kind, KINDS)}")

    def options(self) -> dict[str, Any]:
        """Return the options of the commands that say the same."""
        text = [self.text] if isinstance(self.text, str) else self.text and list(self.text)
        label = self.label if self.label is None or isinstance(self.label, str) else list(self.label)
        labels = self.labels and [str(label) for label in self.labels]
        values = {"kind": self.kind, "label": label, "text": text, "labels": labels}
        return {f"data.custom.{name}": value for name, value in values.items() if value}


def choose_columns(
    given: Columns, splits: Mapping[str, Dataset], config: PreTrainedConfig | None, trained: bool
) -> Columns:
    """Return ``given`` with everything that follows from the data sets and the model.

    Args:
        given: the user's options.
        splits: data sets by split.
        config: of the model; None if it cannot be read.
        trained: its head is trained on the classes of the data.

    Raises:
        UserError: a column is missing, or several could be meant.
    """
    rows = splits.get("train", next(iter(splits.values())))
    names = rows.column_names
    for option, value in (("text", given.text), ("label", given.label)):
        for name in [value] if isinstance(value, str) else value or ():
            if name not in names:
                raise UserError(f"{option}: the data has no column '{name}'; {nearest(name, names)}")
    label = given.label or next((name for name in LABELS if name in names), None)
    if label is None or isinstance(label, str):
        kind = given.kind or likely_kind(config, rows, label)
    else:  # a column for each label
        kind = given.kind or next(name for name, meant in KINDS.items() if meant.own_columns)
    if not KINDS[kind].recognised:
        return replace(given, kind=kind)
    if KINDS[kind].own_columns and not isinstance(label, str):
        head = (_head_names(config) if trained else None) or []
        order = head if set(head) == set(label or head) and set(head) <= set(names) else None
        text = given.text or _texts(rows, label or order)
        return replace(given, kind=kind, text=text, label=label or order, labels=given.labels or order)
    label = label or next((name for name in names if hasattr(rows.features[name], "names")), None)
    chosen = replace(given, kind=kind, text=given.text or _texts(rows, label), label=label)
    if not KINDS[kind].classes or given.labels or not isinstance(label, str):
        return chosen
    return replace(chosen, labels=_labels(splits, kind, label, config, trained))


def _texts(rows: Dataset, label: str | Sequence[str] | None) -> Sequence[str]:
    """Return the columns of the texts: usual names, or the only column of texts."""
    texts = [name for name, feature in rows.features.items() if getattr(feature, "dtype", "") in _STRINGS]
    labels = [label] if label is None or isinstance(label, str) else label
    texts = [name for name in texts if name not in (*labels, "id", "idx")]
    for names in TEXTS:
        if set(names) <= set(texts):
            return names
    if len(texts) == 1:
        return texts
    if not texts:
        tokens = (
            ", only the tokens of texts; give the data before it was tokenised" if "input_ids" in rows.features else ""
        )
        raise UserError(f"text: no column holds texts{tokens}; columns: {', '.join(rows.column_names)}")
    raise UserError(
        f"text: which column holds the texts is not clear; name it, e.g. text='{texts[0]}'; "
        f"columns: {', '.join(rows.column_names)}"
    )


_STRINGS = ("string", "large_string")


def _labels(
    splits: Mapping[str, Dataset], kind: str, label: str, config: PreTrainedConfig | None, trained: bool
) -> Sequence[str] | None:
    """Return the names of the classes in order: the data's, or those of the model's head; None: of the training rows.

    Numbers are classes in the model's order.
    """
    rows = splits.get("train", next(iter(splits.values())))
    feature = rows.features[label]
    if listed := is_list(feature):
        feature = getattr(feature, "feature", None) or feature[0]
    if names := getattr(feature, "names", None):
        return names
    head = _head_names(config) if trained else None
    if getattr(feature, "dtype", "") in _STRINGS:
        columns = (some for some in splits.values() if label in some.features)
        values = [row for some in columns for row in (some[label] if listed else some.unique(label))]
        sign = KINDS[kind].sign_in(values)
        classes = {
            str(value).strip() for row in values for value in KINDS[kind].classes_in(f"data: '{label}'", row, sign)
        }
        if head and classes <= set(head):
            return head
        return None if "train" in splits else sorted(classes)
    return head


def _head_names(config: PreTrainedConfig | None) -> list[str] | None:
    """Return what a model calls its classes; their numbers where they have no names."""
    if config is None:
        return None
    names = [str(name) for _, name in sorted((config.id2label or {}).items())]
    return [str(i) for i in range(len(names))] if names == [f"LABEL_{i}" for i in range(len(names))] else names
