"""The options of the commands, parsed once into objects: a method, its data, the Trainer's arguments, the export."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache, reduce
from importlib import import_module
from inspect import signature
from operator import or_
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import lightning.pytorch as pl
import yaml
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lit_compress import methods
from lit_compress.cli import catalogue
from lit_compress.cli.recipes import CUSTOM, check_config, merged_configs
from lit_compress.cli.words import CLASSES, SET_BY_STAGE, Line, choices_of
from lit_compress.data.datamodule import DataModule
from lit_compress.data.sources import located
from lit_compress.export.choices import Choices
from lit_compress.methods import Method
from lit_compress.models.backbones import resolve
from lit_compress.models.checks import trained_head
from lit_compress.run.job import Job
from lit_compress.run.trainer import FSDP2Strategy  # noqa: F401  registers --trainer.strategy fsdp2
from lit_compress.stages.base import Training
from lit_compress.tasks import KINDS, task_type
from lit_compress.utils.devices import use_device
from lit_compress.utils.errors import UserError, nearest, require, user_error
from lit_compress.utils.hub import is_name, model_snapshot, split_name
from lit_compress.utils.progress import note

_MOVES = (None, "main")  # revisions that are not always the same commit
_SIZES = ("density", "rank", "rank_ratio")  # options in whose place a budget is
_TRAINER = {"gradient_clip_val": 1.0, "log_every_n_steps": 10, "enable_model_summary": False}
_KEY = re.compile(r'Parser key "([\w.]+)"')  # these and the others: in messages of the parser
_VALUE = re.compile(r"(?:Got|Given) value: (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, one: dumper.represent_data(one.value))  # Lightning's strings
_PATH = re.compile(r"class_path[ =]'([\w.]+)'")


@dataclass(frozen=True)
class Settings:
    """The options of a run.

    Args:
        run_dir: folder of the run; default runs/<method>-<task>.
        ckpt_path: `last` continues the run in run_dir where it stopped, or starts it.
        checkpoint_every: optimizer steps between two checkpoints to continue from.
        seed_everything: of the run: the order of the data, new weights, dropout.
    """

    run_dir: str | None = None
    ckpt_path: Literal["last"] | None = None
    checkpoint_every: int = 500
    seed_everything: int = 42


@cache
def _parser() -> LightningArgumentParser:
    """Return the parser of all options but those that a single command has; methods are made by their class."""
    parser = LightningArgumentParser(prog="python -m lit_compress", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action=ActionConfigFile)  # for --print_config; configs are read before
    parser.add_class_arguments(Settings)
    parser.add_lightning_class_args(pl.Trainer, "trainer")
    parser.set_defaults({f"trainer.{name}": value for name, value in _TRAINER.items()})
    parser.add_lightning_class_args(DataModule, "data")
    parser.add_class_arguments(Choices, "export")
    parser.set_defaults({"export.dtype": "auto"})
    for action in parser._actions:
        if hasattr(action, "_typehint"):
            action._typehint = _whole_first(action._typehint)
    parser.add_lightning_class_args(Method, "model", subclass_mode=True)
    parser.link_arguments("data.record", "model.init_args.task", apply_on="instantiate")
    parser.link_arguments("model.init_args.backbone", "data.backbone")
    parser.link_arguments("model.init_args.teacher", "data.teacher")
    parser.link_arguments("seed_everything", "data.seed")
    return parser


def _whole_first(hint: Any) -> Any:
    """Return a union with int before float, as typing keeps the order of who made it first.

    Else ``1`` is read as 1.0, which for the Trainer is all batches, not one.
    """
    kinds = [*get_args(hint)]
    if get_origin(hint) is not Union or not {int, float} <= {*kinds}:
        return hint
    kinds.remove(int)
    kinds.insert(kinds.index(float), int)
    return reduce(or_, kinds)


def method_class(name: str | None) -> type[Method] | None:
    """Return a method by its name or import path; None if there is none that can be imported."""
    package, _, last = (name or "").rpartition(".")
    try:
        kind = getattr(import_module(package) if package else methods, last, None)
    except (ImportError, ValueError):
        return None
    return kind if isinstance(kind, type) and issubclass(kind, Method) and kind is not Method else None


class CommandLine:
    """The options of a command that needs a method and data, all in ``config``; makes both.

    Args:
        line: checked.
        base: the first config, which all others override; somebody else may have written it.
    """

    def __init__(self, line: Line, base: dict[str, Any] | None = None) -> None:
        self.line = line
        self.origin: str | None = None  # the backbone of a stored config, in whose place its model is
        self._built: tuple[Namespace, Job] | None = None
        self._folders: dict[str, str] = {}  # of the models that are names on the hub, by option, once they are known
        merged = merged_configs(line, base)
        self._has_kind = bool(
            line.last("data.custom.kind") or ((merged.get("data") or {}).get("custom") or {}).get("kind")
        )
        self.config = self._parsed(merged)
        # a model with a head that was trained on the task is given
        self.trained = line.command == "factorize" or bool(self.config.model.init_args.get("teacher"))
        self._check()
        accelerator = self.config.trainer.accelerator
        use_device(accelerator if isinstance(accelerator, str) else "auto")
        pl.seed_everything(self.config.seed_everything, workers=True)

    def _parsed(self, config: dict[str, Any]) -> Namespace:
        """Return all values: of ``config``, then of the options."""
        model, line = config["model"], self.line
        if (name := model.get("class_path")) is None:
            raise UserError(
                "model: no method given; start from a config (--config lpaf_sst2.yaml) or --model SecondOrder"
            )
        if (kind := method_class(name)) is None:
            raise UserError(
                f"model.class_path: '{name}' cannot be imported here, or is no subclass of lit_compress.methods.Method"
            )
        own = self._own = signature(kind).parameters
        shipped = getattr(methods, kind.__name__, None) is kind
        path = f"{methods.__name__ if shipped else kind.__module__}.{kind.__qualname__}"
        init = model.get("init_args") or {}
        if line.last("model.budget"):  # it takes the place of what a config says of the size
            init |= {n: None for n in _SIZES if n in own and not own[n].default and f"model.{n}" not in line.names}
        config = {**config, "model": {"class_path": path, "init_args": init}}
        check_config(config, path)  # in place of a group of options, the parser would read a file
        texts = [(n, text) for n, text in line.options if isinstance(text, str) and n not in ("config", "model")]
        texts.sort(key=lambda text: not text[0].endswith((".optimizer", ".lr_scheduler")))  # a class before its options
        words = [f"--{n}" if n == "print_config" else f"--{n}={text}" for n, text in texts]
        of_files = str(line.last("trainer.logger")).rpartition(".")[2] in ("CSVLogger", "TensorBoardLogger")
        if of_files and "trainer.logger.save_dir" not in line.names:
            words.append(f"--trainer.logger.save_dir={line.last('run_dir') or 'runs'}/logs")
        try:
            return _parser().parse_args(words, namespace=_parser().parse_object(config))
        except Exception as error:
            mistake = user_error(error) or _explained(error, path)
            raise UserError(str(mistake or " ".join(str(error).split())[:400])) from error

    def _check(self) -> None:
        """Refuse values that are of their types, and yet cannot be meant."""
        config, init = self.config, self.config.model.init_args
        for name, advice in SET_BY_STAGE.items() if self.line.command in ("fit", "plan") else ():
            if (value := config.trainer[name]) is not None and value is not True:
                raise UserError(f"trainer.{name}: {value} has no effect in a fit; {advice}")
        require(config, "checkpoint_every", low=1)
        require(config, "seed_everything", low=0, high=2**32 - 1)
        for option in self.line.names:
            stage, _, name = option.removeprefix("model.").rpartition(".")
            taker = {"learning_rate": "optimizer", "weight_decay": "optimizer", "warmup": "lr_scheduler"}.get(name)
            if taker and stage in init and (kind := init[stage].get(taker)) is not None:
                theirs = "lr" if name == "learning_rate" else name
                hint = "leave it out" if name == "warmup" else f"give --model.{stage}.optimizer.{theirs}"
                raise UserError(f"{option}: {kind.class_path} takes its place; {hint}")
        if init.get("backbone") is None:
            raise UserError("model.backbone: it is null; give a model (./null for a folder of this name)")
        own = self._own
        beside = [n for n in _SIZES if init.get(n) is not None and (n not in own or init[n] != own[n].default)]
        if init.get("budget") is not None and beside:
            raise UserError(
                f"model.budget {init.budget}, model.{beside[0]} {init[beside[0]]}: only one of them can decide the "
                "size; set the others to null"
            )

    def _check_stages(self, method: Method) -> None:
        """Refuse typed options of a stage that the run has not, unless of 0 epochs; a config may serve several runs."""
        names = ["dense", *(stage.name for stage in method.stages() if stage.name != "dense")]
        for option in self.line.names:
            stage = option.removeprefix("model.").partition(".")[0]
            settings = method.given.get(stage)
            if stage not in names and isinstance(settings, Training) and settings.epochs:
                raise UserError(f"{option}: the run has no stage {stage}, only {', '.join(names)}; leave it out")

    def build(self) -> Job:
        """Return method, data and the Trainer's arguments; they are built again only after the config has changed."""
        config = self.config.clone()
        init = config.model.init_args
        init.update(Namespace(**self._folders))
        config.data.backbone, config.data.teacher = init.backbone, init.get("teacher")
        if self._built is not None and self._built[0] == config:
            return self._built[1]
        asked = config.clone()
        try:
            made = _parser().instantiate_classes(config)
        except ValueError as error:  # its first cause is what a class raised, such as that its package is missing
            cause: BaseException = error
            path = found[1] if (found := _PATH.search(str(error))) else ""
            while cause.__cause__ is not None:
                cause = cause.__cause__
            option = next((name for name in CLASSES if path and f"'{path}'" in str(config.trainer.get(name))), None)
            if user_error(error) is not None or option is None:
                raise
            raise UserError(f"trainer.{option}: {path.rpartition('.')[2]} cannot be used here: {cause}") from error
        made.data.teacher = made.model.teacher or self.origin or made.model.backbone
        more = config.seed_everything, made.export, config.checkpoint_every
        job = Job(made.model, made.data, dict(made.trainer), *more)
        self._built = asked, job
        return job

    def ready(self, recorded: dict[str, Any] | None = None) -> Job:
        """Resolve the names on the hub once all values are known to be valid; the config keeps their commits.

        So a run, its report and its card say which revision they are of. Commands that make something call it in place
        of :meth:`build`; commands on existing runs read these, and no backbone.

        Args:
            recorded: config of the run that is continued, whose commits stay, whatever ``main`` is now.

        Raises:
            UserError: the hub does not give one of them, a folder is not usable, two revisions of one name are given,
                or a revision of a folder.
        """
        init, data = self.config.model.init_args, self.config.data
        own = "model" if self.line.command == "factorize" else "model.backbone"
        option = {"backbone": own, "teacher": "model.teacher"}
        before, known = (recorded or {}).get("model", {}).get("init_args", {}), (recorded or {}).get("data", {})
        named = [name for name in option if init.get(name) is not None and is_name(init[name])]
        for name in named:  # the teacher may be the same one as the backbone
            init[name] = _newest(init[name], before.get(name), *[init.backbone] * ("@" not in init[name]))
        if "backbone" in named:
            data.backbone = init.backbone.partition("@")[0]
        if data.get("path") is not None and is_name(data.path):
            data.path, data.revision = split_name("data.path", data.path, data.get("revision"))
        if (known.get("task"), known.get("path")) == (data.task, data.get("path")) and data.get("revision") in _MOVES:
            data.revision = known.get("revision") or data.get("revision")
        if self.trained and data.task == CUSTOM:
            trained = "backbone" if own == "model" else "teacher"
            folder = model_snapshot(option[trained], init[trained]).folder if trained in named else init[trained]
            self.follow_head(Path(folder).expanduser())
        method = self.build().method  # are all values valid?
        if recorded is None:
            self._check_stages(method)
        if "backbone" not in named:
            resolve(init.backbone, option["backbone"])  # is it a model, before data is asked for?
        for name in named:
            snapshot = model_snapshot(option[name], init[name])
            self._folders[name] = resolve(str(snapshot.folder), option[name])
            # a run of version 0.2 that knows no commit stays that run
            init[name] = init[name] if before.get(name) == init[name] else snapshot.pinned
        if (rows := located(data.task, data.get("path"), data.get("revision"), data.custom.configuration)) is not None:
            data.revision = rows.commit
        return self.build()

    def follow_head(self, folder: Path) -> None:
        """Let the trained head of the model in ``folder`` say the kind and the classes of the user's own task.

        Options go before it. Numbers in the data are its classes in their order.
        """
        custom, (kind, labels) = self.config.data.custom, trained_head(folder)
        if self.config.data.task != CUSTOM:
            return
        custom.kind = custom.kind if self._has_kind else kind or custom.kind
        if labels and custom.labels is None and KINDS[custom.kind].classes:
            columns = custom.label if isinstance(custom.label, list) else []
            own = {name.strip().casefold(): name.strip() for name in columns}
            custom.labels = labels = [own.get(name.casefold(), name) for name in labels]
            note(f"the model's head gives the classes and their order: {', '.join(labels):.200}")

    def revisions(self) -> dict[str, str]:
        """Return the options that say which commits :meth:`ready` has found, for other processes."""
        init, data = self.config.model.init_args, self.config.data
        pins = {"model.backbone": init.backbone} if "backbone" in self._folders else {}
        if data.revision is not None:
            pins |= {"data.revision": data.revision} | ({"data.path": data.path} if data.path else {})
        return pins

    def backbone_as_teacher(self) -> None:
        """Make the backbone, at its commit, the teacher."""
        init = self.config.model.init_args
        init.teacher = init.backbone
        if "backbone" in self._folders:
            self._folders["teacher"] = self._folders["backbone"]

    def dump(self) -> dict[str, Any]:
        """Return the whole config as plain values, with the labels and the pooling of the data once these are known."""
        if self._built is not None:
            record, given = self._built[1].data.record, self.config.data
            if given.task == CUSTOM:
                given.custom.labels, given.custom.numbered = list(record.labels), record.numbered
                given.custom.label = list(record.label_columns) or given.custom.label
            if task_type(record).pools:
                given.pooling, given.normalize = record.pooling.tokens, record.pooling.normalize
        text = _parser().dump(self.config, skip_link_targets=False, skip_none=False, format="yaml")
        config: dict[str, Any] = yaml.safe_load(text)
        init = config["model"]["init_args"]
        # a name such as 1e5 is dumped as the number
        init |= {k: text for k, text in self.config.model.init_args.items() if k in init and isinstance(text, str)}
        init["task"] = self.config.data.task  # otherwise known only after build()
        return config


