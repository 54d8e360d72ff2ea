"""The task ``custom``: a record made from the user's settings and from the labels in the training file."""

from __future__ import annotations

import re
from dataclasses import replace

from lit_compress.data.checks import Source, no_rows
from lit_compress.data.readers import Place
from lit_compress.data.sources import sources_at
from lit_compress.tasks import KINDS
from lit_compress.tasks.classification import fraction_line, label_name, whole_number
from lit_compress.tasks.records import Custom, Task
from lit_compress.utils.errors import UserError, nearest

MOST_LABELS = 1000  # more are numbers or texts, not classes
_NUMBER = re.compile(r"-?\d+([.]\d*)?(e[+-]?\d+)?", re.IGNORECASE)


def custom_task(settings: Custom, place: Place) -> Task:
    """Return the record of the user's task.

    Columns that the settings leave out are the type's usual ones, and the training rows have the labels.

    Raises:
        UserError: there is no path, the labels are not usable, or a row has none.
    """
    if place.path is None:
        raise UserError("data.path: task 'custom' has no data of its own; give a file or a folder")
    kind = KINDS[settings.kind]
    text = (settings.text,) if isinstance(settings.text, str) else tuple(settings.text or kind.columns)
    fewest, most = kind.texts
    if not fewest <= len({*text}) == len(text) <= most:
        raise UserError(
            f"data.custom.text: {', '.join(text)}: kind {kind.name} has {fewest} to {most} columns, each once, e.g. "
            f"{', '.join(kind.columns)}"
        )
    label = settings.label or (text[0] if kind.label in kind.columns else kind.label)  # plain text is its own label
    columns: tuple[str, ...] = ()
    if (label in text) != kind.one_text:
        none = f"'{label}': kind {kind.name} has no labels; leave it out"
        both = f"'{label}' is a column of texts (data.custom.text); name the one of labels"
        raise UserError(f"data.custom.label: {none if kind.one_text else both}")
    if isinstance(label, list):
        shown, columns, label = f"data.custom.label: [{', '.join(label)}]", tuple(label), kind.label
        if not kind.own_columns:
            raise UserError(
                f"{shown}: kind {kind.name} has one label column; several of 0 and 1 are for kind multi_label"
            )
        if len({name.strip() for name in columns}) < max(2, len(columns)):
            raise UserError(f"{shown}: name two or more, each once; one alone is for kind classification")
    names = tuple(name.strip() for name in settings.labels or ())
    draft = Task(
        "custom", settings.kind, text, (), (), None, length=kind.length, max_length=kind.max_length, label=label,
        configuration=settings.configuration, label_columns=columns,
    )  # fmt: skip
    labels = names if kind.classes else ()
    numbered = not any(re.search(r"\d", name) for name in labels)  # 1 may be the class of "1 star", which is the first
    if columns:
        own = tuple(name.strip() for name in columns)
        labels = labels or own
        if {*labels} != {*own}:
            raise UserError(
                f"data.custom.labels: {', '.join(labels)}: labels with a column each are called like these; give "
                f"{', '.join(columns)}, in any order, or leave it out"
            )
    if kind.classes and not labels:
        splits = ("train", "validation", "test")
        sources = sources_at(draft, place, splits)
        if (split := next((name for name in splits if name in sources), None)) is None:
            raise UserError(f"{place.where} has no file for 'train', and data.custom.labels names no classes")
        labels, numbered = _find_labels(draft, sources[split])
    if kind.classes and len(set(labels)) < max(2, len(labels)):
        raise UserError(f"data.custom.labels: {', '.join(labels)}: give two or more, each once")
    numbered = numbered if settings.numbered is None else settings.numbered
    whole = replace(draft, labels=labels, numbered=numbered)
    return replace(whole, metrics=kind.metrics_of(whole))


def _find_labels(task: Task, source: Source) -> tuple[tuple[str, ...], bool]:
    """Return the labels of the training rows, and whether their numbers are known.

    These are the names that a ``ClassLabel`` column brings, with its numbers, else all values of the rows, sorted.

    Raises:
        UserError: a label is null, labels are of several types, or there are too many or too few.
    """
    table = source.read()
    meant = KINDS[task.kind]
    columns = "; a 0 or 1 for each label: --data.custom.label '[COLUMN,COLUMN]'" if meant.own_columns else ""
    if table.names is not None and task.label not in table.names:
        raise UserError(f"{source.where} has no column '{task.label}'; {nearest(task.label, table.names)}{columns}")
    if table.classes:
        return tuple(name.strip() for name in table.classes), True
    values: dict[str, int] = {}
    first: type | None = None
    for number, row in enumerate(table.rows, start=1):
        where = f"{source.where} row {number}"
        if task.label not in row:
            raise UserError(f"{where} has no '{task.label}'; {nearest(task.label, row)}{columns}")
        for value in meant.classes_in(f"{where}: '{task.label}'", row[task.label]):
            name = label_name(where, value)
            kind = str if isinstance(value, str) else bool if isinstance(value, bool) else int
            first = first or kind
            if kind is not first:
                types = f"is {kind.__name__}, but the label of row 1 is {first.__name__}"
                raise UserError(f"{where}: label {value!r:.60} {types}; write all in one way")
            values.setdefault(name, number)
            if len(values) > MOST_LABELS:
                other = f"the {len(values)}th different one; give a column of classes, or kind regression"
                raise UserError(f"{where}: label {value!r:.60} is {other}")
    if not values:
        raise no_rows(source.where, table.names)
    if len(values) < 2:
        raise UserError(f"{source.where}: all labels are '{', '.join(values)}'; give two or more")
    if not all(_NUMBER.fullmatch(name) for name in values):
        return tuple(sorted(values)), False
    numbers = {whole_number(name): at for name, at in values.items()}  # 3 for 3.0
    for name, at in numbers.items():
        if not name.removeprefix("-").isdecimal():
            raise UserError(fraction_line(f"{source.where} row {at}", name))
    return tuple(sorted(numbers, key=int)), False
