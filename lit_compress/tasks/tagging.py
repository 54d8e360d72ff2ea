"""Tagging: a label for every word of a row, predicted at the word's first token (CoNLL-2003: named entities).

A row with too many tokens for one input becomes several, so that every word gets a label; entities are joined again
before they are scored. A word that the tokenizer drops (a lone control character) is replaced by its unknown token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from lit_compress.tasks.base import IGNORED, Batch, Columns, Metrics, TaskType, Tokenizer, token_columns
from lit_compress.tasks.classification import class_number
from lit_compress.tasks.records import Task
from lit_compress.tasks.text_lists import list_in
from lit_compress.utils.errors import UserError

# letters of the schemes IOB, IOE, BIOES, BILOU, BMES and BMEWO -> what they mean in BIOES
_LETTERS = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S", "W": "S"}


class Tagging(TaskType):
    """Tagging: logits [b, tokens, classes]; labels [b, tokens], -100 except at the first tokens of words.

    Further columns: ``example`` [b], the number of an input's row; ``word`` [b, tokens], at the first token of a word
    its number, counted from 1, else 0.
    """

    name = "tagging"
    auto_class = "AutoModelForTokenClassification"
    suffix = "ForTokenClassification"
    pipeline = "token-classification"
    stored: Any = ["int64"]
    words = True
    per_token = True
    columns = ("tokens",)
    label = "tags"
    classes = True
    means = "For every token; a word has the label of its first token:\n\n{classes}"

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> list[int]:
        """Return the class number of every word."""
        words, labels = row[task.text[0]], self.classes_in(f"{where}: '{task.label}'", row[task.label])
        if len(labels) != len(words):
            raise UserError(
                f"{where}: {len(words)} words in '{task.text[0]}', {len(labels)} labels in '{task.label}'; "
                "give one label per word"
            )
        return [class_number(task, f"{where} word {i}", label) for i, label in enumerate(labels, start=1)]

    def encode(self, batch: Columns, rows: list[int], tokenizer: Tokenizer, task: Task, max_length: int) -> Columns:
        """Tokenise words; a row may become several inputs."""
        sentences = batch[task.text[0]]
        tokens = tokenizer(
            sentences if task.split_words else [" ".join(words) for words in sentences], truncation=True,
            max_length=max_length, is_split_into_words=task.split_words, return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )  # fmt: skip
        columns = token_columns(tokens)
        columns["truncated"] = [False] * len(columns["length"])  # nothing is lost
        sources = tokens["overflow_to_sample_mapping"]
        columns["example"] = [rows[i] for i in sources]
        if task.split_words:
            numbers = [[0 if i is None else i + 1 for i in encoding.word_ids] for encoding in tokens.encodings]
        else:
            numbers = _numbers(sentences, sources, tokens["offset_mapping"])
        columns["word"] = _first_pieces(sources, numbers)
        if dropped := _dropped(sentences, sources, columns["word"], tokenizer.unk_token):
            return self.encode({**batch, task.text[0]: dropped}, rows, tokenizer, task, max_length)
        if task.label in batch:
            columns["labels"] = [
                [batch[task.label][i][number - 1] if number else IGNORED for number in numbers]
                for i, numbers in zip(sources, columns["word"], strict=True)
            ]
        useful = [any(numbers) for numbers in columns["word"]]  # an input may have only the middle of a huge word
        return {name: [v for v, keep in zip(values, useful, strict=True) if keep] for name, values in columns.items()}

    def reads_otherwise(self, task: Task, tokenizer: Tokenizer) -> str | None:
        """Return a note if a list of words and the same words joined by spaces are different tokens."""
        words = ["New", "York"]
        ways = tokenizer(" ".join(words))["input_ids"], tokenizer(words, is_split_into_words=True)["input_ids"]
        if task.split_words or ways[0] == ways[1]:
            return None
        return (
            "words are joined by spaces, and this tokenizer reads a list of words otherwise; for a model that was "
            "trained on lists (is_split_into_words=True, as run_ner.py does) add --data.custom.split_words true"
        )

    def classes_in(self, where: str, label: Any) -> list[Any]:
        """Return the labels of a list, or of a text of one or with spaces between labels."""
        labels = label
        if isinstance(label, str) and (labels := list_in(where, label, bare=True)) is None:
            labels = label.split()
        if not isinstance(labels, list):
            raise UserError(f"{where} is {labels!r:.60} ({type(labels).__name__}); give a list")
        return labels

    def metrics_of(self, task: Task) -> tuple[str, ...]:
        """Return F1 of entities if the labels are tags of entities, see :func:`entity_tags`, else accuracy of words."""
        return ("word_accuracy",) if entity_tags(task.labels) is None else ("entity_f1",)

    def counted(self, batch: Batch) -> Tensor:
        """Return which tokens are the first of a word."""
        return batch["labels"] != IGNORED if "labels" in batch else batch["word"] > 0

    def observe(self, metrics: Metrics, outputs: Tensor, batch: Batch) -> None:
        """Update the metrics with predicted and true class of every word, and the numbers of its row and of itself."""
        counted = self.counted(batch)
        example = batch["example"][:, None].expand_as(counted)
        metrics.update(outputs.argmax(-1)[counted], batch["labels"][counted], example[counted], batch["word"][counted])

    def pieces(self, task: Task, outputs: Tensor, batch: Batch) -> list[tuple[int, dict[int, int]]]:
        """Return for every input the number of its row and the classes of its words."""
        inputs = zip(batch["example"].tolist(), batch["word"].tolist(), outputs.argmax(-1).tolist(), strict=True)
        return [
            (example, {word: label for word, label in zip(words, classes, strict=True) if word})
            for example, words, classes in inputs
        ]

    def answer(self, task: Task, row: dict[str, Any], pieces: list[dict[int, int]]) -> dict[str, Any]:
        """Return ``labels``, one per word."""
        classes = {number: label for piece in pieces for number, label in piece.items()}
        return {"labels": [task.labels[classes[number]] for number in sorted(classes)]}

    def example(self, task: Task) -> str:
        """Return words as they are tokenised here."""
        return '["some", "words"], is_split_into_words=True' if task.split_words else '"some words"'


def entity_tags(labels: Sequence[str]) -> dict[str, tuple[str, str]] | None:
    """Return the letter of every tag, in BIOES, and the type of its entity; ``O`` has none.

    >>> entity_tags(["O", "U-PER", "L_LOC"])
    {'U-PER': ('S', 'PER'), 'L_LOC': ('E', 'LOC')}

    Tags are ``O``, and a letter with a type, ``B-PER`` or ``B_PER``, or alone if there is one type. None if the labels
    are no such tags, e.g. parts of speech.
    """
    tags = {}
    for label in (label for label in labels if label != "O"):
        letter, sign, kind = label[:1], label[1:2], label[2:]
        if letter not in _LETTERS or not ((sign in ("-", "_") and kind) or (not sign and "O" in labels)):
            return None
        tags[label] = _LETTERS[letter], kind
    return tags or None


def _numbers(sentences: list[list[str]], sources: list[int], offsets: list[list[tuple[int, int]]]) -> list[list[int]]:
    """Return for every token of every input the number of its word, counted from 1; 0 for special tokens.

    A token may begin with the space before its word, so the word is found by the token's last character.
    """
    starts = [list(accumulate((len(word) + 1 for word in words[:-1]), initial=0)) for words in sentences]
    return [
        [bisect_right(starts[source], end - 1) if end > start else 0 for start, end in spans]
        for source, spans in zip(sources, offsets, strict=True)
    ]


def _first_pieces(sources: list[int], words: list[list[int]]) -> list[list[int]]:
    """Return for every token of every input the number of the word whose first token it is, else 0."""
    seen = dict.fromkeys(sources, 0)
    firsts: list[list[int]] = []
    for source, numbers in zip(sources, words, strict=True):
        firsts.append([])
        for number in numbers:
            firsts[-1].append(number if number > seen[source] else 0)
            seen[source] = max(seen[source], number)
    return firsts


def _dropped(
    sentences: list[list[str]], sources: list[int], firsts: list[list[int]], unknown: str | None
) -> list[list[str]] | None:
    """Return the sentences with ``unknown`` in place of words without a token; None if there are no such words."""
    have = {(source, number) for source, numbers in zip(sources, firsts, strict=True) for number in numbers}
    new = [
        [word if unknown is None or (row, i) in have else unknown for i, word in enumerate(words, start=1)]
        for row, words in enumerate(sentences)
    ]
    return None if new == sentences else new
