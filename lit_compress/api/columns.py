"""Which columns of a data set hold texts and labels, the names of its classes, and its type of task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def choose_columns(
    given: Mapping[str, Any], splits: Mapping[str, Dataset], config: PreTrainedConfig | None, trained: bool
) -> dict[str, Any]:
    """Return ``kind``, ``text``, ``label`` and ``labels`` of the task: as given, else by the data and the model.

    Args:
        given: by the user; ``label`` may be the names of columns of 0 and 1, one for each label.
        splits: data sets by split.
        config: of the model; None if it cannot be read.
        trained: its head is trained on the classes of the data.

    Raises:
        UserError: a column is missing, or several could be meant.
    """
    rows = splits.get("train", next(iter(splits.values())))
    names = rows.column_names
    for option in ("text", "label"):
        value = given.get(option) or ()
        for name in [value] if isinstance(value, str) else value:
            if name not in names:
                raise UserError(f"{option}: the data has no column '{name}'; {nearest(name, names)}")
    label = given.get("label") or next((name for name in LABELS if name in names), None)
    if (kind := given.get("kind")) is None and (label is None or isinstance(label, str)):
        kind = likely_kind(config, rows, label)
    elif kind is None:  # a column for each label
        kind = next(name for name, meant in KINDS.items() if meant.own_columns)
    elif kind not in KINDS:
        raise UserError(f"kind: unknown '{kind}'; {nearest(kind, KINDS)}")
    if not (meant := KINDS[kind]).recognised:
        return {**given, "kind": kind}
    labels: Sequence[str] | None = None
    if meant.own_columns and not isinstance(label, str):
        head = (_head_names(config) if trained else None) or []
        labels = head if set(head) == set(label or head) and set(head) <= set(names) else None
        label = label or labels
    else:
        label = label or next((name for name in names if hasattr(rows.features[name], "names")), None)
        if meant.classes and isinstance(label, str):
            labels = _labels(splits, kind, label, config, trained)
    return {"kind": kind, "text": given.get("text") or _texts(rows, label), "label": label, "labels": labels}


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
