"""The words of a command line: options by name and their values, checked before anything heavy is imported.

A command's own options are the parameters of its function in commands.py. Every command also reads some options of
``fit``. A mistyped option ends here, and so does ``--help``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lit_compress.cli import catalogue
from lit_compress.cli.catalogue import Option
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.removed import removed

ALIASES = {"device": "trainer.accelerator", "c": "config", "h": "help", "model.class_path": "model"}
_SYNONYMS = {"lr": "learning_rate", "method": "model"}  # a word of other tools -> the option's last part
# short option of factorize -> option of fit
SHORT = {
    **{name: f"model.{name}" for name in ("density", "rank", "rank_ratio", "budget", "round_to", "shape",
                                          "allocation")},
    **{name: f"model.retrain.{name}" for name in ("weighting", "calibration_examples", "removes", "fisher_examples")},
    **{name: f"export.{name}" for name in ("format", "vocabulary", "embeddings", "dtype", "max_drop")},
}  # fmt: skip
# last part of an option that names a class, of the Trainer or of a stage -> module with these, and what they are called
CLASSES = {
    "callbacks": ("lightning.pytorch.callbacks", "callback"),
    "logger": ("lightning.pytorch.loggers", "logger"),
    "plugins": ("lightning.pytorch.plugins", "plugin"),
    "profiler": ("lightning.pytorch.profilers", "profiler"),
    "strategy": ("lightning.pytorch.strategies", "strategy"),
    "optimizer": ("torch.optim", "optimizer"),
    "lr_scheduler": ("torch.optim.lr_scheduler", "schedule"),
}

# arguments of the Trainer that a stage has of its own, or that nothing reads -> what to do
SET_BY_STAGE = {
    **dict.fromkeys(("max_epochs", "min_epochs", "min_steps"), "set model.<stage>.epochs"),
    "enable_checkpointing": "a stage always keeps last.ckpt; set checkpoint_every",
    "default_root_dir": "set run_dir",
    **dict.fromkeys(
        ("num_sanity_val_steps", "use_distributed_sampler", "limit_test_batches", "limit_predict_batches"),
        "leave it out",
    ),
}
WHOLE = ("fit", "plan", "compare")  # commands that read all options
_SHARED = ("config", "print_config", "seed_everything", "trainer.accelerator", "data")
# options of a stage that trains, which `factorize --distil` has of its own; it reads the optimizer and the schedule
_TRAINING = ("epochs", "learning_rate", "warmup", "weight_decay")
# another command -> options, or groups of them, that it reads, and those among them that it does not; others read none
READ: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "factorize": (
        (*_SHARED, "model", "export", "trainer", "checkpoint_every"),
        ("model.backbone", "model.dense", "trainer.max_steps", *(f"trainer.{name}" for name in SET_BY_STAGE)),
    ),
    **dict.fromkeys(("bench", "export"), ((*_SHARED, "model.teacher"), ())),
    **dict.fromkeys(
        ("evaluate", "predict"),
        ((*_SHARED, "model.teacher"), ("data.batch_size", "data.train_examples", "data.hold_out")),
    ),
}


_NAME = re.compile(r"--|-[^\W\d_]")  # a word that begins so is the name of an option


@dataclass
class Line:
    """A command line, taken apart; or the arguments of a function of the Python API.

    ``own`` has the values of the command's own options, as its function takes them; ``options`` names and values of
    those of ``fit``, in their order: the text that was typed, or an object from Python.
    """

    command: str
    own: dict[str, Any] = field(default_factory=dict)
    options: list[tuple[str, Any]] = field(default_factory=list)
    args: Sequence[str] = ()  # all words
    help: bool = False  # --help was given

    @property
    def names(self) -> list[str]:
        """The names of all options of ``fit``."""
        return [plain(name) for name, _ in self.options]

    def last(self, option: str) -> Any:
        """Return the last value of an option of ``fit``; None if it is not given."""
        return next((value for name, value in reversed(self.options) if plain(name) == option), None)


def own_options(command: str) -> dict[str, Option]:
    """Return the options that only a command has, by name."""
    options = {name: option for name, option in catalogue.command(command).items() if name != "line"}
    choices = [name for name in catalogue.shared() if name.startswith("export.")] if command == "export" else []
    return options | {n[7:]: replace(catalogue.shared()[n], name=n[7:], default="None") for n in choices}


def from_python(command: str, given: Mapping[str, Any]) -> Line:
    """Return the arguments of a function by option."""
    own, line = own_options(command), Line(command)
    for name, value in given.items():
        if name in own:
            line.own[name] = value
        else:
            line.options.append((_in_full(name, command, own), str(value) if isinstance(value, Path) else value))
    return line


def take_apart(command: str, args: Sequence[str]) -> Line:
    """Return the words behind a command by option.

    Raises:
        UserError: a word belongs to no option, a value is missing or is not of the option's type.
    """
    own, line, left, given = own_options(command), Line(command, args=args), list(args), dict[str, list[str]]()
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word[1:2].isdigit() or word == "-":
            place = next((name for name in own if own[name].position and name not in given), None)
            if place is None:
                ending = f"--config {word}" if word.endswith((".yaml", ".yml")) else "see --help"
                raise UserError(f"'{word}' has no option before it; {ending}")
            given[place] = [word]
            continue
        typed, equals, value = word.lstrip("-").partition("=")
        name = _in_full(typed, command, own)
        if name == "help":
            line.help = True
            continue
        option = own.get(name) or catalogue.shared().get(name)
        kind, values = option.kind if option else "", [value] if equals else []
        while left and not equals and not _NAME.match(left[0]) and (not values or (name in own and "list" in kind)):
            values.append(left.pop(0))
        if not values and kind.startswith("bool"):
            values = ["true"]
        elif not values and name in own and len(only := choices_of(kind)) == 1:
            values = only
        elif not values:
            known = option or "." in name
            raise UserError(f"{name}: the value is missing" if known else unknown(command, name))
        if name in own:
            given.setdefault(name, []).extend(values)
        else:
            line.options.append((name, values[0]))
    for name, option in own.items():
        if name in given:
            line.own[name] = converted(option, given[name])
        elif option.default is None and not line.help:
            raise UserError(f"{name.upper() if option.position else name}: it is missing; see {command} --help")
    return line


def _in_full(name: str, command: str, own: Mapping[str, Option]) -> str:
    """Return the option of ``fit`` that a short name stands for; the command's own options keep theirs."""
    short = SHORT.get(name) if command == "factorize" else None
    return name if name in own else short or ALIASES.get(name, name)


