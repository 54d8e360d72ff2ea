"""The options of the commands, parsed by LightningCLI; every user error is one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from functools import reduce
from operator import or_
from typing import Any, NoReturn, Union, get_args, get_origin

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

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
from lit_compress.cli.option_errors import explain, no_method
from lit_compress.cli.option_names import method_names, parameters_of
from lit_compress.cli.pins import pin, recall
from lit_compress.cli.unread import check_read, names_of
from lit_compress.data.datamodule import DataModule
from lit_compress.data.sources import CUSTOM
from lit_compress.export.choices import Choices
from lit_compress.methods import Method
from lit_compress.models.own_code import trust_code
from lit_compress.run.settle import Components
from lit_compress.run.solve import Storage
from lit_compress.run.trainer import FSDP2Strategy  # noqa: F401  registers --trainer.strategy fsdp2
from lit_compress.tasks.records import task_name
from lit_compress.utils.devices import use_device
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import yaml_text
from lit_compress.utils.removed import without_removed
from lit_compress.utils.tables import print

_SIZES = ("density", "rank", "rank_ratio", "params")  # options in whose place a budget is


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
        for action in self._actions:
            if hasattr(action, "_typehint"):
                action._typehint = _whole_first(action._typehint)
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
        line = (
            line
            or explain_class(text, [action.dest for action in self._actions])
            or explain(text, self.method, self.own)
        )
        self.explained.append(line)
        raise UserError(line)


class CommandLine(LightningCLI):
    """The options of every command that needs a method and data; builds both for each stage.

    Args:
        args: without the command.
        command: its name.
        own: options that only this command has; they are no longer among ``args``.
        typed: the words among ``args`` that the user has typed; None for all.
    """

    def __init__(
        self, args: list[str], command: str, own: Iterable[str] = (), typed: Iterable[str] | None = None
    ) -> None:
        self.command = command
        self.given = names_of(args if typed is None else typed)
        self.density: float | None = None  # that meets the budget, once it is known
        self.removes: str | None = None  # that is best, once it is known
        self.tokens: int | None = None  # that the export's vocabulary has, once it is known
        self.origin: str | None = None  # the backbone of a stored config, in whose place its model is
        self._logger: Any = None
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
            trainer_defaults={"gradient_clip_val": 1.0, "log_every_n_steps": 10, "enable_model_summary": False},
            parser_class=_Parser,
            parser_kwargs={"prog": f"python -m lit_compress {command}"},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the run folder, and link those that method and data share."""
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="Folder of the run; default runs/<method>-<task>."
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
            "--trust_remote_code",
            type=bool,
            default=False,
            help="true: run the code that models bring, with all rights of the user; give it to each command.",
        )
        parser.add_class_arguments(Choices, "export")
        parser.set_defaults({"export.dtype": "auto"})
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
        for i in [i for i, option in enumerate(resolved[:-1], 1) if option == "--config"]:
            content = content_of(resolved[i])
            _check_groups(content)
            if (kept := without_removed(content, strict=True)) != content:
                resolved[i] = yaml_text(kept)
        if given & {"-h", "--help"}:
            shown = f"{_Parser.method.__module__}.{_Parser.method.__qualname__}" if _Parser.method else None
            print(fit_help(parser, self.command, shown, method_names(), "trainer" in given))
            raise SystemExit(0)
        for name in ("--model.task", "--model.init_args.task"):
            if name in given:
                raise UserError(f"{name[2:]}: follows from the data; give --data.task")
        if "--print_config" in given and not given & {"--model", "--config", "-c"}:
            raise UserError(no_method())
        self.config = parser.parse_args(resolved)
        check_read(self.command, self.given, self.config)
        seed = self.config.seed_everything
        if not 0 <= seed < 2**32:
            near = 0 if seed < 0 else 2**32 - 1
            raise UserError(f"seed_everything: {seed} is not in [0, {2**32 - 1}]; nearest valid {near}")
        if self.config.model.init_args.get("backbone") is None:
            raise UserError("model.backbone: it is null; give a model (./null for a folder of this name)")
        if self.config.model.class_path.endswith(".Method"):  # options of every method were given, and no method
            raise UserError(no_method())
        self._check_budget()
        trust_code(self.config.trust_remote_code)
        accelerator = self.config.trainer.accelerator
        use_device(accelerator if isinstance(accelerator, str) else "auto")

    def _check_budget(self) -> None:
        """Refuse a budget together with a density, a rank or a number of parameters."""
        init, own = self.config.model.init_args, parameters_of(_Parser.method) if _Parser.method else {}
        beside = [n for n in _SIZES if init.get(n) is not None and (n not in own or init[n] != own[n].default)]
        if init.get("budget") is not None and beside:
            raise UserError(
                f"model.budget {init.budget}, model.{beside[0]} {init[beside[0]]}: only one of them can decide the "
                "size; set the others to null"
            )

    def instantiate_classes(self) -> None:
        """Build nothing: :meth:`build` does, for every stage."""

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
        if self.removes is not None:
            config.model.init_args.retrain.removes = self.removes
        init = made_classes(self.parser, config)
        given, record = self.config.data, init.data.record  # later commands need the data's labels
        if init.data.task == CUSTOM:
            given.custom.labels, given.custom.numbered = list(record.labels), record.numbered
            given.custom.label = list(record.label_columns) or given.custom.label
        if record.kind == "embedding":
            given.pooling, given.normalize = record.pooling.tokens, record.pooling.normalize
        init.data.teacher = init.model.teacher or self.origin or init.model.backbone
        (storage := Storage(init.export, self.tokens)).tell(init.model)
        trainer = dict(init.trainer)
        if trainer.get("logger") not in (None, True, False):  # all stages of this process have the same one
            self._logger = trainer["logger"] = self._logger or trainer["logger"]
        return Components(init.model, init.data, trainer, self.config.seed_everything, storage)

    def ready(self, recorded: dict[str, Any] | None = None) -> Components:
        """Resolve the names on the hub, see :mod:`lit_compress.cli.pins`, once all values are known to be valid.

        Commands that make something call it before :meth:`build`; commands on existing runs read these, and no
        backbone.

        Args:
            recorded: config of the run that is continued.
        """
        recall(self.config, recorded or {})
        option = "model" if self.command == "factorize" else "model.backbone"
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
            if init.revision is not None:
                init.teacher = f"{init.backbone}@{init.revision}"
            self._folders["teacher"] = self._folders["backbone"]

    def at_density(self, density: float | None, removes: str | None = None) -> Method:
        """Build the method with a density and a kind of removal; None: the config's.

        Later calls of :meth:`build` keep them.
        """
        self.density, self.removes = density, removes
        return self.build().method

    def dump(self) -> dict[str, Any]:
        """Return the whole config as plain values."""
        _take_plain_words(self.config)
        self._dump_config()
        init = self.config_dump["model"]["init_args"]
        # a name such as 1e5 is dumped as the number
        init |= {
            name: text for name, text in self.config.model.init_args.items() if name in init and isinstance(text, str)
        }
        init["task"] = self.config.data.task  # otherwise known only after build()
        return self.config_dump


def _whole_first(typehint: Any) -> Any:
    """Return a union with int before float. Else ``1`` is read as 1.0, which for the Trainer is all batches, not one.

    typing keeps one order for ``Optional[Union[int, float]]``: that of the library which made such a type first.
    """
    kinds = list(get_args(typehint))
    if get_origin(typehint) is not Union or not {int, float} <= set(kinds):
        return typehint
    kinds.remove(int)
    kinds.insert(kinds.index(float), int)
    return reduce(or_, kinds)


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


def _place_of_logger(args: list[str]) -> list[str]:
    """Return the option that puts a logger of files into the run folder, if one is given without a folder."""
    logger = (last_value(args, "--trainer.logger") or "").rpartition(".")[2]
    if logger not in ("CSVLogger", "TensorBoardLogger") or any(w.startswith("--trainer.logger.save_dir") for w in args):
        return []
    return [f"--trainer.logger.save_dir={last_value(args, '--run_dir') or 'runs'}/logs"]


def _check_groups(config: dict[str, Any]) -> None:
    """Refuse a value where a config has a group of options, and other keys next to the class of a method.

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
