"""The commands: fit, validate, test, predict, export, factorize, analyze."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NoReturn

import yaml
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console

from lit_compress.analysis.pictures import log_report
from lit_compress.errors import UserError, nearest
from lit_compress.evaluation import evaluate
from lit_compress.export.folder import export_run
from lit_compress.export.report import table
from lit_compress.one_shot import KINDS, RATIOS, analyze_model, analyze_runs, factorize_model
from lit_compress.options import CommandLine
from lit_compress.predictions import write_predictions
from lit_compress.runs import Run, write_json
from lit_compress.stages import check_stages, run_stages
from lit_compress.surgery import load_net


def fit(args: list[str]) -> None:
    """Run or continue every stage of a method, export, report."""
    _quiet()
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
    _begin(run, cli, config.ckpt_path)
    try:
        run_stages(cli.build, run, config.ckpt_path, config.checkpoint_every)
    except SIGTERMException as error:  # it would end the process as if all were done
        print("stopped by SIGTERM; the same command with --ckpt_path last continues", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM) from error
    _report(run, cli)


@rank_zero_only
def _begin(run: Run, cli: CommandLine, ckpt_path: str | None) -> None:
    """Check that the run can work, then create its folder; or check that it may be continued."""
    config = cli.dump()
    if not run.started:
        if run.folder.exists() and any(run.folder.iterdir()) and not (run.folder / "config.yaml").is_file():
            raise UserError(f"run_dir: '{run.folder}' holds something that is not a run; give a new folder")
        check_stages(cli.build())
        run.begin(config)
        return
    run.check_same(config)
    if ckpt_path is None:
        raise UserError(
            f"run_dir: '{run.folder}' exists already; continue it with --ckpt_path last, or give another --run_dir"
        )


@rank_zero_only
def _report(run: Run, cli: CommandLine) -> None:
    """Export, print the final table, show it in TensorBoard."""
    path = run.folder / "report.json"
    if path.is_file() and (run.folder / "export" / "report.json").is_file():
        report = json.loads(path.read_text())
    else:
        parts = cli.build()
        report = export_run(run, run.folder / "export", parts.method, parts.data)
        write_json(path, report)
        log_report(run, report)
    Console().print(table(report))
    print(f"export: {run.folder / 'export'}\nreport: {path}\ncurves: tensorboard --logdir {run.folder}")


def export(args: list[str]) -> None:
    """Write a finished run as a folder that loads without this package."""
    parser = argparse.ArgumentParser(prog="python -m lit_compress export", description=export.__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument(
        "--format", choices=("hf", "onnx", "torch"), default="hf",
        help="onnx or torch: the net also as model.onnx or model.pt2, which need no transformers (default hf: without)",
    )  # fmt: skip
    parser.add_argument(
        "--round_to", type=int, metavar="N",
        help="SP3: fill widths up to multiples of N with zeros; 8 is faster in PyTorch on many tokens (default: as is)",
    )  # fmt: skip
    parser.error = _one_line  # type: ignore[method-assign]
    given = parser.parse_args(args)
    _quiet()
    run = Run(given.run)
    parts = _again(run.config(), [], "export").build()
    report = export_run(run, Path(given.out).expanduser(), parts.method, parts.data, given.format, given.round_to)
    print(f"exported {given.out}: density {report['compressed']['density']:.4f}")
    print(f"reloaded alone, its logits differ by {report['export_difference']:.1e}")
    if "program" in report:
        print(f"{report['program']['file']}: its logits differ by {report['program']['difference']:.1e}")


# what `factorize` and `analyze` call by its last name: option of fit, meaning
_SHORT = {
    "density": ("model.density", "fraction of every matrix that is kept; or"),
    "rank": ("model.rank", "rank of every matrix; or"),
    "rank_ratio": ("model.rank_ratio", "fraction of the ranks of every matrix (default 0.33)"),
    "allocation": ("model.allocation", "uniform (default), or global: as many parameters, where they are worth most"),
    "weighting": ("model.retrain.weighting", "fisher (default), none, or importance: scores of a pruning stage"),
    "axis": ("model.retrain.axis", "what shares an importance: in (default), out, both, element"),
    "power": ("model.retrain.power", "exponent of the importance (default 0.5)"),
    "estimator": ("model.retrain.estimator", "per_example (default) or batch"),
    "fisher_examples": ("model.retrain.fisher_examples", "training examples of the Fisher pass (default all)"),
}


def factorize(args: list[str]) -> None:
    """Factorize a fine-tuned model at once, without training, and export it."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_compress factorize", description=factorize.__doc__, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of a model fine-tuned on the task")
    parser.add_argument("out", metavar="OUT", help="folder to write, a full export")
    given, cli = _one_shot(parser, args, "factorize")
    parts = cli.build()
    report = factorize_model(Path(given.out).expanduser(), parts.method, parts.data, cli.dump())
    Console().print(table(report))
    print(f"export: {given.out}")