def converted(option: Option, texts: list[str]) -> Any:
    """Return the value of a command's own option; refuse one that is not of its type."""
    name, kind, text = option.name, option.kind.removesuffix(" | None"), texts[-1]
    if kind.startswith("list"):
        return [converted(replace(option, kind=kind[5:-1]), [text]) for text in texts]
    if (choices := ["true", "false"] if kind == "bool" else choices_of(kind)) and text not in choices:
        raise UserError(f"{name}: '{text}' is not valid; {nearest(text, choices)}")
    try:
        return text == "true" if kind == "bool" else {"int": int, "float": float}.get(kind, str)(text)
    except ValueError:
        raise UserError(f"{name}: '{text}' is not a valid {kind}") from None


def choices_of(kind: str) -> list[str]:
    """Return the words that a type allows; [] if it allows others as well.

    >>> choices_of("Literal['a', 'b'] | None"), choices_of("int | Literal['a']")
    (['a', 'b'], [])
    """
    parts = [part for part in kind.split(" | ") if part != "None"]
    if not all(part.startswith("Literal[") for part in parts):
        return []
    return [str(value) for part in parts for value in ast.literal_eval(f"[{part[8:-1]}]")]


# ------------------------------------------------------------------------------------------ which options there are


def plain(name: str) -> str:
    """Return the name of an option without the parts for configs and lists alone.

    >>> plain("model.init_args.density"), plain("trainer.callbacks+")
    ('model.density', 'trainer.callbacks')
    """
    return name.removesuffix("+").replace(".init_args", "")


