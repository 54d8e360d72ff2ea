"""Functions of all studies: the command line, commands as users type them, results without local paths, tables.

A study is a folder with run.py (further scripts have other names), tables.py, findings.md and results/. Scripts are
run from the root of the repository as modules: ``python -m benchmarks.fwsvd.run --backbone DIR --data GLUE_DIR``.
An existing result is not made again, so a script can be stopped and started again; ``--list`` prints the commands
of missing results, ``--list all`` those of all results.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
# of every script that trains; a script says which of the other options it has
TRAINED = ("backbone", "data", "work", "teachers", "precision")
OPTIONS: dict[str, dict[str, Any]] = {
    "backbone": {"type": Path, "help": "folder or name of the model that is fine-tuned"},
    "data": {"type": Path, "help": "folder of the data sets"},
    "work": {"type": Path, "help": "folder of the runs (default: runs/<study>)"},
    "teachers": {"type": Path, "help": "folder with dense-<task>/dense/net, made where missing (default: --work)"},
    "precision": {"default": "bf16-mixed", "help": "Lightning's precision"},
    "device": {"help": "device to measure on"},
    "tasks": {"nargs": "+", "help": "run only these tasks"},
    "shapes": {"nargs": "+", "help": "measure only models of these shapes"},
    "only": {"nargs": "+", "help": "run only these parts, methods or models"},
    "seeds": {"nargs": "+", "type": int, "help": "run only these seeds"},
    "examples": {"type": int, "help": "number of training examples, to try the script (default: the study's)"},
    "epochs": {"type": int, "help": "epochs of compression, to try the script (default: the study's)"},
    "rounds": {"type": int, "help": "number of times that everything is timed"},
    "threads": {"type": int, "default": 1, "help": "threads of PyTorch"},
    "results": {"type": Path, "help": "folder of the results (default: the study's)"},
    "list": {"nargs": "?", "const": "missing", "choices": ["missing", "all"],
             "help": "print the commands of the missing results, or of all, and run nothing"},
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A script's command line; with ``--list``, folders need not be given."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options; exit with an error if the folder of the model or of the data is missing."""
        options = super().parse_args(args, namespace)
        options.listed = set()
        for name in ("backbone", "data"):
            if getattr(options, name, "") is None:
                if not getattr(options, "list", None):
                    self.error(f"--{name} is needed")
                setattr(options, name, Path(name.upper()))
        return options


def parser(script: str, doc: str | None, *names: str, **values: Any) -> Parser:
    """Return the command line of a script, to which it may add options.

    Args:
        script: ``fwsvd`` for fwsvd/run.py, ``fwsvd/fisher`` for another script of the study.
        doc: its docstring.
        names: the OPTIONS that it has.
        values: further OPTIONS with their defaults; a tuple has the choices: the default is all of them for options
            that take several words, else the first.
    """
    made = Parser(
        prog=f"python -m {module(script)}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    values = {"results": results(script), **values}
    if "work" in names:
        values |= {"work": values.get("work", Path("runs") / script.replace("/", "_")), "list": None}
    for name in dict.fromkeys((*names, *values, "threads")):
        settings = dict(OPTIONS[name])
        value = values.get(name, settings.get("default"))
        if isinstance(value, tuple):
            settings |= {"choices": value, "metavar": name.upper().rstrip("S")}
            settings["help"] += ": " + ", ".join(map(str, value))
            value = list(value) if "nargs" in settings else value[0]
        made.add_argument(f"--{name}", **settings | {"default": value})
    return made


# ------------------------------------------------------------------------------------------------- running


def command(options: Any, *words: object, start: Sequence[str] = ("-m", "lit_compress")) -> float:
    """Print and run ``python -m lit_compress WORDS``; return its peak memory in MiB. A failure ends the script.

    With ``--list`` the command is printed once, and not run. ``start`` is how Python starts it, if not so.
    """
    line = [*start, *map(str, words)]
    module = start if start[0] == "-m" else ("-m", "lit_compress")
    shown = shlex.join(["python", *module, *map(str, words)])
    if shown not in options.listed:
        print(shown, flush=True)
    if options.list:
        options.listed.add(shown)
        return 0.0
    process = subprocess.Popen([sys.executable, *line], env=os.environ | {"OMP_NUM_THREADS": str(options.threads)})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, shown)
    return usage.ru_maxrss / 1024


def source(task: str, folder: Path, examples: int | None = None) -> list[object]:
    """Return the options for a task and its data, of which ``examples`` are drawn for training (None: all)."""
    return ["--data.task", task, "--data.path", folder, *(["--data.train_examples", examples] if examples else [])]


def shared(
    options: Any, task: str, folder: Path, examples: int | None = None, backbone: Path | None = None
) -> list[object]:
    """Return the options of a ``fit`` that all runs of a study share."""
    return [
        "--model.backbone", backbone or options.backbone, *source(task, folder, examples),
        "--trainer.precision", options.precision, "--trainer.enable_progress_bar", "false",
    ]  # fmt: skip