def _newest(name: str, *known: Any) -> str:
    """Return a name on the hub with its revision; without one as the first of the ``known`` names that is the same."""
    text, _, revision = name.partition("@")
    same = (one for one in known if str(one).partition("@")[0] == text)
    return next(same, name) if revision in ("", "main") else name


# ------------------------------------------------------------------------------------------ mistakes in values


def _explained(error: Exception, method: str) -> str | None:
    """Return one line on the option whose value the parser refused; None if its message names none.

    A key in the message is inside of the key before.
    """
    text = str(error)
    if not (keys := list(dict.fromkeys(_KEY.findall(text)))):
        return None
    inside = 1 + (keys[0] == "model")
    option, argument = ".".join(keys[:inside]), ".".join(keys[inside:])
    own = text[text.rindex(f'"{keys[-1]}"') :] if len(keys) > 1 else text
    value = found[1] if (found := _VALUE.search(own)) else "null"
    known = catalogue.of_method(method) | catalogue.shared() | catalogue.trainer()
    kind = known[option].kind if option in known else "value"
    if option.rpartition(".")[2] in CLASSES:
        if not argument:
            return _of_class(option, text.split(f'"{keys[inside - 1]}"', 1)[1], value)
        kind, option = next(iter(re.findall(r"Expected a <class '([\w.]+)'>", own)), "value"), f"{option}.{argument}"
    if choices := choices_of(kind):
        return f"{option}: '{value}' is not a valid value of {', '.join(choices)}; {nearest(value, choices)}"
    hint = f"; for a text, quote it inside of the list: '[\"{value}\"]'" if "list[str]" in kind else ""
    return f"{option}: '{value}' is not a valid {kind.replace(' | ', ' or ').replace('None', 'null')}{hint}"


def _of_class(option: str, text: str, value: str) -> str:
    """Return one line on a mistake in a class that an option names, by what the parser said of it."""
    module, what = CLASSES[option.rpartition(".")[2]]
    package, _, name = made[1].rpartition(".") if (made := _PATH.search(text)) else ("", "", "")
    if unknown := re.search(r"Option '(\w+)' is not accepted", text):
        known = signature(getattr(import_module(package), name)).parameters
        return f"unknown option '{option}.{unknown[1]}'; {nearest(unknown[1], known)}"
    if missing := re.search(r"arguments are required: (\w+).*", text):
        return f"{option}: {name} needs {missing[0].partition(': ')[2]}; e.g. --{option}.{missing[1]} VALUE"
    package, _, name = value.rpartition(".")
    near = nearest(name, import_module(module).__all__) if package in ("", module) else "give the import path of one"
    return f"{option}: '{value:.80}' is no {what}, or cannot be imported here; {near}"
