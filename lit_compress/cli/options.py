"""The options of the commands, parsed by LightningCLI; every user error is one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from enum import Enum
from inspect import Parameter, signature
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_compress import methods
from lit_compress.cli.arguments import (
    after_configs,
    chosen_method,
    content_of,
    last_value,
    resolve_configs,
    with_default_method,
)
from lit_compress.cli.classes import explain_class, made_classes
from lit_compress.cli.help import fit_help
from lit_compress.cli.pins import pin, recall
from lit_compress.data.datamodule import DataModule
from lit_compress.data.sources import CUSTOM
from lit_compress.export.choices import Choices
from lit_compress.methods import Method
from lit_compress.models.own_code import trust_code
from lit_compress.run.runner import Components
from lit_compress.run.solve import Storage
from lit_compress.run.strategies import FSDP2Strategy  # noqa: F401  registers --trainer.strategy fsdp2
from lit_compress.stages.base import Training
from lit_compress.tasks.records import task_name
from lit_compress.utils.devices import use_device
from lit_compress.utils.errors import UserError, nearest


class _Parser(LightningArgumentParser):
    """A parser without abbreviations of options, whose errors are one line."""

    method: type[Method] | None = None  # that the command line or its configs name
    own: tuple[str, ...] = ()  # further options, which the command has taken out already
    explained: list[str] = []  # by the nested parsers of a class, whose errors an outer one wraps in a longer text

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, **kwargs: Any) -> list[str]:
        """Add the options of a class; those of a method, inherited ones too, in the order in which a run uses them."""
        added = super().add_class_arguments(theclass, nested_key, **kwargs)
        if isinstance(theclass, type) and issubclass(theclass, Method):
            names, prefix = list(parameters_of(theclass)), f"{nested_key}." if nested_key else ""

            def place(action: Any) -> int:
                name = action.dest.removeprefix(prefix).partition(".")[0]
                return names.index(name) if name in names else -1

            self._actions.sort(key=place)  # of keys in a config; then of the help
            groups: Any = self._action_groups
            for group in groups:
                group._group_actions.sort(key=place)
            groups.sort(key=lambda group: max(map(place, group._group_actions[:2]), default=-1))
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message as a :class:`UserError` of one line."""
        text = " ".join(message.split())
        line = next((known for known in self.explained if known in text), None)
        line = line or explain_class(text, [action.dest for action in self._actions]) or _explain(text)
        self.explained.append(line)
        raise UserError(line)


