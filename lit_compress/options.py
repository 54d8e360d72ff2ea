"""The options of the commands: LightningCLI parses, every mistake is one line."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_compress import methods
from lit_compress.configs_path import find_config
from lit_compress.data.datamodule import DataModule
from lit_compress.data.sources import CUSTOM
from lit_compress.errors import UserError, nearest
from lit_compress.methods import Method
from lit_compress.stages import Parts
from lit_compress.strategies import FSDP2Strategy  # noqa: F401  registers --trainer.strategy fsdp2
from lit_compress.tasks import task_name


class _Parser(LightningArgumentParser):
    """A parser that takes no abbreviations and whose errors are one line."""

    explained: list[str] = []  # by the nested parsers of a class, whose errors an outer one wraps in a longer text

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message as a :class:`UserError` of one line."""
        text = " ".join(message.split())
        line = next((known for known in self.explained if known in text), None) or _explain(text)
        self.explained.append(line)
        raise UserError(line)


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
            trainer_defaults={
                "gradient_clip_val": 1.0,
                "log_every_n_steps": 10,
                "enable_model_summary": False,
            },
            parser_class=_Parser,
            parser_kwargs={"prog": f"python -m lit_compress {command}"},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run folder and what method and data share."""
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Folder of the run; default runs/<method>-<task>.",
        )
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None,
            help="`last` continues the run in run_dir where it stopped, or starts it; or a checkpoint of that run.",
        )  # fmt: skip
        parser.add_argument(
            "--checkpoint_every",
            type=int,
            default=500,
            help="Optimizer steps between two checkpoints to continue from.",
        )
        parser.link_arguments("data.record", "model.init_args.task", task_name, apply_on="instantiate")
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
        if init.data.task == CUSTOM:
            self.config.data.custom.labels = list(init.data.record.labels)  # later commands need the same ones
        return Parts(init.model, init.data, dict(init.trainer), self.config.seed_everything)

    def dump(self) -> dict[str, Any]:
        """Return the whole config as plain values."""
        self._dump_config()
        self.config_dump["model"]["init_args"]["task"] = self.config.data.task  # linked when it is built
        return self.config_dump


def _resolve_configs(args: list[str]) -> list[str]:
    """Replace the value after --config by the file it names."""
    found = list(args)
    for i, arg in enumerate(args):
        if arg in ("--config", "-c") and i + 1 < len(args):
            found[i + 1] = str(find_config(args[i + 1]))
        elif arg.startswith("--config="):
            found[i] = f"--config={find_config(arg.partition('=')[2])}"
    return found


def _keys() -> list[str]:
    """Return every option of the methods, the data and the trainer, as users type them."""
    keys = ["run_dir", "ckpt_path", "checkpoint_every", "seed_everything", "config", "print_config"]
    for name in methods.__all__:
        for option, parameter in inspect.signature(getattr(methods, name)).parameters.items():
            keys.append(f"model.{option}")
            if is_dataclass(parameter.default):
                keys += [f"model.{option}.{field.name}" for field in fields(parameter.default)]
    for prefix, kind in (("data", DataModule), ("trainer", pl.Trainer)):
        for option, parameter in inspect.signature(kind).parameters.items():
            keys.append(f"{prefix}.{option}")
            if is_dataclass(parameter.default):
                keys += [f"{prefix}.{option}.{field.name}" for field in fields(parameter.default)]
    return sorted(set(keys))


def _explain(text: str) -> str:
    """Make one line of a parser's message: the name, the value, the nearest valid one."""
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
    if found := re.search(r'Parser key "(\S+)":.*Given value: (.*)$', text):
        return f"{_full(found[1])}: '{found[2]}' is not valid; see --help for what it takes"
    if (
        text.endswith(("are required: model", "are required: backbone"))
        or "class_path='lit_compress.methods.Method'" in text
    ):
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
    hint = next(
        (h for h in (nearest(c, known) for c in reversed(candidates)) if h.startswith("did")),
        nearest(key, known),
    )
    return f"unknown option '{key}'; {hint}"


def _type(text: str) -> str:
    return text.replace("<class '", "").replace("'>", "").replace("typing.Literal", "value of ")
