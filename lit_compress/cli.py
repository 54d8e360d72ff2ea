"""The commands. LightningCLI parses (typed signatures, --help from docstrings, --print_config); stages run here."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress import methods
from lit_compress.configs_path import find_config
from lit_compress.data.datamodule import DataModule
from lit_compress.errors import UserError, nearest
from lit_compress.evaluation import evaluate as _evaluate
from lit_compress.methods import Method
from lit_compress.runs import Run, write_json
from lit_compress.stages import Parts, run_stages


class _Parser(LightningArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if isinstance(ex, UserError):
            raise ex
        raise UserError(_explain(message))


class CommandLine(LightningCLI):
    """The options of every command that needs a method and data; builds both anew for each stage."""

    def __init__(self, args: list[str], command: str) -> None:
        self.command = command
        super().__init__(
            Method,
            DataModule,
            subclass_mode_model=True,
            run=False,
            args=args,
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            seed_everything_default=42,
            trainer_defaults={"gradient_clip_val": 1.0, "log_every_n_steps": 10, "enable_model_summary": False},
            parser_class=_Parser,
            parser_kwargs={"prog": f"python -m lit_compress {command}", "allow_abbrev": False},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run folder and what method and data share."""
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="Folder of the run; default runs/<method>-<task>."
        )
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None,
            help="`last` continues the run in run_dir where it stopped (and starts it if there is none); or a checkpoint file of it.",
        )  # fmt: skip
        parser.add_argument(
            "--checkpoint_every", type=int, default=500, help="Optimizer steps between two checkpoints to continue from."
        )
        parser.link_arguments("data.task", "model.init_args.task")
        parser.link_arguments("model.init_args.backbone", "data.backbone")
        parser.link_arguments("seed_everything", "data.seed")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse ``args``; configs are found by path or among the shipped ones."""
        self.config = parser.parse_args(_resolve_configs(list(args)))

    def instantiate_classes(self) -> None:
        """Build nothing yet: every stage gets fresh parts."""

    def build(self) -> Parts:
        """Build method, data and the Trainer's arguments from the config."""
        init = self.parser.instantiate_classes(self.config)
        return Parts(init.model, init.data, dict(init.trainer), self.config.seed_everything)

    def dump(self) -> dict[str, Any]:
        """Return the whole config as plain values."""
        self._dump_config()
        return self.config_dump


def fit(args: list[str]) -> None:
    """Run or continue every stage of a method, export, report."""
    _quiet()
    cli = _command_line(args, "fit")
    config = cli.config
    if config.trainer.max_epochs is not None:
        raise UserError(f"trainer.max_epochs: {config.trainer.max_epochs} would hold for every stage; set model.<stage>.epochs")
    if config.checkpoint_every < 1:
        raise UserError(f"checkpoint_every: {config.checkpoint_every} is below 1, the smallest valid value")
    parts = cli.build()
    name = type(parts.method).__name__
    run = Run(config.run_dir or f"runs/{name.lower()}-{parts.data.record.name}")
    _begin(run, cli.dump(), config.ckpt_path)
    run_stages(cli.build, run, config.ckpt_path, config.checkpoint_every)
    _report(run, cli)


@rank_zero_only
def _begin(run: Run, config: dict[str, Any], ckpt_path: str | None) -> None:
    """Create the run folder, or check that it may be continued."""
    if not run.started:
        if run.folder.exists() and any(run.folder.iterdir()):
            raise UserError(f"run_dir: '{run.folder}' holds something that is not a run; give a new folder")
        run.begin(config)
        return
    run.check_same(config)
    if ckpt_path is None:
        raise UserError(f"run_dir: '{run.folder}' exists already; continue it with --ckpt_path last, or give another --run_dir")


@rank_zero_only
def _report(run: Run, cli: CommandLine) -> None:
    """Export, print the final table, show it in TensorBoard."""
    from rich.console import Console

    from lit_compress.analysis.pictures import log_report
    from lit_compress.export.folder import export_run
    from lit_compress.export.report import table

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
    parser.error = _one_line  # type: ignore[method-assign]
    given = parser.parse_args(args)
    _quiet()
    from lit_compress.export.folder import export_run

    run = Run(given.run)
    parts = _from_run(run, [], "export").build()
    report = export_run(run, Path(given.out).expanduser(), parts.method, parts.data)
    print(f"exported {given.out}: density {report['compressed']['density']:.4f}, "
          f"logits differ by {report['export_difference']:.1e} when reloaded alone")  # fmt: skip


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
    from lit_compress.predictions import write_predictions
    from lit_compress.surgery import load_net

    _quiet()
    target, out, rest = _target(args, command)
    if (target / "config.yaml").is_file():
        run = Run(target)
        cli = _from_run(run, rest, command)
        folder = run.folder / "export"
        if not folder.is_dir():
            raise UserError(f"{command}: '{target}' has no export yet; finish it with fit --ckpt_path last")
    else:
        cli = _from_export(target, rest, command)
        folder = target
    parts = cli.build()
    parts.data.backbone = str(folder)  # the tokenizer of the export
    net = load_net(folder)
    if command == "predict":
        path = out or folder / "predictions.jsonl"
        print(f"{write_predictions(net, parts.data, path)} predictions: {path}")
    else:
        for name, value in _evaluate(net, parts.data, command).items():
            print(f"{name} {value:.6f}")


