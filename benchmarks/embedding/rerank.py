"""A reranker without labels: sentences put in order for a question by a cross-encoder, which is then made smaller.

    python -m benchmarks.embedding.rerank --backbone DIR --data DIR [--work DIR] [--densities 0.5 ...]

DIR of the data has squad/ as parquet files. A row is a question of SQuAD and one sentence of its paragraph; the
sentence in which the answer begins is relevant. The dense reranker is the backbone with a new head after an epoch on
the sentences of 4,000 questions. ``factorize`` and ``factorize --distil`` then read other questions and sentences, all
without labels: 300 steps of 32 pairs, none of which is read twice. Scored on 1,000 questions of SQuAD's dev set, each
with at least two sentences. ``layers`` is whole blocks by measured loss with the same training.

Writes benchmarks/embedding/results/rerank/<cell>-<density>.json (the export's report.json and ``scores``, those on
SQuAD of the dense model, of the export before training and after it); existing ones are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.embedding.run import LAYERS
from benchmarks.second_order.run import shortened

SCRIPT = "embedding/rerank"
CELLS = {"kfac": (), "layers": LAYERS}
DENSITIES = (0.5, 0.25, 0.1)
LABELLED, ASKED, STEPS, BATCH, RATE = 4000, 1000, 300, 32, 1e-4
PAIR = ("--data.custom.text", "[question,sentence]", "--data.custom.label", "label")
CUSTOM = ("--data.task", "custom", "--data.custom.kind", "reranking", *PAIR)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a paragraph, each with the place of its first character.

    >>> list(sentences("It rained. The match, at 3 p.m. in Rome, was moved."))
    [(0, 'It rained.'), (11, 'The match, at 3 p.m. in Rome, was moved.')]
    """
    start = 0
    for end in [*(found.end() for found in re.finditer(r"[.!?][\"')]*\s+(?=[A-Z\"(])", text)), len(text)]:
        yield start, text[start:end].strip()
        start = end


def rows(file: Path, most: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of the first questions on paragraphs of several sentences, a question at a time."""
    import pyarrow.parquet as pq

    found = 0
    for row in pq.read_table(file, columns=["context", "question", "answers"]).to_pylist():
        parts, begin = list(sentences(row["context"])), row["answers"]["answer_start"][0]
        if len(parts) < 2 or found == most:
            continue
        found += 1
        relevant = max(place for place, _ in parts if place <= begin)
        yield [
            {"question": row["question"], "sentence": text, "label": float(place == relevant)} for place, text in parts
        ]


def prepare(options: Any) -> tuple[Path, Path]:
    """Return a folder with labelled questions of both splits, and a file of other pairs without labels."""
    folder, pairs, squad = options.work / "rerank", options.work / "pairs.jsonl", options.data / "squad"
    if options.list or pairs.exists():
        return folder, pairs
    folder.mkdir(parents=True, exist_ok=True)

    def write(file: Path, found: list[dict[str, Any]]) -> None:
        file.write_text("".join(json.dumps(row) + "\n" for row in found))

    for split, name, most in (("train", "train", LABELLED), ("validation", "validation", ASKED)):
        write(folder / f"{split}.jsonl", [row for asked in rows(squad / f"{name}.parquet", most) for row in asked])
    others = [row for asked in rows(squad / "train_extra.parquet", STEPS * BATCH) for row in asked][: STEPS * BATCH]
    write(pairs, [{key: row[key] for key in ("question", "sentence")} for row in others])
    return folder, pairs


def scores(options: Any, net: Path, folder: Path) -> dict[str, float]:
    """Return nDCG@10 and MRR@10 of a reranker on the dev questions."""
    return common.metrics_on(net, folder, options.threads, *CUSTOM)


def make(options: Any, cell: str, density: float) -> None:
    """Make a result: the export before training and after it."""
    name = f"{cell}-{density:g}"
    if not common.missing(options, name):
        return
    folder, pairs = prepare(options)
    words = (*CUSTOM, "--data.path", folder)
    dense = common.dense_net(
        options, "reranker", "--model.backbone", options.backbone, *words, "--trainer.precision", "bf16-mixed",
        epochs=1, rate=RATE,
    )  # fmt: skip
    before, out = options.work / f"{name}-before", options.work / name
    training = ("--distil", STEPS, "--distil_texts", pairs, "--trainer.precision", "bf16-mixed")
    for made, more in ((before, ()), (out, training)):
        if options.list or not (made / "report.json").is_file():
            common.command(options, "factorize", dense, made, *words, "--density", density, *CELLS[cell], *more)
    if options.list:
        return
    report = shortened(json.loads((out / "report.json").read_text()))
    found = {key: scores(options, net, folder) for key, net in (("dense", dense), ("before", before), ("after", out))}
    result = {"name": name, "threads": options.threads, "records": [], "density": density, "scores": found}
    common.write(options, name, {**result, **report})


def main() -> None:
    """Make what is missing."""
    parser = common.parser(SCRIPT, __doc__, "backbone", "data", "work", "teachers", only=tuple(CELLS))
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    options = parser.parse_args()
    for cell in options.only:
        for density in options.densities if cell == "kfac" else DENSITIES[:1]:
            make(options, cell, density)


if __name__ == "__main__":
    main()