class CommandLine(LightningCLI):
    """The options of every command that needs a method and data; builds both anew for each stage.

    Args:
        args: without the command.
        command: its name.
        own: options that only this command has; they are no longer among ``args``.
    """

    def __init__(self, args: list[str], command: str, own: Iterable[str] = ()) -> None:
        self.command = command
        self.density: float | None = None  # that meets the budget, once it is known
        self.tokens: int | None = None  # that the export's vocabulary has, once it is known
        self.origin: str | None = None  # the backbone of a stored config, in whose place its net stands
        self._folders: dict[str, str] = {}  # of the models that are names on the hub, by option, once they are known
        _Parser.own = tuple(own)
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
        """Add the options of the run folder, and link those that method and data share."""
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
        parser.add_argument(
            "--max_skipped",
            type=int,
            default=20,
            help="Steps in a row whose gradients are not finite, which are left out, before the run stops.",
        )
        parser.add_argument(
            "--allow_changed",
            type=bool,
            default=False,
            help="true: continue with other data, options or version, and write down what was changed.",
        )
        parser.add_argument(
            "--trust_remote_code",
            type=bool,
            default=False,
            help="true: run the code that models bring, with all rights of the user; a run and its export keep it.",
        )
        parser.add_class_arguments(Choices, "export")
        parser.link_arguments("data.record", "model.init_args.task", task_name, apply_on="instantiate")
        parser.link_arguments("model.init_args.backbone", "data.backbone")
        parser.link_arguments("model.init_args.teacher", "data.teacher")
        parser.link_arguments("seed_everything", "data.seed")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse ``args``; configs are found by path or among the shipped recipes."""
        args = with_default_method([re.sub(r"^--device(=|$)", r"--trainer.accelerator\1", arg) for arg in args])
        given, resolved = {arg.partition("=")[0] for arg in args}, resolve_configs(args)
        _Parser.method = chosen_method(resolved)
        if _Parser.method and "--model.budget" in given:  # it takes the place of what a config says of the size
            own = parameters_of(_Parser.method)
            resolved = after_configs(resolved, [f"--model.{n}=null" for n in _SIZES if n in own and not own[n].default])
        resolved += _place_of_logger(resolved)
        for config in (value for option, value in pairwise(resolved) if option == "--config"):
            _check_groups(content_of(config))
        if given & {"-h", "--help"}:
            shown = f"{_Parser.method.__module__}.{_Parser.method.__qualname__}" if _Parser.method else None
            print(fit_help(parser, self.command, shown, _names(), "trainer" in given))
            raise SystemExit(0)
        for name in ("--model.task", "--model.init_args.task"):
            if name in given:
                raise UserError(f"{name[2:]}: follows from the data; give --data.task")
        if "--print_config" in given and not given & {"--model", "--config", "-c"}:
            raise UserError(_no_method())
        self.config = parser.parse_args(resolved)
        seed = self.config.seed_everything
        if not 0 <= seed < 2**32:
            near = 0 if seed < 0 else 2**32 - 1
            raise UserError(f"seed_everything: {seed} is not in [0, {2**32 - 1}]; nearest valid {near}")
        if self.config.model.class_path.endswith(".Method"):  # options of every method were given, and no method
            raise UserError(_no_method())
        self._check_budget()
        trust_code(self.config.trust_remote_code)
        accelerator = self.config.trainer.accelerator
        use_device(accelerator if isinstance(accelerator, str) else "auto")

    def _check_budget(self) -> None:
        """Refuse a budget beside a density, a rank or a number of parameters."""
        init, own = self.config.model.init_args, parameters_of(_Parser.method) if _Parser.method else {}
        beside = [n for n in _SIZES if init.get(n) is not None and (n not in own or init[n] != own[n].default)]
        if init.get("budget") is not None and beside:
            raise UserError(
                f"model.budget {init.budget}, model.{beside[0]} {init[beside[0]]}: only one of them can decide the "
                "size; set the others to null"
            )

    def instantiate_classes(self) -> None:
        """Build nothing: :meth:`build` does, anew for every stage."""

    def build(self) -> Components:
        """Build method, data and the Trainer's arguments from the config."""
        config = self.config.clone()
        if (revision := config.model.init_args.get("revision")) is not None and "@" not in config.data.backbone:
            config.data.backbone = f"{config.data.backbone}@{revision}"
        for name, folder in self._folders.items():
            config.model.init_args[name] = folder
        if "backbone" in self._folders:
            config.data.backbone, config.model.init_args.revision = self._folders["backbone"], None
        config.data.teacher = config.model.init_args.get("teacher")
        if self.density is not None:
            config.model.init_args.density = self.density
        init = made_classes(self.parser, config)
        given, record = self.config.data, init.data.record  # later commands need the data's labels
        if init.data.task == CUSTOM:
            given.custom.labels, given.custom.numbered = list(record.labels), record.numbered
            given.custom.label = list(record.label_columns) or given.custom.label
        if record.kind == "embedding":
            given.pooling, given.normalize = record.pooling.tokens, record.pooling.normalize
        init.data.teacher = init.model.teacher or self.origin or init.model.backbone
        (storage := Storage(init.export, self.tokens)).tell(init.model)
        return Components(init.model, init.data, dict(init.trainer), self.config.seed_everything, storage)

    def ready(self, recorded: dict[str, Any] | None = None) -> Components:
        """Resolve the names on the hub, see :mod:`lit_compress.cli.pins`, once all values are known to be valid.

        Commands that make something call it before :meth:`build`, those on what is made read that, and no backbone.

        Args:
            recorded: config of the run that is continued.
        """
        recall(self.config, recorded or {})
        option = "model" if self.command in ("factorize", "analyze") else "model.backbone"
        self._folders = pin(self.config, recorded or {}, self.build().data.record, option)
        return self.build()

    def revisions(self) -> dict[str, str]:
        """Return the options that say which commits :meth:`ready` has found, for other processes."""
        init, data = self.config.model.init_args, self.config.data
        pins = {} if init.revision is None else {"model.backbone": init.backbone, "model.revision": init.revision}
        if data.revision is not None:
            pins |= {"data.revision": data.revision} | ({"data.path": data.path} if data.path else {})
        return pins

    def backbone_as_teacher(self) -> None:
        """Make the backbone, at its commit, the teacher."""
        init = self.config.model.init_args
        init.teacher = init.backbone
        if "backbone" in self._folders:
            init.teacher = f"{init.backbone}@{Path(self._folders['backbone']).name}"
            self._folders["teacher"] = self._folders["backbone"]

    def at_density(self, density: float) -> Method:
        """Build the method with a density, which later calls of :meth:`build` keep."""
        self.density = density
        return self.build().method

    def dump(self) -> dict[str, Any]:
        """Return the whole config as plain values."""
        _take_plain_words(self.config)
        self._dump_config()
        self.config_dump["model"]["init_args"]["task"] = self.config.data.task  # otherwise known only after build()
        return self.config_dump