def analyze(args: list[str]) -> None:
    """Look at what truncation or pruning does to models, without training: table, figure, TensorBoard."""
    if args[:1] == ["allocation"]:
        return _analyze_runs(args[1:])
    parser = argparse.ArgumentParser(
        prog="python -m lit_compress analyze", description=analyze.__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "kind", metavar="KIND",
        help="truncation: drop for every tenth of the components (FWSVD's Figure 1); sweep: metric over the ratio of "
        "ranks kept; spectra: singular values; ranks: numerical rank of every matrix, over the density for several "
        "models; neurons: histograms of the neurons' importance; pattern: which weights of a matrix are zero; "
        "allocation RUN [RUN ...] OUT: metric over the low-rank share of finished LoSparse runs",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", nargs="+",
                        help="fine-tuned on the task; several for ranks, neurons, pattern")  # fmt: skip
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--weightings", nargs="+", default=["none", "fisher-in"], metavar="W",
                        help="none, fisher-in, fisher-out, fisher-both, fisher-element, importance-out")  # fmt: skip
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS), help="of the ranks, for sweep")
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
    """Parse the arguments of ``parser``, its short options and those of fit's FWSVD, for MODEL instead of a run."""
    for short, (_, meaning) in _SHORT.items():
        parser.add_argument(f"--{short}", help=meaning, metavar="")
    parser.add_argument("--data.task", dest="task", required=True, help="what the model was fine-tuned on, e.g. sst2")
    parser.epilog = "Further options are those of fit, e.g. --data.path DIR, --data.batch_size 16."
    parser.error = _one_line  # type: ignore[method-assign]
    given, rest = parser.parse_known_args(args)
    _quiet()
    values = {option: getattr(given, name) for name, (option, _) in _SHORT.items()}
    short = [f"--{option}={value}" for option, value in values.items() if value is not None]
    model = given.model if isinstance(given.model, str) else given.model[0]
    shared = ["--model", "FWSVD", f"--model.backbone={model}", f"--data.task={given.task}"]
    return given, CommandLine([*shared, *short, *rest], command)


def validate(args: list[str]) -> None:
    """Print the dev metrics of a run or an export."""
    _evaluate_command(args, "validate")


def test(args: list[str]) -> None:
    """Print the metrics on the test split of a run or an export."""
    _evaluate_command(args, "test")


def predict(args: list[str]) -> None:
    """Write text, label and probability of every row as JSON lines."""
    _evaluate_command(args, "predict")


def _evaluate_command(args: list[str], command: str) -> None:
    """Load the net of a run or an export, and the config it was made with; options override the config."""
    _quiet()
    target, out, rest = _target(args, command)
    folder = target / "export" if (target / "config.yaml").is_file() else target
    if not folder.is_dir():
        raise UserError(f"{command}: '{target}' has no export yet; finish it with fit --ckpt_path last")
    cli = _again(_stored_config(target, command), rest, command)
    parts = cli.build()
    parts.data.backbone = str(folder)  # the tokenizer of the export
    net = load_net(folder)
    if command == "predict":
        path = out or folder / "predictions.jsonl"
        print(f"{write_predictions(net, parts.data, path)} predictions: {path}")
    else:
        for name, value in evaluate(net, parts.data, command).items():
            print(f"{name} {value:.6f}")


def _target(args: list[str], command: str) -> tuple[Path, Path | None, list[str]]:
    """Split TARGET and --output from the options that override the stored config."""
    parser = argparse.ArgumentParser(prog=f"python -m lit_compress {command}", allow_abbrev=False)
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="folder of a finished run or of an export; then any option of fit, e.g. --data.path DIR",
    )
    if command == "predict":
        parser.add_argument("--output", help="JSON lines to write; default predictions.jsonl beside the net")
    parser.error = _one_line  # type: ignore[method-assign]
    given = parser.parse_args(args[:1])
    target = Path(given.target).expanduser()
    if not target.is_dir():
        raise UserError(f"{command}: no folder '{given.target}'; give a run folder or an export")
    if command != "predict":
        return target, None, args[1:]
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--output", type=Path)
    parser.error = _one_line  # type: ignore[method-assign]
    options, rest = parser.parse_known_args(args[1:])
    return target, options.output, rest


def _stored_config(folder: Path, command: str) -> dict[str, Any]:
    """Return the config of a run or an export.

    Raises:
        UserError: the folder is neither.
    """
    if (folder / "config.yaml").is_file():
        return Run(folder).config()
    if (folder / "report.json").is_file():
        return json.loads((folder / "report.json").read_text())["config"]
    raise UserError(f"{command}: '{folder}' is neither a run (config.yaml) nor an export (report.json)")


def _again(config: dict[str, Any], rest: list[str], command: str) -> CommandLine:
    """Parse a stored config with further options; what is linked is computed, not given."""
    config["model"]["init_args"].pop("task")
    config["data"].pop("backbone")
    config["data"].pop("seed")
    if command == "predict":
        config["data"].pop("validation_examples", None)  # it limited what fit and validate take; here it is given anew
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        return CommandLine(["--config", file.name, *rest], command)


def _one_line(message: str) -> NoReturn:
    raise UserError(message)


def _quiet() -> None:
    """Keep the bar and our own lines; hide advice that is not for the user of this command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
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
