"""Sentence embeddings without labels: MiniLM factorized at four densities, by K-FAC and by plain SVD, and trained.

    python -m benchmarks.embedding.run --backbone DIR --data DIR [--work DIR] [--threads 1]

DIR has glue/stsb/ and squad/ as parquet files. A cell is one ``factorize`` of the sentence model, calibrated on the
texts of 1,024 training pairs of STS-B, without their scores; ``passages`` is K-FAC calibrated on as many questions of
SQuAD's training split and their paragraphs instead. The export is scored by Spearman's correlation on the dev
pairs, and by retrieval: each of 500 questions of SQuAD's dev set looks for its paragraph among the 500.

``vectors`` is a run of ``fit`` after the factorization: one epoch, 320 steps, on 10,240 texts without any label, half
of them sentences of STS-B, half questions and paragraphs of SQuAD; the dense model's vectors are what is learned.

``wide`` is ``factorize --distil`` with 800 steps on 25,600 different texts: half of them pieces of articles (SQuAD's
training split, XSum, CNN/DailyMail), a quarter questions of SQuAD, a quarter sentences of STS-B. It is scored on 2,000
questions of SQuAD's dev set among 2,000 paragraphs, and on CNN/DailyMail's test articles by their highlights, with the
dense model and the export before training next to it. ``layers`` is the same with whole blocks, by measured loss.
``all`` reads every text that there is, 42,851 in 1,340 steps, and learns vectors alone, without hidden states.
For a larger model, fewer: --steps and --questions.
``int8`` is the dense model as OpenVINO's program in 8 bits, calibrated on questions and paragraphs of SQuAD's training
split, and scored on the same questions and highlights. ``smaller`` is another model, --smaller, scored alike.

Writes benchmarks/embedding/results/<cell>-<density>.json (the export's report.json, ``retrieval`` of export and model,
for ``vectors`` also ``similarity``, the scores on STS-B); existing ones are kept, so the script can be stopped and
started again.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.second_order.run import shortened
from lit_compress.utils.files import write_json

STUDY = "embedding"
DENSITIES = (0.5, 0.25, 0.16, 0.10)
CELLS = ("kfac", "none", "passages", "vectors", "wide", "layers", "all", "int8", "smaller")
LAYERS = ("--method", "Layers", "--model.prune.choice", "measured")
QUESTIONS, CALIBRATED, TAUGHT = 500, 1024, 10_240
MANY, STEPS, WIDE, WORDS = 2000, 800, 25_600, 100  # questions, steps, texts, words of a piece of an article
ALL_STEPS = 1340  # that read all texts once


def asked(options: Any, count: int = QUESTIONS) -> Path:
    """Return a folder with a question on each of the first paragraphs of SQuAD's dev set that differ."""
    return _searched(options, f"asked{count}", lambda: pairs(options.data / "squad" / "validation.parquet", count))


def highlights(options: Any) -> Path:
    """Return a folder with CNN/DailyMail's test articles, each behind its highlights."""

    def found() -> list[tuple[str, str]]:
        import pyarrow.parquet as pq

        rows = pq.read_table(options.data / "cnn_dailymail" / "test.parquet").to_pylist()
        return [(row["highlights"], row["article"]) for row in rows]

    return _searched(options, "highlights", found)


