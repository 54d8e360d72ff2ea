"""Sentence embeddings without labels: MiniLM factorized at four densities, by K-FAC and by plain SVD, and trained.

    python -m benchmarks.embedding.run --backbone DIR --data DIR [--work DIR] [--threads 1]

DIR has glue/stsb/ and squad/ as parquet files. A cell is one ``factorize`` of the sentence model, calibrated on the
texts of 1,024 training pairs of STS-B, without their scores; ``passages`` is K-FAC calibrated on as many questions of
SQuAD's training split and their paragraphs instead. The export is scored by Spearman's correlation on the dev
pairs, and by retrieval: each of 500 questions of SQuAD's dev set looks for its paragraph among the 500.

``vectors`` is a run of ``fit`` after the factorization: one epoch, 320 steps, on 10,240 texts without any label, half
of them sentences of STS-B, half questions and paragraphs of SQuAD; the dense model's vectors are what is learned.

Writes benchmarks/embedding/results/<cell>-<density>.json (the export's report.json, ``retrieval`` of export and model,
for ``vectors`` also ``similarity``, the scores on STS-B); existing ones are kept, so the script can be stopped and
started again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.second_order.run import shortened

STUDY = "embedding"
DENSITIES = (0.5, 0.25, 0.16, 0.10)
CELLS = ("kfac", "none", "passages", "vectors")
QUESTIONS, CALIBRATED, TAUGHT = 500, 1024, 10_240


def asked(options: Any) -> Path:
    """Return a folder with a question on each of the first paragraphs of SQuAD's dev set that differ."""
    folder = options.work / "asked"
    if not options.list and not (folder / "validation.jsonl").exists():
        found = pairs(options.data / "squad" / "validation.parquet", QUESTIONS)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"query": question, "document": text}) + "\n" for question, text in found]
        (folder / "validation.jsonl").write_text("".join(lines))
    return folder


def pairs(file: Path, count: int) -> list[tuple[str, str]]:
    """Return the first paragraphs of a file of SQuAD that differ, each behind its first question."""
    import pyarrow.parquet as pq

    rows = pq.read_table(file, columns=["context", "question"]).to_pylist()
    first = {row["context"]: row["question"] for row in reversed(rows)}
    return [(question, text) for text, question in list(first.items())[::-1][:count]]


def passages(options: Any) -> list[object]:
    """Return the options for STS-B's dev pairs and, in the place of its training pairs, questions and paragraphs."""
    folder = options.work / "passages"
    if not options.list and not (folder / "train.jsonl").exists():
        import pyarrow.parquet as pq

        folder.mkdir(parents=True, exist_ok=True)
        dev = pq.read_table(options.data / "glue" / "stsb" / "validation.parquet").to_pylist()
        (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dev))
        train = [
            {"sentence1": question, "sentence2": text, "label": 0.0}  # no score is read
            for question, text in pairs(options.data / "squad" / "train_extra.parquet", CALIBRATED)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    return [*common.source("stsb_embedding", folder), "--data.max_length", 256]


def texts_alone(options: Any) -> Path:
    """Return a folder with single texts: sentences of STS-B and as many questions and paragraphs of SQuAD."""
    folder = options.work / "texts"
    if not options.list and not (folder / "train.jsonl").exists():
        import pyarrow.parquet as pq

        folder.mkdir(parents=True, exist_ok=True)
        squad = [text for pair in pairs(options.data / "squad" / "train_extra.parquet", TAUGHT // 4) for text in pair]
        for split, count in (("train", TAUGHT // 2), ("validation", 200)):
            rows = pq.read_table(options.data / "glue" / "stsb" / f"{split}.parquet").to_pylist()
            found = [text for row in rows for text in (row["sentence1"], row["sentence2"])][:count]
            found += squad if split == "train" else []
            (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in found))
    return folder


def train(options: Any, density: float) -> None:
    """Make a cell of ``vectors``."""

    def scores(run: Path) -> dict[str, Any]:
        stsb = ("--data.task", "stsb_embedding")
        similarity = common.metrics_on(run / "export", options.data / "glue" / "stsb", options.threads, *stsb)
        return {"density": density, "retrieval": {"compressed": retrieval(options, run / "export")},
                "similarity": similarity}  # fmt: skip

    common.fit(
        options, f"vectors-{density:g}", "--model", "SecondOrder", "--model.density", density,
        "--model.backbone", options.backbone, "--data.task", "custom", "--data.custom.kind", "embedding",
        "--data.path", texts_alone(options), "--data.max_length", 256, "--model.retrain.epochs", 1,
        "--model.retrain.learning_rate", 3e-4, "--trainer.precision", "32-true", "--trainer.accelerator", "cpu",
        "--trainer.enable_progress_bar", "false", more=scores,
    )  # fmt: skip


def retrieval(options: Any, net: Path) -> dict[str, float]:
    """Return the scores of a model on :func:`asked`."""
    words = ["--data.task", "custom", "--data.custom.kind", "embedding", "--data.custom.text", "[query,document]"]
    return common.metrics_on(net, asked(options), options.threads, *words, "--data.max_length", 256)


def main() -> None:
    """Make what is missing."""
    parser = common.parser(STUDY, __doc__, "backbone", "data", "work", only=CELLS)
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    options = parser.parse_args()
    texts = common.source("stsb_embedding", options.data / "glue" / "stsb")
    for cell in options.only:
        for density in options.densities:
            if cell == "vectors":
                train(options, density)
                continue
            name = f"{cell}-{density:g}"
            if not common.missing(options, name):
                continue
            out = options.work / name
            own, weighting = (passages(options), "kfac") if cell == "passages" else (texts, cell)
            memory = common.command(
                options, "factorize", options.backbone, out, *own, "--density", density, "--weighting", weighting,
            )  # fmt: skip
            if options.list:
                continue
            report = shortened(json.loads((out / "report.json").read_text()))
            scored = {"compressed": retrieval(options, out), "dense": retrieval(options, options.backbone)}
            made = {"name": name, "weighting": cell, "memory_mib": memory, "threads": options.threads}
            common.write(options, name, {**made, "records": [], "retrieval": scored, **report})


if __name__ == "__main__":
    main()
