"""Accuracy against megabytes: one model in files of 60 to 2 MB, with more and more of what makes a file small.

    python -m benchmarks.size.run --backbone DIR --data DIR [--work DIR] [--teachers DIR] [--threads 1]

One teacher, fine-tuned on SST-2; 2,000 training rows are held out. A cell is one ``factorize --budget size=<N>MB``,
without training, calibrated on 1,024 of the other training rows; the cells ``trained`` are runs of ``fit`` with 1,000
steps after the teacher. Every export is scored on the dev set and on the held-out rows.

Writes benchmarks/size/results/<cell>-<megabytes>.json (the export's report.json, ``held_out``); existing ones are kept,
so the script can be stopped and started again. `python -m benchmarks.tables` makes the tables from them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from benchmarks.second_order.run import shortened

STUDY = "size"
EXAMPLES, EPOCHS, RATE = 8000, 4, 3e-4  # 1,000 steps


@dataclass(frozen=True)
class Levers:
    """What makes a file small.

    Attributes:
        name: in tables and pictures.
        net: options of the method.
        export: options of the export.
        megabytes: sizes that can be reached with them, the most telling first.
    """

    name: str
    net: tuple[str, ...]
    export: tuple[str, ...]
    megabytes: tuple[float, ...]


WORDS = ("--vocabulary", "data")
CELLS = {
    "blocks": Levers("blocks", (), (), (60, 55, 75)),
    "int8": Levers(
        "blocks, table in 8 bits, vocabulary, 16 bits",
        (),
        (*WORDS, "--embeddings", "int8", "--dtype", "float16"),
        (8, 7, 10),
    ),
}
TRAINED = (("int8", 8),)


def main() -> None:
    """Make what is missing: without training, then trained."""
    parser = common.parser(STUDY, __doc__, *common.TRAINED, only=(*CELLS, "trained"), precision="32-true")
    parser.add_argument("--teacher_examples", default=12000, type=int)
    options = parser.parse_args()
    data, held_out = common.hold_out(options, rows=2000)
    words = common.shared(options, "sst2", data, options.teacher_examples)

    def dense() -> Path:
        return common.dense_net(options, "teacher", *words, epochs=2, rate=5e-5)

    def factorize(cell: str, megabytes: float) -> None:
        name, levers = f"{cell}-{megabytes:g}", CELLS[cell]
        if not common.missing(options, name):
            return
        net, out = dense(), options.work / name
        line = [net, out, *common.source("sst2", data), "--budget", f"size={megabytes:g}MB"]
        memory = common.command(options, "factorize", *line, *levers.net, *levers.export)
        if options.list:
            return
        report = shortened(json.loads((out / "report.json").read_text()))
        made = {"name": name, "cell": cell, "megabytes": megabytes, "memory_mib": memory, "threads": options.threads}
        scored = common.metrics_on(out, held_out, options.threads)
        common.write(options, name, {**made, "records": [], "held_out": scored, **report})

    def train(cell: str, megabytes: float) -> None:
        levers = CELLS[cell]
        given = [f"--model.{word[2:]}" if word.startswith("--") else word for word in levers.net]
        given += [f"--export.{word[2:]}" if word.startswith("--") else word for word in levers.export]
        common.fit(
            options, f"trained-{cell}-{megabytes:g}", *common.shared(options, "sst2", data, EXAMPLES),
            "--model", "SecondOrder", "--model.budget", f"size={megabytes:g}MB", *given, *common.compared(),
            "--model.retrain.epochs", EPOCHS, "--model.retrain.learning_rate", RATE, teacher=dense,
            more=lambda made: {
                "cell": cell, "megabytes": megabytes,
                "held_out": common.metrics_on(made, held_out, options.threads),
            },
        )  # fmt: skip

    for cell in options.only:
        for megabytes in CELLS[cell].megabytes if cell in CELLS else ():
            factorize(cell, megabytes)
    if "trained" in options.only:
        for cell, megabytes in TRAINED:
            train(cell, megabytes)


if __name__ == "__main__":
    main()