def _searched(options: Any, name: str, found: Callable[[], list[tuple[str, str]]]) -> Path:
    """Return a folder with queries and documents as its dev split."""
    folder = options.work / name
    if not options.list and not (folder / "validation.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"query": query, "document": text}) + "\n" for query, text in found()]
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


def wide_texts(options: Any, all_of_them: bool = False) -> Path:
    """Return a file of WIDE texts, or of all, one a line, in an order drawn once; no article is of a test set."""
    file = options.work / ("all.txt" if all_of_them else "wide.txt")
    if options.list or file.exists():
        return file

    import pyarrow.parquet as pq

    def column(name: str, *columns: str) -> list[str]:
        table = pq.read_table(options.data / f"{name}.parquet", columns=[*columns])
        return [" ".join(text.split()) for column in columns for text in table[column].to_pylist()]

    articles = column("xsum/train", "document") + column("cnn_dailymail/validation", "article")
    articles += column("xsum/test", "document")
    words = [article.split() for article in articles]
    pieces = [" ".join(some[i : i + WORDS]) for some in words for i in range(0, len(some) - WORDS // 2, WORDS)]
    squad, drawn = ("squad/train", "squad/train_extra", "squad_v2/train"), random.Random(0)
    texts = sorted({text for name in squad for text in column(name, "context")})
    questions = [text for name in squad for text in column(name, "question")]
    sentences = column("glue/stsb/train", "sentence1", "sentence2")
    for part, count in ((pieces, WIDE // 2 - len(texts)), (questions, WIDE // 4), (sentences, WIDE // 4)):
        different = sorted({*part})
        texts += different if all_of_them else drawn.sample(different, count)
    drawn.shuffle(texts)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{text}\n" for text in texts))
    return file


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


def retrieval(options: Any, net: Path, folder: Path | None = None) -> dict[str, float]:
    """Return the scores of a model on the queries and documents of a folder, by default :func:`asked`."""
    words = ["--data.task", "custom", "--data.custom.kind", "embedding", "--data.custom.text", "[query,document]"]
    return common.metrics_on(net, folder or asked(options), options.threads, *words, "--data.max_length", 256)


def teach_widely(options: Any, cell: str, density: float) -> None:
    """Make a cell of ``wide``, ``layers`` or ``all``; a training that was stopped continues."""
    name = f"{cell}-{density:g}"
    if not common.missing(options, name):
        return
    out, before = (folder / name for folder in (options.work, options.work / "before"))
    data = ("--data.task", "custom", "--data.custom.kind", "embedding", "--data.path", texts_alone(options),
            "--data.max_length", 256, "--density", density, *(LAYERS if cell == "layers" else ()))  # fmt: skip
    steps, own = (ALL_STEPS, ("--model.distillation.alpha_layers", 0)) if cell == "all" else (options.steps, ())
    more = ("--distil", steps, "--distil_texts", wide_texts(options, cell == "all"), *own)
    more += ("--trainer.precision", "bf16-mixed")
    for folder, training in ((out, more), (before, ())):
        if options.list or not (folder / "report.json").is_file():
            common.command(options, "factorize", options.backbone, folder, *data, *training)
    if options.list:
        return
    scores = scored(options, {"dense": options.backbone, "before": before, "compressed": out})
    report = shortened(json.loads((out / "report.json").read_text()))
    made = {"name": name, "threads": options.threads, "records": [], "density": density}
    common.write(options, name, {**made, **scores, **report})


def scored(options: Any, nets: dict[str, Path]) -> dict[str, Any]:
    """Return how well models find documents, and how well they tell similar sentences; finished scores are kept."""
    folders, kept = searches(options, options.questions), options.work / "scores"

    def score(net: Path, name: str, made: Callable[[], dict[str, float]]) -> dict[str, float]:
        path = kept / f"{net.parent.name}-{net.name}-{name}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, made())
        return dict(json.loads(path.read_text()))

    def similar(net: Path) -> dict[str, float]:
        words = ("--data.task", "stsb_embedding")
        return common.metrics_on(net, options.data / "glue" / "stsb", options.threads, *words)

    def searched(net: Path) -> dict[str, dict[str, float]]:
        return {key: score(net, one.name, partial(retrieval, options, net, one)) for key, one in folders.items()}

    return {
        "searched": {name: searched(net) for name, net in nets.items()},
        "similar": {name: score(net, "stsb", partial(similar, net)) for name, net in nets.items()},
    }


def score_smaller(options: Any) -> None:
    """Score the model --smaller."""
    if common.missing(options, "smaller") and not options.list:
        made = {"name": "smaller", "model": options.smaller.name, "threads": options.threads}
        common.write(options, "smaller", made | scored(options, {"dense": options.smaller}) | common.frame())


def searches(options: Any, questions: int = MANY) -> dict[str, Path]:
    """Return the folders of questions and of highlights."""
    return {"squad": asked(options, questions), "cnn": highlights(options)}


def quantize(options: Any) -> None:
    """Make the dense model as a program in 8 bits, and score it on both searches."""
    for key, folder in searches(options, options.questions).items():
        name = f"int8-{key}"
        if not common.missing(options, name):
            continue
        both, out = options.work / f"{name}-data", options.work / name
        if not options.list:
            both.mkdir(exist_ok=True)
            lines = [
                json.dumps({"query": query, "document": text}) + "\n"
                for query, text in pairs(options.data / "squad" / "train_extra.parquet", CALIBRATED)
            ]
            (both / "train.jsonl").write_text("".join(lines))
            shutil.copy(folder / "validation.jsonl", both)
        common.command(
            options, "factorize", options.backbone, out, "--data.task", "custom", "--data.custom.kind", "embedding",
            "--data.custom.text", "[query,document]", "--data.path", both, "--data.max_length", 256, "--density", 1.0,
            "--format", "openvino", "--dtype", "int8",
        )  # fmt: skip
        if not options.list:
            program = json.loads((out / "report.json").read_text())["program"]
            made = {"name": name, "searched_in": key, "threads": options.threads, "program": program}
            common.write(options, name, made | common.frame())


def main() -> None:
    """Make what is missing."""
    parser = common.parser(STUDY, __doc__, "backbone", "data", "work", only=CELLS)
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--steps", type=int, default=STEPS, help="of wide and layers")
    parser.add_argument("--questions", type=int, default=MANY, help="of wide, layers, all and int8")
    parser.add_argument("--smaller", type=Path, help="another sentence model")
    options = parser.parse_args()
    texts = common.source("stsb_embedding", options.data / "glue" / "stsb")
    for cell in options.only:
        for density in options.densities if cell not in ("int8", "smaller") else ():
            if cell in ("wide", "layers", "all"):
                teach_widely(options, cell, density)
                continue
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
    if "int8" in options.only:
        quantize(options)
    if "smaller" in options.only and options.smaller:
        score_smaller(options)


if __name__ == "__main__":
    main()
