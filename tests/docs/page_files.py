"""The data files that the pages name, of a few words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tiny import WORDS

from lit_compress.data.datamodule import DataModule


def rows_of(task: str, number: int) -> list[dict[str, Any]]:
    """Return rows of a task as the hub has them, of a few words."""
    record = DataModule(task).record
    found, most = [], 2 if record.kind == "reranking" else 6
    for i in range(number):
        words = [WORDS[(i * 7 + j * 3) % len(WORDS)] for j in range(3 + i % 5)]
        row: dict[str, Any] = {name: " ".join(words) for name in record.text}
        if record.kind == "tagging":
            row = {record.text[0]: words, record.label: [(i + j) % len(record.labels) for j in range(len(words))]}
        elif record.kind == "span_qa":
            start = len(words[0]) + 1
            row |= {"id": str(i), record.label: {"text": [words[1]], "answer_start": [start]}}
        elif record.kind == "summarization":
            row[record.label] = " ".join(words[:2])
        elif record.kind == "multi_label":
            row[record.label] = [i % len(record.labels), (i + 1) % len(record.labels)]
        elif record.kind != "language_modelling":
            row[record.label] = i % len(record.labels) if record.labels else float(i % most)
        found.append(row)
    return found


def write_rows(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Write JSON lines, a file per split."""
    folder.mkdir(parents=True)
    for split, some in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def real_reviews(count: int) -> list[tuple[str, int]]:
    """Return sentences of film reviews and their stars from the real data, if LIT_COMPRESS_SHARED names it; else []."""
    file = Path(os.environ.get("LIT_COMPRESS_SHARED", "/nowhere")) / "data" / "glue" / "sst2" / "validation.parquet"
    if not file.is_file():
        return []
    table = pq.read_table(file, columns=["sentence", "label"]).slice(0, count).to_pylist()
    return [(row["sentence"].strip().replace('"', '""'), 5 if row["label"] else 1) for row in table]


def custom_files(place: Path) -> None:
    """Write the single files of the page on data."""
    rows = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(4 + i % 3)) for i in range(60)]

    def csv(name: str, header: str, lines: list[str]) -> None:
        (place / name).write_text("\n".join([header, *lines]) + "\n")

    made_up = [(text, 1 + i % 3) for i, text in enumerate(rows)]
    reviews = [(f'"{text}"', stars) for text, stars in real_reviews(60) or made_up]
    csv("reviews.csv", "review,stars", [f"{text},{stars}" for text, stars in reviews])
    csv("new_reviews.csv", "review", [text for text, _ in reviews[:5]])
    csv("sentences.csv", "sentence", rows)
    csv("scores.csv", "left,right,score", [f"{text},{rows[0]},{i % 7}" for i, text in enumerate(rows)])
    csv("answers.csv", "query,document,label", [f"{WORDS[i // 4]},{text},{i % 2}" for i, text in enumerate(rows)])
    flags = [f"{i % 2},{i // 2 % 2},{i % 3 % 2}" for i in range(60)]
    csv("comments.csv", "comment_text,toxic,insult,threat", [",".join(row) for row in zip(rows, flags, strict=True)])
    custom = {
        "tagged": [{"tokens": text, "tags": " ".join("OX"[j % 2] for j in range(len(text.split())))} for text in rows],
        "questions": [{"question": "the", "context": f"0 {text}", "answers": "0"} for text in rows],
        "articles": [{"article": text, "headline": text[:5]} for text in rows],
    }  # fmt: skip
    for name, some in custom.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
