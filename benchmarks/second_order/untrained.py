"""Models made smaller without labels: K-FAC compared with K-prune, and what ``--refine`` and ``--distil`` give back.

    python -m benchmarks.second_order.untrained --teachers DIR --data DATA_DIR --tasks stsb [--work DIR] [--threads 1]

DIR/<task> is a model fine-tuned on the task without the rows that this script holds out: as many as in HELD_OUT, drawn
by the data's seed 1, as ``compare`` draws them. DATA_DIR has a folder of parquet files per task. All rows of a task
share the calibration texts (1,024 training rows) and are scored on the dev set and on the held-out rows. ``refined``
is ``factorize --refine 100``; ``distilled`` is ``factorize --distil 300`` on at most 8,000 training texts, ``longer``
``--distil 800``.

Seconds are those of the processor, because another program may share the machine; they include everything between the
loaded model and the smaller one. Writes benchmarks/second_order/results/untrained/<task>-<method>-<density>[-<after>]
.json; existing ones are kept, so the script can be stopped and started again.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.decoder.search import Searched, search
from benchmarks.second_order.estimate import estimated_loss
from benchmarks.second_order.kprune import Settings, kprune

STUDY = "second_order/untrained"
DENSITIES = (0.25, 0.1)
HELD_OUT = {"stsb": 500, "sst2": 2000, "mrpc": 400, "qnli": 400}
SEED, CALIBRATED, TEXTS = 1, 1024, 8000
REMOVES = ("structures", "components")
MADE = (*REMOVES, "search")
JUDGES = 128  # texts that judge the models of a search, and texts on which its finals are refined
STEPS = {"refined": 100, "distilled": 300, "longer": 800}


class Untrained:
    """One task: its data, its dense model, and the models that are made of it.

    Args:
        options: of the script.
        task: name.
    """

    def __init__(self, options: Any, task: str) -> None:
        self.options, self.task, self.device = options, task, torch.device("cpu")

    def command_line(self, removes: str, folder: Path) -> Any:
        """Return the command ``factorize`` that reads the data of ``folder``."""
        from lit_compress.cli.lines import read_line
        from lit_compress.cli.options import CommandLine

        words = [
            "--model", "SecondOrder", "--model.retrain.removes", removes.replace("search", "structures"),
            "--model.backbone", self.options.teachers / self.task, *common.source(self.task, folder, self.texts),
            "--data.batch_size", 32, "--seed_everything", SEED, "--trainer.accelerator", "cpu",
        ]  # fmt: skip
        return CommandLine(read_line("plan", [str(word) for word in words]))

    @cached_property
    def folders(self) -> tuple[Path, Path]:
        """Folders with the training and the dev rows, and with the held-out rows as dev set."""
        import pyarrow.parquet as pq

        from lit_compress.data.batching import held_out

        train, held = (self.options.work / "data" / self.task / name for name in ("train", "held_out"))
        if not (held / "validation.parquet").exists():
            rows = pq.read_table(self.options.data / self.task / "train.parquet")
            dev = pq.read_table(self.options.data / self.task / "validation.parquet")
            parts = held_out(len(rows), HELD_OUT[self.task], SEED)
            for folder, part, validation in ((train, parts[0], dev), (held, parts[0], rows.take(parts[1]))):
                folder.mkdir(parents=True, exist_ok=True)
                pq.write_table(rows.take(part), folder / "train.parquet")
                pq.write_table(validation, folder / "validation.parquet")
        return train, held

    @cached_property
    def texts(self) -> int | None:
        """Number of training texts; None: all, fewer than :data:`TEXTS`."""
        import pyarrow.parquet as pq

        rows = pq.read_metadata(self.folders[0] / "train.parquet").num_rows
        return TEXTS if rows > TEXTS else None

    @cached_property
    def parts(self) -> Any:
        """Method and data of ``factorize``."""
        return self.command_line("components", self.folders[0]).build()

    @cached_property
    def held(self) -> Any:
        """Data whose dev set are the held-out rows."""
        return self.command_line("components", self.folders[1]).build().data

    @cached_property
    def dense(self) -> Any:
        """The fine-tuned model."""
        from lit_compress.cli.factorizing import load_model

        return load_model(str(self.options.teachers / self.task), self.parts.method)

    def store(self, name: str, net: Any, facts: dict[str, Any]) -> None:
        """Score a model on both sets of rows; write the result, and the model for what comes after."""
        from lit_compress.evaluation.evaluate import evaluate
        from lit_compress.models.accounting import count_params, stored_density
        from lit_compress.models.storage import save_net

        folder = self.options.work / name
        folder.mkdir(parents=True, exist_ok=True)
        save_net(net.eval(), folder)
        made = {
            "name": name, "task": self.task, **facts, "file_density": stored_density(net),
            "params": asdict(count_params(net)), "metric": self.parts.data.record.metrics[0],
            "dev": evaluate(net, self.parts.data, sure=True), "held_out": evaluate(net, self.held, sure=True),
            "threads": self.options.threads,
        }  # fmt: skip
        common.write(self.options, name, made | common.frame())
        key = f"val/{made['metric']}"
        print(name, *(f"{part} {made[part][key]:.4f}" for part in ("dev", "held_out")), flush=True)

    def compressed(self, cell: str, densities: list[float]) -> None:
        """Make the rows of K-FAC: statistics are gathered once for all densities."""
        from lit_compress.cli.factorizing import one_shot_stage
        from lit_compress.stages.compression import compress, measure
        from lit_compress.stages.units import UnitRemoval

        cli, start, measured = self.command_line(cell, self.folders[0]), time.process_time(), None
        gathered = 0.0
        for density in densities:
            compression = one_shot_stage(cli.build().at(density).method).compression
            task, data = self.parts.method.task, self.parts.data
            if measured is None:
                measured = measure(self.dense, compression, task, data, self.device)
                gathered, start = time.process_time() - start, time.process_time()
            more: dict[str, Any] = {}
            if cell == "search":
                assert isinstance(compression, UnitRemoval)
                compression, table = Searched(compression.rule, compression.settings), self.options.work / "search"
                kind = self.parts.method.kind
                more = search(table / self.task, self.dense, compression, measured, data, kind, JUDGES, JUDGES)
            net = compress(self.dense, compression, task, data, self.device, keep=True, measured=measured)
            facts = {
                "estimated_loss": estimated_loss(self.dense, compression, measured),
                "seconds": gathered + time.process_time() - start,
            } | more
            self.store(f"{self.task}-{cell}-{density:g}", net, {"cell": cell, "target": density, "after": ""} | facts)
            start = time.process_time()

    def kpruned(self, density: float, name: str) -> None:
        """Make a row of K-prune."""
        start, kind, settings = time.process_time(), self.parts.method.kind, Settings()
        data = self.parts.data
        texts = list(data.calibration_dataloader(min(CALIBRATED, data.train_size())))
        net = kprune(self.dense, texts, kind, density, settings)
        facts = {"seconds": time.process_time() - start, "settings": asdict(settings)}
        self.store(name, net, {"cell": "kprune", "target": density, "after": ""} | facts)

    def recovered(self, cell: str, density: float, after: str) -> None:
        """Make a row of a model that is refined or distilled."""
        from lit_compress.calibration.walk import calibration_parts
        from lit_compress.cli.factorizing import one_shot_stage
        from lit_compress.models.storage import load_net
        from lit_compress.run.distilling import Recovery
        from lit_compress.stages.refinement import refine_net

        before = f"{self.task}-{cell}-{density:g}"
        net, start, steps = load_net(self.options.work / before), time.process_time(), STEPS[after]
        data, kind, stage = self.parts.data, self.parts.method.kind, one_shot_stage(self.parts.method)
        if after == "refined":
            rows = calibration_parts(kind, stage.texts(data), None)
            with tempfile.TemporaryDirectory() as states:
                told = refine_net(self.dense, net, kind, rows, steps, Path(states), self.device)
        else:
            cli = self.command_line(cell, self.folders[0])
            model = self.options.work / before
            net, told = common.distilled(cli, self.dense, model, Recovery(distil=steps))
        facts = {"cell": cell, "target": density, "after": after, "told": told}
        self.store(f"{before}-{after}", net, facts | {"seconds": time.process_time() - start})


def main() -> None:
    """Make what is missing."""
    parser = common.parser(
        STUDY, __doc__, "data", "teachers", tasks=tuple(HELD_OUT), only=("dense", *MADE, "kprune", *STEPS),
        work=Path("runs/second_order_untrained"),
    )  # fmt: skip
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    options = parser.parse_args()
    options.list = None
    torch.set_num_threads(options.threads)
    for task in options.tasks:
        made = Untrained(options, task)
        if "dense" in options.only and common.missing(options, f"{task}-dense"):
            made.store(f"{task}-dense", made.dense, {"cell": "dense", "target": 1.0, "after": ""})
        for cell in (c for c in MADE if c in options.only):
            left = [d for d in options.densities if common.missing(options, f"{task}-{cell}-{d:g}")]
            if left:
                made.compressed(cell, left)
        for density in options.densities if "kprune" in options.only else ():
            if common.missing(options, name := f"{task}-kprune-{density:g}"):
                made.kpruned(density, name)
        for after in (a for a in STEPS if a in options.only):
            for density, cell in ((d, c) for d in options.densities for c in MADE):
                if common.missing(options, f"{task}-{cell}-{density:g}-{after}"):
                    if not (options.work / f"{task}-{cell}-{density:g}").exists():
                        made.compressed(cell, [density])
                    made.recovered(cell, density, after)


if __name__ == "__main__":
    main()