def dense_net(options: Any, name: str, *words: object, epochs: int, rate: float) -> Path:
    """Return the folder of the fine-tuned model ``dense-NAME`` in ``--teachers``; else run ``fit WORDS``."""
    run = (options.teachers or options.work) / f"dense-{name}"
    net = run / "dense" / "net"
    if options.list == "all" or not net.exists():  # density 1: nothing is factorized; only the dense stage is used
        command(
            options, "fit", "--model", "SVD", "--model.density", 1.0, *words, "--model.dense.epochs", epochs,
            "--model.dense.learning_rate", rate, "--model.retrain.epochs", 0, "--run_dir", run, "--ckpt_path", "last",
        )  # fmt: skip
    return net


def comparison() -> dict[str, Any]:
    """Return configs/compare/compare.yaml."""
    return yaml.safe_load((HERE.parent / "configs" / "compare" / "compare.yaml").read_text())


def compared(label: str = "") -> list[object]:
    """Return the options of a method in configs/compare/compare.yaml.

    Without a name, the options are those of the distillation that all methods share.
    """
    found = comparison()
    options = found["methods"][label]["options"] if label else found["taught"]
    return [word for key, value in options.items() for word in (f"--{key}", str(value).lower())]


def distilled(
    cli: Any, dense: Any, model: Path, recovery: Any, losses: dict[str, Any] | None = None, **changed: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the model in a folder after its distillation, as ``factorize --distil`` does it, and facts about that.

    Args:
        cli: the command ``factorize``.
        dense: the teacher.
        model: folder of the compressed model.
        recovery: steps, texts and learning rate.
        losses: settings of the distillation in place of the usual ones.
        **changed: arguments of the Trainer.
    """
    from lit_compress.models.storage import load_net
    from lit_compress.run.distilling import DISTIL, LOSSES, Distilling
    from lit_compress.run.folder import Run

    job = cli.build().at()
    job.method.given["distillation"] = replace(LOSSES, **(losses or {}))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.dense = dense
        distilling = Distilling(job.at(trainer=job.trainer | {"logger": False, **changed}), recovery, run)
        distilling.fit(model)
        return load_net(run.net(DISTIL)), distilling.told()


def missing(options: Any, name: str) -> bool:
    """Say whether a result is to be made: it does not exist, or all commands are listed."""
    return options.list == "all" or not (options.results / f"{name}.json").exists()


def fit(
    options: Any,
    name: str,
    *words: object,
    teacher: Callable[[], Path] | None = None,
    more: Callable[[Path], dict[str, Any]] = lambda run: {},
) -> bool:
    """Run one ``fit`` in the folder ``name`` of ``--work`` and write its report as a result, if that is missing.

    Args:
        options: options of the script.
        name: name of the result.
        words: options of ``fit``.
        teacher: function that returns the folder of the dense model; called only if the run is made.
        more: function of the run's folder that returns further values of the result.

    Returns:
        Whether the run was made now.
    """
    if not missing(options, name):
        return False
    run = options.work / name
    known = ["--model.teacher", teacher()] if teacher else []
    memory = command(options, "fit", *words, *known, "--run_dir", run, "--ckpt_path", "last")
    if options.list:
        return False
    made = {"name": name, "memory_mib": memory, "threads": options.threads}
    write(options, name, {**made, **more(run), **report_of(run)})
    return True


def hold_out(options: Any, rows: int, seed: int = 0) -> tuple[Path, Path]:
    """Split the training rows of ``--data`` (parquet) into training and held-out rows, on which settings are chosen.

    Returns:
        A folder with the other training rows and the validation split of the data, and one with the ``rows`` held-out
        rows as its validation split.
    """
    folder = options.work / "data"
    train, held = folder / "train", folder / "held_out"
    if not options.list and not (held / "validation.parquet").exists():
        from datasets import Dataset

        file = str(options.data / "train.parquet")
        mixed = Dataset.from_parquet(file, cache_dir=str(folder / "cache")).shuffle(seed=seed)
        for part in (train, held):
            part.mkdir(parents=True, exist_ok=True)
        mixed.select(range(rows, len(mixed))).to_parquet(train / "train.parquet")
        shutil.copy(options.data / "validation.parquet", train)
        mixed.select(range(rows)).to_parquet(held / "validation.parquet")
    return train, held


def metrics_on(run: Path, data: Path, threads: int, *words: object) -> dict[str, float]:
    """Return the metrics of a run's export, or of a model, on ``data``'s validation split; ``words`` are options."""
    line = [sys.executable, "-m", "lit_compress", "validate", str(run), "--data.path", str(data), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    output = subprocess.run(line, env=environment, check=True, capture_output=True, text=True).stdout
    pairs = (text.split()[:2] for text in output.splitlines() if text.startswith("val"))
    return {name: float(value) for name, value in pairs if not name.endswith(("/rows", "_low95", "_high95"))}


def last_scalar(run: Path, tag: str) -> float:
    """Return the last value of a curve that a run logged to TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = {path.parent for path in (run / "tensorboard").rglob("events.*")}
    stages = [EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload() for folder in folders]
    found = [stage.Scalars(tag)[-1] for stage in stages if tag in stage.Tags()["scalars"]]
    return max(found, key=lambda event: event.step).value


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV that an analysis wrote, with numbers as floats."""

    def value(text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    with file.open() as lines:
        return [{key: value(text) for key, text in row.items()} for row in csv.DictReader(lines)]


# ------------------------------------------------------------------------------------------------- results


def module(script: str) -> str:
    """Return the module of a script: ``benchmarks.fwsvd.run`` for ``fwsvd``."""
    study, _, name = script.partition("/")
    return f"benchmarks.{study}.{name or 'run'}"


def results(script: str) -> Path:
    """Return the folder of a script's results: ``results/`` of its study, or a folder in it for scripts but run.py."""
    study, _, name = script.partition("/")
    return HERE / study / "results" / name


def write(options: Any, name: str, result: dict[str, Any]) -> None:
    """Write a result as NAME.json, with the commit of this checkout."""
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"{name}.json").write_text(json.dumps({"commit": commit(), **result}, indent=1) + "\n")