def _take_plain_words(config: Namespace) -> None:
    """Replace strings that are members of an enumeration, such as Lightning's defaults, by ordinary strings, in place.

    YAML cannot hold the members.
    """
    for key, value in config.items():
        if isinstance(value, str) and isinstance(value, Enum):
            config[key] = value.value
        for part in value if isinstance(value, list) else ():
            if isinstance(part, Namespace):
                _take_plain_words(part)


def parameters_of(kind: type[Method]) -> dict[str, Parameter]:
    """Return the options of a method by name: its constructor's parameters and those of its base classes.

    They have the order in which a run uses them: own values after the density, own settings between the dense stage's
    and the distillation's.
    """
    options: dict[str, Parameter] = {}
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = list(signature(vars(base)["__init__"]).parameters.values())[1:]
            options = {p.name: p for p in parameters if p.kind is not Parameter.VAR_KEYWORD} | options
        if base is Method:
            break
    common = list(signature(Method).parameters)

    def place(name: str) -> float:
        if name in common:
            return common.index(name)
        return common.index("dense" if is_dataclass(options[name].default) else "density") + 0.5

    return {name: options[name] for name in sorted(options, key=place)}


def _place_of_logger(args: list[str]) -> list[str]:
    """Return the option that puts a logger of files into the run folder, if one is given without a folder."""
    logger = (last_value(args, "--trainer.logger") or "").rpartition(".")[2]
    if logger not in ("CSVLogger", "TensorBoardLogger") or any(w.startswith("--trainer.logger.save_dir") for w in args):
        return []
    return [f"--trainer.logger.save_dir={last_value(args, '--run_dir') or 'runs'}/logs"]


def _check_groups(config: dict[str, Any]) -> None:
    """Refuse a value where a config has a group of options, and what stands beside the class of a method.

    The parser takes the one, and blames the class for the other.
    """
    model = config.get("model")
    groups: dict[str, Any] = {name: config[name] for name in ("data", "trainer", "export") if name in config}
    if isinstance(model, dict) and "init_args" in model:
        groups["model.init_args"] = model["init_args"]
    for name, value in groups.items():
        if not isinstance(value, dict):
            raise UserError(f"config: {name} is {value!r:.80}; give its options as a mapping, e.g. {name}: {{}}")
    if isinstance(model, dict) and "class_path" in model:
        for key in sorted(model.keys() - {"class_path", "init_args"}):
            moved = _Parser.method is not None and key in parameters_of(_Parser.method)
            hint = f"did you mean 'init_args.{key}'?" if moved else nearest(key, ["init_args"])
            raise UserError(f"config: unknown key 'model.{key}'; {hint}")


_SIZES = ("density", "rank", "rank_ratio", "params")  # options in whose place a budget stands
_LINKED = {"model.task", "data.backbone", "data.teacher", "data.seed"}  # follow from other options, cannot be given


def _keys(method: type[Method] | None = None) -> list[str]:
    """Return all options of a method (None: of all methods), the data and the trainer, as users type them."""
    keys = [
        "run_dir",
        "ckpt_path",
        "checkpoint_every",
        "max_skipped",
        "allow_changed",
        "trust_remote_code",
        "seed_everything",
        "config",
        "print_config",
        "model",
    ]
    for kind in [method] if method else [getattr(methods, name) for name in methods.__all__]:
        for option, parameter in parameters_of(kind).items():
            keys.append(f"model.{option}")
            if is_dataclass(parameter.default):
                keys += [f"model.{option}.{field.name}" for field in fields(parameter.default)]
    for prefix, kind in (("data", DataModule), ("export", Choices), ("trainer", pl.Trainer)):
        for option, parameter in signature(kind).parameters.items():
            keys.append(f"{prefix}.{option}")
            if is_dataclass(parameter.default):
                keys += [f"{prefix}.{option}.{field.name}" for field in fields(parameter.default)]
    return sorted(set(keys) - _LINKED)