def check_names(command: str, options: Iterable[tuple[str, Any]], method: str | None) -> None:
    """Refuse the first option that the command does not read or ``method``, of this name or import path, has not."""
    known, foreign = catalogue.names(method), method and not catalogue.of_method(method)
    for name, value in options:
        name = plain(name)
        of_class = re.match(rf".*?\.({'|'.join(CLASSES)})(?=\.|$)", name)
        if name == "model.task":
            raise UserError(f"{name}: follows from the data; give --data.task")
        # the class of a method of the user's own, or that an option names, alone knows its options
        if (of_class[0] if of_class else name) not in known and not (foreign and name.startswith("model.")):
            raise UserError(unknown(command, name, method))
        inside = next((other for other in known if other.startswith(f"{name}.") and name != "model"), None)
        if inside and isinstance(value, str) and not value.startswith("{"):
            raise UserError(
                f"{name}: '{value}' is no value of a group of options; give them one by one, e.g. --{inside}"
            )
        if not is_read(command, name):
            use = "; nearest: eval_batch_size" if name == "data.batch_size" else "; leave it out"
            use += ", or use fit" if command == "factorize" else ""
            raise UserError(f"{name}: {command} does not read it{use}")


def is_read(command: str, option: str) -> bool:
    """Return whether a command reads an option, which is named as in a config."""
    if command in WHOLE:
        return True
    parts = option.split(".")
    trains = parts[0] == "model" and parts[2:3] and parts[2] in _TRAINING
    read, unread = (any(f"{option}.".startswith(f"{name}.") for name in names) for names in READ.get(command, ((), ())))
    return read and not (unread or trains)


def unknown(command: str, key: str, method: str | None = None) -> str:
    """Return the message on an unknown option: the nearest one of the command, the method, the data and the Trainer."""
    if line := removed(key) or (command == "factorize" and removed(f"model.retrain.{key}")):
        return line
    reads = command in (*WHOLE, *READ)
    known, said = [*own_options(command), *(catalogue.names(method) if reads else ())], f"unknown option '{key}'"
    full = next((name for name in (key, f"model.{key}") if name in catalogue.names()), "")
    if method and full and full not in known:  # another method has it
        groups = ([n for n in known if n.rpartition(".")[0] == group] for group in (full.rpartition(".")[0], "model"))
        return f"{said} for {method.rpartition('.')[2]}; its options: {', '.join(next(filter(None, groups)))}"
    group, dot, last = key.removeprefix("model.").rpartition(".")
    tail = f".{group}{dot}{_SYNONYMS.get(last, last)}"
    if same := sorted((name for name in known if f".{name}".endswith(tail)), key=len):
        return f"{said}; did you mean {' or '.join(map(repr, same[:4]))}?"
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    if close := get_close_matches(key, [*known, *by_last], n=1):
        return f"{said}; did you mean '{by_last.get(close[0], close[0])}'?"
    return f"{said}; {nearest(key, known)}"


def as_typed(message: str, args: Sequence[str]) -> str:
    """Return a message with the whole name of the option that it begins with.

    Settings know neither the stage they are of nor that they are the method's; ``args`` say which stage was meant.
    """
    option, colon, rest = message.partition(":")
    typed, names = [plain(word.partition("=")[0].lstrip("-")) for word in args if word[:2] == "--"], catalogue.names()
    if not colon or " " in option or option in (*typed, *names):
        return message
    whole = [name for name in typed if name.endswith(f".{option}")]
    whole += [f"{group}.{option}" for group in ("model", "data", "export") if f"{group}.{option}" in names]
    return f"{(*whole, option)[0]}:{rest}"
