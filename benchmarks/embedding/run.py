"""Sentence embeddings without labels and without training: MiniLM factorized at four densities, K-FAC beside plain SVD.

    python -m benchmarks.embedding.run --backbone DIR --data DIR [--work DIR] [--threads 1]

DIR has glue/stsb/ and squad/ as parquet files. A cell is one ``factorize`` of the sentence model, calibrated on the
texts of 1,024 training pairs of STS-B, without their scores. The export is scored by Spearman's correlation on the dev
pairs, and by retrieval: each of 500 questions of SQuAD's dev set looks for its paragraph among the 500.

Writes benchmarks/embedding/results/<weighting>-<density>.json (the export's report.json, ``retrieval`` of export and
model); existing ones are kept, so the script can be stopped and started again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.second_order.run import shortened

STUDY = "embedding"
DENSITIES = (0.5, 0.25, 0.16, 0.10)
WEIGHTINGS = ("kfac", "none")
QUESTIONS = 500


def asked(options: Any) -> Path:
    """Return a folder with a question on each of the first paragraphs of SQuAD's dev set that differ."""
    folder = options.work / "asked"
    if not options.list and not (folder / "validation.jsonl").exists():
        import pyarrow.parquet as pq

        rows = pq.read_table(options.data / "squad" / "validation.parquet", columns=["context", "question"]).to_pylist()
        first = {row["context"]: row["question"] for row in reversed(rows)}
        pairs = [{"query": question, "document": text} for text, question in list(first.items())[::-1][:QUESTIONS]]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "validation.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def retrieval(options: Any, net: Path) -> dict[str, float]:
    """Return the scores of a net on :func:`asked`."""
    words = ["--data.task", "custom", "--data.custom.kind", "embedding", "--data.custom.text", "[query,document]"]
    return common.metrics_on(net, asked(options), options.threads, *words, "--data.max_length", 256)


def main() -> None:
    """Make what is missing."""
    parser = common.parser(STUDY, __doc__, "backbone", "data", "work", only=WEIGHTINGS)
    options = parser.parse_args()
    texts = common.source("stsb_embedding", options.data / "glue" / "stsb")
    for weighting in options.only:
        for density in DENSITIES:
            name = f"{weighting}-{density:g}"
            if not common.missing(options, name):
                continue
            out = options.work / name
            memory = common.command(
                options, "factorize", options.backbone, out, *texts, "--density", density, "--weighting", weighting,
            )  # fmt: skip
            if options.list:
                continue
            report = shortened(json.loads((out / "report.json").read_text()))
            scored = {"compressed": retrieval(options, out), "dense": retrieval(options, options.backbone)}
            made = {"name": name, "weighting": weighting, "memory_mib": memory, "threads": options.threads}
            common.write(options, name, {**made, "records": [], "retrieval": scored, **report})


if __name__ == "__main__":
    main()