def load(where: str | Path) -> list[dict[str, Any]]:
    """Return all results of a script, or in a folder, each with the name of its file."""
    folder = where if isinstance(where, Path) else results(where)
    return [{"file": path.stem, **json.loads(path.read_text())} for path in sorted(folder.glob("*.json"))]


def commit() -> str | None:
    """Return the commit of this checkout, with ``-dirty`` if files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    described = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    )
    return described.stdout.strip() or None


def frame() -> dict[str, Any]:
    """Return versions, hardware and commit, for a result that is not a report."""
    from lit_compress.export.report import hardware, versions

    return {"versions": versions(), "hardware": hardware(), "commit": commit()}


def report_of(run: Path) -> dict[str, Any]:
    """Return a finished run's report, with the records of its stages and without local paths."""
    report = json.loads((run / "report.json").read_text())
    report["records"] = json.loads((run / "stages.json").read_text())
    for record in report["records"]:
        record.pop("teacher", None)
    data, init = report["config"]["data"], report["config"]["model"]["init_args"]
    for key in ("backbone", "path"):  # local folders mean nothing elsewhere
        data[key] = Path(data[key]).name
    if data.get("teacher"):
        data["teacher"] = "dense"
    init["backbone"], init["teacher"] = Path(init["backbone"]).name, init["teacher"] and "dense"
    report["config"].pop("run_dir", None)  # in runs of 0.2
    return report


def file_density(result: dict[str, Any]) -> float:
    """Return the density of the exported file of a result.

    It is in reports of today; older ones had the density that the method kept, even if matrices were merged.
    """
    found = result["compressed"]
    merged = "kept" not in found and result.get("merged", {}).get("matrices")
    return found["stored"] if merged else found["density"]


def updates(result: dict[str, Any]) -> int:
    """Return the optimizer steps of all stages after the teacher."""
    return sum(record["steps"] for record in result["records"] if record["name"] != "dense")


# ------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Cell:
    """A method at one density on SST-2, in the table of all methods.

    Attributes:
        method: name of the method in the table.
        runs: results, one per seed; [] if the study has not been run.
        metrics: metric of each run, as on the study's page.
    """

    method: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; a cell without text gets a dash."""
    lines = [header, ["---"] * len(header), *([cell or "-" for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def percent(value: float) -> str:
    """Return a fraction as a percentage with one decimal."""
    return f"{100 * value:.1f}"


def mean_and_deviation(values: list[float]) -> str:
    """Return mean and standard deviation in %."""
    return f"{percent(mean(values))} ± {percent(stdev(values))}" if len(values) > 1 else percent(values[0])


def spread(ratio: dict[str, float]) -> str:
    """Return a ratio with its range."""
    return f"{ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f})"


def held(yes: bool) -> str:
    """Return ``held`` or ``not held``."""
    return "held" if yes else "not held"


def origin(result: dict[str, Any], script: str, threads: int, compare: str = "") -> str:
    """Return the line on the script, hardware and versions of a table.

    Args:
        result: one of the table's results.
        script: as :func:`parser`.
        threads: of PyTorch.
        compare: words of the command ``compare`` that replaces the script, whose results stay.
    """
    hardware = result["hardware"]
    device = hardware.get("accelerator")
    made = (
        f"Made by `python -m {module(script)}` on {f'{device} and ' if device else ''}{hardware['cpu']}, {threads} "
        f"thread(s), torch {result['versions']['torch']}; every JSON names its commit."
        f"{'' if device else ' No GPU was measured.'}\n"
    )
    if compare:
        made += (
            f"\nThat script is gone: it is in the commits that the JSONs name, and each JSON holds its run's config. "
            f"`python -m lit_compress compare {compare}` asks the same today, with a teacher trained to its end.\n"
        )
    return made
