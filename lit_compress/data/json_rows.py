"""JSON -> rows: one object per line, a list of objects, an object that holds one, nested SQuAD files, columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError

Row = dict[str, Any]


def json_rows(task: Task, where: str, lines: Iterator[str]) -> Iterator[Row]:
    """Yield the rows of a JSON file; one object per line is read line by line, everything else as a whole.

    Raises:
        UserError: the JSON is malformed, or its content is no row.
    """
    full = filter(str.strip, lines)
    first = next(full, "")
    try:
        alone = json.loads(first) if first else None
    except (ValueError, RecursionError):
        alone = None
    second = next(full, "") if isinstance(alone, dict) else ""
    if second:
        yield from _by_line(where, chain([first, second], full))
    elif first:
        yield from _as_a_whole(task, where, first + "".join(full))


def _by_line(where: str, lines: Iterator[str]) -> Iterator[Row]:
    """Yield one object per line."""
    for row, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} row {row}: malformed JSON: {error.msg} (column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
            raise UserError(f"{where} row {row}: malformed JSON: {error}") from error
        yield _object(where, row, value)


def _object(where: str, row: int, value: Any) -> Row:
    if not isinstance(value, dict):
        raise UserError(
            f"{where} row {row}: a JSON {type(value).__name__}; give one object per line, or a list of them"
        )
    return value


def _as_a_whole(task: Task, where: str, text: str) -> Iterator[Row]:
    """Yield the rows of a text that holds one value, or objects on several lines each, as jq prints them."""
    values: list[Any] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise UserError(f"{where} row {len(values) + 1}: malformed JSON: {error.msg} ({place})") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} row {len(values) + 1}: malformed JSON: {error}") from error
        values.append(value)
        while at < len(text) and text[at].isspace():
            at += 1
    if len(values) == 1:
        values = rows_of(task, where, values[0])
    for row, value in enumerate(values, start=1):
        yield _object(where, row, value)


def rows_of(task: Task, where: str, value: Any) -> list[Any]:
    """Return the content of a JSON file's only value: rows in a list, in the list of an object, by column, or one row.

    Raises:
        UserError: several lists could be meant, or columns are of different lengths.
    """
    if not isinstance(value, dict):
        return value if isinstance(value, list) else [value]
    if all(name in value for name in task.text):
        return _by_column(task, where, value)
    lists = [name for name, items in value.items() if isinstance(items, list) and items and isinstance(items[0], dict)]
    if len(lists) > 1:
        raise UserError(
            f"{where} holds the lists {', '.join(lists)}; save each as a file of its own, e.g. {lists[0]}.json"
        )
    if not lists:
        return [value]
    items = value[lists[0]]
    return list(squad_rows(task, where, items)) if "paragraphs" in items[0] else items


def _by_column(task: Task, where: str, value: Row) -> list[Row]:
    """Return the rows of an object with a list, or an object of values by row, per column; else the object.

    ``json.dump(dataset[:], file)`` of datasets writes the first form, ``DataFrame.to_json`` of pandas the second.
    """
    named = [value[name] for name in (*task.text, task.label) if name in value]
    has_lists = task_type(task).words and isinstance(next(iter(named[0]), None), str)  # the words of one row
    if has_lists or not (all(isinstance(v, list) for v in named) or all(isinstance(v, dict) for v in named)):
        return [value]
    columns = {name: list(v.values()) if isinstance(v, dict) else v for name, v in value.items()}
    columns = {name: column for name, column in columns.items() if isinstance(column, list)}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"{where} holds columns of different lengths ({shown}); write one object per row")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def squad_rows(task: Task, where: str, articles: list[Any]) -> Iterator[Row]:
    """Yield the questions of a nested SQuAD file: articles, their paragraphs, their questions.

    Raises:
        UserError: the task is no ``span_qa``, or something is not where it should be.
    """
    if task.kind != "span_qa":
        raise UserError(f"{where} is a file of SQuAD; task '{task.name}' is {task.kind}, kind span_qa reads it")
    question, context = task.text
    for number, article in enumerate(articles, start=1):
        try:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    row = {question: asked["question"], context: paragraph["context"]}
                    yield row | ({"id": asked["id"]} if "id" in asked else {}) | _answers(task, asked)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{where} article {number}: not as SQuAD is nested ({type(error).__name__}: {error})"
            ) from error


def _answers(task: Task, asked: Row) -> Row:
    """Return the column of the answers, if the question has some or says that it has none."""
    if "answers" not in asked:
        return {}
    answers = asked["answers"]
    return {task.label: {key: [answer[key] for answer in answers] for key in ("text", "answer_start")}}
