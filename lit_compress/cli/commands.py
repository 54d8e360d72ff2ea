"""The commands: fit, validate, test, predict, export, bench, clean, factorize, analyze."""

from __future__ import annotations

import argparse
import filecmp
import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import NoReturn

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console

from lit_compress.cli.bench import bench_command
from lit_compress.cli.one_shot import KINDS, RATIOS, analyze_model, analyze_runs, factorize_model
from lit_compress.cli.options import CommandLine
from lit_compress.cli.targets import find_target, parse_stored
from lit_compress.data.facts import DataFacts
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.evaluation.predict import write_predictions
from lit_compress.export.folder import check_out
from lit_compress.export.report import print_table
from lit_compress.models.backbones import finetuned_on
from lit_compress.run.clean import clean as remove_leftovers
from lit_compress.run.finish import export_run
from lit_compress.run.folder import Run
from lit_compress.run.plan import Plan, facts_lines, facts_table, plan_lines
from lit_compress.run.runner import check_stages, run_stages
from lit_compress.run.tensorboard import log_report
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import check_file, check_folder, write_json
from lit_compress.utils.progress import note


def fit(args: list[str]) -> None:
    """Run or continue all stages of a method, export the net, print the report."""
    _silence_libraries()
    cli = CommandLine(args, "fit")
    config = cli.config
    if config.trainer.max_epochs is not None:
        raise UserError(
            f"trainer.max_epochs: {config.trainer.max_epochs} would hold for every stage; set model.<stage>.epochs"
        )
    if config.checkpoint_every < 1:
        raise UserError(f"checkpoint_every: {config.checkpoint_every} is below 1, the smallest valid value")
    parts = cli.build()
    name = type(parts.method).__name__
    run = Run(config.run_dir or f"runs/{name.lower()}-{parts.data.record.name}")
    _choose_teacher(cli, run, parts.data.record, args)
    _prepare_run(run, cli, config.ckpt_path)
    try:
        run_stages(cli.build, run, config.ckpt_path, config.checkpoint_every)
    except SIGTERMException as error:  # Lightning's would end the process with exit code 0
        print("stopped by SIGTERM; the same command with --ckpt_path last continues", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM) from error
    _report(run, cli)


def _choose_teacher(cli: CommandLine, run: Run, task: Task, args: list[str]) -> None:
    """Choose the teacher where none is given: where a run is continued the one that it has, else maybe the backbone.

    A backbone that is fine-tuned on the labels of the data is the teacher, so that no dense stage is trained, unless
    options of the dense stage among ``args`` say otherwise.
    """
    init = cli.config.model.init_args
    if init.get("teacher"):
        return
    if run.started:
        init.teacher = run.config()["model"]["init_args"].get("teacher")
        return
    asked = any(arg.startswith(("--model.dense", "--model.teacher")) for arg in args)
    if asked or not finetuned_on(init.backbone, task):
        return
    init.teacher = init.backbone
    note(
        f"model.backbone: '{init.backbone}' is fine-tuned on these labels ({', '.join(task.labels)}): it is the "
        "teacher as it is; --model.dense.epochs 3 would fine-tune it first"
    )


@rank_zero_only
def _prepare_run(run: Run, cli: CommandLine, ckpt_path: str | None) -> None:
    """Check that the run can work, then create its folder; or check that it may be continued."""
    config = cli.dump()
    if not run.started:
        check_folder("run_dir", run.folder)
        if run.folder.exists() and any(run.folder.iterdir()) and not (run.folder / "config.yaml").is_file():
            raise UserError(f"run_dir: '{run.folder}' holds something that is not a run; give a new folder")
        parts = cli.build()
        plan, facts = check_stages(parts), parts.data.facts()
        _show_plan(parts.data.record.name, facts, plan)
        run.begin(config, facts.as_dict())
        return
    run.check_same(config)
    if ckpt_path is None:
        raise UserError(
            f"run_dir: '{run.folder}' exists already; continue it with --ckpt_path last, or give another --run_dir"
        )


def _show_plan(task: str, facts: DataFacts, plan: Plan) -> None:
    """Show what was found and what will be done."""
    Console().print(facts_table(task, facts))
    for line in (*facts_lines(facts), *plan_lines(plan)):
        print(line)