def _explain(text: str) -> str:
    """Return one line for a parser's message: the option, its value, the nearest valid one."""
    if match := re.search(r"unrecognized arguments: (\S+)", text):
        if match[1].endswith((".yaml", ".yml")):
            return f"'{match[1]}' stands without its option; --config {match[1]}"
        if not match[1].startswith("-"):
            return f"'{match[1]}' stands without an option; see --help"
        return _unknown(match[1].lstrip("-").partition("=")[0])
    if match := re.search(r"Group '(\S+)' does not accept option '(\S+)'", text):
        return _unknown(f"{match[1]}.{match[2]}")
    if match := re.search(r"Option '(\S+)' is not accepted", text):
        return _unknown(match[1])
    if match := re.search(r"Problem with given class_path '([^']+)'|dot import path string: (\S+)", text):
        name = match[1] or match[2]
        if "." in name and not name.startswith("lit_compress."):
            return (
                f"model.class_path: '{name}' cannot be imported here, or is no subclass of lit_compress.methods.Method"
            )
        return f"model.class_path: unknown method '{name}'; {nearest(name.rpartition('.')[2], _names())}"
    if match := re.search(r'Parser key "(\S+)": .*?Expected a (.+?)\. Got value: (.*)$', text):
        return f"{_full(match[1])}: '{match[3]}' is not a valid {_type(match[2])}"
    if match := re.search(r'Parser key "(\S+)":.*Given value: (.*)$', text):
        kinds = re.findall(r"- Expected an? (.+?)(?= - Expected | Given value)", text)
        shown = " or ".join(_type(kind) for kind in kinds)
        return f"{_full(match[1])}: '{match[2]}' is not a valid {shown or 'value; see --help'}"
    if match := re.search(r"Parser key \"(\S+)\": Unable to load config '(.*?)'", text):
        key = _full(match[1])
        first = next((k for k in _keys(_Parser.method) if k.startswith(f"{key}.")), f"{key}.OPTION")
        return f"{key}: '{match[2]}' is no value of a group of options; give them one by one, e.g. --{first}"
    if text.endswith("are required: model") or "class_path='lit_compress.methods.Method'" in text:
        return _no_method()
    return text[:400]


def _names() -> list[str]:
    return [name for name in methods.__all__ if name != "Method"]


def _no_method() -> str:
    return f"model: no method given; start from a config (--config lpaf_sst2.yaml) or --model {_names()[0]}"


def _full(key: str) -> str:
    """Return the full option, as users type it, for a key that a nested parser names without its prefix."""
    known = _keys()
    return next((k for k in (key, f"model.{key}", f"data.{key}", f"export.{key}") if k in known), key)


def _unknown(key: str) -> str:
    """Return what is said of an unknown option: the nearest one of the method at hand, the data and the trainer."""
    method = _Parser.method
    if method and (line := _not_a_stage(key, method)):
        return line
    known = [*_Parser.own, *_keys(method)]
    if method and (whole := next((k for k in (key, f"model.{key}") if k in _keys()), None)):
        group = whole.rpartition(".")[0]
        own = ", ".join(name for name in known if name.rpartition(".")[0] == group)
        return f"unknown option '{key}' for {method.__name__}; its options: {own}"
    same = min((name for name in known if name.endswith(f".{key}")), key=len, default=None)
    groups = ("model.", "data.", "export.", "trainer.")
    prefixes = ("",) if key.startswith(groups) else ("", *groups)

    def likeness(prefix: str) -> float:
        close = get_close_matches(prefix + key, known, n=1)
        return SequenceMatcher(None, prefix + key, close[0]).ratio() if close else 0.0

    hint = f"did you mean '{same}'?" if same else nearest(max(prefixes, key=likeness) + key, known)
    return f"unknown option '{key}'; {hint}"


def _not_a_stage(key: str, method: type[Method]) -> str | None:
    """Return what is said of the settings of a stage that the method lacks and another has; None: it is no such key."""
    stage = key.removeprefix("model.").partition(".")[0]
    stages = [name for name, p in parameters_of(method).items() if isinstance(p.default, Training)]
    if stage in stages or not any(k.startswith(f"model.{stage}.") for k in _keys()):
        return None
    if stage in parameters_of(method):
        return None
    return f"model.{stage}: {method.__name__} has no stage {stage}; its stages: {', '.join(stages)}"


def as_typed(message: str, args: list[str]) -> str:
    """Return a message with the whole name of the option that it begins with.

    Settings know neither the stage they are of nor that they are the method's; ``args`` say which stage was meant.
    """
    if match := re.match(r"unknown option '(\S+?)'", message):
        names = (word.partition("=")[0].lstrip("-") for word in args if word.startswith("-"))
        typed = next((name for name in names if f".{name}".endswith(f".{match[1]}")), match[1])
        return message.replace(match[1], typed, 1)
    message = _with_stage(message, args)
    option = re.match(r"[a-z_0-9.]+", message)
    known = set(_keys())
    if not option or option[0] in known:
        return message
    groups = ("model", "data", "export")
    return next((f"{prefix}.{message}" for prefix in groups if f"{prefix}.{option[0]}" in known), message)


def _with_stage(message: str, args: list[str]) -> str:
    """Put the stage before a setting that every stage has, such as ``epochs``: that of the option in ``args``."""
    option = message.partition(": ")[0]
    typed = [word.partition("=")[0].lstrip("-") for word in args if word.startswith(("--model.", "--trainer."))]
    return next((f"{name.removesuffix(option)}{message}" for name in typed if name.endswith(f".{option}")), message)


def _type(text: str) -> str:
    text = text.replace("<class '", "").replace("'>", "").replace("typing.Literal", "value of ")
    return "null" if text == "NoneType" else text