def _target(args: list[str], command: str) -> tuple[Path, Path | None, list[str]]:
    parser = argparse.ArgumentParser(prog=f"python -m lit_compress {command}", allow_abbrev=False)
    parser.add_argument("target", metavar="TARGET", help="folder of a finished run or of an export; further options as in fit, e.g. --data.path DIR")
    if command == "predict":
        parser.add_argument("--output", help="JSON lines to write; default predictions.jsonl beside the net")
    parser.error = _one_line  # type: ignore[method-assign]
    given, rest = parser.parse_known_args(args)
    target = Path(given.target).expanduser()
    if not target.is_dir():
        raise UserError(f"{command}: no folder '{given.target}'; give a run folder or an export")
    output = getattr(given, "output", None)
    return target, Path(output) if output else None, rest


def _from_run(run: Run, rest: list[str], command: str) -> CommandLine:
    run.config()
    return _with_config(run.folder / "config.yaml", rest, command)


def _from_export(folder: Path, rest: list[str], command: str) -> CommandLine:
    import tempfile

    import yaml

    report = folder / "report.json"
    if not report.is_file():
        raise UserError(f"{command}: '{folder}' is neither a run (config.yaml) nor an export (report.json)")
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "config.yaml"
        path.write_text(yaml.safe_dump(json.loads(report.read_text())["config"]))
        return _with_config(path, rest, command)


def _with_config(path: Path, rest: list[str], command: str) -> CommandLine:
    """Parse a stored config: link targets are computed, not given."""
    import tempfile

    import yaml

    config = yaml.safe_load(path.read_text())
    config["model"]["init_args"].pop("task", None)
    for key in ("backbone", "seed"):
        config["data"].pop(key, None)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        return _command_line(["--config", file.name, *rest], command)


def _command_line(args: list[str], command: str) -> CommandLine:
    with _short_seed_message():
        return CommandLine(args, command)


def _resolve_configs(args: list[str]) -> list[str]:
    """Replace the value after --config by the file it names."""
    found = list(args)
    for i, arg in enumerate(args):
        if arg in ("--config", "-c") and i + 1 < len(args):
            found[i + 1] = str(find_config(args[i + 1]))
        elif arg.startswith("--config="):
            found[i] = f"--config={find_config(arg.partition('=')[2])}"
    return found


# ------------------------------------------------------------------ messages


def _keys() -> list[str]:
    """Return every option of the methods, the data and the trainer, as users type them."""
    import inspect
    from dataclasses import fields, is_dataclass

    keys = ["run_dir", "ckpt_path", "checkpoint_every", "seed_everything", "config", "print_config"]
    for name in methods.__all__:
        for option, parameter in inspect.signature(getattr(methods, name)).parameters.items():
            keys.append(f"model.{option}")
            if is_dataclass(parameter.default):
                keys += [f"model.{option}.{field.name}" for field in fields(parameter.default)]
    for prefix, kind in (("data", DataModule), ("trainer", pl.Trainer)):
        keys += [f"{prefix}.{option}" for option in inspect.signature(kind).parameters]
    return sorted(set(keys))


def _explain(message: str) -> str:
    """Make one line of a parser's message: the name, the value, the nearest valid one."""
    text = " ".join(message.split())
    if found := re.search(r"unrecognized arguments: (\S+)", text):
        key = found[1].lstrip("-").partition("=")[0]
        return _unknown(key)
    if found := re.search(r"Group '(\S+)' does not accept option '(\S+)'", text):
        return _unknown(f"{found[1]}.{found[2]}")
    if found := re.search(r"Option '(\S+)' is not accepted", text):
        return _unknown(found[1])
    if found := re.search(r"Problem with given class_path '([^']+)'|dot import path string: (\S+)", text):
        name = found[1] or found[2]
        return f"model.class_path: unknown method '{name}'; {nearest(name.rpartition('.')[2], _names())}"
    if found := re.search(r'Parser key "(\S+)": .*?Expected a (.+?)\. Got value: (.*)$', text):
        return f"{_full(found[1])}: '{found[3]}' is not a valid {_type(found[2])}"
    if found := re.search(r'Parser key "(\S+)":.*?Expected (?:a|one of) (.+?)(?: - | Given| \.).*Given value: (.*)$', text):
        return f"{_full(found[1])}: '{found[3]}' is not a valid {_type(found[2])}"
    if "arguments are required: model" in text:
        return f"model: no method given; start from a config (--config lpaf_sst2.yaml) or --model {_names()[0]}"
    return text[:400]


def _names() -> list[str]:
    return [name for name in methods.__all__ if name != "Method"]


def _full(key: str) -> str:
    """Return the option users typed for a key that a nested parser names without its prefix."""
    known = _keys()
    return next((k for k in (key, f"model.{key}", f"data.{key}") if k in known), key)


def _unknown(key: str) -> str:
    known = _keys()
    candidates = [key, f"model.{key}"] if key.partition(".")[0] not in ("model", "data", "trainer") else [key]
    hint = next((h for h in (nearest(c, known) for c in reversed(candidates)) if h.startswith("did")), nearest(key, known))
    return f"unknown option '{key}'; {hint}"


def _type(text: str) -> str:
    return text.replace("<class '", "").replace("'>", "")


def _one_line(message: str) -> NoReturn:
    raise UserError(message)


def _quiet() -> None:
    """Keep the bar and our own lines; hide advice that is not for the user of this command."""
    import os

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for message in ("does not have many workers", "`isinstance\\(treespec, LeafSpec\\)`", "Checkpoint directory", "The number of training batches"):
        warnings.filterwarnings("ignore", f".*{message}")


@contextlib.contextmanager
def _short_seed_message() -> Iterator[None]:
    logger = logging.getLogger("lightning.fabric.utilities.seed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)