@rank_zero_only
def _report(run: Run, cli: CommandLine) -> None:
    """Export the net, write the report, print the final table and log it to TensorBoard."""
    path = run.folder / "report.json"
    if path.is_file() and (run.folder / "export" / "report.json").is_file():
        report = json.loads(path.read_text())
    else:
        parts = cli.build()
        report = export_run(run, run.folder / "export", parts.method, parts.data)
        write_json(path, report)
        log_report(run, report)
    print_table(report)
    print(f"export: {run.folder / 'export'}\nreport: {path}\ncurves: tensorboard --logdir {run.folder}")


def clean(args: list[str]) -> None:
    """Remove what nothing needs any more: checkpoints of finished stages, files that killed processes left."""
    parser = argparse.ArgumentParser(prog="python -m lit_compress clean", description=clean.__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run, finished or not")
    parser.error = _one_line  # type: ignore[method-assign]
    run = Run(Path(parser.parse_args(args).run).expanduser())
    run.config()  # refuses what is no run
    removed = remove_leftovers(run)
    for path, size in removed.items():
        print(f"removed {path.relative_to(run.folder)}, {size:,} bytes")
    print(f"{sum(removed.values()):,} bytes are free; the nets of all stages, the export and the curves are kept")


def export(args: list[str]) -> None:
    """Write a finished run as a folder that loads without this package."""
    parser = argparse.ArgumentParser(prog="python -m lit_compress export", description=export.__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument(
        "--format", choices=("hf", "onnx", "torch"), default="hf",
        help="onnx, torch: also write model.onnx or model.pt2, which run without transformers (default hf: neither)",
    )  # fmt: skip
    parser.add_argument(
        "--round_to", type=int, metavar="N",
        help="SP3: pad widths with zeros to multiples of N; 8 is faster in PyTorch with many tokens (default: none)",
    )  # fmt: skip
    parser.error = _one_line  # type: ignore[method-assign]
    given = parser.parse_args(args)
    _silence_libraries()
    run, out = Run(given.run), Path(given.out).expanduser()
    check_out(out)
    parts = parse_stored(run.config(), [], "export").build()
    report = export_run(run, out, parts.method, parts.data, given.format, given.round_to)
    print(f"exported {given.out}: density {report['compressed']['density']:.4f}")
    print(f"reloaded alone, its logits differ by {report['export_difference']:.1e}")
    if "program" in report:
        print(f"{report['program']['file']}: its logits differ by {report['program']['difference']:.1e}")


def bench(args: list[str]) -> None:
    """Time an export, or any fine-tuned model, beside a dense one, in the runtimes that are installed."""
    _silence_libraries()
    bench_command(args, bench.__doc__)


# short option of `factorize` and `analyze`: option of fit, help
_SHORT = {
    "density": ("model.density", "fraction of the matrices that is kept (default 0.25 for kfac); or"),
    "rank": ("model.rank", "rank of every matrix; or"),
    "rank_ratio": ("model.rank_ratio", "fraction of the ranks of every matrix (default 0.33 for other weightings)"),
    "allocation": (
        "model.allocation",
        "global: one budget for all, where energy is most (default for kfac), or uniform (default for the others)",
    ),
    "scope": (
        "model.scope",
        "inputs, kfac: the density is of the blocks' matrices (blocks, default), or of the whole model (all)",
    ),
    "price": (
        "model.price",
        "what the density is a share of: parameters (default), flops, or milliseconds measured on this machine",
    ),
    "weighting": (
        "model.retrain.weighting",
        "kfac (default of factorize: Fisher information, Kronecker-factored), inputs (second moments of the inputs), "
        "fisher (diagonal), none (SVD), or importance: scores of a pruning stage",
    ),
    "labels": ("model.retrain.labels", "kfac: drawn from the model (default), exact, or true"),
    "centred": ("model.retrain.centred", "inputs, kfac: biases take over the mean of the inputs (default true)"),
    "input_damping": ("model.retrain.input_damping", "inputs, kfac: share of the mean second moment (default 0.001)"),
    "gradient_damping": ("model.retrain.gradient_damping", "kfac: the same for gradients (default 0.01)"),
    "calibration_examples": ("model.retrain.calibration_examples", "inputs, kfac: training examples (default 1,024)"),
    "calibration_seed": ("model.retrain.calibration_seed", "inputs, kfac: of the choice of examples and of labels"),
    "stacked": ("model.retrain.stacked", "inputs, kfac: query, key and value share one right factor (default true)"),
    "removes": (
        "model.retrain.removes",
        "inputs, kfac: components of matrices (default), structures (heads, neurons), or both",
    ),
    "refit": (
        "model.retrain.refit",
        "inputs, kfac: fit the factors block by block to the inputs as compressed",
    ),
    "axis": ("model.retrain.axis", "fisher: which weights share an importance: in (default), out, both, element"),
    "power": ("model.retrain.power", "fisher, importance: exponent of the importance (default 0.5)"),
    "estimator": ("model.retrain.estimator", "fisher: per_example (default) or batch"),
    "fisher_examples": ("model.retrain.fisher_examples", "fisher: number of training examples (default all)"),
}
_OF_FISHER = ("axis", "power", "estimator", "fisher_examples")  # without any meaning for the default weighting


def factorize(args: list[str]) -> None:
    """Factorize a fine-tuned model at once, without training, and export it."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_compress factorize", description=factorize.__doc__, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of a model fine-tuned on the task")
    parser.add_argument("out", metavar="OUT", help="folder to write, a full export")
    given, cli = _one_shot(parser, args, "factorize")
    out = Path(given.out).expanduser()
    check_out(out)
    parts = cli.build()
    report = factorize_model(out, parts.method, parts.data, cli.dump())
    print_table(report)
    print(f"export: {given.out}")


def analyze(args: list[str]) -> None:
    """Measure what truncation or pruning does to models, without training; write a table and a figure."""
    if args[:1] == ["allocation"]:
        return _analyze_runs(args[1:])
    parser = argparse.ArgumentParser(
        prog="python -m lit_compress analyze", description=analyze.__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "kind", metavar="KIND",
        help="truncation: drop of the metric without each tenth of the components (FWSVD's Figure 1); sweep: metric "
        "over the ratio of ranks kept; spectra: singular values; ranks: numerical rank of every matrix, over the "
        "density for several models; neurons: histograms of the neurons' importance; pattern: which weights of a "
        "matrix are zero; allocation RUN [RUN ...] OUT: metric over the low-rank share of finished LoSparse runs",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", nargs="+",
                        help="model fine-tuned on the task; several for ranks, neurons, pattern")  # fmt: skip
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--weightings", nargs="+", default=["none", "fisher-in"], metavar="W",
                        help="none, fisher-in, fisher-out, fisher-both, fisher-element, importance-out")  # fmt: skip
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS), help="for sweep: ranks kept / ranks")
    parser.add_argument("--site", help="for pattern: name of the matrix (default the first attention output)")
    given, cli = _one_shot(parser, args, "analyze")
    if given.kind not in KINDS:
        raise UserError(f"analyze: unknown kind '{given.kind}'; {nearest(given.kind, KINDS)}")
    parts, out = cli.build(), Path(given.out).expanduser()
    rows = analyze_model(
        given.kind, out, given.model, parts.method, parts.data, given.weightings, given.ratios, given.site
    )
    _say_rows(given.kind, out, len(rows))


def _analyze_runs(args: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m lit_compress analyze allocation", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", nargs="+", help="folder of a finished LoSparse run")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.error = _one_line  # type: ignore[method-assign]
    given = parser.parse_args(args)
    out = Path(given.out).expanduser()
    _say_rows("allocation", out, len(analyze_runs(out, given.run)))


def _say_rows(kind: str, out: Path, count: int) -> None:
    print(f"{count} rows: {out / kind}.csv\nfigure: {out / kind}.png")


def _one_shot(parser: argparse.ArgumentParser, args: list[str], command: str) -> tuple[argparse.Namespace, CommandLine]:
    """Parse the arguments of ``parser``, the short options and those of fit, for a method on MODEL."""
    for short, (_, meaning) in _SHORT.items():
        parser.add_argument(f"--{short}", help=meaning, metavar="")
    parser.add_argument("--data.task", dest="task", required=True, help="task of the fine-tuned model, e.g. sst2")
    parser.epilog = "Further options are those of fit, e.g. --data.path DIR, --data.batch_size 16."
    parser.error = _one_line  # type: ignore[method-assign]
    given, rest = parser.parse_known_args(args)
    typed = {option[2:] for action in parser._actions for option in action.option_strings if option[:2] == "--"}
    _silence_libraries()
    values = {option: getattr(given, name) for name, (option, _) in _SHORT.items()}
    short = [f"--{option}={value}" for option, value in values.items() if value is not None]
    model = given.model if isinstance(given.model, str) else given.model[0]
    method = _method_of(given, rest) if command == "factorize" else "FWSVD"
    shared = ["--model", method, f"--model.backbone={model}", f"--data.task={given.task}"]
    return given, CommandLine([*shared, *short, *rest], command, (name for name in vars(given) if name in typed))


def _method_of(given: argparse.Namespace, rest: list[str]) -> str:
    """Return the method whose factorization `factorize` does: SecondOrder, unless another weighting is asked for.

    Raises:
        UserError: an option of another weighting is given, but not the weighting.
    """
    if given.weighting or any(word.startswith("--model.retrain.weighting") for word in rest):
        return "SecondOrder" if given.weighting == "kfac" else "FWSVD"
    for name in _OF_FISHER:
        if (value := getattr(given, name)) is not None:
            raise UserError(f"{name}: '{value}' means nothing to weighting kfac, the default; add --weighting fisher")
    return "SecondOrder"


def validate(args: list[str]) -> None:
    """Print the dev metrics of a run, an export or any fine-tuned model."""
    _evaluate_command(args, "validate")


def test(args: list[str]) -> None:
    """Print the metrics on the test split of a run, an export or any fine-tuned model."""
    _evaluate_command(args, "test")


def predict(args: list[str]) -> None:
    """Write text, label and probability of every row as JSON lines."""
    _evaluate_command(args, "predict")


def _evaluate_command(args: list[str], command: str) -> None:
    """Load the net of a run, an export or a model; options override the config it was made with."""
    _silence_libraries()
    name, out, rest = _target(args, command)
    target = find_target(name, command)
    path = out or target.folder / "predictions.jsonl"
    if command == "predict":
        check_file("--output", path)
    parts = target.parse(rest, command).build()
    parts.data.backbone = str(target.folder)  # the tokenizer that belongs to the net
    parts.data.whole_file = _is_another_file(target.trained_on, parts.data.path)
    if command == "predict" and path.exists() and path.samefile(Path(parts.data.path or "/").expanduser()):
        raise UserError(f"--output: '{path}' is the file that is read; give another")
    net = target.load(parts.data.record)
    if command == "predict":
        print(f"{write_predictions(net, parts.data, path)} predictions: {path}")
    else:
        for metric, value in evaluate(net, parts.data, command, sure=True).items():
            print(f"{metric} {value}" if isinstance(value, int) else f"{metric} {value:.6f}")


def _is_another_file(known: str | None, given: str | None) -> bool:
    """Say whether ``given`` is a single file, and not the content of that which the net was trained on."""
    file, trained = (Path(path or "").expanduser() for path in (given, known))
    return file.is_file() and not (trained.is_file() and filecmp.cmp(file, trained, shallow=False))


def _target(args: list[str], command: str) -> tuple[str, Path | None, list[str]]:
    """Split TARGET and --output from the options that override the stored config."""
    parser = argparse.ArgumentParser(prog=f"python -m lit_compress {command}", allow_abbrev=False)
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="folder of a finished run, of an export, of a net of a run, or of any fine-tuned model (with --data.task);"
        " then any option of fit, e.g. --data.path DIR",
    )
    if command == "predict":
        parser.add_argument(
            "--output", metavar="FILE", help="JSON lines to write; default predictions.jsonl beside the net"
        )
    parser.error = _one_line  # type: ignore[method-assign]
    out, rest = _output(args) if command == "predict" else (None, args)
    return parser.parse_args(rest[:1]).target, out, rest[1:]


def _output(args: list[str]) -> tuple[Path | None, list[str]]:
    """Take --output out of the arguments, wherever it stands."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--output", type=Path)
    parser.error = _one_line  # type: ignore[method-assign]
    given, rest = parser.parse_known_args(args)
    return given.output and given.output.expanduser(), rest


def _one_line(message: str) -> NoReturn:
    raise UserError(message)


def _silence_libraries() -> None:
    """Hide messages of libraries that do not help the user of a command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # type: ignore[assignment]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    for name in ("transformers", "huggingface_hub", "datasets", "torch.export", "torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    for message in (
        "does not have many workers",
        "`isinstance\\(treespec, LeafSpec\\)`",
        "It is recommended to use `self.log",  # our metrics are reduced over ranks already
        "The number of training batches",
    ):
        warnings.filterwarnings("ignore", f".*{message}")
